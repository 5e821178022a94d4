"""The phases of a step in microbatches, as data: which operation runs before, in and after the loop over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from autopar.compat import Var
from autopar.intra_op.lowering.assignment import Assignment
from autopar.microbatches.estimates import find_estimates
from autopar.program.program import Equation

Phase = Literal["prologue", "body", "epilogue"]


@dataclasses.dataclass(frozen=True, eq=False)
class TimePlan:
    """See the module's text. `phases` holds the equations of the outermost level; strategies are those of `assignment`."""

    microbatches: int
    phases: Mapping[Equation, Phase]
    assignment: Assignment

    @functools.cached_property
    def estimates(self) -> frozenset[Var]:
        """The variables that are estimates (`estimates.py`)."""
        return find_estimates(self.assignment.program, self.of_phase("body"))

    def of_phase(self, phase: Phase) -> tuple[Equation, ...]:
        """The outermost equations of one phase, in order."""
        return tuple(eqn for eqn in self.assignment.program.equations if self.phases[eqn] == phase)
