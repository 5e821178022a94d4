"""The pipe from a worker to its supervisor, and the messages through it."""

from __future__ import annotations

import os
import signal
import time

from autopar.launch.messages import Message, MessageKind
from autopar.launch.tuning import TUNING


class Line:
    """Sends the messages of a worker. Each beat carries `steps` and `doing`."""

    def __init__(self, pipe: int, doing: str) -> None:
        """Send through a file descriptor, which processes that this one starts do not inherit."""
        os.set_inheritable(pipe, False)
        self._pipe = pipe
        self.steps, self.doing = 0, doing

    def say(self, kind: MessageKind, words: str) -> None:
        """Send a message. If the supervisor is gone, this process ends too."""
        message = Message(kind=kind, at_s=time.monotonic(), steps=self.steps, words=words)
        try:
            os.write(self._pipe, message.line())
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)

    def beat(self) -> None:
        """Send a beat at every interval, for ever."""
        while True:
            self.say("beat", self.doing)
            time.sleep(TUNING.beat_s)
