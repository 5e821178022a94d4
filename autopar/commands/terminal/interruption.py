"""Ctrl-C while a plan is sought: the first ends the search with the best plan so far, the second ends the command at once.

SIGTERM does the same. The command prints that plan and ends with the exit status of an interrupted one, 130 or 143, so that a
script does not go on as if nothing had happened. Before a search has begun there is no plan to wait for: the first signal ends
the command. One that comes when the search has just ended finds its plan. What comes after the search may be stopped in its own
way (`stopping_by`). What can go wrong: the search has no plan yet; its error is printed, and the status is the same.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from autopar.errors import AutoparError
from autopar.progress import Progress, listening, tell

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """The signal that interrupted planning, if one did."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        """Nothing has come yet; `stop` ends the search with what it has, and says whether there was one."""
        self.number: int | None = None
        self._stop, self._has_begun = stop, False

    def hear(self, progress: Progress) -> None:
        """Note that a search has begun."""
        self._has_begun = self._has_begun or (progress.phase or "").startswith("planning")

    def finish(self, words: str = "the plan is the best that was found so far") -> None:
        """End the command if it was interrupted: KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM."""
        if self.number is not None:
            _raise(self.number, words)

    @contextlib.contextmanager
    def stopping_by(self, stop: Callable[[], bool]) -> Iterator[None]:
        """A context in which `stop` is called instead, at once if a signal has come already. It may raise, as handlers may."""
        before, self._stop = self._stop, stop
        try:
            if self.number is not None:
                stop()
            yield
        finally:
            self._stop = before

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.number is not None:
            _raise(number)
        self.number = number
        tell(Progress(stopping="stopping, once more ends at once"))
        if not (self._stop() or self._has_begun):
            _raise(number)


@contextlib.contextmanager
def interruptible(stop: Callable[[], bool]) -> Iterator[Interruption]:
    """A context in which a signal calls `stop`, and one that comes again, or finds nothing to stop, ends the command.

    An ignored signal stays ignored, as shells want of commands in the background.
    """
    interruption = Interruption(stop)
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, interruption.on_signal)) for number in heard]
    try:
        with listening(interruption.hear):
            yield interruption
    except AutoparError as error:
        if interruption.number is None:
            raise
        _raise(interruption.number, f"there was no plan yet: {error}")
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _raise(number: int, words: str = "") -> None:
    """End the command; `__main__` prints the words after Ctrl-C."""
    gc.freeze()  # or the interpreter looks for garbage in all that was planned before it ends, which takes seconds
    if number == signal.SIGINT:
        raise KeyboardInterrupt(words)
    sys.stderr.write(f"autopar: stopped by SIGTERM{words and ': '}{words}\n")
    raise SystemExit(128 + number)
