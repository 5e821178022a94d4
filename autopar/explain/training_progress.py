"""What a run tells of itself while it goes on: a bar in a terminal, a line now and then elsewhere.

In: each step's loss and seconds. Out: the step, its loss, tokens or examples per second, measured and predicted seconds, the
share of the devices' peak that the step's arithmetic takes (MFU), and the time that is left.
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
from autopar.explain.progress_bar import BAR_CHARACTERS, BAR_COLUMNS, REPORTS_WITHOUT_TERMINAL


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
        predicted_s: seconds that the plan says it takes; None if there is no plan.
    """

    count: int
    noun: str
    ideal_s: float | None = None
    predicted_s: float | None = None

    def rate(self, seconds: float) -> str:
        """Tokens or examples per second."""
        return f"{self.count / seconds:,.0f} {self.noun}/s" if seconds else ""


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
        if step.number == self._first + 2:
            self._seconds.clear()  # of the first step, in which much is compiled
        self._seconds.append(step.seconds)
        if self._progress is not None and self._console is not None:
            report = self.line(step, self._room(self._console))
            self._progress.update(self._task, completed=step.number, report=report)
        elif self._console is not None and self._is_due(step.number):
            left_s = (self._last - step.number) * statistics.median(self._seconds)
            left = f", {seconds_text(left_s)} left" if step.number > self._first + 1 else ""
            self._console.print(
                f"{self._name}  step {step.number}/{self._last}  {self.line(step)}{left}",
                markup=False,
                highlight=False,
            )

    def say(self, words: str) -> None:
        """Something else has happened."""
        if self._console is not None:
            self._console.print(f"{self._name}  {words}", markup=False, highlight=False)

    def line(self, step: RunStep, most: int | None = None) -> str:
        """The step's loss, and what the last steps took: as many of these as so many characters hold."""
        usual_s, scale = statistics.median(self._seconds), self._scale
        taken = [scale.rate(usual_s), f"{seconds_text(usual_s)} per step"]
        if scale.predicted_s is not None:
            taken.append(f"{seconds_text(scale.predicted_s)} predicted")
        if scale.ideal_s and usual_s:
            taken.append(f"MFU {scale.ideal_s / usual_s:.1%}")
        lines = [f"loss {step.loss:.4f}  {', '.join(taken[:count])}" for count in range(len(taken), 0, -1)]
        return next((line for line in lines if most is None or len(line) <= most), f"loss {step.loss:.4f}")

    def _room(self, console: Console) -> int:
        """The characters that a terminal has beside the bar, the name, the count and the time that is left."""
        return console.width - BAR_CHARACTERS - len(self._name) - 2 * len(str(self._last))

    def _is_due(self, number: int) -> bool:
        every = max(1, (self._last - self._first) // REPORTS_WITHOUT_TERMINAL)
        return number in (self._first + 1, self._last) or number % every == 0
