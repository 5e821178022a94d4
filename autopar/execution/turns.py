"""Threads take turns: of all threads of this process one plans a step, and one starts a step or moves its state, at a time.

In: the name of a step. Out: a context that one thread at a time is in. What can go wrong without it: two threads give the same
state to steps that consume it, both find it there, and XLA ends the process as it takes one piece of memory twice; or two
programs reach the devices in different orders, and each waits for the other. A step that is called while it runs, by one of its
own callbacks, would wait for itself without end, and one that is planned while it is traced would be traced without end: both are
refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from autopar.callbacks import is_inside_callback
from autopar.errors import ArgumentError


class Turn:
    """What one thread at a time may do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._name = ""

    @contextlib.contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Wait until no other thread is in this context. Raises ArgumentError if this thread is, or a device waits for it."""
        if is_inside_callback():
            raise ArgumentError(
                f"{name} is called from a Python callback of a step that is running: the devices wait for the callback, and "
                f"{name} would wait for the devices. Return from the callback what it is to work on, and call it after the step."
            )
        if self._thread == threading.get_ident():
            raise ArgumentError(
                f"{name} is called, or planned, while {self._name} is at work in the same thread: a step cannot contain itself. "
                "Call it before or after."
            )
        with self._lock:
            self._thread, self._name = threading.get_ident(), name
            try:
                yield
            finally:
                self._thread = None


RUNNING = Turn()
"""To start a step, or to move its state."""
