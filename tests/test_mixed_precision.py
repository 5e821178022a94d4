"""Steps in bfloat16 and float16 give on many devices what `jax.jit` gives on one, up to the rounding of their type.

With plain gradient descent of rate 1 the move of a weight is its gradient. Sums over examples are made in another
order, so they differ by roundings. Gradients must be as near to those of float32 as `jax.jit`'s own are: at most twice
as far, and a few roundings of the largest entry of their leaf.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.models import MODELS, build
from tests.models.conftest import SIZES

ROUNDINGS = 4
EXACT = {"learning_rate": 1.0, "sgd": True, "weight_decay": 0.0, "clip_norm": 1e9, "batch": 16}
MODES = {
    "zero3": {"constraints": autopar.zero3(), "mesh_shape": (4,)},
    "data parallel": {"constraints": autopar.data_parallel(), "mesh_shape": (8,)},
    "stages": {"num_stages": 2, "num_microbatches": 4, "mesh_shape": (2,)},
}
FAST = [("mlp", "bfloat16", "zero3"), ("mlp", "float16", "stages"), ("gpt", "bfloat16", "zero3")]
SLOW = [(name, "bfloat16", "data parallel" if name == "wide_resnet" else "stages") for name in MODELS]
SLOW += [(name, "float16", "zero3") for name in ("gpt", "moe", "unet", "wide_resnet")]


@functools.cache
def example(name, dtype):
    """(model, state, batch, what `jax.jit` returns, and the gradients in float32)."""
    layers = {"layers": 1} if name == "gpt" else {}
    model = build(name, **SIZES[name] | EXACT | layers, dtype=dtype)
    state, batch = jax.jit(model.create_state)(jax.random.key(0)), next(model.data(0))
    expected = jax.jit(model.train_step)(state, batch)
    exact = gradients(state, expected[0]) if dtype == "float32" else example(name, "float32")[-1]
    return model, state, batch, expected, exact


def gradients(before, after):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), before.params, after.params)


def check(name, dtype, mode):
    model, state, batch, (expected, expected_metrics), exact = example(name, dtype)
    step = autopar.parallelize(model.train_step, **MODES[mode])
    new, metrics = step(state, batch)
    new = step.gather(new)
    rounding = float(jnp.finfo(dtype).eps)
    by_jit = jax.tree.leaves(gradients(state, expected))
    both = zip(jax.tree.leaves_with_path(gradients(state, new)), by_jit, jax.tree.leaves(exact), strict=True)
    for (path, actual), wanted, true in both:
        off, off_by_jit = (np.abs(found - true).max() for found in (actual, wanted))
        allowed = 2 * off_by_jit + ROUNDINGS * rounding * max(np.abs(true).max(), 1e-3)
        assert off < allowed, f"{jax.tree_util.keystr(path)}: off by {off:.1e}, allowed are {allowed:.1e}"
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=rounding)
    rest = [(tree.step, tree.loss_scale) for tree in (new, expected)]
    jax.tree.map(np.testing.assert_array_equal, *rest)
    return step.last_plan()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        case if case[1:] != ("bfloat16", "zero3") or case[0] == "gpt" else pytest.param(*case, marks=pytest.mark.slow)
        for case in FAST
    ],
)
def test_a_step_in_half_precision_equals_jit_within_its_rounding(name, dtype, mode):
    plan = check(name, dtype, mode)
    if mode == "zero3":
        gathered = {item.operand.partition("[")[0] for item in plan.collectives if item.kind == "all-gather"}
        assert gathered == {dtype}, "the weights are cast before they are gathered"
        summed = {item.operand.partition("[")[0] for item in plan.collectives if "reduce" in item.kind}
        assert summed <= {dtype, "float32"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "mode"), SLOW)
def test_every_model_in_half_precision_equals_jit_within_its_rounding(name, dtype, mode):
    check(name, dtype, mode)


def test_microbatches_are_added_up_in_float32():
    """Thirty-two of them: a sum in bfloat16 would be off by as many roundings."""
    sizes = {"layers": 1, "hidden": 16, "inputs": 8, "outputs": 8} | EXACT | {"batch": 64}
    moves = {}
    for dtype in ("float32", "bfloat16"):
        model = build("mlp", **sizes, dtype=dtype)
        state, batch = model.create_state(jax.random.key(0)), next(model.data(0))
        step = autopar.parallelize(model.train_step, num_microbatches=32, mesh_shape=(2,))
        moves[dtype] = gradients(state, step(state, batch)[0])
    for exact, rounded in zip(*map(jax.tree.leaves, moves.values()), strict=True):
        assert np.abs(exact - rounded).max() < 2 * 2.0**-8 * np.abs(exact).max()
