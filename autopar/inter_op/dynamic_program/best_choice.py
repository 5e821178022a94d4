"""The best choice of stages that a search has met, and what it need not look at for it.

In: choices as they are met. Out: the least seconds of a step, the stages that take it, and what others must not exceed to matter.
Ties go to fewer stages, then to earlier cuts, then to earlier submeshes in the list.
"""

from __future__ import annotations

import math

from autopar.inter_op.dynamic_program.families import Family
from autopar.inter_op.dynamic_program.recursion import TIE, Stages
from autopar.solver.budget import Budget


class BestChoice:
    """The best choice so far over all families, of those below a number of seconds.

    `floor_s`: no choice takes less. `is_cut_short`: the budget ended the search.
    """

    def __init__(self, tolerance: float, *, below_s: float = math.inf, budget: Budget | None = None) -> None:
        self.tolerance, self.below_s = tolerance, below_s
        self.step_s = math.inf
        self.stages: Stages | None = None
        self.family: Family | None = None
        self.floor_s = math.inf
        self.is_cut_short = False
        self._budget = budget

    @property
    def worth_s(self) -> float:
        """Seconds that a choice must not exceed to matter."""
        own_s = self.step_s * (1 - self.tolerance) * (1 + TIE) if self.stages else math.inf
        return min(own_s, self.below_s)

    def ends(self) -> bool:
        """Whether to be content with what is known."""
        if self.stages is not None and self._budget is not None and self._budget.is_over:
            self.is_cut_short = True
        return self.is_cut_short

    def offer(self, step_s: float, stages: Stages, family: Family) -> None:
        """Note a choice of a family, if it is better than the best so far."""
        if self.stages is None or is_better(step_s, stages, than_s=self.step_s, than=self.stages):
            self.step_s, self.stages, self.family = step_s, stages, family


def is_better(value: float, stages: Stages, *, than_s: float, than: Stages) -> bool:
    """Whether a choice takes less time than another, or as little and comes first."""
    if abs(value - than_s) > TIE * than_s:
        return value < than_s
    return _rank(stages) < _rank(than)


def _rank(stages: Stages) -> tuple[int, list[int], list[int]]:
    return len(stages), [i for i, _, _ in stages], [z for _, _, z in stages]
