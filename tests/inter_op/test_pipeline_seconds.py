"""Seconds of a pipeline's step: by hand for equal stages, and the same in plan, report and simulator."""

import dataclasses

import pytest

from autopar.cost_model.hardware import preset
from autopar.explain.figures import parts_of
from autopar.inter_op.candidates.pipeline_seconds import find_exposed_s, predict_step_s, schedule_of, time_stages
from autopar.inter_op.candidates.timetables import Timetable
from autopar.pipeline_plan import ONCE, TransferPlan, plan_from_json, sent_once_s
from autopar.schedules.schedules import make_schedule
from autopar.simulate.reprice import reprice
from tests.inter_op.test_search import searched, two_nodes
from tests.schedules.chains import TRAINING_IN_ONE
from tests.why.test_leaf import planned

STAGES = {"num_stages": 2, "num_microbatches": 8, "mesh_shape": (1,), "devices": 2, "recompute": "none"}


def machine(slower):
    """A node whose devices are joined by links so many times slower."""
    cluster = preset("p3.16xlarge")
    tiers = [dataclasses.replace(tier, bytes_per_s=tier.bytes_per_s / slower) for tier in cluster.tiers]
    return dataclasses.replace(cluster, tiers=tuple(tiers))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TRAINING_IN_ONE)
def test_plan_report_and_simulator_have_the_same_seconds(name):
    """Priced on a machine with slow links, a plan takes what one that is made for these links takes."""
    here, there = (planned(**STAGES, schedule=name, cluster=machine(slower)) for slower in (1, 200))
    assert predict_step_s(here) == pytest.approx(here.step_s, rel=1e-12)
    assert reprice(here, machine(200), planned_for=machine(1)).step_s == pytest.approx(there.step_s, rel=1e-9)
    seconds = [(stage.forward_s, stage.backward_s) for stage in there.stages]
    exposed_s = find_exposed_s(schedule_of(there), seconds, there.transfers)
    assert exposed_s >= sum(t.predicted_s for t in there.transfers if t.what not in ONCE) * (1 - 1e-9)
    (row,) = [part for part in parts_of(there) if part.name == "transfers that are waited for"]
    assert row.seconds == pytest.approx(exposed_s)


