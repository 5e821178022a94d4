"""What is proven of a plan: how much of its step another plan could save at most, in words that say which other plans.

In: a plan of one mesh or a pipeline. Out: the end of a sentence. What can go wrong: a bound that is taken for one of real steps.
It is one of the cost model's.
"""

from __future__ import annotations

from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

_EXACT = 1 + 1e-6
_SHOWN = 1e-3
_USEFUL = 2.0
"""A bound that is farther from the step than this factor says nothing."""
_MODEL = "under the cost model"


def proof_text(plan: Plan | PipelinePlan) -> str:
    """What is proven of a plan's step."""
    if is_proven(plan):
        return f"proven optimal {_MODEL}"
    if plan.lower_bound_s <= 0:
        return "not proven optimal: no bound on the best plan is known"
    is_useful = plan.step_s <= _USEFUL * plan.lower_bound_s
    if isinstance(plan, PipelinePlan):
        if not is_useful:
            return "not proven optimal: no useful bound on the best plan is known"
        saved = _saved_text(plan, plan.lower_bound_s)
        return f"not proven optimal: another plan, in stages or on one mesh, could save at most {saved} of the step {_MODEL}"
    if not plan.one_mesh_bound_s:
        return f"not proven optimal: another plan could save at most {_saved_text(plan, plan.lower_bound_s)} of the step {_MODEL}"
    in_stages = _saved_text(plan, plan.lower_bound_s) if is_useful else ""
    if plan.step_s <= plan.one_mesh_bound_s * _EXACT:
        found = f"; a plan in stages could save at most {in_stages} of the step" if in_stages else ""
        return f"proven optimal on one mesh{found} {_MODEL}"
    found = f", one in stages at most {in_stages}," if in_stages else ""
    saved = _saved_text(plan, plan.one_mesh_bound_s)
    return f"not proven optimal: another plan on one mesh could save at most {saved} of the step{found} {_MODEL}"


def is_proven(plan: Plan | PipelinePlan) -> bool:
    """Whether no plan of what was left open is faster under the cost model."""
    return isinstance(plan, Plan) and plan.is_optimal


def _saved_text(plan: Plan | PipelinePlan, bound_s: float) -> str:
    """The part of the step that a plan at the bound would save."""
    saved = max(0.0, 1 - bound_s / plan.step_s) if plan.step_s else 0.0
    return f"{saved:.1%}" if saved >= _SHOWN else "0.1%"
