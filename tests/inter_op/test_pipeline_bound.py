"""A pipeline's bound is one: no stages by hand, in any schedule and number of microbatches, and no mesh go below it."""

import dataclasses
import itertools
import json

import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import AutoparError
from autopar.explain import explain
from autopar.inter_op.describe_pipeline import bound_stages
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.schedules.schedules import TRAINING
from tests.inter_op.test_search import arguments, request_on, step, traced_step, two_nodes

ROUNDING = 1 + 1e-9


def with_launches(machine, launch_s):
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, launch_s=launch_s))


MACHINES = {
    "two nodes": two_nodes(),
    "no launches": with_launches(two_nodes(), 0.0),
    "slow launches": with_launches(two_nodes(), 1e-3),
    "fused": preset("dgx-h100"),
}


def planned(width, batch, machine, **options):
    weights, x = arguments(width, batch=batch)
    return autopar.parallelize(step, devices=4, cluster=machine, **options).plan(weights, x)


EVERY = ((1, 2, 4), (1, 2, 8), TRAINING)
FEW = ((1, 2), (1, 8), ("gpipe", "zb-h1"))
"""Stages, microbatches and schedules: for `make test-all`, and for `make test`."""


def every_plan(width, batch, machine, ways):
    """Plans by hand."""
    for stages, microbatches, schedule in itertools.product(*ways):
        for recompute in ("none", "layer"):
            options = {"num_stages": stages, "num_microbatches": microbatches, "recompute": recompute}
            if stages > 1:
                options["schedule"] = schedule
            elif schedule != "gpipe":
                continue
            try:
                yield planned(width, batch, machine, **options)
            except AutoparError:
                continue


@pytest.mark.filterwarnings("ignore::autopar.errors.AutoparWarning")
@pytest.mark.parametrize(
    "name",
    ["slow launches", *(pytest.param(name, marks=pytest.mark.slow) for name in MACHINES if name != "slow launches")],
)
def test_no_plan_by_hand_goes_below_the_bound(name):
    machine = MACHINES[name]
    for width, batch in ((16, 16),) if name != "two nodes" else ((16, 16), (256, 64)):
        bound_s = bound_stages(traced_step(*arguments(width, batch=batch)), request_on(machine), 4)
        plans = list(every_plan(width, batch, machine, FEW if name == "slow launches" else EVERY))
        assert {isinstance(plan, PipelinePlan) for plan in plans} == {True, False}
        assert 0 < bound_s <= min(plan.step_s for plan in plans) * ROUNDING
        for plan in plans:
            assert plan.lower_bound_s <= plan.step_s * ROUNDING
            assert not isinstance(plan, PipelinePlan) or plan.lower_bound_s == pytest.approx(bound_s)


@pytest.mark.sweep
def test_a_plan_of_one_mesh_is_bounded_by_stages_too_if_they_are_open():
    one = planned(256, 64, two_nodes(), num_stages=1)
    both = planned(256, 64, two_nodes())
    weights, x = arguments(256, batch=64)
    bound_s = bound_stages(traced_step(weights, x), request_on(two_nodes()), 4)
    assert one.one_mesh_bound_s == 0.0
    assert both.lower_bound_s == pytest.approx(min(one.lower_bound_s, bound_s))
    if not isinstance(both, PipelinePlan):
        assert both.one_mesh_bound_s == pytest.approx(one.lower_bound_s)


@pytest.mark.sweep
def test_the_report_says_what_the_bound_of_a_pipeline_is_over():
    plan = planned(256, 64, two_nodes(), num_stages=2)
    assert "no useful bound on the best plan is known" in explain(plan)  # most of so small a step is launches
    near = dataclasses.replace(plan, lower_bound_s=plan.step_s / 1.25)
    assert "another plan, in stages or on one mesh, could save at most 20.0% of the step" in explain(near)
    assert plan_from_json(plan.to_json()) == plan
    old = dataclasses.replace(plan, lower_bound_s=0.0)
    assert "no bound on the best plan is known" in explain(old)
    fields = json.loads(plan.to_json())
    del fields["lower_bound_s"]
    assert plan_from_json(json.dumps(fields)) == old


@pytest.mark.parametrize("name", ["no launches", "slow launches"])
def test_on_one_device_the_bound_is_the_step_but_for_its_call_and_more_devices_divide_it(name):
    """Nothing is lost there: a bound that is too high by any part exceeds a step that there is."""
    machine, (weights, x) = MACHINES[name], arguments(256, batch=64)
    traced, request = traced_step(weights, x), request_on(MACHINES[name])
    plan = autopar.parallelize(step, devices=1, cluster=machine, num_microbatches=1).plan(weights, x)
    bound_s = bound_stages(traced, request, 1)
    assert bound_s * (1 - 1e-9) <= plan.step_s - machine.dispatch_s(len(traced.inputs)) <= 1.05 * bound_s
    assert bound_stages(traced, request, 4) == pytest.approx(bound_s / 4)
