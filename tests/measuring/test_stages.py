"""What ran of a pipeline is led back to the task and the microbatch that it ran for, on CPUs and in the form that GPUs have."""

import collections
import dataclasses
import time
import warnings

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import AutoparWarning
from autopar.measuring import profile
from autopar.measuring.profile import Profile, Seen
from autopar.measuring.stage_operations import TaskProgram, operations_of_tasks
from autopar.recording.compare import compare
from autopar.recording.device_times import device_times
from autopar.recording.recorded import RecordedSpan
from tests.measuring.gpu_profiles import HEAD, entry, fusion, ran
from tests.plan_examples import plan_of

WIDTH, WIDE, MICROBATCHES = 32, 2048, 4


def make_state():
    """Four small layers, and behind them a product that is 64 times as large."""

    def draw(number, *shape):
        return jax.random.normal(jax.random.key(number), shape) / 8

    return {
        **{f"layer_{n}": {"kernel": draw(n, WIDTH, WIDTH)} for n in range(4)},
        "wide": {"up": draw(5, WIDTH, WIDE)},
    }


def train_step(state, batch):
    def loss_of(state):
        x = batch["x"]
        for n in range(4):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ state[f"layer_{n}"]["kernel"])
        with jax.named_scope("wide/ffn"):
            x = (x @ state["wide"]["up"]).reshape(-1, WIDTH, WIDE // WIDTH).mean(-1)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda x, gradient: x - 0.1 * gradient, state, gradients), loss


def recorded(calls=3, **settings):
    ways = {"num_microbatches": MICROBATCHES, "num_stages": 2, "mesh_shape": (2,), "schedule": "1f1b", **settings}
    step = autopar.parallelize(train_step, devices=jax.devices()[:4], plan_cache=False, **ways)
    state = make_state()
    batch = {"x": jnp.ones((512, WIDTH)), "y": jnp.zeros((512, WIDTH))}
    with warnings.catch_warnings(), autopar.record(step) as run:
        warnings.simplefilter("ignore", AutoparWarning)  # that one operation is most of the work, as it is to be
        for _ in range(calls):
            state, _ = step(state, batch)
    return run


@pytest.fixture(scope="module")
def run():
    return recorded(constraints=autopar.data_parallel())


def test_each_operation_runs_once_for_each_microbatch_on_each_device(run):
    data = run.data
    assert data.missing == ()
    in_loop = {span.name for span in data.spans if span.kind in ("forward", "backward")}
    count = collections.Counter((one.task, one.name, one.microbatch, one.device) for one in data.operations)
    assert set(count.values()) == {1}
    times = collections.Counter((one.task, one.name) for one in data.operations)
    assert {task for task, _ in times} >= in_loop
    assert all(n == 2 * (MICROBATCHES if task in in_loop else 1) for (task, _), n in times.items())


def test_operations_lie_within_their_tasks_and_take_no_longer_than_these(run):
    data = run.data
    spans = {(span.name, span.microbatch): span for span in data.spans if span.transfer is None}
    for (task, microbatch), span in spans.items():
        own = [one for one in data.operations if (one.task, one.microbatch) == (task, microbatch)]
        assert own or span.kind in ("prologue", "epilogue")
        assert all(span.start_s <= one.start_s <= one.end_s <= span.end_s for one in own)
        for one in device_times(dataclasses.replace(data, operations=tuple(own)), 2):
            assert one.compute_s + one.exposed_s <= span.seconds
    found = compare(data)
    for stage in range(2):
        tasks_s = sum(span.seconds for span in spans.values() if span.stage == stage)
        parts = ("compute", "communication that is waited for", "neither")
        assert sum(found[f"{part} in stage {stage}"].measured_s for part in parts) == pytest.approx(tasks_s)


def test_a_large_product_is_the_longest_operation_and_names_its_module_and_its_stage(run):
    data = run.data
    (home,) = [stage.stage for stage in data.plan.stages if any("wide/up" in leaf for leaf in stage.leaves)]
    seconds = collections.Counter()
    for one in data.operations:
        if not data.operation(one).collective:
            seconds[data.stage(one), data.operation(one).scope] += one.seconds
    (stage, scope), _ = seconds.most_common(1)[0]
    assert (stage, scope) == (home, "wide/ffn")
    assert "wide/ffn" in str(run)


def test_products_of_all_stages_are_those_of_the_plan(run):
    data = run.data
    assert sum(data.operation(one).flops for one in data.operations) == data.plan.flops


def test_collectives_of_each_stage_are_over_the_axes_and_of_the_bytes_of_its_plan(run):
    data, found = run.data, compare(run.data)
    for stage in data.plan.stages:
        ran_in_it = [one for one in data.operations if data.stage(one) == stage.stage and one.device == 0]
        reduces = [data.operation(one) for one in ran_in_it if data.operation(one).collective]
        assert {(one.collective, one.axes) for one in reduces} == {("all-reduce", ("x",))}
        assert sum(one.bytes for one in reduces) == sum(one.bytes * one.count for one in stage.plan.collectives)
        part = found[f"all-reduce over x in stage {stage.stage}"]
        assert part.predicted_s == pytest.approx(sum(one.count * one.predicted_s for one in stage.plan.collectives))
        assert part.measured_s > 0


def test_stages_that_share_a_mesh_are_told_apart():
    data = recorded(virtual_stages=2, schedule="interleaved", num_stages=2).data
    assert data.missing == ()
    assert {data.stage(one) for one in data.operations} == {0, 1, 2, 3}
    assert all(data.mesh(one) == data.stage(one) % 2 for one in data.operations)
    spans = {(span.name, span.microbatch): span for span in data.spans}
    for one in data.operations:
        span = spans[one.task, one.microbatch]
        assert span.start_s <= one.start_s <= one.end_s <= span.end_s


def test_a_profiler_that_is_busy_costs_the_operations_and_not_the_tasks(tmp_path):
    jax.profiler.start_trace(str(tmp_path))
    try:
        found = recorded()
    finally:
        jax.profiler.stop_trace()
    assert found.data.spans
    assert found.data.operations == ()
    assert "not measured: the time of each operation: JAX's profiler could not be started" in str(found)


def test_a_profiler_that_does_not_tell_its_clock_costs_the_operations_of_stages_alone(monkeypatch):
    monkeypatch.setattr(profile, "_marks_of", lambda path: [])
    found = recorded()
    assert found.data.spans
    assert found.data.operations == ()
    assert "not measured: the time of each operation: JAX's profiler does not tell its clock" in str(found)
    step = autopar.parallelize(train_step, devices=jax.devices()[:2], plan_cache=False, mesh_shape=(2,))
    state, batch = make_state(), {name: jnp.ones((8, WIDTH)) for name in "xy"}
    with autopar.record(step) as run:
        for _ in range(2):
            state, _ = step(state, batch)
    assert run.data.operations


def test_seconds_of_the_profiler_are_those_of_the_clock():
    add = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(add(jnp.ones(8)))
    session = Profile()
    began_s = time.perf_counter()
    jax.block_until_ready(add(x))
    ended_s = time.perf_counter()
    assert all(began_s < one.start_s <= one.end_s < ended_s for one in session.end())


TEXT = HEAD + entry(fusion("add.1", "x", "fused_add"), fusion("exp.1", "add.1", "fused_exp"))
PLAN = plan_of(mesh_shape=(1,), axis_names=("x",))
PROGRAMS = {
    task: TaskProgram(
        hlo_text=TEXT.replace("jit_run", f"jit_{task.replace(' ', '_')}"), plan=PLAN, mesh=mesh, places={mesh: 0}
    )
    for task, mesh in (("forward 0", 0), ("backward 0", 0), ("forward 1", 1))
}


def task(name, microbatch, start_ms, end_ms):
    kind, stage = name.split()
    at = {"start_s": start_ms * 1e-3, "end_s": end_ms * 1e-3}
    return RecordedSpan(call=2, mesh=int(stage), kind=kind, stage=int(stage), microbatch=microbatch, name=name, **at)


SPANS = [
    task("forward 0", 0, 0, 4),
    task("forward 0", 1, 4, 8),
    task("backward 0", 0, 10, 14),
    task("forward 1", 0, 4, 8),
]
ORIGIN_S = 100.0


def place(*seen):
    at = [dataclasses.replace(one, start_s=one.start_s + ORIGIN_S, end_s=one.end_s + ORIGIN_S) for one in seen]
    return operations_of_tasks([(2, one) for one in at], SPANS, {2: ORIGIN_S}, PROGRAMS)


def where(found):
    return [(one.task, one.microbatch, one.name, one.device) for one in found.operations]


def seen(module, start_ms, run="", name="add.1", device=0):
    at = {"start_s": start_ms * 1e-3, "end_s": start_ms * 1e-3 + 1e-4}
    return Seen(name=name, module=module, device=device, run=run, **at)


def test_executions_of_one_program_belong_to_the_microbatches_during_which_they_ran():
    found = place(
        seen("jit_forward_0", 5, "b"),
        seen("jit_forward_0", 1, "a"),
        seen("jit_forward_0", 2, "a", "exp.1"),
        seen("jit_forward_1", 5, "b", device=1),
        seen("jit__cut", 5.5, "c"),
    )
    assert sorted(where(found)) == [
        ("forward 0", 0, "add.1", 0),
        ("forward 0", 0, "exp.1", 0),
        ("forward 0", 1, "add.1", 0),
        ("forward 1", 0, "add.1", 0),
    ]
    assert found.missing == ()
    assert found.operations[0].start_s == pytest.approx(5e-3)


def test_an_operation_whose_end_is_told_late_ends_with_its_task():
    late = dataclasses.replace(seen("jit_forward_0", 3, "a"), end_s=6e-3)
    (one,) = place(late).operations
    assert (one.microbatch, one.start_s, one.end_s) == (0, pytest.approx(3e-3), pytest.approx(4e-3))


@pytest.mark.parametrize(
    "lost",
    [
        [seen("jit_forward_0", 9, "b")],
        [seen("jit_forward_0", 11, "b")],
        [seen("jit_forward_0", 3.9, "b"), seen("jit_forward_0", 4.1, "b", "exp.1")],
    ],
    ids=["in no task", "in the task of another program", "in two tasks"],
)
def test_what_is_not_certain_is_left_out_and_said(lost):
    found = place(seen("jit_forward_0", 1, "a"), *lost)
    assert where(found) == [("forward 0", 0, "add.1", 0)]
    total_us = 100 * len(lost)
    assert found.missing == (
        f"to which task {total_us} us of operations belong, such as add.1: they began in none, or in several",
    )


def test_kernels_of_graphs_are_those_of_the_task_during_which_they_ran():
    """Kernels of two microbatches and of another task, which name neither an instruction nor, on the second mesh, a module."""
    found = place(
        *ran("add_1", "exp_1", graph=1, module="jit_forward_0", first=1),
        *ran("add_1", "exp_1", graph=2, module="jit_forward_0", first=5),
        *ran("add_1", "exp_1", graph=3, module="", first=11),
        *ran("add_1", "exp_1", graph=3, module="", device=1, first=5),
    )
    assert where(found) == [
        (name, microbatch, operation, 0)
        for name, microbatch in (("forward 0", 0), ("forward 0", 1), ("backward 0", 0), ("forward 1", 0))
        for operation in ("add.1", "exp.1")
    ]
    assert found.missing == ()
    assert {one.task for one in found.program.values()} == set(PROGRAMS)
