"""Results in another order of dimensions: on JAX 0.12 each costs a buffer, before only what reads it may."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.intra_op.memory.buffers import real_bytes

SQUARE = jax.ShapeDtypeStruct((512, 512), jnp.float32)
READERS = {
    "nothing": lambda turned, x: 0.0,
    "a norm": lambda turned, x: jnp.sum(turned**2),
    "two norms": lambda turned, x: (jnp.sum(turned**2), jnp.sum(jnp.abs(turned))),
    "a sum": lambda turned, x: turned + x,
    "a norm and a sum": lambda turned, x: (jnp.sum(turned**2), turned + x),
    "a maximum": lambda turned, x: jnp.max(turned),
    "a product": lambda turned, x: turned @ x,
}


@pytest.mark.parametrize("reader", READERS)
def test_the_peak_of_a_turned_result_that_is_read_is_xlas(reader):
    def step(state, batch):
        turned = batch["x"].T
        return state + 1.0, (turned, READERS[reader](turned, batch["y"]))

    arguments = jax.ShapeDtypeStruct((), jnp.float32), {"x": SQUARE, "y": SQUARE}
    planned = autopar.parallelize(step, devices=1, num_microbatches=1, recompute="none").plan(*arguments).peak_bytes
    compiled = real_bytes(jax.jit(step, donate_argnums=0, keep_unused=True).lower(*arguments).compile())
    assert planned == pytest.approx(compiled, rel=0.01)
