"""Searches that end when their time is up, whatever they have found by then, or when somebody stops them.

In: searches, functions without arguments, and seconds. Out: what each found, or None if it was left. A search looks at its own
clock and hands over the best plan that it has; one that has none yet goes on, and on a busy machine two looks are far apart. So
an alarm of the system leaves it where it stands. What can go wrong: alarms reach the main thread alone, and one that the caller
has set is not touched; a search then ends by its own clock. No alarm interrupts a call of a library, which has to return first.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.solver.budget import Budget, LeftError

T = TypeVar("T")
_AGAIN_S = 0.25
"""After so many seconds the alarm rings again: what is raised in a finaliser, or as garbage is collected, gets lost."""
_GRACE_S = 2.0
"""So long a search that is stopped has time to hand over its plan."""
_LONGEST_S = 1e7
"""The system takes no alarm that never rings."""


class Deadline:
    """A clock under which searches are made, until it ends or is stopped.

    Attributes:
        clock: the clock.
        left: how the search that was left last was left, with what was asked; None if none was.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        """Start the clock."""
        self.clock = Budget(seconds=seconds)
        self.left: LeftError | None = None
        self._is_searching = self._has_alarm = False

    def stop(self) -> bool:
        """End it, for a signal handler of the main thread: a search that is under way there is left at once."""
        self.clock.stop()
        if self._is_searching:
            raise LeftError
        return True

    def hurry(self) -> bool:
        """End it, for a signal handler: a search that was told to stop is left if it does not do so soon."""
        self.clock.stop()
        if self._has_alarm:
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S, _AGAIN_S)
        return True

    def run(self, search: Callable[[], T], seconds: float) -> T | None:
        """What a search finds in so many seconds; None if it found nothing by then. Ctrl-C ends the clock, too."""
        if self.clock.is_late:
            return None
        try:
            with _again_where_it_is_lost(), _alarm(min(seconds, self.clock.seconds_left)) as self._has_alarm:
                self._is_searching = True
                return search()
        except LeftError as left:
            self.left = left
            return None
        except KeyboardInterrupt:
            self.clock.stop()
            return None
        finally:
            self._is_searching = self._has_alarm = False


def nothing_found(deadline: Deadline) -> OutOfMemoryError:
    """The error of a search for a plan that was left. Raises ArgumentError if that was before it had begun."""
    asked = None if deadline.left is None else deadline.left.asked
    if asked is None:
        raise ArgumentError(
            "the time was over before the search for a plan began: give it more (--planning-seconds, planning_seconds)"
        )
    error = OutOfMemoryError("no plan was found that fits in the time there was", is_settled=False)
    error.asked = asked
    return error


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[bool]:
    """A context that is left after so many seconds; it says whether it is: where the system can, and the caller sets no alarm."""
    if not _is_free():
        yield False
        return
    before = signal.signal(signal.SIGALRM, _leave)
    signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 1e-6), _LONGEST_S), _AGAIN_S)
    try:
        yield True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _is_free() -> bool:
    """Whether alarms can be used here and are not."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise LeftError


@contextlib.contextmanager
def _again_where_it_is_lost() -> Iterator[None]:
    """A context in which Python does not print that the alarm came where nothing can be left, such as in a finaliser."""
    before = sys.unraisablehook

    def hear(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, LeftError):
            before(lost)

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before
