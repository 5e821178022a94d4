"""What leaves a scan on the way back, and what stays in it."""

import functools

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compat import source_line, transformations
from autopar.program import from_jaxpr
from autopar.program.from_jaxpr import program_of
from tests.oracles import assert_trees_close
from tests.program.scanned_layers import LAYERS, WIDTH, weights_and_examples


def scan_of(fun, *arguments):
    """The last scan of a program."""
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments), rearranged=True)
    return [eqn for eqn in program.equations if eqn.primitive.name == "scan"][-1]


def operations(scan):
    return {eqn.primitive.name for eqn in scan.regions[0].equations}


@pytest.fixture
def everything_goes_back(monkeypatch):
    """Every scan counts as one of a derivative going back, so that plain ones show what stays in them, and what does not."""
    monkeypatch.setattr(from_jaxpr._ProgramBuilder, "_goes_back", lambda builder, eqn: True)


def layered_by(layer, start):
    """A function of weights and examples whose layers are these."""
    return lambda weights, x: jax.lax.scan(functools.partial(layer, x), start(x), weights)


def multiplied(x, h, w):
    return h, jnp.sum(x, 0) * jnp.exp(w[1])


def counted(x, total, w):
    return total + jnp.sum(x, 0) * jnp.exp(w[1] + w[0][0]), None


def per_example(x, h, w):
    """Probabilities are of each example, though nothing else in the scan reads them."""
    return h, jax.nn.softmax(jnp.sum(x[:, None] * w[0], -1) + w[1])


def read_on_its_way(x, total, w):
    """Each iteration sees what the ones before it have added up."""
    total = total + jnp.sum(x, 0) * jnp.exp(w[1] + w[0][0])
    return total, jnp.max(total)


def read_before_it(x, total, w):
    """The total so far is stacked, too."""
    return total + jnp.sum(x, 0) * jnp.exp(w[1] + w[0][0]), total


def read_elsewhere(x, h, w):
    """What is made of the sum and the weight goes on to the next layer."""
    made = jnp.sum(x, 0) * jnp.exp(w[1])
    return jnp.tanh(h + made), made


LAYERED = {
    multiplied: (False, jnp.copy),
    counted: (False, lambda x: jnp.zeros(WIDTH)),
    per_example: (True, jnp.copy),
    read_on_its_way: (True, lambda x: jnp.zeros(WIDTH)),
    read_before_it: (True, lambda x: jnp.zeros(WIDTH)),
    read_elsewhere: (True, jnp.copy),
}
"""By layer, whether the exponential stays in its scan, and what the first layer takes."""


@pytest.mark.parametrize("layer", LAYERED)
def test_what_nobody_else_reads_leaves_its_scan(layer, everything_goes_back):
    stays, start = LAYERED[layer]
    arguments = weights_and_examples(LAYERS)
    assert ("exp" in operations(scan_of(layered_by(layer, start), *arguments))) == stays


@pytest.mark.parametrize("layer", [multiplied, counted])
def test_tails_and_totals_are_those_of_jit(layer, everything_goes_back):
    """Of a total that does not begin with zero, too."""
    step = layered_by(layer, lambda x: jnp.full(WIDTH, 3, jnp.float32))
    weights, x = weights_and_examples(LAYERS)
    assert_trees_close(autopar.parallelize(step, devices=1)(weights, x), jax.jit(step)(weights, x), rtol_of_scale=1e-6)


def test_a_total_of_small_integers_keeps_its_type(everything_goes_back):
    def step(weights, x):
        def layer(total, w):
            return total + jnp.sum(x, 0, dtype=x.dtype) * w[0], None

        return jax.lax.scan(layer, weights[0, 0], weights)[0]

    numbers = jnp.ones((LAYERS, WIDTH, WIDTH), jnp.int8), jnp.ones((3, WIDTH), jnp.int8)
    assert "mul" not in operations(scan_of(step, *numbers))
    assert_trees_close(autopar.parallelize(step, devices=1)(*numbers), jax.jit(step)(*numbers))


@pytest.mark.parametrize("layer", [multiplied, counted])
def test_what_a_scan_makes_going_forward_stays_in_it(layer):
    """Its values may be large, and statistics of the batch are no gradients."""
    assert "exp" in operations(scan_of(layered_by(layer, LAYERED[layer][1]), *weights_and_examples(LAYERS)))


def test_what_is_large_on_its_way_stays_in_its_scan(everything_goes_back):
    """The product of the sum and the weight has many times as many entries as what is made of it."""

    def layer(x, h, w):
        return h, jnp.sum(jnp.tanh(jnp.sum(x, 0)[:, None, None] * w[0]), (0, 1))

    assert "tanh" in operations(scan_of(layered_by(layer, jnp.copy), *weights_and_examples(LAYERS)))


def test_sums_that_take_more_memory_than_the_results_stay_in_their_scan():
    """The gradient of a weight that two small ones make is larger than theirs."""
    low_rank = jnp.ones((LAYERS, WIDTH, 1)), jnp.ones((LAYERS, 1, WIDTH))

    def step(weights, x):
        def loss_of(weights):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ jnp.exp(w[0] @ w[1])), None), x, weights)[0] ** 2)

        return jax.grad(loss_of)(weights)

    backward = scan_of(step, low_rank, jnp.ones((2, WIDTH)))
    assert {v.aval.shape for v in backward.outvars[1:]} == {(LAYERS, WIDTH, 1), (LAYERS, 1, WIDTH)}


def gradient_of_layers(cell):
    """The way back through layers in a scan."""
    return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(cell(h, w)), None), x, w)[0]))


def test_a_transposed_product_stays_in_its_scan():
    """It is linear in the sum."""
    weights, x = weights_and_examples(LAYERS)
    scan = scan_of(gradient_of_layers(lambda h, w: (w @ h.T).T), weights[0], x)
    assert {"dot_general", "transpose"} <= operations(scan)


def test_tails_are_of_the_lines_and_the_derivative_that_they_were_of():
    """By these a report names them, and a step's way back is told from its way forth."""
    weights, x = weights_and_examples(LAYERS)
    made = jax.make_jaxpr(gradient_of_layers(lambda h, w: h * jnp.exp(w)))(weights[1], x)
    program, _ = program_of(made, rearranged=True)
    *_, scan, tail = (eqn for eqn in program.equations if eqn.primitive.name in ("scan", "mul"))
    assert (scan.primitive.name, tail.primitive.name) == ("scan", "mul")
    for eqn in (scan, tail):
        assert {"jvp", "transpose"} <= transformations(eqn)
    assert "test_moved_tails.py" in source_line(tail)
