"""Measured beside predicted: what devices do adds up, collectives come apart, stages have a bubble."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ArgumentError
from autopar.explain.figures import parts_of
from autopar.inter_op.candidates.pipeline_seconds import predict_step_s
from autopar.pipeline_plan import TransferPlan
from autopar.plan import Plan
from autopar.recording.compare import compare, parts_of_step
from autopar.recording.device_times import collective_runs, device_times
from autopar.recording.page import page
from tests.recording.recordings import PLAN, STAGES, in_stages, on_one_mesh, ran, span


def figures(comparison):
    return {part.what: (part.predicted_s, part.measured_s) for part in comparison.parts}


def approximately(expected):
    return {what: pytest.approx(pair) for what, pair in expected.items()}


def test_the_parts_of_one_mesh_are_means_over_its_devices():
    found = compare(on_one_mesh())
    assert figures(found) == approximately(
        {
            "step": (PLAN.step_s, 5e-3),
            "compute": (2e-3, 1.25e-3),
            "communication that is waited for": (1.5e-3, (2 + 1 + 1 + 1) / 4e3),
            "all-reduce over y": (1e-3, 1.25e-3),
            "all-gather over x": (1e-3, 0.0),
            "the call that was looked into": (None, 7e-3),
            "neither": (None, 7e-3 - 1.25e-3 - (2 + 1 + 1 + 1) / 4e3),
        }
    )
    assert found["step"].note == "the median of 3 calls"
    assert found["all-reduce over y"].note == "1 in the program, 20% of it for the last device to come"
    assert found["all-gather over x"].note == "none ran: XLA made something else of them"
    assert found["compute"].ratio == pytest.approx(0.625)
    with pytest.raises(
        ArgumentError,
        match="no part 'update' of a recorded step; there are step, the call that was looked into, compute, ",
    ):
        found["update"]


def test_a_collective_is_waited_for_until_the_last_rank_has_come_and_then_exchanges():
    first, second = collective_runs(on_one_mesh(), 2)
    assert (first.devices, second.devices) == ((0, 1), (2, 3))
    assert first.waited_s == pytest.approx((1e-3, 0.0))
    assert (first.exchange_s, second.exchange_s) == pytest.approx((1e-3, 1e-3))
    assert first.seconds == pytest.approx(1.5e-3)


def test_executions_of_one_operation_are_paired_in_their_order():
    again = (*on_one_mesh().operations, ran("psum.2", 3, 5, 8), ran("psum.2", 2, 6, 8))
    runs = [run for run in collective_runs(on_one_mesh(operations=again), 2) if run.devices == (2, 3)]
    assert [run.exchange_s for run in runs] == pytest.approx([1e-3, 2e-3])
    assert runs[1].waited_s == pytest.approx((0.0, 1e-3))


executions = st.tuples(
    st.sampled_from(["dot.1", "psum.2"]), st.integers(0, 3), st.integers(0, 40), st.integers(0, 20)
).map(lambda one: ran(one[0], one[1], one[2], one[2] + one[3]))


@given(st.lists(executions, min_size=1, max_size=12))
def test_what_a_device_does_adds_up_to_the_call(operations):
    recorded = on_one_mesh(operations=tuple(operations))
    lasts_s = max(one.end_s for one in operations) - min(one.start_s for one in operations)
    for one in device_times(recorded, 2):
        assert one.compute_s + one.exposed_s + one.idle_s == pytest.approx(lasts_s, abs=1e-12)
        collectives_s = sum(o.seconds for o in operations if o.device == one.device and o.name == "psum.2")
        assert one.exposed_s + one.hidden_s <= collectives_s + 1e-12
        assert min(one.compute_s, one.exposed_s, one.hidden_s, one.idle_s) >= -1e-12


def test_the_parts_of_stages_are_those_of_the_busiest_mesh():
    found = compare(in_stages())
    measured = {part.what: part.measured_s for part in found.parts}
    assert measured == pytest.approx(
        {
            "step": 5e-3,
            "work of the busiest mesh": 12e-3,
            "bubble": 5e-3,
            "transfers that are waited for": 0.0,
            "the call that was looked into": 7e-3,
            "once per step, such as the update": 1e-3,
            "transfers once per step": 0.0,
            "before the first task and after the last": 0.0,
            "forward of stage 0": 2e-3,
            "backward of stage 0": 4e-3,
            "forward of stage 1": 2e-3,
            "backward of stage 1": 4e-3,
        }
    )
    assert found["forward of stage 1"].predicted_s == STAGES.stages[1].forward_s
    assert found["work of the busiest mesh"].predicted_s == pytest.approx(2 * 3e-3)
    assert found["bubble"].predicted_s == pytest.approx(3e-3)


def looked_into(*spans, wall_s):
    """A recording in stages whose second call was looked into, and took so long."""
    base = in_stages()
    calls = [dataclasses.replace(call, wall_s=wall_s) if call.is_detailed else call for call in base.calls]
    return dataclasses.replace(base, calls=tuple(calls), spans=spans or base.spans)


def test_what_is_measured_adds_up_to_the_call_that_was_looked_into_and_what_is_predicted_to_the_step():
    late = (
        span(1, "forward", 0, 4, 0),
        span(1, "epilogue", 4, 5),
        span(0, "receive", 3, 7, name="w", transfer=1),
        span(1, "send", 5, 5, name="w", transfer=1),
        span(0, "epilogue", 7, 8),
    )
    for recorded in (on_one_mesh(), looked_into(wall_s=20e-3), looked_into(*late, wall_s=9e-3)):
        found = compare(recorded)
        parts = parts_of_step(found)
        looked = found["the call that was looked into"]
        assert sum(part.measured_s or 0.0 for part in parts) == pytest.approx(looked.measured_s)
        plan = recorded.plan
        step_s = plan.step_s if isinstance(plan, Plan) else predict_step_s(plan)
        assert sum(part.predicted_s or 0.0 for part in parts) == pytest.approx(step_s)
        more = looked.measured_s / found["step"].measured_s - 1
        assert looked.note == f"the parts below add up to it; {more:.0%} more than the step: looking takes time"
    assert found["transfers once per step"].measured_s == pytest.approx(2e-3), "from when it is sent"
    assert found["once per step, such as the update"].measured_s == pytest.approx(2e-3)
    assert "looked into: call 2" in page(recorded)


def test_what_happens_once_per_step_is_predicted_as_in_the_report_of_the_plan():
    weights = TransferPlan(what="weights", source=0, target=1, count=1, bytes=4, predicted_s=1e-4)
    plan = dataclasses.replace(STAGES, transfers=(*STAGES.transfers, weights))
    found = compare(dataclasses.replace(in_stages(), plan_text=plan.to_json()))
    told = {part.name: part.seconds for part in parts_of(plan)}
    assert found["transfers once per step"].predicted_s == told["transfers once per step"] == 1e-4
    name = "once per step, such as the update"
    assert [found[name].predicted_s] == [seconds for what, seconds in told.items() if what.startswith(name)]


def test_a_backward_in_two_halves_counts_as_one_and_a_transfer_from_when_it_was_sent():
    halves = (
        span(0, "forward", 0, 1, 0),
        span(0, "send", 1, 1, name="x@0", transfer=0),
        span(1, "receive", 0, 3, name="x@0", transfer=0),
        span(1, "input_gradient", 3, 4, 0),
        span(1, "weight_gradient", 6, 8, 0),
    )
    found = compare(dataclasses.replace(in_stages(), spans=halves))
    assert found["backward of stage 1"].measured_s == pytest.approx(3e-3)
    assert found["transfers that are waited for"].measured_s == pytest.approx(2e-3)


def test_without_details_only_the_step_is_measured():
    for whole in (on_one_mesh(), in_stages()):
        calls = tuple(dataclasses.replace(call, is_detailed=False) for call in whole.calls)
        found = compare(dataclasses.replace(whole, calls=calls, operations=(), spans=(), program=()))
        assert {part.what for part in found.parts if part.measured_s is not None} == {"step"}
        assert "Measured beside predicted" in str(found)


def test_seconds_of_first_calls_and_of_those_that_were_looked_into_count_only_if_there_are_no_others():
    calls = on_one_mesh().calls
    assert on_one_mesh(calls=calls[:2]).wall_s == 7e-3
    assert on_one_mesh(calls=calls[:1]).wall_s == 9.0
    assert compare(on_one_mesh(calls=calls[:2]))["step"].note == "of one call while it was looked into"
    assert compare(on_one_mesh(calls=calls[:1]))["step"].note == "of one call, the first"
