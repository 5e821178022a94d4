"""Judge the loss of a step: a run does not go on from a bad one.

In: the losses of the last steps, and the loss of the next one. Out: what is wrong with it, in words, or None. Every process, and
every resumed run, judges the same losses alike. What can go wrong: ordinary noise exceeds the threshold.
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
    """The conditions that make a loss bad, and what the run does then. A loss that is not finite is always bad.

    Attributes:
        action: `"stop"` ends the run with a TrainingError. `"skip"` goes back to the last checkpoint and makes the steps again
            without the bad batch, as if it had not been there. `"back"` goes back to the last checkpoint and continues with the
            batches after the bad one.
        spike: a loss is bad if it exceeds the median of the last losses by more than (spike - 1) times the absolute value of
            the median; for positive losses, if it is more than `spike` times the median. None looks for no spikes.
        window: the number of losses of which the median is taken. With fewer losses there are no spikes.
        most: how often a run may go back without reaching another checkpoint. After that it stops.
    """

    action: Literal["stop", "skip", "back"] = "stop"
    spike: float | None = None
    window: int = 50
    most: int = 3

    def __post_init__(self) -> None:
        """Raise ArgumentError for an unknown action, a factor that every loss exceeds, and counts below 1."""
        if self.action not in ACTIONS:
            raise ArgumentError(f"Guard(action={self.action!r}): give one of {', '.join(map(repr, ACTIONS))}")
        if self.spike is not None and not self.spike > 1:
            raise ArgumentError(f"Guard(spike={self.spike!r}): give a factor above 1, or None")
        if min(self.window, self.most) < 1:
            raise ArgumentError(f"Guard(window={self.window}, most={self.most}): give positive numbers")

    def judge(self, losses: Sequence[float], loss: float) -> str | None:
        """Say what is wrong with a loss that follows `losses`; None if it is good."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if self.spike is None or len(losses) < self.window:
            return None
        usual = statistics.median(losses[-self.window :])
        if loss - usual > (self.spike - 1) * abs(usual):
            return f"the loss is {loss:.4g}, more than {self.spike:g} times the median {usual:.4g} of the last {self.window}"
        return None
