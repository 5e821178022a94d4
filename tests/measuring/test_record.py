"""Calls are recorded as they run: operations on one mesh, instructions in stages."""

import json

import jax
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.recording.compare import compare
from tests.perceptron_step import make_batch, make_state, train_step


def recorded(calls=3, details=1, most=None, **settings):
    step = autopar.parallelize(train_step, devices=jax.devices()[:4], plan_cache=False, **settings)
    state, batch = make_state(), make_batch()
    with autopar.record(step, details=details, calls=most) as run:
        for _ in range(calls):
            state, _ = step(state, batch)
    return run


@pytest.fixture(scope="module")
def one_mesh():
    return recorded(mesh_shape={"x": 4}, constraints=autopar.data_parallel())


@pytest.fixture(scope="module")
def stages():
    return recorded(num_stages=2, num_microbatches=2, schedule="1f1b")


def test_calls_are_numbered_and_the_second_is_looked_into(one_mesh, stages):
    for run in (one_mesh, stages):
        calls = run.data.calls
        assert [(call.number, call.is_first, call.is_detailed) for call in calls] == [
            (1, True, False),
            (2, False, True),
            (3, False, False),
        ]
        assert run.data.wall_s == calls[2].wall_s > 0
        assert run.data.missing == ()


def test_each_device_runs_each_operation_of_the_program_equally_often(one_mesh):
    data = one_mesh.data
    ran = {device: sorted(o.name for o in data.operations if o.device == device) for device in range(4)}
    assert ran[0]
    assert ran[0] == ran[1] == ran[2] == ran[3]
    assert all(0 <= one.start_s <= one.end_s < data.calls[1].wall_s for one in data.operations)


def test_collectives_carry_the_axes_and_the_bytes_of_the_plan(one_mesh):
    data = one_mesh.data
    planned = [item for item in data.plan.collectives if item.kind == "all-reduce"]
    ran = [one for one in data.program if one.collective == "all-reduce"]
    assert {one.axes for one in ran} == {("x",)}
    assert sum(one.bytes for one in ran) == sum(item.bytes * item.count for item in planned)
    assert {one.groups for one in ran} == {((0, 1, 2, 3),)}
    part = compare(data)["all-reduce over x"]
    assert part.predicted_s == pytest.approx(sum(item.count * item.predicted_s for item in planned))
    assert part.measured_s > 0


def test_products_are_found_in_what_xla_made_of_them(one_mesh):
    data = one_mesh.data
    flops = sum(data.operation(one).flops for one in data.operations)
    assert flops == data.plan.flops


def test_each_task_of_a_pipeline_has_a_span_and_each_transfer_two(stages):
    spans = stages.data.spans
    tasks = sorted((span.stage, span.kind, span.microbatch) for span in spans if span.kind in ("forward", "backward"))
    assert tasks == [(s, kind, m) for s in range(2) for kind in ("backward", "forward") for m in range(2)]
    sends = {span.transfer for span in spans if span.kind == "send"}
    assert sends == {span.transfer for span in spans if span.kind == "receive"}
    assert sends
    assert {span.mesh for span in spans if span.kind == "epilogue"} == {0, 1}


def test_a_recording_prints_and_is_kept(one_mesh, stages, tmp_path):
    for run in (one_mesh, stages):
        text = str(run)
        assert text.startswith("3 calls of train_step on cpu; looked into: call 2\n")
        assert len(text.splitlines()) <= 40
        run.save(tmp_path / "run.json")
        assert autopar.RecordedRun.load(tmp_path / "run.json").data == run.data
        cluster = json.loads(run.data.cluster_text)
        assert cluster["name"] == "cpu"


def test_calls_behind_the_last_that_is_asked_for_run_as_always(one_mesh):
    run = recorded(calls=3, details=0, most=2, mesh_shape=(4,))
    assert [call.number for call in run.data.calls] == [1, 2]
    assert run.data.detailed == ()


def test_a_first_call_alone_is_timed_and_that_is_said():
    run = recorded(calls=1, mesh_shape=(4,))
    assert run.data.operations == ()
    assert "the only call was the first of its programs; call the step twice" in str(run)
    assert run.data.calls[0].is_first


def test_a_profiler_that_is_busy_costs_the_operations_and_not_the_seconds(tmp_path):
    jax.profiler.start_trace(str(tmp_path))
    try:
        run = recorded(mesh_shape=(4,))
    finally:
        jax.profiler.stop_trace()
    assert len(run.data.calls) == 3
    assert "not measured: the time of each operation: JAX's profiler could not be started" in str(run)
    assert compare(run.data)["compute"].measured_s is None


def test_nothing_called_or_asked_for_wrongly_is_refused():
    step = autopar.parallelize(train_step, devices=jax.devices()[:2], plan_cache=False)
    with autopar.record(step) as run:
        pass
    with pytest.raises(ArgumentError, match="nothing was recorded: train_step was not called in the block"):
        run.compare()
    with pytest.raises(ArgumentError, match="calls=0 counts calls from 1"), autopar.record(step, calls=0):
        pass
    with pytest.raises(ArgumentError, match="details=-1 counts calls from 0"), autopar.record(step, details=-1):
        pass


def test_a_block_that_fails_raises_its_own_error_and_leaves_the_profiler_free(tmp_path):
    step = autopar.parallelize(train_step, devices=jax.devices()[:1], plan_cache=False)
    with pytest.raises(ZeroDivisionError), autopar.record(step):
        raise ZeroDivisionError
    jax.profiler.start_trace(str(tmp_path))
    jax.profiler.stop_trace()


@pytest.mark.parametrize("step", [lambda state, batch: state, None])
def test_a_step_that_is_not_parallel_is_refused(step):
    with (
        pytest.raises(autopar.ArgumentError, match="record takes a step that `parallelize` made"),
        autopar.record(step),
    ):
        pass
