"""What a terminal shows while a plan is sought and a step is compiled: one line that moves, and is gone at the end.

In: the reports of the search (`autopar.progress`). Out, on standard error: the phase, candidates, the best step so far, what
stages promise, the bound and the seconds left; with `-v` also the log. A thread of rich draws the line four times a second, so
that it moves during long steps as well. A narrow terminal gets the steps and the seconds whole: candidates go first, then the
bound, then the end of the phase. A pipe or a file gets nothing but the log that `-v` asks for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from autopar.explain import seconds_text
from autopar.progress import COMPILING, LOGGER, STEPPING, Progress, listening

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_PER_SECOND = 4
_SEPARATOR = " · "


@contextlib.contextmanager
def show_progress(verbose: int = 0, console: Console | None = None) -> Iterator[None]:
    """A context in which the terminal shows what autopar is at: tracing, planning, compiling.

        with autopar.show_progress():
            state, loss = step(state, batch)  # the first call, which plans and compiles

    A pipe, a file and a notebook are shown nothing. Of several processes each shows its own terminal what it does.

    Args:
        verbose: 0: no log; 1: phases and better plans; 2: everything.
        console: where to; standard error if None.

    Yields:
        nothing; at the end of the context the line is gone.
    """
    console = console or Console(stderr=True)
    with contextlib.ExitStack() as stack:
        if console.file.isatty() and not console.is_dumb_terminal:
            line = _Line(console)
            live = Live(
                console=console, get_renderable=line.draw, refresh_per_second=_PER_SECOND, transient=True, screen=False
            )
            stack.enter_context(live)
            stack.enter_context(listening(line.hear))
        if verbose:
            stack.enter_context(_logging(_LEVELS[min(verbose, len(_LEVELS) - 1)]))
        yield


class _Line:
    """The line: what was reported last, and when."""

    def __init__(self, console: Console) -> None:
        self._console, self._spinner = console, Spinner("dots")
        self._now, self._started, self._ends = Progress(), console.get_time(), math.inf

    def hear(self, progress: Progress) -> None:
        """Take a report. What compiles and runs has no candidates and no clock."""
        if progress.phase in (COMPILING, STEPPING):
            self._now, self._started, self._ends = Progress(), self._console.get_time(), math.inf
        self._now = progress.after(self._now)
        if progress.seconds_left is not None:
            self._ends = self._console.get_time() + progress.seconds_left

    def draw(self) -> Text:
        """The line at this moment, for the thread that draws."""
        time = self._console.get_time()
        spinner = self._spinner.render(time)
        assert isinstance(spinner, Text)
        words = describe(
            self._now,
            elapsed_s=time - self._started,
            left_s=self._ends - time,
            width=self._console.width - spinner.cell_len - 1,
        )
        return Text.assemble(spinner, " ", words, no_wrap=True, overflow="ellipsis")


def describe(now: Progress, *, elapsed_s: float, left_s: float = math.inf, width: float = math.inf) -> str:
    """The words of the line.

    Args:
        now: all that is known.
        elapsed_s: seconds since the start.
        left_s: seconds until planning ends at the latest.
        width: the cells that there are.
    """
    phase = ", ".join(filter(None, [now.stopping, now.search, now.phase or "starting", now.at]))
    counts = {"bounded": now.bounded, "dropped": now.dropped, "proven": now.proven}
    candidates = " / ".join(f"{count} {name}" for name, count in counts.items() if count is not None)
    best = _join([_step_text("best step", now.best_s), _step_text("stages promise", now.promised_s)])
    bound = _step_text("bound", now.bound_s)
    time = f"{max(0.0, left_s):.0f} s left" if math.isfinite(left_s) else f"{elapsed_s:.0f} s"
    for said in ([phase, candidates, best, bound, time], [phase, best, bound, time], [phase, best, time]):
        words = _join(said)
        if cell_len(words) <= width:
            return words
    figures = _join([best, time])
    short = Text(phase)
    short.truncate(max(1, int(width) - cell_len(_SEPARATOR + figures)), overflow="ellipsis")
    return _join([short.plain, figures])


def _step_text(name: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{name} {seconds_text(seconds)}"


def _join(said: Sequence[str]) -> str:
    return _SEPARATOR.join(filter(None, said))


@contextlib.contextmanager
def _logging(level: int) -> Iterator[None]:
    """A context in which autopar's log goes to standard error, above the line if there is one."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("autopar: %(relativeCreated)6.0f ms %(levelname)s %(message)s"))
    own_process = os.getpid()
    # A fork has no thread that draws, and may have been made while that held the console's lock.
    handler.addFilter(lambda record: record.process == own_process)
    before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        yield
    finally:
        LOGGER.setLevel(before)
        LOGGER.removeHandler(handler)
