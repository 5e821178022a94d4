"""`parallelize` as users call it: decorators, arguments by name, donation, sharded creation, following."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import autopar
from autopar.errors import ArgumentError
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from tests.oracles import assert_trees_close
from tests.perceptron_step import (
    SPLIT_STATE,
    assert_same_as_jit,
    loss_of,
    make_batch,
    make_state,
    shardings_of,
    train_step,
    updated,
)

# --- decorators and arguments -----------------------------------------------------------------------------------------


def test_a_decorator_without_arguments_keeps_name_and_documentation():
    @autopar.parallelize
    def my_step(state, batch):
        """What it does."""
        return train_step(state, batch)

    assert (my_step.__name__, my_step.__doc__, my_step.__wrapped__.__name__) == ("my_step", "What it does.", "my_step")
    assert_same_as_jit(train_step, my_step, make_state(), make_batch())


def test_a_decorator_with_arguments():
    @autopar.parallelize(mesh_shape=(2, 4), constraints=autopar.data_parallel())
    def my_step(state, batch):
        return train_step(state, batch)

    assert_same_as_jit(train_step, my_step, make_state(), make_batch())
    assert my_step.last_plan().mesh_shape == (2, 4)


def test_keywords_may_name_positional_parameters_and_keyword_only_ones():
    def step(state, batch, *, rate, offset=0.0):
        return updated(state, jax.grad(loss_of)(state["params"], batch), rate), offset

    parallel = autopar.parallelize(step, mesh_shape=(8,))
    arguments = {"state": make_state(), "batch": make_batch(), "rate": jnp.float32(0.2)}
    actual = parallel(**arguments)
    assert_trees_close(actual, jax.jit(step)(make_state(), make_batch(), rate=0.2))
    roles = {value.path: value.role for value in parallel.last_plan().inputs}
    assert (roles["state/count"], roles["batch/x"], roles["rate"]) == ("state", "batch", "other")


def test_a_mix_of_positions_and_keywords_is_the_same_call():
    parallel = autopar.parallelize(train_step, mesh_shape=(8,))
    first = parallel.plan(make_state(), make_batch())
    assert parallel.plan(make_state(), batch=make_batch()) is first
    assert parallel.plan(batch=make_batch(), state=make_state()) is first


def test_static_arguments_choose_the_program_and_are_traced_once_each():
    traced = []

    @autopar.parallelize(static_argnums=(0, 3), batch_argnums=2, mesh_shape=(8,))
    def step(activation, state, batch, power=2):
        traced.append((activation, power))
        x = (jnp.tanh if activation == "tanh" else jax.nn.relu)(batch["x"])
        return jax.tree.map(lambda p: p + 1, state), jnp.sum(x**power)

    state, batch = make_state(), make_batch()
    for activation, function in (("tanh", jnp.tanh), ("relu", jax.nn.relu)):
        for power in (2, 3):
            for _ in range(2):
                total = step(activation, state, batch, power)[1]
            np.testing.assert_allclose(total, jnp.sum(function(batch["x"]) ** power), rtol=1e-5)
    assert traced == [("tanh", 2), ("tanh", 3), ("relu", 2), ("relu", 3)]
    np.testing.assert_allclose(step("tanh", state, batch)[1], jnp.sum(jnp.tanh(batch["x"]) ** 2), rtol=1e-5)


def test_changed_shapes_are_planned_anew_and_known_ones_are_not():
    step = autopar.parallelize(train_step, mesh_shape=(8,))
    first = step.plan(make_state(), make_batch(16))
    second = step.plan(make_state(), make_batch(24))
    assert first.fingerprint != second.fingerprint
    assert step.plan(make_state(), make_batch(16)) is first
    for examples in (16, 24):
        assert_same_as_jit(train_step, step, make_state(), make_batch(examples))


# --- donation and layouts ---------------------------------------------------------------------------------------------


def test_the_returned_state_is_in_the_planned_layout_and_the_next_call_takes_its_buffers():
    step = autopar.parallelize(train_step, mesh_shape=(8,), constraints=SPLIT_STATE)
    original = make_state()
    first, _ = step(original, make_batch())
    compiled = step.compile(original, make_batch())
    count = len(jax.tree.leaves(first))
    wanted = compiled.in_shardings[:count]
    assert all(s.is_equivalent_to(w, 2) for s, w in zip(shardings_of(first), wanted, strict=True) if len(w.spec) == 2)
    assert first["params"][0]["kernel"].sharding.shard_shape((8, 16)) in [(1, 16), (8, 2)]
    batch = jax.device_put(make_batch(), dict(zip("xy", compiled.in_shardings[count:], strict=True)))
    with jax.transfer_guard("disallow"):
        second, _ = step(first, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((original, second)))
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 4 * (8 * 16 + 16 * 16 + 16 * 8) // 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize("constraints", [None, {"*": autopar.Replicated()}], ids=["planned", "replicated"])
def test_arrays_that_the_step_did_not_lay_out_stay_the_callers(constraints):
    step = autopar.parallelize(train_step, mesh_shape=(8,), constraints=constraints)
    state, batch = make_state(), make_batch()
    expected = jax.tree.map(np.asarray, (state, batch))
    for _ in range(2):
        step(state, batch)
    assert_trees_close((state, batch), expected, rtol_of_scale=0)


def test_a_consumed_state_that_is_passed_again_is_refused_by_the_leaves_paths_in_every_step_that_takes_it():
    step = autopar.parallelize(train_step, mesh_shape=(8,))
    evaluate = autopar.parallelize(lambda state, batch: loss_of(state["params"], batch), follow=step)
    first, _ = step(make_state(), make_batch())
    second, _ = step(first, make_batch())
    words = r"given to train_step no longer exist: state/.*A step consumes its state: .* Pass the returned state on"
    with pytest.raises(ArgumentError, match=words):
        step(first, make_batch())
    with pytest.raises(ArgumentError, match=r"given to <lambda> no longer exist: state/.*donate_argnums=\(\)"):
        evaluate(first, make_batch())
    second["params"][0]["kernel"].delete()
    with pytest.raises(ArgumentError, match=r"1 of the \d+ arrays .* no longer exist: state/params/0/kernel\. A step"):
        step(second, make_batch())


def test_nothing_is_donated_if_the_user_says_so():
    step = autopar.parallelize(train_step, mesh_shape=(8,), donate_argnums=())
    first, _ = step(make_state(), make_batch())
    again = [step(first, make_batch())[1] for _ in range(2)]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert again[0] == again[1]
    assert step.compile(first, make_batch()).memory_analysis().alias_size_in_bytes == 0


def test_a_named_argument_is_donated_and_others_are_not():
    def step(scale, batch, state):
        new, loss = train_step(state, batch)
        return new, scale * 2, loss

    parallel = autopar.parallelize(step, donate_argnums=2, mesh_shape=(8,))
    state, scale, _ = parallel(jnp.ones((8, 8)), make_batch(), make_state())
    parallel(scale, make_batch(), state)
    assert not scale.is_deleted()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_batch_is_not_donated_even_if_it_is_returned():
    step = autopar.parallelize(lambda state, batch: (state, batch), mesh_shape=(8,))
    _, first = step(make_state(), make_batch())
    _, _ = step(make_state(), first)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))


# --- creation and following -------------------------------------------------------------------------------------------


def test_init_state_makes_the_same_bits_already_laid_out():
    step = autopar.parallelize(train_step, mesh_shape=(2, 4), constraints=SPLIT_STATE)
    plan = step.plan(jax.eval_shape(make_state, jax.random.key(3)), make_batch())
    state = step.init_state(make_state, jax.random.key(3))
    kernel = state["params"][1]["kernel"]
    assert kernel.sharding.spec == plan.input("state/params/1/kernel").partition_spec
    assert kernel.addressable_shards[0].data.size == 16 * 16 // 8
    assert_trees_close(state, jax.jit(make_state)(jax.random.key(3)), rtol_of_scale=0)
    new, _ = step(state, make_batch())
    assert kernel.is_deleted()
    assert_trees_close(new, jax.jit(train_step)(make_state(jax.random.key(3)), make_batch())[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("compiled", "options"),
    [(CompiledStep, {"mesh_shape": (2,)}), (CompiledPipeline, {"num_stages": 2, "num_microbatches": 2, "devices": 2})],
)
def test_a_step_is_compiled_once_for_its_state_its_calls_and_whoever_asks_for_it(compiled, options, monkeypatch):
    made, build = [], compiled.__init__
    monkeypatch.setattr(compiled, "__init__", lambda self, *args, **kwargs: made.append(build(self, *args, **kwargs)))
    step = autopar.parallelize(train_step, **options)
    step.plan(jax.eval_shape(make_state), make_batch())
    assert len(made) == 0, "a plan needs no compilation"
    state = step.init_state(make_state)
    for _ in range(2):
        state, _ = step(state, make_batch())
    assert step.compile(state, make_batch()) is step.compile(make_state(), make_batch())
    assert len(made) == 1


def test_the_last_plan_is_the_one_that_was_made_or_used_last():
    step = autopar.parallelize(train_step, mesh_shape=(2,))
    small, large = (step.plan(make_state(), make_batch(examples)) for examples in (16, 32))
    assert step.last_plan() is large
    step(make_state(), make_batch(16))
    assert step.last_plan() is small


def test_an_evaluation_that_follows_has_the_steps_mesh_and_layouts_and_moves_nothing():
    devices = jax.devices()[4:]
    step = autopar.parallelize(train_step, mesh_shape={"data": 2, "model": 2}, devices=devices, constraints=SPLIT_STATE)
    state, _ = step(make_state(), make_batch())
    evaluate = autopar.parallelize(lambda state, batch: loss_of(state["params"], batch), follow=step)
    loss = evaluate(state, make_batch())
    np.testing.assert_allclose(loss, loss_of(jax.device_get(state["params"]), make_batch()), rtol=1e-5)
    trained, followed = step.last_plan(), evaluate.last_plan()
    assert (followed.mesh_shape, followed.axis_names) == (trained.mesh_shape, trained.axis_names)
    for value in followed.inputs:
        if value.path.startswith("state/params"):
            assert value.spec == trained.input(value.path).spec, value.path
    assert set(loss.sharding.device_set) == set(devices)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


# --- devices ----------------------------------------------------------------------------------------------------------


def test_a_subset_of_the_devices():
    devices = jax.devices()[5:7]
    step = autopar.parallelize(train_step, devices=devices)
    (state, _) = assert_same_as_jit(train_step, step, make_state(), make_batch())
    assert {device for s in shardings_of(state) for device in s.device_set} == set(devices)


def test_a_number_of_devices():
    step = autopar.parallelize(train_step, devices=2)
    (state, _) = assert_same_as_jit(train_step, step, make_state(), make_batch())
    assert {device for s in shardings_of(state) for device in s.device_set} == set(jax.devices()[:2])


def test_one_device():
    step = autopar.parallelize(train_step, devices=1)
    assert_same_as_jit(train_step, step, make_state(), make_batch())
    assert step.last_plan().collectives == ()


def test_a_mapping_names_the_mesh_axes_in_plan_and_shardings():
    step = autopar.parallelize(train_step, mesh_shape={"data": 2, "model": 4}, constraints=SPLIT_STATE)
    state, _ = step(make_state(), make_batch())
    assert step.last_plan().axis_names == ("data", "model")
    sharding = state["params"][0]["kernel"].sharding
    assert isinstance(sharding, NamedSharding)
    assert sharding.mesh.shape == {"data": 2, "model": 4}


PLAN_WITHOUT_DEVICES = """
import jax, jax.numpy as jnp, autopar
def step(state, batch):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"]) ** 2))(state)
    return jax.tree.map(lambda p, d: p - 0.1 * d, state, g), loss
