"""What a run tells of itself while it goes on: a bar in a terminal, a line now and then elsewhere.

In: each step's loss and seconds. Out: the step, its loss, tokens or examples per second, the share of the devices' peak that the
step's arithmetic takes (MFU), and the time that is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections import deque
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress

from autopar.explain import seconds_text
from autopar.explain.progress_bar import BAR_COLUMNS, REPORTS_WITHOUT_TERMINAL


@dataclasses.dataclass(frozen=True)
class RunStep:
    """A step of a run that was made: its number, from 1, its loss, and its seconds, from the end of the one before to its own."""

    number: int
    loss: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """What one step amounts to.

    Attributes:
        count: tokens, or examples, of its batch.
        noun: which of the two.
        ideal_s: seconds that its arithmetic takes on all devices at their peak; None if that is not known.
    """

    count: int
    noun: str
    ideal_s: float | None


class Report:
    """Tells of a run; nothing if `console` is None, as in all processes but the first."""

    def __init__(self, console: Console | None, scale: Scale, *, name: str, first: int, last: int) -> None:
        self._console, self._scale, self._name, self._first, self._last = console, scale, name, first, last
        self._seconds: deque[float] = deque(maxlen=50)
        self._progress: Progress | None = None

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """A context in which the bar is shown."""
        if self._console is None or not self._console.is_terminal:
            yield
            return
        with Progress(*BAR_COLUMNS, console=self._console) as self._progress:
            self._task = self._progress.add_task(self._name, total=self._last, completed=self._first, report="")
            yield

    def tell(self, step: RunStep) -> None:
        """A step was made."""
        self._seconds.append(step.seconds)
        if self._progress is not None:
            self._progress.update(self._task, completed=step.number, report=self.line(step))
        elif self._console is not None and self._is_due(step.number):
            left = seconds_text((self._last - step.number) * statistics.median(self._seconds))
            self._console.print(
                f"{self._name}  step {step.number}/{self._last}  {self.line(step)}, {left} left",
                markup=False,
                highlight=False,
            )

    def say(self, words: str) -> None:
        """Something else has happened."""
        if self._console is not None:
            self._console.print(f"{self._name}  {words}", markup=False, highlight=False)

    def line(self, step: RunStep) -> str:
        """The step's loss, and what the last steps took."""
        usual_s = statistics.median(self._seconds)
        rate = f"{self._scale.count / usual_s:,.0f} {self._scale.noun}/s" if usual_s else ""
        share = f", MFU {self._scale.ideal_s / usual_s:.1%}" if self._scale.ideal_s and usual_s else ""
        return f"loss {step.loss:.4f}  {rate}, {seconds_text(usual_s)} per step{share}"

    def _is_due(self, number: int) -> bool:
        every = max(1, (self._last - self._first) // REPORTS_WITHOUT_TERMINAL)
        return number in (self._first + 1, self._last) or number % every == 0
