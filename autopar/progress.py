"""How far planning is: said by the passes, heard by whoever asks.

In: a `Progress` from the pass that is at work. Out: each listener of this thread gets it, and so does Python's `logging`, by the
logger `autopar`: a new phase and a better plan as INFO, everything else as DEBUG. Importing installs no handler, and without a
listener a report costs a microsecond. What can go wrong: planning runs on in forks as well (`forks/`), whose
reports stay there; a listener hears of what its own process does.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from autopar.events import reach

LOGGER = logging.getLogger("autopar")
COMPILING, STEPPING = "compiling", "first step"
"""The phases after planning. A pipeline compiles the tasks of its stages in its first step. The log does not have that one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the search is. What is left out is as it was before.

    Attributes:
        phase: what is being done, such as `tracing` or `planning layers`.
        bounded: candidates that have a bound.
        dropped: candidates that no longer matter.
        proven: candidates whose best plan is known.
        best_s: predicted seconds per step of the best plan so far.
        promised_s: seconds per step of the stages that are best by what their layers take, which are not planned as a whole yet.
        bound_s: seconds per step that no plan can beat.
        seconds_left: until planning ends at the latest; infinite without a limit.
        at: what of the phase is being done, such as `mesh (2, 4)`.
        search: which of several searches this is, in words, such as `ZeRO-2, 2 of 5`.
        stopping: that planning was asked to end, in words.
    """

    phase: str | None = None
    bounded: int | None = None
    dropped: int | None = None
    proven: int | None = None
    best_s: float | None = None
    promised_s: float | None = None
    bound_s: float | None = None
    seconds_left: float | None = None
    at: str | None = None
    search: str | None = None
    stopping: str | None = None

    def after(self, before: Progress) -> Progress:
        """All that is known after both reports; a new phase begins with no `at`, and another search with nothing.

        The best step so far is the lesser of both. A report of one ends what stages promised.
        """
        if self.search not in (None, before.search):
            before = Progress(stopping=before.stopping)
        known = {name: value for name, value in _fields(self).items() if value is not None}
        if self.best_s is not None:
            before = dataclasses.replace(before, promised_s=None)
            known["best_s"] = min(self.best_s, math.inf if before.best_s is None else before.best_s)
        since = dataclasses.replace(before, at=None) if self.phase not in (None, before.phase) else before
        return dataclasses.replace(since, **known)

    def __str__(self) -> str:
        """The report as one line of a log."""
        named = _fields(self)
        words = [str(named.pop(name) or "") for name in ("search", "phase", "at")]
        figures = [f"{name} {value:.6g}" for name, value in named.items() if isinstance(value, int | float)]
        return ": ".join(filter(None, [", ".join(filter(None, words)), ", ".join(figures)]))


Listener: TypeAlias = Callable[[Progress], None]
_LISTENERS: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("listeners", default=())
_IS_OF_A_PART: contextvars.ContextVar[bool] = contextvars.ContextVar("is_of_a_part", default=False)
_BEST_S: contextvars.ContextVar[list[float]] = contextvars.ContextVar("best_s")
"""The least seconds per step that this search has reported."""
_OF_THE_WHOLE = ("bounded", "dropped", "proven", "best_s", "bound_s")


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A context in which a function gets every report that this thread makes."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@contextlib.contextmanager
def planning_parts() -> Iterator[None]:
    """A context in which layers or stages are planned, whose candidates, steps and bounds are not those of the whole step."""
    token = _IS_OF_A_PART.set(True)
    try:
        yield
    finally:
        _IS_OF_A_PART.reset(token)


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """A context in which one plan is searched for: a step that takes no less than an earlier one is no news there."""
    token = _BEST_S.set([math.inf])
    try:
        yield
    finally:
        _BEST_S.reset(token)


def report(progress: Progress, event: str = "", *, is_news: bool = False) -> Progress:
    """Tell all listeners, and the log.

    Args:
        progress: what is known now.
        event: what happened, for the log; without it the log has the figures.
        is_news: whether this is a new phase or a better plan, which the log has as INFO.

    Returns:
        `progress`, so that a search can go on from it: `now = report(replace(now, dropped=now.dropped + 1))`.
    """
    if _IS_OF_A_PART.get():
        progress = dataclasses.replace(progress, **dict.fromkeys(_OF_THE_WHOLE))
        if not event and progress == Progress():
            return progress
    if is_news and progress.phase is not None:
        reach("phase", progress.phase)
    elif is_news and progress.best_s is not None:
        is_news = _is_better(progress.best_s)
    LOGGER.log(logging.INFO if is_news else logging.DEBUG, "%s", event or progress)
    tell(progress)
    return progress


def _is_better(best_s: float) -> bool:
    """Whether a step takes less than any that this search has reported; it does, where no search is known."""
    if (before := _BEST_S.get(None)) is None:
        return True
    least_s, before[0] = before[0], min(best_s, before[0])
    return best_s < least_s


def tell(progress: Progress) -> None:
    """Tell all listeners and not the log, which a signal handler must not touch: it may have interrupted a line of it."""
    for listener in _LISTENERS.get():
        listener(progress)


def enter(phase: str) -> None:
    """Say that a phase begins."""
    report(Progress(phase=phase), is_news=True)


def begin_search(words: str) -> None:
    """Say that one of several searches begins, and which."""
    report(Progress(search=words), is_news=True)


def _fields(progress: Progress) -> dict[str, Any]:
    return {field.name: getattr(progress, field.name) for field in dataclasses.fields(progress)}
