"""How far a plan may be from the best one, in words that say over which plans.

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


def proof_text(plan: Plan | PipelinePlan) -> str:
    """What is proven of a plan's step."""
    if plan.lower_bound_s <= 0:
        return "not proven optimal: no bound on the best plan is known"
    if isinstance(plan, PipelinePlan) and plan.step_s > _USEFUL * plan.lower_bound_s:
        return "not proven optimal: no useful bound on the best plan is known"
    if isinstance(plan, PipelinePlan):
        return f"at most {_gap_text(plan, plan.lower_bound_s)} slower than any plan in stages or on one mesh under the cost model"
    if plan.is_optimal:
        return "proven optimal under the cost model"
    if not plan.one_mesh_bound_s:
        return f"not proven optimal: at most {_gap_text(plan, plan.lower_bound_s)} slower than the best plan under the cost model"
    in_stages = ""
    if plan.step_s <= _USEFUL * plan.lower_bound_s:
        in_stages = f", and at most {_gap_text(plan, plan.lower_bound_s)} slower than any in stages"
    if plan.step_s <= plan.one_mesh_bound_s * _EXACT:
        return f"proven optimal on one mesh{in_stages} under the cost model"
    gap = _gap_text(plan, plan.one_mesh_bound_s)
    return f"not proven optimal: at most {gap} slower than the best plan on one mesh{in_stages} under the cost model"


def _gap_text(plan: Plan | PipelinePlan, bound_s: float) -> str:
    gap = max(0.0, plan.step_s / bound_s - 1)
    return f"{gap:.1%}" if gap >= _SHOWN else "0.1%"
