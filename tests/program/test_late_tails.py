"""Tails behind scans: gradients of layers are added up over microbatches before they are rounded, or multiplied."""

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


def shown(h, w, g):
    """Python sees what becomes of the weight."""
    jax.debug.callback(lambda gate: None, jnp.exp(g))
    return gated(h, w, g)


FUNCTIONS_OF_WEIGHTS = {f.__name__: f for f in (gated, normed, mean_gated, twice_in_half, nested, shown)}


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


def weights_and_examples(*layers):
    draw = np.random.default_rng(0)
    weights = draw.normal(size=(*layers, WIDTH, WIDTH)) / 3, draw.normal(size=(*layers, WIDTH))
    return tuple(jnp.asarray(w, jnp.float32) for w in weights), draw.normal(size=(2 * ROWS, WIDTH)).astype(np.float32)


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


def scan_of(fun, *arguments):
    """The last scan of a program."""
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments), rearranged=True)
    return [eqn for eqn in program.equations if eqn.primitive.name == "scan"][-1]


def operations(scan):
    return {eqn.primitive.name for eqn in scan.regions[0].equations}


def test_what_a_scan_makes_of_sums_along_features_stays_in_it():
    """Probabilities are of each example, though nothing else in the scan reads them."""

    def forward(weights, x):
        def layer(x, w):
            made = jnp.tanh(x @ w[0])
            return made, jax.nn.softmax(made @ w[0] + w[1])

        return jax.lax.scan(layer, x, weights)

    assert "exp" in operations(scan_of(forward, *weights_and_examples(LAYERS)))


def test_sums_that_take_more_memory_than_the_results_stay_in_their_scan():
    """The gradient of a weight that two small ones make is larger than theirs."""
    low_rank = jnp.ones((LAYERS, WIDTH, 1)), jnp.ones((LAYERS, 1, WIDTH))

    def step(weights, x):
        def loss_of(weights):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ jnp.exp(w[0] @ w[1])), None), x, weights)[0] ** 2)

        return jax.grad(loss_of)(weights)

    backward = scan_of(step, low_rank, jnp.ones((2, WIDTH)))
    assert {v.aval.shape for v in backward.outvars[1:]} == {(LAYERS, WIDTH, 1), (LAYERS, 1, WIDTH)}


def test_a_total_that_is_read_on_its_way_stays_in_its_scan():
    """Each iteration sees what the ones before it have added up."""

    def totals(weights, x):
        def layer(total, w):
            total = total + jnp.sum(x, 0) * jnp.exp(w[1])
            return total, jnp.max(total)

        return jax.lax.scan(layer, jnp.zeros(WIDTH), weights)

    assert "exp" in operations(scan_of(totals, *weights_and_examples(LAYERS)))
