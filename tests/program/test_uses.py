"""What a step does with each leaf of its state, by data flow: in the ways in which libraries keep parameters and moments."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
WEIGHTS = {"a": jax.ShapeDtypeStruct((4, 6), jnp.float32), "b": jax.ShapeDtypeStruct((6, 4), jnp.float32)}


def uses(fun, *args):
    """The use of every leaf of the state that has one, by its path."""
    inputs = trace(
        CallSignature(fun, "auto", (), "auto"), bind_arguments(CallSignature(fun, "auto", (), "auto"), args, {})
    ).inputs
    return {leaf.path: leaf.use for leaf in inputs if leaf.use is not None}


def loss_of(w, x):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - x) ** 2)


def of(head, use):
    return {f"{head}/{key}": use for key in WEIGHTS}


def moments(use="optimizer", head="state/1/0"):
    return {f"{head}/{moment}/{key}": use for moment in ("mu", "nu") for key in WEIGHTS}


def trained(tx, grad=None):
    """A step whose state is a tuple of parameters and the state of an optimizer of optax, and its state."""

    def step(state, x):
        gradients = (grad or jax.grad(loss_of))(state[0], x)
        updates, kept = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), kept), loss_of(state[0], x)

    return step, (WEIGHTS, jax.eval_shape(tx.init, WEIGHTS))


def test_adam_has_parameters_and_moments_in_a_tuple_without_names():
    step, state = trained(optax.adam(0.1))
    assert uses(step, state, X) == {**of("state/0", "parameter"), **moments()}


def test_plain_descent_has_parameters_alone():
    step, state = trained(optax.sgd(0.1))
    assert uses(step, state, X) == of("state/0", "parameter")


def test_clipping_by_a_norm_of_all_and_a_schedule_change_nothing():
    step, state = trained(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10)))
    )
    assert uses(step, state, X) == {**of("state/0", "parameter"), **moments(head="state/1/1/0")}


def test_factored_moments_are_the_optimizers_though_their_shapes_are_no_parameters():
    step, state = trained(optax.adafactor(0.1, min_dim_size_to_factor=4))
    found = uses(step, state, X)
    assert {path: use for path, use in found.items() if path.startswith("state/0")} == of("state/0", "parameter")
    assert {use for path, use in found.items() if path.startswith("state/1")} == {"optimizer"}
    assert "state/1/0/v_row/a" in found


def test_gradients_that_a_scan_adds_up_are_gradients():
    def grad(w, x):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(w, part)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), x.reshape(2, 4, 4))[0]

    step, state = trained(optax.adam(0.1), grad)
    assert uses(step, state, X) == {**of("state/0", "parameter"), **moments()}


def test_several_steps_in_one_scan_keep_parameters_and_moments_apart():
    one, state = trained(optax.adam(0.1))
    assert uses(lambda state, x: jax.lax.scan(one, state, jnp.stack([x, x])), state, X) == {
        **of("state/0", "parameter"),
        **moments(),
    }


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda fun: jax.vmap(fun, in_axes=(None, 0))])
def test_recomputation_and_other_transformations_change_nothing(wrap):
    inner = wrap(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"])
    step, state = trained(optax.adam(0.1), jax.grad(lambda w, x: jnp.mean((inner(w, x) - x) ** 2)))
    assert uses(step, state, X) == {**of("state/0", "parameter"), **moments()}


def test_an_average_of_the_weights_is_kept_as_the_optimizers_state_is():
    def step(state, x):
        new = jax.tree.map(lambda w, g: w - g, state["w"], jax.grad(loss_of)(state["w"], x))
        return {"w": new, "average": jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, state["average"], new)}, 0.0

    assert uses(step, {"w": WEIGHTS, "average": WEIGHTS}, X) == {
        **of("state/average", "optimizer"),
        **of("state/w", "parameter"),
    }


def test_counters_keys_statistics_and_frozen_weights_have_no_use():
    def step(state, x):
        def loss(w):
            y = x @ state["frozen"]
            mean = 0.9 * state["mean"] + 0.1 * y.mean(0)
            return jnp.mean((y - y.mean(0)) @ w) ** 2, mean

        gradient, mean = jax.grad(loss, has_aux=True)(state["w"])
        key = jax.random.split(state["key"])[0]
        return {**state, "w": state["w"] - gradient, "mean": mean, "count": state["count"] + 1, "key": key}, 0.0

    state = {
        "w": jax.ShapeDtypeStruct((6, 2), jnp.float32),
        "frozen": WEIGHTS["a"],
        "mean": jax.ShapeDtypeStruct((6,), jnp.float32),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
        "key": jax.random.key(0),
    }
    assert uses(step, state, X) == {"state/w": "parameter"}


def test_two_networks_trained_one_after_the_other_are_both_parameters_and_neither_ones_moments():
    tx = optax.adam(0.1)

    def step(state, x):
        one, other, kept = state
        updates, kept_one = tx.update(jax.grad(loss_of)(one, x), kept[0], one)
        one = optax.apply_updates(one, updates)
        gradient = jax.grad(lambda w: loss_of(w, x) * loss_of(one, x))(other)
        updates, kept_other = tx.update(gradient, kept[1], other)
        return (one, optax.apply_updates(other, updates), (kept_one, kept_other)), 0.0

    kept = jax.eval_shape(tx.init, WEIGHTS)
    assert uses(step, (WEIGHTS, WEIGHTS, (kept, kept)), X) == {
        **of("state/0", "parameter"),
        **of("state/1", "parameter"),
        **moments(head="state/2/0/0"),
        **moments(head="state/2/1/0"),
    }


def test_gradients_written_out_by_hand_tell_nothing():
    assert uses(lambda w, x: (w - 0.1 * x.T @ (x @ w - 1), 0.0), jax.ShapeDtypeStruct((4, 2), jnp.float32), X) == {}