def test_what_stages_wait_for_transfers_depends_on_the_schedule():
    """Equal stages and neighbours: one microbatch's transfers in GPipe and eager 1F1B, more in 1F1B."""
    for p, m in ((2, 8), (3, 8), (4, 4)):
        sent = [
            TransferPlan(source=a, target=b, what=what, bytes=1, count=m, predicted_s=0.25)
            for s in range(p - 1)
            for a, b, what in ((s, s + 1, "forward"), (s + 1, s, "backward"))
        ]
        waited = {
            name: find_exposed_s(make_schedule(name, num_meshes=p, num_microbatches=m), [(1.0, 2.0)] * p, sent)
            for name in ("gpipe", "1f1b", "eager-1f1b")
        }
        first_s = 2 * (p - 1) * 0.25
        assert waited["gpipe"] == pytest.approx(first_s)
        assert waited["eager-1f1b"] == pytest.approx(first_s)
        assert waited["1f1b"] == pytest.approx(first_s + 2 * 0.25 * ((m - 1) * (p - 1) // p))


@pytest.mark.parametrize("shares_host", [True, False])
def test_each_task_of_a_stage_is_called_with_its_arrays(shares_host):
    """On the host's cores a call adds to the work; devices of their own wait only where their work is shorter than the call."""
    free = machine(1)
    known = {"schedule": "1f1b", **STAGES}
    work = planned(**known, cluster=free)
    longest_s = max(max(stage.forward_s, stage.backward_s, stage.once_s) for stage in work.stages)
    for call_s in (longest_s / 1e3, longest_s * 10):
        called = planned(**known, cluster=dataclasses.replace(free, call_s=call_s, shares_host=shares_host))
        for before, after in zip(work.stages, called.stages, strict=True):
            for name in ("forward_s", "backward_s", "once_s"):
                alone_s = getattr(before, name)
                expected_s = alone_s + call_s if shares_host else max(alone_s, call_s)
                assert getattr(after, name) == pytest.approx(expected_s), name
        assert predict_step_s(called) == pytest.approx(called.step_s, rel=1e-12)


@pytest.mark.parametrize("shares_host", [True, False])
def test_a_split_backward_is_called_twice(shares_host):
    """Schedules are compared with the calls that each of them makes."""
    free = machine(1)
    whole, halves = (planned(**STAGES, schedule=name, cluster=free) for name in ("1f1b", "zb-h1"))
    call_s = max(stage.backward_s for stage in whole.stages)
    cluster = dataclasses.replace(free, call_s=call_s, shares_host=shares_host)
    called = planned(**STAGES, schedule="zb-h1", cluster=cluster)
    for alone, split, after in zip(whole.stages, halves.stages, called.stages, strict=True):
        assert split.backward_s == alone.backward_s, "calls that take no time"
        assert after.backward_s == pytest.approx(alone.backward_s + 2 * call_s if shares_host else 2 * call_s)
    assert predict_step_s(called) == pytest.approx(called.step_s, rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_task_pays_for_the_bytes_that_it_hands_to_the_stage_s_tasks_and_is_handed(name):
    """With a second for each byte: what forward keeps is written there, and read by backward."""
    free = machine(1)
    alone = planned(**STAGES, schedule=name, cluster=free)
    paid = planned(**STAGES, schedule=name, cluster=dataclasses.replace(free, call_s_per_byte=1.0))
    for before, after in zip(alone.stages, paid.stages, strict=True):
        forward, backward = (getattr(after, part) - getattr(before, part) for part in ("forward_s", "backward_s"))
        assert (forward, backward) == pytest.approx((round(forward), round(backward)), abs=1e-3)
        assert min(forward, backward) > 0
        assert after.once_s == pytest.approx(before.once_s)
    assert predict_step_s(paid) == pytest.approx(paid.step_s, rel=1e-12)


def test_a_call_pays_for_the_arrays_that_come_and_go():
    """With a second for each array, a stage's seconds are numbers of arrays, weights among them."""
    cluster = dataclasses.replace(machine(1), call_s_per_array=1.0, shares_host=True)
    plan = planned(**STAGES, schedule="1f1b", cluster=cluster)
    for stage in plan.stages:
        weights = len(stage.leaves)
        assert stage.forward_s >= weights / 2
        assert stage.backward_s >= stage.forward_s / 2
        assert 2 * stage.forward_s == pytest.approx(round(2 * stage.forward_s), abs=0.01)
        assert stage.once_s >= weights


def sends(p, m, seconds, **options):
    """What neighbours of p stages send each other for m microbatches, forward and back."""
    return [
        TransferPlan(source=a, target=b, what=what, bytes=1, count=m, predicted_s=seconds, **options)
        for s in range(p - 1)
        for a, b, what in ((s, s + 1, "forward"), (s + 1, s, "backward"))
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_what_a_mesh_sends_by_its_own_work_hides_behind_nothing(name):
    """A step takes as long as with tasks that are longer by it; at least as long as over links of their own."""
    p, m, sent_s = 3, 6, 0.25
    schedule, stages = make_schedule(name, num_meshes=p, num_microbatches=m), [(1.0, 2.0)] * p
    alone_s = time_stages(schedule, stages).makespan_s
    with_work_s = alone_s + find_exposed_s(schedule, stages, sends(p, m, sent_s, is_work=True))
    over_links_s = alone_s + find_exposed_s(schedule, stages, sends(p, m, sent_s))
    assert over_links_s <= with_work_s + 1e-12
    sending = [(1.0 + sent_s * (s < p - 1), 2.0 + sent_s * (s > 0)) for s in range(p)]
    if name != "zb-h1":
        assert with_work_s == pytest.approx(time_stages(schedule, sending).makespan_s)
    else:  # the half of backward that others wait for is longer, and the other half is not
        assert with_work_s <= time_stages(schedule, sending).makespan_s + sent_s * m
        assert with_work_s >= alone_s + sent_s * m


def test_a_mesh_s_own_work_for_stages_that_are_no_neighbours_counts_in_every_microbatch():
    schedule, stages = make_schedule("gpipe", num_meshes=3, num_microbatches=4), [(1.0, 2.0)] * 3
    skip = TransferPlan(source=0, target=2, what="forward", bytes=1, count=4, predicted_s=0.5)
    assert find_exposed_s(schedule, stages, [skip]) == pytest.approx(0.5)
    assert find_exposed_s(schedule, stages, [dataclasses.replace(skip, is_work=True)]) > 0.5


def test_transfers_once_a_step_run_side_by_side_but_for_the_work_of_one_stage():
    once = [
        TransferPlan(source=source, target=2, what=what, bytes=1, count=1, predicted_s=seconds)
        for source, what, seconds in ((0, "update", 1.0), (0, "weights", 2.0), (1, "update", 2.5), (1, "forward", 9.0))
    ]
    assert sent_once_s(once) == 2.5
    assert sent_once_s([dataclasses.replace(one, is_work=True) for one in once]) == 3.0
    assert sent_once_s(()) == 0.0


def test_where_devices_share_the_host_a_plan_s_transfers_are_work_of_the_stages_that_send():
    shared = dataclasses.replace(machine(1), sent_s_per_array=0.1, shares_host=True)
    for cluster, is_work in ((shared, True), (dataclasses.replace(shared, shares_host=False), False)):
        plan = planned(**STAGES, schedule="1f1b", cluster=cluster)
        assert any(item.what not in ONCE for item in plan.transfers)
        for item in plan.transfers:
            assert item.is_work == is_work
            assert item.predicted_s == pytest.approx(0.1 * item.arrays, rel=0.01)
        assert predict_step_s(plan) == pytest.approx(plan.step_s, rel=1e-12)
        assert plan_from_json(plan.to_json()) == plan
    here = reprice(plan, shared, planned_for=cluster)
    assert here.waited_s > here.planned_waited_s


def test_stages_are_chosen_by_sums_that_know_what_sending_takes_of_them():
    """Two stages, four microbatches, a tenth of a second to send: a link each way would carry what goes back meanwhile."""
    for shares_host, seconds in ((True, (4 + 1) * 0.1), (False, 4 * 0.1)):
        cluster = dataclasses.replace(two_nodes(), sent_s_per_array=0.1, shares_host=shares_host)
        found = searched(64, 4, cluster, num_stages=2, timetables=[Timetable(4, "eager-1f1b")])
        assert found.choice.step_s == pytest.approx(seconds, rel=0.02)
    schedule = make_schedule("eager-1f1b", num_meshes=2, num_microbatches=4)
    assert find_exposed_s(schedule, [(1e-9, 1e-9)] * 2, sends(2, 4, 0.1, is_work=True)) == pytest.approx(0.5)
