"""Make items in a thread, a few ahead of the step that takes them.

In: a function that makes the next item. Out: a `Feed`, from which one thread takes items in order. An exception, such as the
StopIteration at the end, takes the place of the item that it prevented. What can go wrong: the feed is dropped, and the thread
ends by itself; or the program ends, and waits a moment for the item that is being made.
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
"""The most seconds that the end of a program waits for an item that is being made. A source may wait for ever."""


class _Shared(Generic[T]):
    """The state that the thread and the feed share. The thread holds no reference to the feed, which would keep it alive."""

    def __init__(self, ahead: int) -> None:
        self.ahead, self.is_over = ahead, False
        self.made: collections.deque[T | BaseException] = collections.deque()
        self.changed = threading.Condition()

    def stop(self) -> None:
        """Tell the thread that nobody takes items any more."""
        with self.changed:
            self.is_over = True
            self.made.clear()
            self.changed.notify_all()


def _fill(shared: _Shared[T], make: Callable[[], T]) -> None:
    """Run the thread: make an item whenever fewer than `ahead` are ready."""
    while True:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.is_over or len(shared.made) < shared.ahead)
            if shared.is_over:
                return
        try:
            found: T | BaseException = make()
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            found = error
        with shared.changed:
            if not shared.is_over:
                shared.made.append(found)
            shared.changed.notify_all()
        if isinstance(found, BaseException):
            return


def _leave(shared: _Shared[T], thread: threading.Thread) -> None:
    """Let the thread end before the program does. Python would stop it inside XLA, and the program would abort (SIGABRT)."""
    shared.stop()
    thread.join(LEAVE_S)


class Feed(Generic[T]):
    """Items that a thread makes ahead."""

    def __init__(self, make: Callable[[], T], *, ahead: int) -> None:
        """Start the thread. `ahead`: the number of items to make in advance."""
        self._shared: _Shared[T] = _Shared(ahead)
        self._thread = threading.Thread(target=_fill, args=(self._shared, make), name="autopar data", daemon=True)
        self._leave = functools.partial(_leave, self._shared, self._thread)
        atexit.register(self._leave)
        self._thread.start()

    def take(self) -> T:
        """Take the next item, once it is made. Raises the exception that took its place, if there is one."""
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
        """End the thread, and wait for the item that it is making."""
        self._shared.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self._leave)

    def __del__(self) -> None:
        self._shared.stop()
