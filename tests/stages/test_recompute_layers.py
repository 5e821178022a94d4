"""Recomputation per layer on one mesh: the same numbers to the last dropout mask, less memory in XLA's own account."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.cost_model.hardware import preset
from autopar.errors import OutOfMemoryError
from autopar.execution.one_mesh import CompiledStep
from autopar.explain.compared import repeated_text
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.planner import plan_step
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import loop_over_microbatches
from autopar.microbatches.phases import plan_time
from autopar.plan import Plan
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.program import operands_of
from autopar.program.trace import trace
from autopar.stages.recompute_layers import Repeated, find_recomputation
from autopar.stages.tuning import Tuning
from tests import pipeline_steps, zoo
from tests.oracles import assert_same_as_jit, assert_trees_close


def arguments(width=32, layers=6, batch=512):
    """Two weights a layer, the second one four times as wide, and a key; examples that need far more memory than these."""
    draw = np.random.default_rng(0)

    def weight(rows, columns):
        return jnp.asarray(draw.normal(size=(rows, columns)) / rows**0.5, jnp.float32)

    weights = [(weight(width, 4 * width), weight(4 * width, width)) for _ in range(layers)]
    return (weights, jax.random.key(1)), jnp.asarray(draw.normal(size=(batch, width)), jnp.float32)


def gradients_of(state, x):
    """Gradients and loss of residual layers with dropout, whose masks come from a key in the state."""
    weights, key = state

    def layer(h, number, w):
        inner = jnp.tanh(jnp.sin(h @ w[0]))
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, inner.shape)
        return h + jnp.tanh(jnp.where(kept, inner / 0.7, 0) @ w[1])

    def loss(weights):
        h = x
        for number, w in enumerate(weights):
            h = layer(h, number, w)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return gradients, value


def step(state, x):
    """An update by those gradients, and another key."""
    weights, key = state
    gradients, value = gradients_of(state, x)
    return (jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), jax.random.fold_in(key, 7)), value


def signature_of(fun):
    return CallSignature(fun, (1,), (), "auto")


def traced(fun, *args):
    return trace(signature_of(fun), bind_arguments(signature_of(fun), args, {}))


def temporaries(parallel, *args):
    return parallel.compile(*args).memory_analysis().temp_size_in_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("mesh_shape", [pytest.param((1,), marks=pytest.mark.slow), (2, 2)])
def test_a_step_that_recomputes_needs_far_less_memory_as_predicted(mesh_shape):
    plain = autopar.parallelize(step, mesh_shape=mesh_shape, recompute="none")
    again = autopar.parallelize(step, mesh_shape=mesh_shape, recompute="layer")
    before, after = plain.plan(*arguments()), again.plan(*arguments())
    assert (before.recompute, after.recompute) == (False, True)
    assert after.compute_s > before.compute_s
    assert temporaries(again, *arguments()) < 0.6 * temporaries(plain, *arguments())
    account = again.compile(*arguments()).memory_analysis()
    real = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    assert after.peak_bytes == pytest.approx(real + account.temp_size_in_bytes, rel=0.15)
    assert_same_as_jit(step, again, *arguments())


@pytest.mark.sweep
def test_masks_are_those_of_the_step_to_the_last_bit():
    """Of one example among zeros: there, rows of a gradient that are zero are the units of a layer that were dropped."""
    state, x = arguments()
    alone = jnp.where(jnp.arange(len(x))[:, None] == 3, x, 0)
    again = autopar.parallelize(gradients_of, mesh_shape=(1,), recompute="layer")
    assert again.plan(state, x).recompute
    plain = autopar.parallelize(gradients_of, mesh_shape=(1,), recompute="none")
    assert_trees_close(again(state, x), plain(state, x), rtol_of_scale=1e-6)
    expected, *found = (dropped_units(f(state, alone)[0]) for f in (jax.jit(gradients_of), again, plain))
    assert 0.2 < expected.mean() < 0.4
    for units in found:
        np.testing.assert_array_equal(units, expected)


def dropped_units(gradients):
    """For each layer and unit, whether the unit's row of the second weight has no gradient."""
    return np.array([np.all(np.asarray(second) == 0, axis=1) for _, second in gradients])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["clipped_adamw", "tied_weights", "metrics", "long_skips", "transformer"])
