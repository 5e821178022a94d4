"""A plan's question asked again with something changed.

In: the settings, the traced step, and the plan that was found. Out: the best plan of the same kind, on the same meshes and in
as many microbatches, under further constraints. What can go wrong: nothing fits, which is an answer too.
"""

from __future__ import annotations

import dataclasses

from autopar.decide import decide
from autopar.errors import ConstraintError, OutOfMemoryError, PlanError
from autopar.layouts.constraints import Constraints, Rule
from autopar.layouts.mesh import LogicalMesh
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.settings import Settings, start_clock


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """What was asked, and the plan that was the answer."""

    settings: Settings
    traced: TracedStep
    plan: Plan | PipelinePlan

    def __post_init__(self) -> None:
        """A step that follows another has its layouts from there."""
        if self.settings.follow is not None:
            raise PlanError("the layouts are those of the step that this one follows: ask the plan of that step")

    def under(self, *rules: Rule) -> Plan | PipelinePlan | str:
        """The best plan on the same meshes that also keeps these rules; if there is none, why in a few words."""
        kept = self._fixed()
        constraints = dataclasses.replace(kept.constraints, rules=(*kept.constraints.rules, *rules))
        return solve(dataclasses.replace(kept, constraints=constraints), self.traced)

    def without(self, rule: Rule) -> Plan | PipelinePlan | str:
        """The best plan on the same meshes that need not keep one of the user's rules."""
        kept = self._fixed()
        rules = tuple(one for one in kept.constraints.rules if one is not rule)
        return solve(dataclasses.replace(kept, constraints=Constraints(rules, kept.constraints.without)), self.traced)

    def _fixed(self) -> Settings:
        """The settings with what the plan has decided beside layouts."""
        plan, settings = self.plan, self.settings
        recompute = settings.recompute if plan.recompute else "none"
        settings = dataclasses.replace(
            settings, plan=None, num_microbatches=plan.num_microbatches, recompute=recompute, virtual_stages="auto"
        )
        if isinstance(plan, Plan):
            mesh = LogicalMesh(plan.mesh_shape, plan.axis_names)
            return dataclasses.replace(settings, meshes=(mesh,), num_stages="auto", schedule="auto")
        of_meshes = plan.stages[: plan.num_stages // plan.virtual_stages]
        return dataclasses.replace(
            settings,
            meshes=tuple(LogicalMesh(stage.plan.mesh_shape, stage.plan.axis_names) for stage in of_meshes),
            num_stages=len(of_meshes),
            virtual_stages=plan.virtual_stages,
            schedule=plan.schedule,
        )


OUT_OF_TIME = "no plan was found in the time there was"
"""What `solve` says where the clock ended a search that might have found one."""


def solve(settings: Settings, traced: TracedStep) -> Plan | PipelinePlan | str:
    """The plan for a step; if there is none, why in a few words."""
    asked = start_clock(settings)
    try:
        return decide(asked, traced).plan
    except OutOfMemoryError:
        return OUT_OF_TIME if asked.budget.is_late else "does not fit the memory"
    except ConstraintError as error:
        return f"cannot be kept: {str(error).splitlines()[0]}"
