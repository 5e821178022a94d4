"""The phases of a step by name, as the plan cache keeps them, and back.

In: a `TimePlan`. Out: `NamedPhases`, texts and numbers alone. Back: these and the same step, which a later run has traced; out
comes the `TimePlan`, without a search. What can go wrong: they are those of another step; PlanError says so where it is noticed.
"""

from __future__ import annotations

import dataclasses
import json

from autopar.errors import PlanError
from autopar.files.json_form import build
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.lowering.named_strategies import assign_by_name, name_strategies
from autopar.layouts.mesh import Layout
from autopar.microbatches.graph_over_time import catalogue_over_time
from autopar.microbatches.time_plan import Phase, TimePlan
from autopar.microbatches.tuning import TUNING
from autopar.plan import NamedLayout, NamedStrategy
from autopar.program.step import TracedStep

_PHASES: dict[str, Phase] = {"p": "prologue", "b": "body", "e": "epilogue"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedPhases:
    """A `TimePlan` in words.

    Attributes:
        microbatches: how many there are.
        phases: a letter for each of the outermost equations: prologue, body or epilogue.
        layouts: the layouts over time, once each.
        strategies: the strategies over time, once each.
        equations: for each equation of `Program.walk` the name of its strategy.
        is_of_finite: see `TimePlan`.
        taken_from: see `TimePlan`.
    """

    microbatches: int
    phases: str
    layouts: tuple[NamedLayout, ...]
    strategies: tuple[NamedStrategy, ...]
    equations: tuple[str, ...]
    is_of_finite: bool
    taken_from: int | None

    @classmethod
    def of(cls, plan: TimePlan) -> NamedPhases:
        """The phases of a plan."""
        named, program = name_strategies(plan.assignment), plan.assignment.program
        return cls(
            microbatches=plan.microbatches,
            phases="".join(plan.phases[eqn][0] for eqn in program.equations),
            layouts=named.layouts,
            strategies=named.strategies,
            equations=named.equations,
            is_of_finite=plan.is_of_finite,
            taken_from=plan.taken_from,
        )

    def to_json(self) -> str:
        """The phases as JSON text, which `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NamedPhases:
        """The phases in the text that `to_json` wrote. Nothing is checked."""
        return build(cls, json.loads(text))

    def find(self, traced: TracedStep) -> TimePlan:
        """The plan of the step that the phases are of. Raises PlanError if they are those of another one."""
        program = traced.program
        if len(self.phases) != len(program.equations):
            raise PlanError(f"the phases are those of {len(self.phases)} equations, not of {len(program.equations)}")
        assignment = assign_by_name(
            program,
            self,
            catalogue_over_time(self.microbatches, RuleBook(finite=self.is_of_finite), TUNING),
            inputs=[Layout.replicated(len(v.aval.shape)) for v in program.invars],
            outputs=[Layout.replicated(len(v.aval.shape)) for v in program.outvars],
        )
        return TimePlan(
            microbatches=self.microbatches,
            phases={eqn: _PHASES[letter] for eqn, letter in zip(program.equations, self.phases, strict=True)},
            assignment=assignment,
            is_of_finite=self.is_of_finite,
            taken_from=self.taken_from,
        )
