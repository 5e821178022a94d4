"""A step in pipeline stages computes what `jax.jit` computes, keeps its state on its stages, and fails in words."""

import _thread
import dataclasses
import gc
import logging
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import (
    ArgumentError,
    PipelineError,
)
from tests import pipeline_steps
from tests.oracles import assert_same_as_jit, assert_trees_close
from tests.pipeline_steps import RATE, descended, forward, in_stages, layers, mean_error, rows

MIXED = [(1,), (1,), (2,)]


# --- equal to jit -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "schedule", "mesh_shape", "virtual_stages"),
    [
        (2, 1, "gpipe", (1,), 1),
        (2, 4, "gpipe", (2,), 1),
        (4, 4, "1f1b", (1,), 1),
        (3, 4, "1f1b", MIXED, 1),
        (4, 8, "eager-1f1b", (1,), 1),
        (3, 4, "eager-1f1b", MIXED, 1),
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


@pytest.mark.sampled(4)
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
        ("tied_weights", 3, "eager-1f1b", (1,)),
    ],
)
def test_what_is_hard_to_cut_computes_what_jit_computes(name, num_stages, schedule, mesh_shape):
    step, state, batch = getattr(pipeline_steps, name)()
    assert_same_as_jit(step, in_stages(step, num_stages, schedule=schedule, mesh_shape=mesh_shape), state, batch)


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(4)
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


def test_a_mesh_of_two_devices_lies_on_one_node_also_where_its_neighbours_then_lie_on_others():
    """After a mesh of one device it would lie on both nodes. What a stage sends crosses the network then, and is priced so."""
    machine = preset("p3.16xlarge")
    inner, network = machine.tiers
    machine = dataclasses.replace(machine, tiers=(dataclasses.replace(inner, devices=2), network))
    step, state, batch = pipeline_steps.plain()
    parallel = in_stages(step, num_stages=3, mesh_shape=[(1,), (2,), (1,)], cluster=machine)
    plan = parallel.plan(state, batch)
    assert [list(stage.devices) for stage in plan.stages] == [[0], [2, 3], [1]]
    neighbours = [one for one in plan.transfers if abs(one.source - one.target) == 1]
    assert neighbours
    assert all(one.predicted_s > network.latency_s for one in neighbours)
    assert_same_as_jit(step, parallel, state, batch, steps=2)
    restored = autopar.parallelize(step, plan=autopar.PipelinePlan.from_json(plan.to_json()))
    assert_same_as_jit(step, restored, state, batch, steps=2)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """A compiled pipeline on a mesh of one device and one of two, with a state that it can take."""
    step, state, batch = pipeline_steps.clipped_adamw()
    parallel = in_stages(step, mesh_shape=[(1,), (2,)])
    return parallel, parallel.compile(state, batch), state, batch


def copied(state):
    return jax.tree.map(jnp.copy, state)


def live_after_collection():
    gc.collect()
    return len(jax.live_arrays())


def test_state_stays_on_its_stages_is_consumed_and_nothing_leaks(trained):
    parallel, compiled, state, batch = trained
    threads = threading.active_count()
    now = compiled(state, batch)[0]
    places = [leaf.sharding for leaf in jax.tree.leaves(now)]
    assert [
        place.is_equivalent_to(compiled.in_shardings[i], leaf.ndim)
        for i, (place, leaf) in enumerate(zip(places, jax.tree.leaves(now), strict=True))
    ] == [True] * len(places)
    live = live_after_collection()
    for _ in range(5):
        before, now = now, compiled(now, batch)[0]
        assert [leaf.sharding for leaf in jax.tree.leaves(now)] == places
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.ndim)
        del before
    assert live_after_collection() == live
    assert threading.active_count() == threads
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the caller's own arrays were taken"
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(parallel.gather(now))} == {1}


def test_a_table_that_two_stages_of_one_mesh_share_is_replaced_in_place():
    """The stage that it is lent to has read it before the update; only an update elsewhere would keep it alive."""
    step, state, batch = pipeline_steps.tied_weights()
    parallel = in_stages(step, schedule="interleaved", virtual_stages=2)
    first = parallel(state, batch)[0]
    second = parallel(first, batch)[0]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert_trees_close(second, jax.jit(step)(jax.jit(step)(state, batch)[0], batch)[0])


def test_a_consumed_state_that_is_passed_again_is_refused_by_the_leaves_paths(trained):
    parallel, compiled, state, batch = trained
    first = compiled(state, batch)[0]
    second = compiled(first, batch)[0]
    words = r"no longer exist: state/.*A step consumes its state: .* Pass the returned state on, `state, \.\.\. ="
    for call in (parallel, compiled):
        with pytest.raises(ArgumentError, match=words):
            call(first, batch)
    compiled(second, batch)


