"""What part of a stage's forward its backward does again: by what it reads."""

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.stages.time_loops import make_time_loop
from tests.inter_op.test_search import request_on, traced_step

WIDTH = 256


def layers_of(step, *weights):
    loop = make_time_loop(traced_step(list(weights), jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32), step), 2)
    request = request_on(preset("p3.16xlarge"))
    places = LayerCosts(lambda _: loop, 2, request, [(1, 1)]).of(2).places
    return PlannedLayers(loop, places, request)


def residual_step(weights, xs):
    """Blocks that add to what they received what two products make of it; no backward reads the second's result."""

    def loss_of(weights):
        x = xs
        for up, down in weights:
            with jax.named_scope("block"):
                x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradients), loss


@pytest.mark.parametrize("wider", [1, 4])
def test_the_last_product_of_a_block_is_not_done_again(wider):
    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, wider * WIDTH), (wider * WIDTH, WIDTH)))
    layers = layers_of(residual_step, *[(up, down)] * 6)
    inner = layers.figures(layers.common, 1)
    assert 0.3 < inner.again_s / inner.forward_s < 0.7, "one product of two, and what is cheap"
    assert inner.slower(2.0).again_s == pytest.approx(2 * inner.again_s)


def test_what_the_loss_reads_of_the_last_block_is_done_again():
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    layers = layers_of(residual_step, *[(weight, weight)] * 6)
    inner, last = (layers.figures(layer, 1) for layer in (layers.common, len(layers) - 1))
    assert last.again_s / last.forward_s > 1.2 * inner.again_s / inner.forward_s
