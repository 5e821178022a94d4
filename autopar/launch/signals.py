"""Signals to the supervisor, kept until it looks: those that ask it to stop, and those that it passes on.

What can go wrong: a signal that comes right before the supervisor begins to wait. So each signal also writes a byte to a socket
that the supervisor's loop waits for.
"""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from contextlib import ExitStack
from types import FrameType
from typing import Self

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """A context in which signals are kept. Afterwards the earlier handlers are in place again."""

    def __init__(self, loop: selectors.BaseSelector) -> None:
        """Wake `loop` when a signal comes."""
        self.stops: deque[int] = deque()
        self.passed_on: deque[int] = deque()
        self.loop, self._stack = loop, ExitStack()

    def __enter__(self) -> Self:
        """Install the handlers."""
        here, there = (self._stack.enter_context(end) for end in socket.socketpair())
        here.setblocking(False)
        there.setblocking(False)
        self._stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False))
        self.loop.register(here, selectors.EVENT_READ, lambda: here.recv(4096))
        self._stack.callback(self.loop.unregister, here)
        for number in STOPS:
            self._take(number, self.stops)
        for number in PASSED_ON:
            self._take(number, self.passed_on)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the earlier handlers."""
        self._stack.close()

    def _take(self, number: signal.Signals, kept: deque[int]) -> None:
        """Keep a signal, unless whoever started the supervisor wants it ignored, as `nohup` does."""
        if signal.getsignal(number) == signal.SIG_IGN:
            return

        def keep(number: int, frame: FrameType | None) -> None:
            kept.append(number)

        before = signal.signal(number, keep)
        self._stack.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