def test_a_state_on_the_host_is_not_overwritten(trained):
    _, compiled, state, batch = trained
    host = jax.tree.map(np.array, jax.device_get(state))
    compiled(compiled(host, batch)[0], batch)
    assert_trees_close(host, jax.device_get(state), rtol_of_scale=0.0)


def test_a_state_that_is_made_on_its_stages_goes_in_as_it_is(trained):
    parallel, compiled, state, batch = trained
    made = parallel.init_state(lambda: copied(state))
    places = [leaf.sharding for leaf in jax.tree.leaves(made)]
    new = compiled(made, batch)[0]
    assert [leaf.sharding for leaf in jax.tree.leaves(new)] == places
    assert_trees_close(new, compiled(state, batch)[0], rtol_of_scale=0.0)


def fails():
    raise ValueError("broken on purpose")


def is_interrupted():
    raise KeyboardInterrupt


@pytest.fixture
def ctrl_c_interrupts():
    """As at a terminal; shells start programs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("happens", "error", "words"),
    [
        (fails, PipelineError, "ValueError: broken on purpose\nStage 0, microbatch 2: the backward failed on mesh 0"),
        (is_interrupted, KeyboardInterrupt, None),
        (_thread.interrupt_main, KeyboardInterrupt, None),
    ],
)
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_a_stage_that_fails_in_the_middle_stops_the_step_leaves_nothing_and_the_step_runs_again(
    trained, monkeypatch, happens, error, words
):
    _, compiled, state, batch = trained
    expected = compiled(state, batch)[0]
    callables, task, seen = compiled._driver._performer.executables, "backward 0", []
    real = callables[task]

    def broken(groups):
        seen.append(task)
        if len(seen) == 3:
            happens()
        return real(groups)

    live, threads = live_after_collection(), threading.active_count()
    with monkeypatch.context() as patch:
        patch.setitem(callables, task, broken)
        with pytest.raises(error, match=words) as caught:
            compiled(state, batch)
    del caught
    assert live_after_collection() == live
    assert threading.active_count() == threads
    assert_trees_close(compiled(state, batch)[0], expected, rtol_of_scale=0.0)


@pytest.fixture
def quiet_callbacks(monkeypatch):
    """JAX logs the traceback of a failing callback; pytest keeps the record, and with it the callback's arrays."""
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("quiet_callbacks")
@pytest.mark.filterwarnings("ignore:.*pure_callback")
@pytest.mark.parametrize("mesh_shape", [(1,), (2,)])
def test_a_callback_of_the_user_that_fails_names_its_stage_on_meshes_of_one_and_of_several_devices(mesh_shape):
    """The callback is in the second stage and fails in the first steps; on several devices XLA reports it late."""
    broken = [True]

    def checked(x):
        if broken:
            raise ValueError("not a number")
        return np.asarray(x)

    def step(weights, x):
        def loss(weights):
            h = jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])
            scale = jax.pure_callback(
                checked, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(weights[2][0, 0])
            )
            return jnp.mean((h @ weights[2] * scale) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    compiled = in_stages(step, mesh_shape=mesh_shape).compile(weights, x)
    with pytest.raises(PipelineError, match=r"ValueError: not a number\nStage 1"):
        compiled(weights, x)
    live, threads = live_after_collection(), threading.active_count()
    for _ in range(2):
        with pytest.raises(
            PipelineError,
            match=r"ValueError: not a number\nStage 1.*failed on mesh 1.*, which runs .*test_pipeline.py:\d+:\d+ \(",
        ) as caught:
            compiled(weights, x)
        assert live_after_collection() == live, "the exception is still held, the arrays are gone"
        assert threading.active_count() == threads
    del caught
    broken.clear()
    assert_trees_close(compiled(weights, x), jax.jit(step)(weights, x))


def normalised(weights, x):
    """Normalises over the batch, so that it cannot be cut into microbatches."""

    def loss(weights):
        h = jnp.tanh(x @ weights[0])
        h = (h - h.mean(axis=0)) / (h.std(axis=0) + 0.1)
        return jnp.mean((h @ weights[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def test_a_step_that_mixes_examples_runs_in_stages_with_one_microbatch_unless_a_number_was_given():
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    step = autopar.parallelize(normalised, num_stages=2, mesh_shape=(1,))
    with pytest.warns(
        autopar.AutoparWarning, match="the stages run with one microbatch, one after the other: the step"
    ):
        assert step.plan(weights, x).num_microbatches == 1
    assert_same_as_jit(normalised, step, weights, x, steps=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"virtual_stages": 2}, "virtual_stages=2 are stages of each mesh of a pipeline: give num_stages"),
        ({"schedule": "gpipe", "num_stages": 1}, "schedule='gpipe' is for pipeline stages: give num_stages=2 or more"),
    ],
)
def test_what_is_for_stages_is_refused_on_one_mesh(options, words):
    with pytest.raises(ArgumentError, match=words):
        autopar.parallelize(normalised, devices=2, **options).plan([jnp.ones((8, 8))] * 2, jnp.ones((8, 8)))
