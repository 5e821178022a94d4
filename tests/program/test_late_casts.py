"""Casts of sums behind scans: gradients of layers are added up over microbatches before they are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.program.from_jaxpr import program_of
from tests.oracles import assert_trees_close

LAYERS, ROWS, WIDTH = 4, 8, 8


def step(state, batch):
    """Layers in bfloat16 with float32 weights, under a norm that computes in float32: its scale's gradient is a rounded sum."""

    def loss_of(state):
        def layer(x, of_layer):
            scale, w = of_layer
            wide = x.astype(jnp.float32)
            normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-3) * scale.astype(jnp.float32)
            return x + jnp.tanh(normed.astype(jnp.bfloat16) @ w), None

        layers = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
        made, _ = jax.lax.scan(layer, batch["x"].astype(jnp.bfloat16), layers)
        return jnp.mean((made.astype(jnp.float32) - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - g, state, gradient), loss


def state_and_batch():
    draw = np.random.default_rng(0)
    state = jnp.ones((LAYERS, WIDTH)), jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 8, jnp.float32)
    return state, {name: draw.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def rounding_scan(rows):
    """What it rounds is no sum."""
    return jax.lax.scan(lambda count, row: (count + 1, row.astype(jnp.bfloat16)), 0, rows)


def stacks(program):
    """The types and shapes of what scans stack."""
    scans = [eqn for eqn in program.equations if eqn.primitive.name == "scan"]
    return {v.aval.str_short() for eqn in scans for v in eqn.outvars[eqn.loop.carries :]}


def test_a_rounded_sum_leaves_its_scan_unrounded_and_what_is_kept_for_the_backward_pass_does_not():
    program, _ = program_of(jax.make_jaxpr(step)(*state_and_batch()))
    assert {"float32[4,8]", "bfloat16[4,8,8]"} <= stacks(program)
    plain, _ = program_of(jax.make_jaxpr(rounding_scan)(jnp.ones((4, 8))))
    assert stacks(plain) == {"bfloat16[4,8]"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "way",
    [{"num_microbatches": 4, "mesh_shape": (2,)}, {"num_stages": 2, "num_microbatches": 2, "mesh_shape": (1,)}],
    ids=["microbatches", "stages"],
)
def test_layers_in_half_precision_are_cut_into_microbatches(way):
    """Without the warning that one microbatch runs, which is an error here."""
    state, batch = state_and_batch()
    parallel = autopar.parallelize(step, **way)
    new = parallel.gather(parallel(state, batch))
    assert_trees_close(new, jax.jit(step)(state, batch), rtol_of_scale=2e-2)
    assert parallel.last_plan().num_microbatches == way["num_microbatches"]


def rounded(x, w):
    """Products in bfloat16 of float32 values, and a result in float32: the gradient of a weight is rounded and widened again."""
    return jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


CELLS = {
    "rounded": (rounded, jnp.float32),
    "float32 activations": (lambda x, w: x @ w.astype(jnp.bfloat16), jnp.float32),
    "bfloat16 weights": (lambda x, w: x @ w.astype(jnp.float32), jnp.bfloat16),
}
"""Products of activations and weights, and the type of the weights."""


def layered(cell):
    """Layers in a scan."""

    def step(weights, x):
        def loss_of(weights):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(cell(x, w)), None), x, weights)[0] ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return (weights - gradient).astype(weights.dtype), loss

    return step


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(
    "way", [{"num_microbatches": 4}, {"num_stages": 2, "num_microbatches": 2}], ids=["one", "stages"]
)
def test_gradients_of_products_in_mixed_precision_are_cut_into_microbatches(name, way):
    cell, dtype = CELLS[name]
    draw = np.random.default_rng(0)
    weights = jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, dtype)
    x = draw.normal(size=(2 * ROWS, WIDTH)).astype(np.float32)
    parallel = autopar.parallelize(layered(cell), mesh_shape=(1,), **way)
    new = parallel.gather(parallel(weights, x))
    assert_trees_close(new, jax.jit(layered(cell))(weights, x), rtol_of_scale=2e-2)
    assert parallel.last_plan().num_microbatches == way["num_microbatches"]


def test_products_that_a_forward_pass_keeps_rounded_stay_rounded():
    """They are of the shape of no weight."""

    def forward(weights, x):
        def layer(x, w):
            made = rounded(x, w).astype(jnp.bfloat16)
            return jnp.tanh(made).astype(jnp.float32), made

        return jax.lax.scan(layer, x, weights)[1]

    program, _ = program_of(jax.make_jaxpr(forward)(jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((3, WIDTH))))
    assert stacks(program) == {"bfloat16[4,3,8]"}
