"""A step in pipeline stages computes what `jax.jit` computes, keeps its state on its stages, and fails in words."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests import pipeline_steps
from tests.oracles import assert_same_as_jit, assert_trees_close
from tests.pipeline_steps import RATE, descended, forward, layers, mean_error, rows

MIXED = [(1,), (1,), (2,)]


def in_stages(step, num_stages=2, **options):
    """The step as a pipeline, one device per stage if nothing else is said."""
    options.setdefault("mesh_shape", (1,))
    options.setdefault("num_microbatches", 4)
    return autopar.parallelize(step, num_stages=num_stages, **options)


# --- equal to jit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "schedule", "mesh_shape", "virtual_stages"),
    [
        (2, 1, "gpipe", (1,), 1),
        (2, 4, "gpipe", (2,), 1),
        (4, 4, "1f1b", (1,), 1),
        (3, 4, "1f1b", MIXED, 1),
        (2, 4, "interleaved", [(1,), (2,)], 2),
        (4, 4, "zb-h1", (1,), 1),
        (3, 4, "zb-h1", MIXED, 1),
    ],
)
def test_every_schedule_computes_what_jit_computes(num_stages, num_microbatches, schedule, mesh_shape, virtual_stages):
    step, state, batch = pipeline_steps.plain()
    parallel = in_stages(
        step,
        num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        mesh_shape=mesh_shape,
        virtual_stages=virtual_stages,
    )
    assert_same_as_jit(step, parallel, state, batch)
    plan = parallel.last_plan()
    assert (plan.schedule, plan.num_microbatches) == (schedule, num_microbatches)
    assert plan.num_stages == num_stages * virtual_stages


@pytest.mark.parametrize(
    ("name", "num_stages", "schedule", "mesh_shape"),
    [
        ("masked_loss", 2, "1f1b", [(1,), (2,)]),
        ("tied_weights", 2, "zb-h1", [(2,), (1,)]),
        ("tied_weights", 4, "1f1b", (1,)),
        ("dropout", 2, "gpipe", [(1,), (2,)]),
        ("raw_key_dropout", 3, "zb-h1", (1,)),
        ("metrics", 4, "1f1b", (1,)),
        ("metrics", 2, "gpipe", (2,)),
        ("loss_scaling", 4, "1f1b", (1,)),
        ("overflowing", 2, "zb-h1", [(1,), (2,)]),
        ("odd_leaves", 2, "1f1b", [(2,), (1,)]),
        ("returned_gradients", 4, "gpipe", (1,)),
        ("captured_constants", 2, "1f1b", [(1,), (2,)]),
        ("whole_batch_leaves", 2, "zb-h1", [(1,), (2,)]),
        ("long_skips", 4, "1f1b", (1,)),
        ("recomputed", 2, "zb-h1", [(1,), (2,)]),
        ("transformer", 2, "1f1b", [(1,), (2,)]),
    ],
)
def test_what_is_hard_to_cut_computes_what_jit_computes(name, num_stages, schedule, mesh_shape):
    step, state, batch = getattr(pipeline_steps, name)()
    assert_same_as_jit(step, in_stages(step, num_stages, schedule=schedule, mesh_shape=mesh_shape), state, batch)


@pytest.mark.parametrize(("num_stages", "mesh_shape"), [(4, (1,)), (2, [(1,), (2,)])])
def test_clipping_by_the_norm_of_all_gradients_and_adamw_computes_what_jit_computes(num_stages, mesh_shape):
    step, state, batch = pipeline_steps.clipped_adamw()
    assert_same_as_jit(step, in_stages(step, num_stages, mesh_shape=mesh_shape), state, batch, adam_lr=1e-2)


def test_a_skipped_update_leaves_every_stage_as_it_was():
    step, state, batch = pipeline_steps.overflowing()
    new, _ = in_stages(step)(state, batch)
    assert not bool(new["finite"])
    assert int(new["skipped"]) == 1
    assert_trees_close(new["params"], state["params"], rtol_of_scale=0.0)


@pytest.mark.parametrize(("schedule", "mesh_shape"), [("inference", [(1,), (2,)]), ("auto", (1,))])
def test_a_step_without_gradients_runs_in_stages(schedule, mesh_shape):
    def step(params, batch):
        return forward(params, batch["x"]), {"loss": mean_error(params, batch)}

    state, batch = layers(), rows()
    parallel = in_stages(step, schedule=schedule, mesh_shape=mesh_shape)
    for _ in range(2):
        assert_trees_close(parallel(state, batch), jax.jit(step)(state, batch))


def test_keywords_batches_on_the_host_and_another_batch_in_every_step():
    def step(params, batch, *, rate, scale=1.0):
        loss, gradients = jax.value_and_grad(lambda p: mean_error(p, batch) * scale)(params)
        return descended(params, gradients, rate), loss

    parallel = in_stages(step)
    state = expected = layers()
    for seed in range(3):
        batch = jax.device_get(rows(seed))
        state, loss = parallel(params=state, batch=batch, rate=jnp.float32(RATE))
        expected, expected_loss = jax.jit(step)(expected, batch, rate=RATE)
        assert_trees_close((state, loss), (expected, expected_loss), what=f"step {seed}: ")


def test_a_saved_plan_gives_the_same_pipeline(tmp_path):
    step, state, batch = pipeline_steps.plain()
    (tmp_path / "plan.json").write_text(in_stages(step, mesh_shape=[(1,), (2,)]).plan(state, batch).to_json())
    plan = autopar.PipelinePlan.from_json((tmp_path / "plan.json").read_text())
    restored = autopar.parallelize(step, plan=plan)
    assert_same_as_jit(step, restored, state, batch, steps=2)
