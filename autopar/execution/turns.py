"""Threads take turns: at any time one thread of this process plans a step, and one starts a step or moves its state.

In: the name of a step. Out: a context that one thread at a time can enter. Without it two threads could pass the same state to
steps that consume it, and XLA would end the process because it takes one buffer twice. Or two programs could reach the devices in
different orders, and each would wait for the other. What can go wrong: a callback of a running step calls the step, which would
wait for itself; or a step is planned while it is traced, which would never end. Both are refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from autopar.callbacks import is_inside_callback
from autopar.errors import ArgumentError


class Turn:
    """A right that one thread at a time has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._name = ""

    @contextlib.contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Enter the context once no other thread is in it. Raises ArgumentError if this thread is, or a device waits for it."""
        if is_inside_callback():
            raise ArgumentError(
                f"{name} is called from a Python callback of a step that is running: the devices wait for the callback, and "
                f"{name} would wait for the devices. Return its input from the callback, and call it after the step."
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
"""The turn to start a step, or to move its state."""
