"""A plan restored in both ways, with all checks and as the cache has kept it: the same step, the same strategies."""

import json

import autopar
from autopar import decide
from autopar.pipeline_plan import kept_plan_from_json, plan_from_json


def assert_restored_alike(step, state, batch, **wishes):
    """Plan the step, and restore the plan with checks and without."""
    parallel = autopar.parallelize(step, plan_cache=False, **wishes)
    plan = parallel.plan(state, batch)
    settings, traced = plan._asked
    planned = parallel._memory.last.planned
    text, phases = plan.to_json(), decide._name_phases(planned)
    assert kept_plan_from_json(text) == plan_from_json(text) == plan
    assert (1 if phases is None else json.loads(phases)["microbatches"]) == plan.num_microbatches
    checked = decide._restore(settings, traced, plan)
    kept = decide._restore_kept(settings, traced, plan, phases)
    pairs = list(zip(parts_of(planned, runs=False), parts_of(checked), parts_of(kept), strict=True))
    for searched, one, other in pairs:
        assert as_text(one) == as_text(other)
        assert as_text(searched, is_whole=False) == as_text(other, is_whole=False)
    return plan


def parts_of(planned, *, runs=True):
    """The program and the strategies of each stage, or of the one mesh. `runs`: those that run, not those that were searched."""
    if hasattr(planned, "assignment"):
        return [(planned.traced, planned.assignment)]
    stages = planned.stages if runs or not hasattr(planned, "staged") else planned.staged.stages
    return [(stage.program.step, stage.assignment) for stage in stages]


def as_text(part, *, is_whole=True):
    """What runs, without the identity of equations. `is_whole`: with the strategies, not only with the layouts of operands."""
    traced, assignment = part
    equations = list(assignment.program.walk())
    strategies = [assignment.strategies.get(eqn) for eqn in equations]
    layouts = [None if one is None else (one.inputs, one.outputs) for one in strategies]
    return (
        traced.fingerprint,
        [(leaf.path, leaf.shape) for leaf in traced.inputs],
        assignment.mesh,
        assignment.inputs,
        assignment.outputs,
        assignment.copy_span,
        [assignment.joins.get(eqn) for eqn in equations],
        layouts,
        (strategies, [assignment.rules.get(eqn) for eqn in equations]) if is_whole else None,
    )
