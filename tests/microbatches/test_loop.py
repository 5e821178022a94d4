"""A step in microbatches computes what the step computes, and says so when it cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.microbatches.counts import cut_into_microbatches, microbatch_counts
from autopar.microbatches.loop import TimeLoop
from autopar.microbatches.mixing import MixedExamples
from autopar.microbatches.phases import plan_time
from autopar.models.registry import build
from tests import zoo
from tests.fast_part import on_the_diagonal
from tests.microbatches.small_steps import linear, traced_of
from tests.oracles import assert_same_as_jit, assert_trees_close

ZOO = {"bert": zoo.build_bert, "gpt": zoo.build_gpt, "moe": zoo.build_moe, "t5": zoo.build_t5, "unet": zoo.build_unet}


def run_in_microbatches(step, count, *args):
    """The step's results through the loop on one device, without planning it for a mesh."""
    traced = traced_of(step, *args)
    plan = plan_time(traced, count)
    assert not isinstance(plan, MixedExamples), str(plan)
    loop = TimeLoop(traced, plan)
    flat = [jnp.asarray(x) for x in jax.tree.leaves(args)]
    sliced = [x.reshape(leaf.shape) for x, leaf in zip(flat, loop.inputs(), strict=False)]
    return jax.tree.unflatten(traced.out_tree, jax.jit(loop.run)(*sliced, *traced.constants))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "count"), on_the_diagonal(list(ZOO), [2, 4, 8]))
def test_every_model_of_the_zoo_computes_the_same_in_microbatches(name, count):
    (step, state, batch), expected = with_result(name)
    assert_trees_close(run_in_microbatches(step, count, state, batch), expected)


@functools.cache
def with_result(name):
    """A model of the zoo and what its step returns; to build and compile it takes longest here, and every count needs it."""
    step, state, batch = ZOO[name]()
    return (step, state, batch), jax.jit(step)(state, batch)


def losses(weights, batch):
    return jnp.sum((jnp.tanh(batch["x"] @ weights) - batch["y"]) ** 2, axis=-1)


LOSSES = {
    "mean": lambda w, b: losses(w, b).mean(),
    "sum": lambda w, b: losses(w, b).sum(),
    "masked": lambda w, b: (losses(w, b) * b["mask"]).sum() / b["mask"].sum(),
    "weighted": lambda w, b: jnp.average(losses(w, b), weights=jnp.arange(1.0, 9.0)),
    "regularised": lambda w, b: losses(w, b).mean() + 0.1 * jnp.sum(w**2),
    "largest": lambda w, b: losses(w, b).max(),
    "logarithm": lambda w, b: jnp.log(losses(w, b).mean()),
    "dropout": lambda w, b: jnp.mean(losses(w, b)[:, None] * jax.random.bernoulli(jax.random.key(3), 0.5, (8, 5))),
    "positions": lambda w, b: jnp.sum(losses(w, b) * jnp.sin(jnp.arange(8.0))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["mean", "sum", "masked", "weighted", "regularised", "dropout", "positions"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_losses_and_gradients_are_those_of_the_full_batch(name, count):
    def step(weights, batch):
        loss, gradient = jax.value_and_grad(LOSSES[name])(weights, batch)
        return weights - 0.1 * gradient, loss, gradient

    args = linear()
    assert_trees_close(run_in_microbatches(step, count, *args), jax.jit(step)(*args))


def test_outputs_per_example_are_joined_and_outputs_per_batch_are_reduced():
    def step(weights, batch):
        each = losses(weights, batch)
        gradient = jax.grad(LOSSES["mean"])(weights, batch)
        metrics = {
            "each": each,
            "order": jnp.argsort(each),
            "largest": each.max(),
            "any": jnp.any(each > 5.0),
            "all": jnp.all(each > 0.0),
            "count": jnp.sum(batch["mask"] > 0),
            "perplexity": jnp.exp(each.mean() / 10),
            "transposed": jnp.tanh(batch["x"] @ weights).T,
        }
        return weights - 0.1 * gradient, metrics

    args = linear()
    assert_trees_close(run_in_microbatches(step, 4, *args), jax.jit(step)(*args))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh_shape": (1,), "num_microbatches": 2},
        {"mesh_shape": (4,), "constraints": autopar.data_parallel()},
        {"mesh_shape": (2,), "constraints": autopar.data_parallel(), "num_microbatches": 2},
        {"mesh_shape": (1,), "num_stages": 2, "num_microbatches": 4},
        {"mesh_shape": (2,), "num_stages": 2, "num_microbatches": 2, "constraints": autopar.data_parallel()},
    ],
)
def test_the_greatest_and_the_least_of_truths_over_the_batch_are_those_of_jit(options):
    def step(weights, batch):
        hidden = jnp.tanh(batch["x"] @ weights)
        gradient = jax.grad(LOSSES["mean"])(weights, batch)
        found = [*((hidden > bound).max(0) for bound in (-2.0, 0.5, 2.0)), (hidden > -0.5).min(0), (hidden > -2).min()]
        return weights - 0.1 * gradient, found

    assert_same_as_jit(step, autopar.parallelize(step, **options), *linear())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("narrow", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4])
