"""Batches are made in a thread, a few ahead of the step that takes them.

In: a function that makes the next item. Out: a `Feed`, from which one thread takes items in their order. An exception, such as
the StopIteration at the end, comes in the place of the item that it kept from being made. What can go wrong: whoever takes items
goes away, and the thread ends by itself; or the program ends, and waits a moment for the item that is being made.
"""

from __future__ import annotations

import atexit
import collections
import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
LEAVE_S = 10.0
"""Seconds that the end of a program waits for an item that is being made: a source may wait for ever."""


class _Shared(Generic[T]):
    """What the thread and the feed both hold, so that the thread does not keep the feed alive."""

    def __init__(self, ahead: int) -> None:
        self.ahead, self.is_over = ahead, False
        self.made: collections.deque[T | BaseException] = collections.deque()
        self.changed = threading.Condition()

    def stop(self) -> None:
        """Tell the thread that nobody takes anything any more."""
        with self.changed:
            self.is_over = True
            self.made.clear()
            self.changed.notify_all()


def _fill(shared: _Shared[T], make: Callable[[], T]) -> None:
    """The thread: make items while fewer than `ahead` are there."""
    while True:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.is_over or len(shared.made) < shared.ahead)
            if shared.is_over:
                return
        try:
            found: T | BaseException = make()
        except BaseException as error:  # noqa: BLE001 - it is raised where the item is taken
            found = error
        with shared.changed:
            if not shared.is_over:
                shared.made.append(found)
            shared.changed.notify_all()
        if isinstance(found, BaseException):
            return


def _leave(shared: _Shared[T], thread: threading.Thread) -> None:
    """At the end of a program: let the thread end. Python would end it inside of XLA, and that ends the program with SIGABRT."""
    shared.stop()
    thread.join(LEAVE_S)


class Feed(Generic[T]):
    """See the module's text."""

    def __init__(self, make: Callable[[], T], *, ahead: int) -> None:
        """`ahead`: how many items are made before they are asked for."""
        self._shared: _Shared[T] = _Shared(ahead)
        self._thread = threading.Thread(target=_fill, args=(self._shared, make), name="autopar data", daemon=True)
        self._leave = functools.partial(_leave, self._shared, self._thread)
        atexit.register(self._leave)
        self._thread.start()

    def take(self) -> T:
        """The next item; waits until it is made, and raises what was raised instead of it."""
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.made or self._shared.is_over)
            if self._shared.is_over:
                raise StopIteration
            found = self._shared.made[0]
            if isinstance(found, StopIteration):
                raise StopIteration
            if isinstance(found, BaseException):
                raise found
            self._shared.made.popleft()
            self._shared.changed.notify_all()
            return found

    def stop(self) -> None:
        """End the thread, and wait until the item that it works on is made."""
        self._shared.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self._leave)

    def __del__(self) -> None:
        self._shared.stop()
