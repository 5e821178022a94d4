"""Where a mesh has several stages, its planned peak is what its compiled tasks need, as it is under other schedules."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_model.hardware import PRESETS
from autopar.explain.memory import parts_of_peak
from autopar.schedules.simulate import simulate
from autopar.verify.memory import LiveBytes
from tests.schedules.chains import TRAINING_IN_CHUNKS

BATCH = 1536
WIDTHS = (32,) * 13
UNLIKE = (8, 8, 8, 8, 8, 8, 96, 96, 96, 96, 96, 8, 8, 8)


def momentum_step(state, batch):
    """Layers that keep three activations and hand on one, trained by SGD with momentum."""

    def loss_of(weights):
        h = batch["x"]
        for weight, back in weights:
            h = jnp.tanh(jnp.tanh(jnp.tanh(h @ weight) @ back.T) @ back)
        return jnp.mean((h - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    speed = jax.tree.map(lambda s, g: 0.9 * s + g, state["speed"], gradients)
    return {"weights": jax.tree.map(lambda w, s: w - 0.1 * s, state["weights"], speed), "speed": speed}, loss


def shapes(widths=WIDTHS):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [(of(n, m), of(m, m)) for n, m in itertools.pairwise(widths)]
    return {"weights": weights, "speed": weights}, {"x": of(BATCH, widths[0]), "y": of(BATCH, widths[-1])}


def parallel(meshes, **options):
    options = {"schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 12, "recompute": "none", **options}
    return autopar.parallelize(momentum_step, num_stages=meshes, **{"devices": meshes, "mesh_shape": (1,), **options})


def peaks(step, given):
    found = step.verify(*given)
    return {row.stage: row for row in found.rows if (row.topic, row.what) == ("memory", "peak")}


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("meshes", [2, 3])
def test_the_peak_of_a_mesh_with_two_stages_is_what_its_tasks_need(meshes, recompute):
    step = parallel(meshes, recompute=recompute)
    found = peaks(step, shapes())
    assert [*found] == [*range(meshes)]
    plan = step.last_plan()
    for mesh, row in found.items():
        assert row.verdict == "matches", row
        assert 0.98 * row.compiled <= row.planned, row
        here = [stage for stage in plan.stages if stage.mesh == mesh]
        assert len(here) == 2
        assert sum(stage.peak_bytes for stage in here) == row.planned
        assert all(sum(parts_of_peak(stage)) == stage.peak_bytes for stage in here)
    assert plan.peak_bytes == max(row.planned for row in found.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "chunks"), TRAINING_IN_CHUNKS)
def test_a_copy_lies_on_its_mesh_from_when_it_may_have_been_sent(schedule, chunks):
    """The simulator counts the same for meshes elsewhere that take no time."""
    compiled = parallel(2, schedule=schedule, virtual_stages=chunks).compile(*shapes())
    for mesh in range(2):
        live = LiveBytes(compiled, mesh)
        live.temporaries, live.replaced = {}, {}
        simulated = simulate(
            compiled.instructions,
            run_s=lambda run, mesh=mesh: int(run.mesh == mesh),
            value_bytes=functools.cache(live.size),
        )
        assert live.peak() == (simulated.peak_bytes[mesh], 0)
        assert sum(live.peak(is_late=True)) <= simulated.peak_bytes[mesh]


def test_a_limit_that_the_stages_of_a_mesh_need_together_is_enough_and_less_is_not():
    """Each stage's own peak is more than half of it."""
    free = parallel(2).plan(*shapes())
    step = parallel(2, memory_limit_bytes=free.peak_bytes + 1)
    assert [stage.peak_bytes for stage in step.plan(*shapes()).stages] == [stage.peak_bytes for stage in free.stages]
    assert max(row.compiled for row in peaks(step, shapes()).values()) <= free.peak_bytes
    with pytest.raises(autopar.OutOfMemoryError, match=r"its part of a mesh with 2 stages: \d microbatches in flight"):
        parallel(2, memory_limit_bytes=int(0.97 * free.peak_bytes)).plan(*shapes())


@pytest.mark.parametrize("widths", [WIDTHS, UNLIKE], ids=["alike", "unlike"])
def test_what_is_planned_within_a_limit_is_compiled_within_it(widths):
    """Recomputation makes room; where one stage of a mesh has nearly all of the work, it has nearly all of the memory."""
    given = shapes(widths)
    free, least = (parallel(2, recompute=way).plan(*given).peak_bytes for way in ("none", "layer"))
    assert least < free
    step = parallel(2, memory_limit_bytes=(free + least) // 2, recompute="auto")
    plan = step.plan(*given)
    assert plan.recompute
    assert plan.peak_bytes <= (free + least) // 2
    assert all(row.compiled <= (free + least) // 2 and row.verdict == "matches" for row in peaks(step, given).values())


def test_stages_that_fit_together_in_other_layouts_are_planned_and_compiled_within_the_limit():
    """Large weights and a small batch: whole weights on every device are faster, and parts of them smaller. Communication is that
    of V100s, the compiler that of the virtual devices which the peaks are compiled for."""
    weights, batch = shapes((256,) * 9)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((48, *x.shape[1:]), x.dtype), batch)
    v100s = PRESETS["p3.16xlarge"]
    cluster = dataclasses.replace(v100s, device=dataclasses.replace(v100s.device, fuses=False))
    options = {"devices": 8, "mesh_shape": (4,), "cluster": cluster}
    limit = int(0.9 * parallel(2, **options).plan(weights, batch).peak_bytes)
    step = parallel(2, memory_limit_bytes=limit, **options)
    assert not step.plan(weights, batch).recompute
    assert step.last_plan().peak_bytes <= limit
    assert all(row.compiled <= limit and row.verdict == "matches" for row in peaks(step, (weights, batch)).values())