@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"num_stages": 2, "num_microbatches": 2}])
def test_numbers_of_eight_and_fewer_bits_are_rounded_and_compared_as_by_jit(narrow, options):
    def step(weights, batch):
        hidden = (3 * jnp.tanh(batch["x"] @ weights)).astype(narrow)
        found = [hidden.max(0).astype(jnp.float32), hidden.min(0).astype(jnp.float32)]
        return weights - 0.1 * jax.grad(LOSSES["mean"])(weights, batch), found

    assert_same_as_jit(step, autopar.parallelize(step, mesh_shape=(1,), **options), *linear())


def test_gradients_in_bfloat16_are_summed_in_float32():
    weights, batch = linear()
    batch = {"x": batch["x"].astype(jnp.bfloat16), "y": batch["y"].astype(jnp.bfloat16)}

    def step(weights, batch):
        return weights, jax.grad(lambda w: losses(w, batch).astype(jnp.float32).sum())(weights.astype(jnp.bfloat16))

    loop = jax.make_jaxpr(lambda *args: run_in_microbatches(step, 4, weights, batch))()
    assert "f32[6,6]" in str(loop)


def test_a_loss_that_is_not_a_sum_over_examples_is_not_cut_where_its_gradient_needs_the_full_batch():
    """d log(mean)/d loss needs the mean of all examples before any gradient can be computed."""

    def step(weights, batch):
        loss, gradient = jax.value_and_grad(LOSSES["logarithm"])(weights, batch)
        return weights - 0.1 * gradient, loss

    plan = plan_time(traced_of(step, *linear()), 4)
    if not isinstance(plan, MixedExamples):
        assert_trees_close(run_in_microbatches(step, 4, *linear()), jax.jit(step)(*linear()))


