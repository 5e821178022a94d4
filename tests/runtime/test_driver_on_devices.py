"""The driver with compiled programs on eight virtual devices: numbers, buffers, errors that XLA reports late, timelines."""

import functools
import json
import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import PipelineError
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Value
from autopar.schedules.schedules import make_schedule
from tests.schedules.chains import TRAINING_IN_ONE, ctrl_c, small_schedules

WIDTH = 8


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No thread and no buffer outlives a test."""
    before = {id(array) for array in jax.live_arrays()}
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("autopar")]
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []


def wait_for_arrays(count, *, seconds=10.0):
    """The number of arrays, once it is this; the callback of another device may hold its operand a little longer."""
    end_s = time.monotonic() + seconds
    while len(jax.live_arrays()) != count and time.monotonic() < end_s:
        time.sleep(0.01)
    return len(jax.live_arrays())


@pytest.fixture
def quiet_callbacks(monkeypatch):
    """JAX logs the traceback of a failing callback; pytest keeps the record, and with it the callback's arrays."""
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)


def forward(w, x):
    y = jnp.tanh(x @ w)
    return y, (x, y)


def input_gradient(residual, g, w):
    return (g * (1 - residual[1] ** 2)) @ w.T


def weight_gradient(dw, residual, g):
    return dw + residual[0].T @ (g * (1 - residual[1] ** 2))


def task(kind):
    """The chain's task with one array per slot: a residual is x and y stacked."""
    if kind == "forward":
        return lambda w, x: (forward(w, x)[0], jnp.stack(forward(w, x)[1]))
    if kind == "backward":
        return lambda dw, r, g, w: (weight_gradient(dw, r, g), input_gradient(r, g, w))
    if kind == "input_gradient":
        return lambda r, g, w: (input_gradient(r, g, w),)
    return lambda dw, r, g: (weight_gradient(dw, r, g),)


@functools.cache
def jitted(kind, extra, donated, placed):
    """The task of a kind and a witness, with results in these places; equal tasks of all steps are compiled once."""

    def program(*arrays):
        arrays = list(arrays)
        if extra is not None:
            arrays[-1] = extra(arrays[-1])
        return *task(kind)(*arrays)[: len(placed) - 1], jnp.zeros(())

    return jax.jit(program, donate_argnums=donated, out_shardings=placed)


class Step:
    """The chain of tanh(x @ w), on `per_mesh` devices for each mesh; rows of the batch are split over them."""

    def __init__(self, schedule, *, per_mesh=1, extra=None, **options):
        self.work = make_chain(schedule)
        p = schedule.num_meshes
        devices = np.array(jax.devices()[: p * per_mesh]).reshape(p, per_mesh)
        self.meshes = [Mesh(row, ("data",)) for row in devices]
        extra = extra or {}
        self.calls = {spec.name: self.compiled(spec, extra.get(spec.name)) for spec in self.work.specs}
        self.driver = Driver(self.work.emit(), self.calls, self.transfer, **options)

    def placed(self, mesh, name):
        split = {"x": PartitionSpec("data"), "g": PartitionSpec("data"), "r": PartitionSpec(None, "data")}
        return NamedSharding(self.meshes[mesh], split.get(name[0], PartitionSpec()))

    def compiled(self, spec, extra):
        placed = (*(self.placed(spec.mesh, slot.name) for slot in spec.outputs), self.placed(spec.mesh, "witness"))
        donated = spec.donated[:1] if spec.kind != "forward" else ()
        function = jitted(spec.kind, extra, tuple(donated), placed)
        return lambda arrays: function(*arrays)

    def transfer(self, array, value, source, target):
        return jax.device_put(array, self.placed(target, value.name))

    def inputs(self):
        return {
            (mesh, value): jax.device_put(content(value), self.placed(mesh, value.name))
            for mesh, values in self.work.inputs.items()
            for value in values
        }

    def gradients(self, **options):
        return {str(value): np.array(array) for (_, value), array in self.driver.run(self.inputs(), **options).items()}


def content(value):
    if value.name.startswith("dw"):
        return np.zeros((WIDTH, WIDTH), np.float32)
    seed = 100 * int(value.name[1:]) + (value.microbatch or 0)
    return np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3


@functools.cache
def by_jax_grad(stages, microbatches):
    """The last stage's output is its own cotangent, so the loss is half its squares."""

    def loss(weights):
        total = 0.0
        for k in range(microbatches):
            x = jnp.asarray(content(Value("x0", k)))
            for w in weights:
                x = jnp.tanh(x @ w)
            total += 0.5 * jnp.sum(x**2)
        return total

    gradients = jax.grad(loss)([content(Value(f"w{s}")) for s in range(stages)])
    return {f"dw{s}": np.array(gradient) for s, gradient in enumerate(gradients)}


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=2e-5)


TRAINING = [
    schedule
    for schedule in small_schedules(max_meshes=4, max_microbatches=4, max_virtual=2)
    if schedule.kinds[-1] != "forward"
    and (schedule.num_meshes, schedule.num_microbatches) in ((1, 4), (2, 1), (2, 4), (4, 4))
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "schedule", TRAINING, ids=lambda s: f"{s.name}-{s.num_meshes}x{s.virtual_stages}-{s.num_microbatches}"
)
def test_gradients_are_those_of_jax_grad(schedule):
    assert_equal(Step(schedule).gradients(), by_jax_grad(schedule.num_stages, schedule.num_microbatches))


