"""Whether a search is worth its time, beside a plan that is there.

In: the equations of a step, and the tuned numbers. Out: below how many seconds another plan is worth looking for. What can go
wrong: a search takes longer than assumed, or shorter; then a plan that is a little faster is missed, or found at a price.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.intra_op.tuning import Tuning
from autopar.solver.budget import SECONDS_PER_UNIT


@dataclasses.dataclass(frozen=True)
class Worth:
    """What is worth looking for in a step of so many equations."""

    equations: int
    tuning: Tuning

    @property
    def is_large(self) -> bool:
        """Whether searches of this step take so long that a gain has to be worth them."""
        return self.equations >= self.tuning.large

    def repays(self, gain_s: float, search_s: float) -> bool:
        """Whether a step that is faster by `gain_s` seconds repays a search of `search_s` in a run of some length."""
        return gain_s * self.tuning.repaid_in_steps > search_s

    def leaves(self, best_s: float, bound_s: float) -> bool:
        """Whether a mesh of many axes is left in a large step, with a plan of `best_s` and no step below `bound_s`."""
        return self.is_large and math.isfinite(best_s) and best_s - bound_s <= self.tuning.least_gain * best_s

    def planning_s(self, best_s: float) -> float:
        """Below how many seconds a step on another mesh is worth planning, with a plan of `best_s`."""
        return self._finding_s(best_s, self.tuning.search_s_per_equation * self.equations, self.tuning.most_worth)

    def choosing_s(self, best_s: float, step_per_choice: float) -> float:
        """Below how many seconds a choice on another mesh is worth a plan, with a plan of `best_s`.

        A step takes longer than the objective says of its choice. In a large step it is assumed to do so on the next mesh too, as
        making a plan of a choice takes as long as the choice.

        Args:
            best_s: seconds of the best step.
            step_per_choice: the least ratio of a step to its choice on the meshes before; infinite if none was planned.
        """
        is_known = self.is_large and math.isfinite(step_per_choice)
        return best_s / max(step_per_choice, 1.0) if is_known else best_s

    def limiting_s(self, best_s: float) -> float:
        """Below how many seconds without a memory limit a step is worth a search within it, with a plan of `best_s`."""
        return self._finding_s(best_s, SECONDS_PER_UNIT * self.tuning.mesh_work, self.tuning.most_worth_within)

    def _finding_s(self, best_s: float, search_s: float, most: float) -> float:
        """In a large step a gain has to repay the search, or to be more than a part `most` of the step."""
        if not self.is_large or math.isinf(best_s):
            return best_s
        repaying_s = max(self.tuning.worth * best_s, search_s / self.tuning.repaid_in_steps)
        return best_s - min(repaying_s, most * best_s)
