"""When the loss of a step is one that no run should go on from.

In: the losses of the last steps, and that of one more. Out: what is wrong with it, in words, or None. The same losses are judged
alike in every process and after every resume. What can go wrong: a threshold that ordinary noise exceeds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from autopar.errors import ArgumentError

ACTIONS = ("stop", "skip", "back")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """What makes a loss bad, and what is done about it. A loss that is no finite number is always bad.

    Attributes:
        action: `"stop"` ends the run with a TrainingError. `"skip"` goes back to the last checkpoint and makes the steps again
            without the batch of the bad one, as if the batch had not been there. `"back"` goes back to the last checkpoint and on
            with the batches behind the bad one.
        spike: a loss above so many times the median of the last ones is bad; None looks for no spikes. Below zero, where a larger
            loss is a smaller number, it is bad above the median by as much as that.
        window: the number of losses that the median is of; while there are fewer, there are no spikes.
        most: so often a run goes back without reaching another checkpoint; then it stops.
    """

    action: Literal["stop", "skip", "back"] = "stop"
    spike: float | None = None
    window: int = 50
    most: int = 3

    def __post_init__(self) -> None:
        """Raises ArgumentError for an action that there is not, and for a factor that every loss exceeds."""
        if self.action not in ACTIONS:
            raise ArgumentError(f"Guard(action={self.action!r}): give one of {', '.join(map(repr, ACTIONS))}")
        if self.spike is not None and not self.spike > 1:
            raise ArgumentError(f"Guard(spike={self.spike!r}): give a factor above 1, or None")
        if min(self.window, self.most) < 1:
            raise ArgumentError(f"Guard(window={self.window}, most={self.most}): give positive numbers")

    def judge(self, losses: Sequence[float], loss: float) -> str | None:
        """What is wrong with a loss after these ones; None if nothing is."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if self.spike is None or len(losses) < self.window:
            return None
        usual = statistics.median(losses[-self.window :])
        if loss - usual > (self.spike - 1) * abs(usual):
            return f"the loss is {loss:.4g}, more than {self.spike:g} times the median {usual:.4g} of the last {self.window}"
        return None
