"""Tails behind scans: gradients of layers are added up over microbatches before they are rounded, or multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.program.from_jaxpr import program_of
from tests.oracles import assert_trees_close
from tests.program.scanned_layers import LAYERS, ROWS, WIDTH, weights_and_examples


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
    program, _ = program_of(jax.make_jaxpr(step)(*state_and_batch()), rearranged=True)
    assert {"float32[4,8]", "bfloat16[4,8,8]"} <= stacks(program)
    plain, _ = program_of(jax.make_jaxpr(rounding_scan)(jnp.ones((4, 8))), rearranged=True)
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
    "bfloat16 weights on the left": (lambda x, w: (w.astype(jnp.float32) @ x.T).T, jnp.bfloat16),
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

    program, _ = program_of(
        jax.make_jaxpr(forward)(jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((3, WIDTH))), rearranged=True
    )
    assert stacks(program) == {"bfloat16[4,3,8]"}


def gated(h, w, g):
    """A function of a weight that is not linear, as gates have."""
    return h + jnp.tanh(h @ w) * jax.nn.sigmoid(g)


def normed(h, w, g):
    """A weight of norm one."""
    return h + jnp.tanh(h @ (g * w / jnp.linalg.norm(w, axis=0)))


def mean_gated(h, w, g):
    return h + jnp.tanh(h @ w) * jnp.exp(jnp.mean(g))


def twice_in_half(h, w, g):
    """A sum of two sums, each of which is rounded."""
    w = w.astype(jnp.bfloat16)
    return h + g * (jnp.tanh(h.astype(jnp.bfloat16) @ w) @ w).astype(jnp.float32)


def nested(h, w, g):
    """Layers of layers."""
    return h + jax.lax.scan(lambda h, g: (jnp.tanh(h * jnp.exp(g)) @ w, None), h, jnp.stack([g, 2 * g]))[0]


def decayed(h, w, g):
    """A state over time inside of each layer, which is read before it is renewed."""
    times = jnp.stack([h, 2 * h, 3 * h]) @ w
    decay = jnp.exp(-jnp.exp(g))
    return h + jax.lax.scan(lambda s, x: (decay * s + x, s), jnp.zeros_like(h), times)[1].sum(0)


def shown(h, w, g):
    """Python sees what becomes of the weight."""
    jax.debug.callback(lambda gate: None, jnp.exp(g))
    return gated(h, w, g)


FUNCTIONS_OF_WEIGHTS = {f.__name__: f for f in (gated, normed, mean_gated, twice_in_half, nested, decayed, shown)}


def over_layers(cell):
    def step(weights, x):
        def loss_of(weights):
            return jnp.mean(jax.lax.scan(lambda h, of_layer: (cell(h, *of_layer), None), x, weights)[0] ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), loss

    return step


def over_time(cell):
    """One cell for all times, whose weights the scan takes as constants."""

    def step(weights, x):
        def loss_of(weights):
            times = jnp.moveaxis(x.reshape(2 * ROWS, 1, WIDTH) * jnp.arange(1.0, 6.0)[:, None], 1, 0)
            return jnp.mean(jax.lax.scan(lambda h, x: (cell(h + x, *weights), None), x, times)[0] ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), loss

    return step


WAYS = {"microbatches": {}, "stages": {"num_stages": 2}}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS_OF_WEIGHTS)
def test_functions_of_weights_in_layers_are_cut_into_microbatches(name, recomputes, way):
    """Their gradients are sums times something of the weight: the sum comes first, whole."""
    cell = FUNCTIONS_OF_WEIGHTS[name]
    step = over_layers(jax.checkpoint(cell) if recomputes and name != "shown" else cell)
    weights, x = weights_and_examples(LAYERS)
    parallel = autopar.parallelize(step, mesh_shape=(1,), num_microbatches=4, **WAYS[way])
    new = parallel.gather(parallel(weights, x))
    assert_trees_close(new, jax.jit(step)(weights, x), rtol_of_scale=2e-2 if name == "twice_in_half" else 1e-5)
    assert parallel.last_plan().num_microbatches == 4


@pytest.mark.parametrize("name", ["gated", "mean_gated"])
def test_functions_of_weights_at_all_times_are_cut_into_microbatches(name):
    step = over_time(FUNCTIONS_OF_WEIGHTS[name])
    weights, x = weights_and_examples()
    parallel = autopar.parallelize(step, mesh_shape=(1,), num_microbatches=4)
    new = parallel.gather(parallel(weights, x))
    assert_trees_close(new, jax.jit(step)(weights, x), rtol_of_scale=1e-5)
    assert parallel.last_plan().num_microbatches == 4


def with_running_means(weights, x):
    """Statistics that scanned layers keep of the batch, and no weight after them."""

    def loss_of(w):
        def layer(h, of_layer):
            w, mean = of_layer
            made = h @ w
            return h + jnp.tanh(made - mean), 0.9 * mean + 0.1 * jnp.mean(made, 0)

        h, means = jax.lax.scan(layer, x, (w, weights[1]))
        return jnp.mean(h**2), means

    (loss, means), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights[0])
    return (weights[0] - gradient, means), loss


def test_statistics_that_scanned_layers_keep_are_no_gradients():
    weights, x = weights_and_examples(LAYERS)
    parallel = autopar.parallelize(with_running_means, mesh_shape=(1,), num_microbatches=4, num_stages=2)
    new = parallel.gather(parallel(weights, x))
    assert_trees_close(new, jax.jit(with_running_means)(weights, x), rtol_of_scale=1e-5)


@jax.custom_vjp
def doubled_on_the_way_back(w):
    return w


def ask_python(_, gradient):
    shape = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
    return (jax.pure_callback(lambda array: 2 * np.asarray(array), shape, gradient),)


doubled_on_the_way_back.defvjp(lambda w: (w, None), ask_python)


def test_a_call_of_python_takes_the_gradient_of_one_layer_at_a_time():
    """It need not be able to take those of all."""
    step = over_layers(lambda h, w, g: gated(h, w, doubled_on_the_way_back(jnp.exp(g))))
    weights, x = weights_and_examples(LAYERS)
    parallel = autopar.parallelize(step, mesh_shape=(1,))
    with pytest.warns(autopar.AutoparWarning, match="calls Python: pure_callback"):
        new = parallel.gather(parallel(weights, x))
    assert_trees_close(new, jax.jit(step)(weights, x), rtol_of_scale=1e-5)