def test_what_is_hard_to_cut_is_recomputed_with_the_same_results(name):
    """These are a few hundred bytes a value, which would be kept."""
    fun, state, batch = getattr(pipeline_steps, name)()
    once = traced(fun, state, batch)
    again = Repeated().apply(once, tuning=Tuning(kept_bytes=0))
    assert len(again.program.equations) > len(once.program.equations) + 4
    request = PlanRequest(
        meshes=(LogicalMesh.of((2,)),),
        cluster=preset("cpu"),
        memory_limit_bytes=None,
        constraints=Constraints(),
        options=PlannerOptions(),
    )
    planned = plan_step(again, request)
    compiled = CompiledStep(signature_of(fun), planned, jax.devices()[:2])
    assert_same_as_jit(fun, compiled, state, batch, steps=2, adam_lr=1e-2 if name == "clipped_adamw" else None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_models_of_the_zoo_are_recomputed_with_the_same_results(name):
    fun, state, batch = getattr(zoo, f"build_{name}")()
    assert find_recomputation(traced(fun, state, batch)).layers
    assert_same_as_jit(fun, autopar.parallelize(fun, mesh_shape=(2,), recompute="layer"), state, batch, adam_lr=1e-2)


def test_a_layer_is_done_again_from_what_it_received():
    """Of six layers the first ones are done again, each from the stream, its weights and the key; masks are made again."""
    layers = find_recomputation(traced(step, *arguments())).layers
    assert 3 <= len(layers) <= 5
    for layer in layers:
        made = {v for eqn in layer.equations for v in eqn.outvars}
        assert layer.results <= made
        received = {v for eqn in layer.equations for v in operands_of(eqn)} - made
        assert {v.aval.shape for v in received} <= {(512, 32), (32, 128), (128, 32), ()}
        assert "random_bits" in {eqn.primitive.name for eqn in layer.equations}


def test_copies_wait_for_cotangents_and_not_for_the_zeros_of_a_derivative():
    """The derivative of `relu` chooses between a cotangent and zeros, which are there before anything is."""

    def rectified(state, x):
        def loss(weights):
            h = x
            for w in weights:
                h = h + jax.nn.relu(jax.nn.relu(h @ w[0]) @ w[1])
            return jnp.mean(h**2)

        return state, jax.grad(loss)(state[0])

    program = Repeated().apply(traced(rectified, *arguments())).program
    constants = set()
    for eqn in program.equations:
        if constants.issuperset(operands_of(eqn)):
            constants.update(eqn.outvars)
    awaited = {eqn.after for eqn in program.equations if eqn.after is not None}
    assert any(v.aval.shape for v in constants)
    assert awaited
    assert not awaited & constants


def test_a_step_without_gradients_is_left_alone():
    def evaluate(weights, x):
        return jnp.mean(jnp.tanh(x @ weights))

    one = traced(evaluate, jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert Repeated().apply(one) is one
    parallel = autopar.parallelize(evaluate, mesh_shape=(1,), recompute="layer")
    with pytest.warns(autopar.AutoparWarning, match=r"finds no layers .* put jax\.checkpoint on its body"):
        assert not parallel.plan(jnp.ones((8, 8)), jnp.ones((8, 8))).recompute


@pytest.mark.sweep
def test_recomputation_is_chosen_where_memory_is_short_if_it_is_the_faster_way():
    free = autopar.parallelize(step, mesh_shape=(2,), recompute="none").plan(*arguments())
    assert not autopar.parallelize(step, mesh_shape=(2,)).plan(*arguments()).recompute
    again = autopar.parallelize(step, mesh_shape=(2,), recompute="layer").plan(*arguments())
    limit = int(1.4 * again.peak_bytes)
    assert limit < 0.7 * free.peak_bytes
    options = {"mesh_shape": (2,), "memory_limit_bytes": limit}
    with pytest.raises(OutOfMemoryError):
        autopar.parallelize(step, recompute="none", num_microbatches=1, **options).plan(*arguments())
    only = autopar.parallelize(step, num_microbatches=1, **options)
    assert only.plan(*arguments()).recompute
    assert only.plan(*arguments()).peak_bytes <= limit
    open_plan = autopar.parallelize(step, **options).plan(*arguments())
    slices = autopar.parallelize(step, recompute="none", **options).plan(*arguments())
    assert open_plan.step_s == min(slices.step_s, only.plan(*arguments()).step_s)


@pytest.mark.sweep
def test_a_plan_that_recomputes_can_be_used_again():
    plan = autopar.parallelize(step, mesh_shape=(2,), recompute="layer", num_microbatches=2).plan(*arguments())
    restored = autopar.parallelize(step, plan=Plan.from_json(plan.to_json()))
    assert restored.plan(*arguments()).recompute
    assert_same_as_jit(step, restored, *arguments(), steps=1)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_users_own_checkpoints_save_as_much_in_plan_and_account(microbatches):
    """Their barriers wait for the cotangents, so that nothing is done again early, also in a loop over microbatches."""

    def checkpointed(weights, x):
        def layer(h, w):
            return h + jnp.tanh(jnp.tanh(jnp.sin(h @ w[0])) @ w[1])

        def loss(weights):
            h = x
            for w in weights:
                h = jax.checkpoint(layer)(h, w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    (weights, _), x = arguments()
    parallel = autopar.parallelize(checkpointed, mesh_shape=(2,), num_microbatches=microbatches)
    account = parallel.compile(weights, x).memory_analysis()
    real = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    assert parallel.plan(weights, x).peak_bytes == pytest.approx(real + account.temp_size_in_bytes, rel=0.15)
    residuals = 6 * 512 * (3 * 32 + 4 * 128) * 4 // 2 // microbatches
    assert account.temp_size_in_bytes < 0.5 * residuals
    assert_same_as_jit(checkpointed, parallel, weights, x)


def named_step(state, x):
    """The same layers, the first product of each named."""

    def layer(h, w):
        return h + jnp.tanh(jnp.sin(checkpoint_name(h @ w[0], "product")) @ w[1])

    def loss(weights):
        return jnp.mean(functools.reduce(layer, weights, x) ** 2)

    value, gradients = jax.value_and_grad(loss)(state[0])
    return (jax.tree.map(lambda w, g: w - 0.1 * g, state[0], gradients), state[1]), value


@pytest.mark.parametrize("count", [1, 3])
def test_of_the_first_layers_only(count):
    once = traced(step, *arguments())
    found = find_recomputation(once)
    assert len(found.layers) == 5  # all but the last
    steps = [once, found.apply(once, count), found.apply(once)]
    masks = [sum(eqn.primitive.name == "random_bits" for eqn in one.program.walk()) for one in steps]
    assert masks == [6, 6 + count, 11]


@pytest.mark.sweep
def test_under_a_limit_as_many_layers_are_done_again_as_have_to_be():
    """Between the memory of all layers and of none there is a mix, which is faster than all, and runs within the limit."""
    options = {"mesh_shape": (2,), "num_microbatches": 1}
    every = autopar.parallelize(step, recompute="layer", **options).plan(*arguments())
    none = autopar.parallelize(step, recompute="none", **options).plan(*arguments())
    assert (every.recomputed_layers, none.recomputed_layers) == (None, None)
    limit = int(
        1.05 * none.peak_bytes
    )  # a limit leaves room for more temporaries than predicted, so this is too little
    mixed = autopar.parallelize(step, memory_limit_bytes=limit, **options)
    plan = mixed.plan(*arguments())
    assert plan.recompute
    assert 1 <= plan.recomputed_layers <= 4
    assert none.step_s < plan.step_s < every.step_s
    assert every.peak_bytes < plan.peak_bytes <= limit
    assert any(one.recomputed_layers == plan.recomputed_layers for one in plan.compared)
    report = autopar.explain.explain(plan)
    assert f"backward repeats {repeated_text(plan)}" in report
    assert f"{plan.recomputed_layers} layer" in report
    account = mixed.compile(*arguments()).memory_analysis()
    real = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    assert plan.peak_bytes == pytest.approx(real + account.temp_size_in_bytes, rel=0.15)
    assert_same_as_jit(step, mixed, *arguments())
    restored = autopar.parallelize(step, plan=Plan.from_json(plan.to_json()), mesh_shape=(2,))
    assert_same_as_jit(step, restored, *arguments())
    assert restored.plan(*arguments()) == plan


def test_named_values_are_kept_and_what_makes_them_is_not_done_again():
    def products(traced_step):
        return sum(eqn.primitive.name == "dot_general" for eqn in traced_step.program.walk())

    once = traced(named_step, *arguments())
    every, named = Repeated().apply(once), Repeated(keeps_named=True).apply(once)
    assert products(once) < products(named) < products(every)  # the second product of a layer has no name
    assert len(once.program.equations) < len(named.program.equations) < len(every.program.equations)
    assert find_recomputation(once).bytes_after < find_recomputation(once, keeps_named=True).bytes_after
    plans = {}
    for way in ("none", "named", "layer"):
        parallel = autopar.parallelize(named_step, mesh_shape=(1,), recompute=way)
        plans[way] = parallel.plan(*arguments())
        assert_same_as_jit(named_step, parallel, *arguments())
    assert plans["none"].peak_bytes > plans["named"].peak_bytes > plans["layer"].peak_bytes
    assert plans["none"].step_s < plans["named"].step_s < plans["layer"].step_s
    assert "except named values" in autopar.explain.explain(plans["named"])
    limit = int(1.3 * plans["named"].peak_bytes)
    chosen = autopar.parallelize(named_step, mesh_shape=(1,), memory_limit_bytes=limit, num_microbatches=1)
    assert chosen.plan(*arguments()).step_s <= plans["named"].step_s
    assert_same_as_jit(named_step, chosen, *arguments())


def test_in_microbatches_too_less_is_kept():
    """The loop over microbatches is traced once more; copies still wait for cotangents there."""
    given, fixed = arguments(batch=2048), {"mesh_shape": (2,), "num_microbatches": 4}
    found = {}
    for recompute in ("none", "layer"):
        parallel = autopar.parallelize(named_step, recompute=recompute, **fixed)
        account = parallel.compile(*given).memory_analysis()
        real = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
        assert parallel.plan(*given).peak_bytes == pytest.approx(real + account.temp_size_in_bytes, rel=0.15)
        found[recompute] = account.temp_size_in_bytes
    assert found["layer"] < 0.6 * found["none"]
    assert_same_as_jit(named_step, parallel, *given)


@pytest.mark.parametrize("microbatches", [2, 8])
def test_copies_wait_in_the_loop_also_for_what_is_finished_after_it(microbatches):
    """The last thing that backward makes of a layer is a gradient, which is reshaped when it is summed up, after the loop."""

    def reshaping(weights, x):
        def layer(h, w):
            return h + jnp.tanh(jnp.sin(h @ w[0].reshape(32, 128)) @ w[1].reshape(128, 32))

        value, gradients = jax.value_and_grad(lambda weights: jnp.mean(functools.reduce(layer, weights, x) ** 2))(
            weights
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    (weights, _), x = arguments()
    weights = jax.tree.map(lambda w: w.reshape(-1), weights)
    again = Repeated().apply(traced(reshaping, weights, x))
    plan = plan_time(again, microbatches)
    waiting = {eqn for eqn in plan.of_phase("body") if eqn.after is not None}
    made_after = {v for eqn in plan.of_phase("epilogue") for v in eqn.outvars}
    assert any(eqn.after in made_after for eqn in waiting)
    assert plan.late.keys() == waiting
    assert made_after.isdisjoint(plan.late.values())
    (loop,) = [eqn for eqn in loop_over_microbatches(again, plan).program.equations if eqn.regions]
    assert sum(eqn.after is not None for eqn in loop.regions[0].equations) == len(waiting)


def test_checkpoints_of_the_user_go_on_waiting_where_other_layers_are_done_again():
    """The step is traced again for the other layers."""

    def half(weights, x):
        def layer(h, w):
            return h + jnp.tanh(jnp.sin(h @ w[0]) @ w[1])

        def loss(weights):
            h = x
            for number, w in enumerate(weights):
                h = (jax.checkpoint(layer) if number % 2 else layer)(h, w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    (weights, _), x = arguments()
    before = traced(half, weights, x)
    after = Repeated().apply(before)
    waits = [sum(eqn.after is not None for eqn in one.program.equations) for one in (before, after)]
    assert waits[1] == len(find_recomputation(before).layers) > waits[0] > 0
    parallel = autopar.parallelize(half, mesh_shape=(2,), recompute="layer")
    assert_same_as_jit(half, parallel, weights, x)
    both, account = parallel.plan(weights, x), parallel.compile(weights, x).memory_analysis()
    real = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    assert both.peak_bytes == pytest.approx(real + account.temp_size_in_bytes, rel=0.15)
    alone = autopar.parallelize(half, mesh_shape=(2,), recompute="none")
    assert account.temp_size_in_bytes < temporaries(alone, weights, x)


def test_names_have_to_be_there_to_be_kept():
    with pytest.raises(
        autopar.AutoparError, match=r"keeps the values that .*checkpoint_name names, and the step names none"
    ):
        autopar.parallelize(step, mesh_shape=(1,), recompute="named").plan(*arguments())