def with_leaves_for_all_examples(rows=32, width=32):
    """(step, state, batch): a key, a scale and the weights of five classes lie in the batch beside its examples."""

    def loss_of(weights, batch):
        h = batch["x"] * batch["scale"]
        for w in weights:
            h = jnp.tanh(h @ w)
        kept = jax.random.bernoulli(batch["key"], 0.8, h.shape)
        h = jnp.where(kept, h, 0.0)
        logits = h[:, : batch["of_class"].shape[0]]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(batch["of_class"][batch["label"]] * losses)

    def step(weights, batch):
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(4)]
    batch = {
        "x": jnp.asarray(draw.normal(size=(rows, width)), jnp.float32),
        "label": jnp.asarray(draw.integers(0, 5, rows)),
        "key": jax.random.PRNGKey(3),
        "scale": jnp.full((1,), 0.5),
        "of_class": jnp.linspace(0.5, 1.5, 5),
    }
    return step, weights, batch


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{"mesh_shape": (2,)}, {"devices": 2, "num_stages": 2}], ids=["one mesh", "stages"])
def test_leaves_of_the_batch_that_all_examples_share_stay_whole(options):
    step, weights, batch = with_leaves_for_all_examples()
    assert microbatch_counts(traced_of(step, weights, batch)) == (1, 2, 4, 8, 16, 32)
    parallel = autopar.parallelize(step, num_microbatches=8, **options)
    assert_same_as_jit(step, parallel, weights, batch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_data_parallelism_splits_the_examples_and_leaves_whole_what_they_share(microbatches):
    step, weights, batch = with_leaves_for_all_examples()
    parallel = autopar.parallelize(
        step, mesh_shape=(8,), num_microbatches=microbatches, constraints=autopar.data_parallel()
    )
    assert_same_as_jit(step, parallel, weights, batch)
    split = {value.path: any(value.spec) for value in parallel.last_plan().inputs if value.role == "batch"}
    assert split == {f"batch/{name}": name in ("x", "label") for name in batch}


def test_the_warning_of_a_batch_that_cannot_be_split_is_of_its_examples_alone(recwarn):
    step, weights, batch = with_leaves_for_all_examples()
    autopar.parallelize(step, mesh_shape=(8,)).plan(weights, batch)
    assert not [w for w in recwarn if "cannot be split" in str(w.message)]
    with pytest.warns(UserWarning, match=r"^batch/label has 9 examples .*, batch/x has 9 examples .*which no"):
        autopar.parallelize(step, mesh_shape=(8,)).plan(
            weights, batch | {"x": batch["x"][:9], "label": batch["label"][:9]}
        )


def test_few_examples_beside_many_are_no_leaf_that_all_share():
    def step(w, batch):
        def loss_of(w):
            return jnp.mean((batch["many"] @ w) ** 2) + jnp.mean((batch["few"] @ w) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * gradient, loss

    w, batch = jnp.ones((15, 15)) / 4, {"many": jnp.ones((64, 15)), "few": jnp.ones((24, 15))}
    traced = traced_of(step, w, batch)
    assert microbatch_counts(traced) == (1, 2, 4, 8)
    with pytest.raises(ArgumentError, match=r"batch/few has 24 \(shape \(24, 15\)\)\. Numbers that do: 1, 2, 4, 8\."):
        cut_into_microbatches(traced, 16)


def test_a_number_of_microbatches_that_does_not_divide_the_batch_is_an_error_with_the_numbers_that_do():
    weights, batch = linear()
    step = autopar.parallelize(lambda w, b: (w, losses(w, b).mean()), num_microbatches=3)
    with pytest.raises(ArgumentError, match=r"num_microbatches=3 .* has 8 .*Numbers that do: 1, 2, 4, 8"):
        step(weights, batch)


@pytest.mark.parametrize("count", [0, -2, 1.5, "many", True])
def test_a_number_of_microbatches_that_is_none_is_an_error(count):
    with pytest.raises(ArgumentError, match="num_microbatches="):
        autopar.parallelize(lambda w, b: w, num_microbatches=count)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_a_parallel_step_in_microbatches_equals_jit(mesh_shape):
    step, state, batch = zoo.build_gpt()
    parallel = autopar.parallelize(step, devices=4, mesh_shape=mesh_shape, num_microbatches=2)
    assert_same_as_jit(step, parallel, state, batch)
    assert parallel.last_plan().num_microbatches == 2


@pytest.mark.sweep
def test_a_user_scan_over_layers_runs_in_microbatches():
    example = build("gpt_scan", layers=2, hidden=16, heads=2, vocab=256, seq=8, batch=8, dropout=0.1, sgd=True)
    state, batch = jax.jit(example.create_state)(jax.random.key(0)), next(example.data(0))
    actual = run_in_microbatches(example.train_step, 4, state, batch)
    assert_trees_close(actual, jax.jit(example.train_step)(state, batch))


def test_clipping_and_adam_update_once_after_the_loop():
    weights, batch = linear()
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    state = (weights, optimizer.init(weights))

    def step(state, batch):
        weights, moments = state
        loss, gradient = jax.value_and_grad(LOSSES["masked"])(weights, batch)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    assert_trees_close(run_in_microbatches(step, 4, state, batch), jax.jit(step)(state, batch))


def test_whether_any_and_all_examples_are_true_is_combined_over_devices():
    def step(w, x):
        above = x @ w > 0
        return 0.5 * w, (above.any(0), above.all(0))

    x = (
        jnp.ones((8, 4)).at[0].set(-1.0)
    )  # column 0 is false on one device, column 1 true on one, 2 everywhere, 3 nowhere
    w = jnp.stack([jnp.ones(4), -jnp.ones(4), jnp.eye(4)[0], jnp.zeros(4)], 1)
    x = x.at[:, 0].set(1.0)
    parallel = autopar.parallelize(step, mesh_shape=(8,), constraints=autopar.data_parallel())
    expected = jax.jit(step)(w, x)[1]
    assert [e.tolist() for e in expected] == [[True, True, True, False], [False, False, True, False]]
    assert "all-reduce" in {c.kind for c in parallel.plan(w, x).collectives}
    assert [e.tolist() for e in parallel(w, x)[1]] == [e.tolist() for e in expected]
