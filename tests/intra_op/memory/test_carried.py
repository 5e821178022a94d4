"""What a loop carries on is written where it was, as XLA does it, unless something reads it later."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.intra_op.memory.buffers import real_bytes

SIZE = 256


def added(carry, x):
    return carry + jnp.tanh(x)


def turned(carry, x):
    return carry.T + jnp.tanh(x)


def multiplied(carry, x):
    return carry @ x


BODIES = {"added": added, "turned": turned, "multiplied": multiplied}


@pytest.mark.parametrize("name", BODIES)
def test_the_peak_of_a_loop_is_xlas(name):
    body = BODIES[name]

    def step(state, batch):
        def trip(carry, x):
            return body(carry, x), None

        after, _ = jax.lax.scan(trip, jnp.tanh(state), batch)
        return state + after, jnp.sum(after)

    state = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    batch = jax.ShapeDtypeStruct((3, SIZE, SIZE), jnp.float32)
    planned = autopar.parallelize(step, devices=1, num_microbatches=1).plan(state, batch).peak_bytes
    compiled = real_bytes(jax.jit(step, donate_argnums=0).lower(state, batch).compile())
    assert planned == pytest.approx(compiled, rel=0.01)
