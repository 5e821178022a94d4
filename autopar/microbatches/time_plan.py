"""The phases of a step in microbatches, as data: which operation runs before, in and after the loop over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from autopar.compat import Var
from autopar.intra_op.lowering.assignment import Assignment
from autopar.microbatches.estimates import find_estimates
from autopar.program.program import Equation, can_be_awaited, operands_of

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

    @functools.cached_property
    def late(self) -> Mapping[Equation, Var]:
        """What each equation of the loop that waits waits for in the loop (`Equation.after`).

        What is made of it after the loop, as a gradient of sums is, comes too late: the last of what that is made of is
        awaited instead.
        """
        body = self.of_phase("body")
        made = {v: number for number, eqn in enumerate(body) for v in eqn.outvars}
        makers = {v: eqn for eqn in self.of_phase("epilogue") for v in eqn.outvars}
        found: dict[Equation, Var] = {}
        for number, eqn in enumerate(body):
            sources = [] if eqn.after is None else _sources(eqn.after, makers)
            there = [v for v in sources if made.get(v, number) < number and can_be_awaited(v)]
            if there:
                found[eqn] = max(there, key=made.__getitem__)
        return found


def _sources(v: Var, makers: Mapping[Var, Equation]) -> list[Var]:
    """What a variable is made of by these equations, as far as they did not make it; itself, if none makes it."""
    found, waiting = dict.fromkeys([v]), [v]
    while waiting:
        maker = makers.get(waiting.pop())
        new = [] if maker is None else [operand for operand in operands_of(maker) if operand not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return [one for one in found if one not in makers]