state = {"a": jax.ShapeDtypeStruct((64, 256), "float32"), "b": jax.ShapeDtypeStruct((256, 64), "float32")}
batch = jax.ShapeDtypeStruct((512, 64), "float32")
print(autopar.parallelize(step, devices=8, cluster="cpu").plan(state, batch).to_json())
"""


def run_python(text, **environment):
    root = str(Path(__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env=os.environ | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.sweep
def test_planning_from_shapes_touches_no_device_and_is_the_same_in_every_process():
    # A platform that does not exist: whatever asks for a device fails.
    plans = [
        json.loads(run_python(PLAN_WITHOUT_DEVICES, JAX_PLATFORMS="no_such_platform", PYTHONHASHSEED=seed))
        for seed in ("1", "2")
    ]
    for plan in plans:
        assert plan.pop("planning_s") > 0
    assert plans[0] == plans[1]
    assert plans[0]["compute_s"] > 0


def test_two_plans_in_one_process_are_equal_but_for_the_time_they_took():
    plans = [autopar.parallelize(train_step).plan(make_state(), make_batch()) for _ in range(2)]
    assert dataclasses.replace(plans[0], planning_s=0.0) == dataclasses.replace(plans[1], planning_s=0.0)


# --- compiled steps ---------------------------------------------------------------------------------------------------


def test_a_compiled_step_is_called_like_the_step():
    step = autopar.parallelize(train_step, mesh_shape=(8,), constraints=autopar.data_parallel())
    shapes = jax.eval_shape(lambda: (make_state(), make_batch()))
    compiled = step.compile(*shapes)
    assert compiled.plan is step.plan(*shapes)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert_trees_close(compiled(make_state(), batch=make_batch()), jax.jit(train_step)(make_state(), make_batch()))
