"""Signals that wait while a fork is made, or ended.

In: a block that forks. Out: the same block, in which no handler of a signal runs. Modules tell Python what to do before and after
a fork; `logging` takes a lock before it and gives it back after it. A fork takes milliseconds, so a signal often comes meanwhile,
and its handler would run in the middle of those functions. What a handler raises there is lost, and so is the rest of the
function: the lock stays with the main thread, and every other thread that logs waits forever. What can go wrong: only the main
thread sets handlers; elsewhere none runs, and nothing is held.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _Held:
    """Stands in for the handlers of all signals, and notes which came. Once it no longer holds them it passes them on."""

    def __init__(self) -> None:
        self.before: dict[int, Handler] = {}
        self.came: list[tuple[int, FrameType | None]] = []
        self.holds = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.holds:
            self.came.append((number, frame))
        else:
            self.before[number](number, frame)

    def take_the_place(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self.before[number] = handler
                signal.signal(number, self)

    def give_back(self) -> None:
        """Put the handlers back. If one raises meanwhile, this one stays in the place of some, and passes their signals on."""
        try:
            for number, handler in self.before.items():
                signal.signal(number, handler)
        finally:
            self.holds = False
        with contextlib.ExitStack() as all_of_them:  # also if the handler of one raises
            for number, frame in reversed(self.came):
                all_of_them.callback(self.before[number], number, frame)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """A context in which no handler of a signal runs. Those that came are handled at its end, where handlers may raise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held()
    try:
        held.take_the_place()
        yield
    finally:
        held.give_back()
