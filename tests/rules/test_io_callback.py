"""`io_callback` in a step: as often as on one device, however many devices and microbatches there are, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar.errors import UnsupportedProgramError
from tests.oracles import assert_trees_close

W = jnp.asarray(np.eye(8, dtype=np.float32) / 2)
X = jnp.asarray(np.arange(128, dtype=np.float32).reshape(16, 8) / 99)


class Calls:
    """What callbacks were given, in any order."""

    def __init__(self):
        self.seen = []

    def note(self, name):
        return lambda value: self.seen.append((name, np.asarray(value).round(4).tolist()))

    def answer(self, value):
        self.note("answer")(value)
        return np.float32(-0.0), np.asarray(value).max(1) > 0.5

    def take(self):
        jax.effects_barrier()
        seen, self.seen = sorted(self.seen, key=str), []
        return seen


def make_step(calls):
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        like = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.bool_))
        zero, large = io_callback(calls.answer, like, x)
        io_callback(calls.note("loss"), None, loss)
        io_callback(
            lambda value: (calls.note("unread")(value), np.int32(0))[1], jax.ShapeDtypeStruct((), jnp.int32), loss
        )

        def turn(count, row):
            io_callback(calls.note("row"), None, row)
            return count + 1, None

        count, _ = jax.lax.scan(turn, 0, x[:3])
        return w - 0.1 * gradient, 1 / zero, large, count

    return step


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh_shape": (2, 2)},
        {"mesh_shape": (4,), "num_microbatches": 4, "constraints": autopar.data_parallel()},
        {"mesh_shape": (2,), "num_stages": 2, "num_microbatches": 4},
    ],
    ids=["mesh", "microbatches", "stages"],
)
@pytest.mark.filterwarnings("ignore:.*of the forward work is one operation:autopar.AutoparWarning")
def test_each_call_is_made_once_and_all_devices_get_its_results(options):
    calls = Calls()
    expected = jax.block_until_ready(jax.jit(make_step(calls))(W, X))
    wanted = calls.take()
    step = autopar.parallelize(make_step(calls), donate_argnums=(), **options)
    assert_trees_close(jax.block_until_ready(step(W, X)), expected)
    assert calls.take() == wanted
    assert len(wanted) == 6


def test_what_the_updates_of_several_stages_need_is_asked_for_once():
    calls = []

    def step(weights, x):
        rate = io_callback(lambda: np.float32(calls.append("rate") or 0.1), jax.ShapeDtypeStruct((), jnp.float32))
        gradients = jax.grad(lambda weights: jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2))(weights)
        return [w - rate * g for w, g in zip(weights, gradients, strict=True)]

    expected = jax.block_until_ready(jax.jit(step)([W, W], X))
    parallel = autopar.parallelize(step, mesh_shape=(2,), num_stages=2, num_microbatches=4, donate_argnums=())
    assert_trees_close(jax.block_until_ready(parallel([W, W], X)), expected)
    jax.effects_barrier()
    assert calls == ["rate"] * 2


def scaled_by_python(w, x):
    def loss(w):
        hidden = x @ w
        scale = io_callback(
            lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((16, 8), x.dtype), jax.lax.stop_gradient(hidden)
        )
        return jnp.mean((hidden * scale) @ w)

    return w - 0.1 * jax.grad(loss)(w)


def scheduled_by_python(w, x):
    scale = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), jnp.float32))
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) * scale @ w)))(w)


def test_a_call_that_no_microbatch_and_no_stage_can_make_is_refused_at_its_line():
    with pytest.raises(UnsupportedProgramError, match=r"cut into 4 microbatches: io_callback at .*calls Python once"):
        autopar.parallelize(scaled_by_python, mesh_shape=(2,), num_microbatches=4).plan(W, X)
    with pytest.raises(UnsupportedProgramError, match=r"cut into 4 microbatches: io_callback at .*calls Python once"):
        autopar.parallelize(scaled_by_python, num_stages=2, num_microbatches=4).plan(W, X)
    with pytest.raises(UnsupportedProgramError, match=r"calls Python once, with io_callback at .*scheduled_by_python"):
        autopar.parallelize(scheduled_by_python, num_stages=2, num_microbatches=4).plan(W, X)
