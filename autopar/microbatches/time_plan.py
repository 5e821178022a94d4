"""The phases of a step in microbatches, as data: which operation runs before, in and after the loop over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from autopar.compat import Var, source_line
from autopar.intra_op.choices.strategies import ShardingStrategy
from autopar.intra_op.lowering.assignment import Assignment
from autopar.microbatches.estimates import find_estimates
from autopar.program.program import Equation, can_be_awaited, operands_of
from autopar.rules.table import linear_if_finite, rule_for

Phase = Literal["prologue", "body", "epilogue"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TimePlan:
    """See the module's text. `phases` holds the equations of the outermost level; strategies are those of `assignment`.

    `is_of_finite`: it was sought under rules by which products are linear in each factor, as they are of finite numbers.
    `taken_from`: the number of microbatches whose phases it took over, as others may be as good; None if it has its own.
    """

    microbatches: int
    phases: Mapping[Equation, Phase]
    assignment: Assignment
    is_of_finite: bool = False
    taken_from: int | None = None

    @functools.cached_property
    def estimates(self) -> frozenset[Var]:
        """The variables that are estimates (`estimates.py`)."""
        return find_estimates(self.assignment.program, self.of_phase("body"))

    def of_phase(self, phase: Phase) -> tuple[Equation, ...]:
        """The outermost equations of one phase, in order."""
        return tuple(eqn for eqn in self.assignment.program.equations if self.phases[eqn] == phase)

    @functools.cached_property
    def assumed_finite(self) -> tuple[str, ...]:
        """The products, each with its line, that take terms of a sum where the other factor need not be finite."""
        if not self.is_of_finite:
            return ()
        taken = (eqn for eqn, how in self.assignment.strategies.items() if needs_finite(eqn, how))
        return tuple(dict.fromkeys(f"{eqn.primitive.name} at {self.line_of(eqn)}" for eqn in taken))

    def line_of(self, eqn: Equation) -> str:
        """The user's line of an equation; where JAX keeps none, as inside a function of its own, of the next or the last."""
        program = list(self.assignment.program.walk())
        place = program.index(eqn)
        lines = (source_line(e) for e in (*program[place:], *reversed(program[:place])))
        return next((line for line in lines if line), "an unknown line")

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


def needs_finite(eqn: Equation, strategy: ShardingStrategy) -> bool:
    """Whether an equation takes terms of a sum that its rule, as the table has it, would have it take only as a whole."""
    partial = tuple(place for place, layout in enumerate(strategy.inputs) if layout.partial)
    is_of_terms = bool(partial) and not any(axes for _, axes in strategy.factor_axes)
    return is_of_terms and partial in linear_if_finite(eqn, rule_for(eqn))


def _sources(v: Var, makers: Mapping[Var, Equation]) -> list[Var]:
    """What a variable is made of by these equations, as far as they did not make it; itself, if none makes it."""
    found, waiting = dict.fromkeys([v]), [v]
    while waiting:
        maker = makers.get(waiting.pop())
        new = [] if maker is None else [operand for operand in operands_of(maker) if operand not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return [one for one in found if one not in makers]
