"""A worker's way to its supervisor: a pipe, and what is said through it."""

from __future__ import annotations

import os
import signal
import time

from autopar.launch.messages import Message, MessageKind
from autopar.launch.tuning import TUNING


class Line:
    """What a worker says. `steps` and `doing` are said with each beat."""

    def __init__(self, pipe: int, doing: str) -> None:
        """Speak through a file descriptor, which no process that this one starts takes over."""
        os.set_inheritable(pipe, False)
        self._pipe = pipe
        self.steps, self.doing = 0, doing

    def say(self, kind: MessageKind, words: str) -> None:
        """Send a message. Without a supervisor this process is to end, too."""
        message = Message(kind=kind, at_s=time.monotonic(), steps=self.steps, words=words)
        try:
            os.write(self._pipe, message.line())
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)

    def beat(self) -> None:
        """Say for ever that this process lives."""
        while True:
            self.say("beat", self.doing)
            time.sleep(TUNING.beat_s)