@pytest.mark.parametrize("name", TRAINING_IN_ONE)
def test_meshes_of_several_devices_give_the_same(name):
    schedule = make_schedule(name, num_meshes=2, num_microbatches=4)
    assert_equal(Step(schedule, per_mesh=4).gradients(), by_jax_grad(2, 4))


def boom_after(calls):
    """Fails in every call of the program but the first ones; each device calls."""
    seen = []

    def callback(x):
        seen.append(True)
        if len(seen) > calls:
            raise ValueError("boom in the callback")
        return np.asarray(x)

    return lambda array: jax.pure_callback(callback, jax.ShapeDtypeStruct(array.shape, array.dtype), array)


boom = boom_after(0)


def on_each_device(function):
    """As a part of a program on the second mesh of two devices."""
    mesh, rows = Mesh(jax.devices()[2:4], ("data",)), PartitionSpec("data")
    return jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)


@pytest.mark.usefixtures("quiet_callbacks")
def test_an_error_inside_a_program_names_the_stage_and_leaves_no_buffer():
    before = len(jax.live_arrays())
    schedule = make_schedule("1f1b", num_meshes=3, num_microbatches=2)
    step = Step(schedule, extra={"forward1": boom})
    for _ in range(2):
        with pytest.raises(PipelineError, match="Stage 1, microbatch 0: the forward failed on mesh 1") as caught:
            step.gradients(record=True)
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
        assert "boom in the callback" in str(caught.value.__cause__)
        assert wait_for_arrays(before) == before, "the exception is still held, the arrays are gone"
        del caught


@pytest.mark.usefixtures("quiet_callbacks")
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(("culprit", "kind", "mesh"), [("forward1", "forward", 1), ("backward1", "backward", 1)])
def test_an_error_that_xla_reports_late_names_the_program_that_failed_not_the_first_one_that_notices(
    record, culprit, kind, mesh
):
    """Programs of several devices run behind the caller's back; without collectives, which would wait for each other."""
    before = len(jax.live_arrays())
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=3)
    step = Step(schedule, per_mesh=2, extra={culprit: on_each_device(boom_after(2))})
    # One microbatch passes on each of two devices, so the second one is the first that fails.
    words = f"ValueError: boom in the callback\nStage 1, microbatch 1: the {kind} failed on mesh {mesh} .*\nAll meshes"
    with pytest.raises(PipelineError, match=words) as caught:
        step.gradients(record=record)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert wait_for_arrays(before) == before, "the exception is still held, the arrays are gone"
    assert_equal(Step(schedule, per_mesh=2).gradients(), by_jax_grad(2, 3))


def test_a_device_without_enough_memory_is_named():
    """CPU devices have no limit, so a task asks for 64 TB of zeros."""
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=2)
    step = Step(schedule)
    zeros = jax.jit(lambda: jnp.zeros((1 << 44,), jnp.float32), out_shardings=step.placed(0, "w"))
    step.calls["backward0"] = lambda arrays: [zeros(), *arrays]
    driver = Driver(step.work.emit(), step.calls, step.transfer)
    with pytest.raises(
        PipelineError,
        match=r"RESOURCE_EXHAUSTED.*\nStage 0, microbatch 0: the backward failed on mesh 0 .*\nThe devices of this mesh have "
        r"less .* Use more microbatches or recompute='layer'",
    ):
        driver.run(step.inputs(), record=True)
    assert_equal(step.gradients(), by_jax_grad(2, 2))


def test_ctrl_c_during_a_program_leaves_no_buffer_and_the_next_step_is_right():
    before = len(jax.live_arrays())
    schedule = make_schedule("1f1b", num_meshes=3, num_microbatches=4)
    pressed = []

    def interrupted(array):
        def callback(x):
            if not pressed:
                pressed.append(True)
                press()
            return np.asarray(x)

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(array.shape, array.dtype), array)

    step = Step(schedule, extra={"forward2": interrupted})
    with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
        step.gradients()
    assert len(jax.live_arrays()) == before
    assert_equal(step.gradients(), by_jax_grad(3, 4))


def peak_residuals(name, p, m):
    """Most residuals alive on the first mesh in front of any of its backwards."""
    step = Step(make_schedule(name, num_meshes=p, num_microbatches=m))
    seen = []
    first = jax.devices()[0]
    call = step.calls["backward0"]

    def watched(arrays):
        shape = (2, WIDTH, WIDTH)
        seen.append(sum(a.shape == shape and a.devices() == {first} for a in jax.live_arrays() if not a.is_deleted()))
        return call(arrays)

    Driver(step.work.emit(), {**step.calls, "backward0": watched}, step.transfer).run(step.inputs())
    return max(seen)


def test_the_first_stage_of_gpipe_keeps_m_residuals_and_that_of_1f1b_p():
    assert peak_residuals("gpipe", 4, 8) == 8
    assert peak_residuals("1f1b", 4, 8) == 4
    assert peak_residuals("1f1b", 2, 8) == 2


def test_a_measured_step_is_a_chrome_trace():
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=2)
    step = Step(schedule)
    step.gradients(record=True)
    events = json.loads(step.driver.timeline().trace_text("my step"))["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert slices["forward 1"]["args"].keys() == {"task", "stage", "microbatch"}
    assert all(event["dur"] >= 0 for event in slices.values())
