"""Branches of a cond write their results where these lie afterwards; XLA of JAX before 0.12 copies what they write over."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.program.from_jaxpr import program_of
from tests.intra_op.memory.buffers import real_bytes

WIDTH, LAYERS = 512, 6
BRANCHES = {
    "keep": lambda weights, gradients: weights,
    "update": lambda weights, gradients: [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)],
    "halve": lambda weights, gradients: [0.5 * w for w in weights],
    "turn": lambda weights, gradients: [w.T for w in weights],
    "replace": lambda weights, gradients: gradients,
    "make": lambda weights, gradients: [jnp.tanh(g) for g in gradients],
}
CHOICES = (
    "keep update",
    "update keep",
    "keep halve",
    "keep turn",
    "keep make",
    "keep replace",
    "replace update",
    "halve update",
    "keep update halve",
    "keep update keep",
    "halve halve update",
)


def loss_of(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def assert_peak_is_xlas(step, state, rel):
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    planned = autopar.parallelize(step, devices=1, num_microbatches=1, recompute="none").plan(state, x).peak_bytes
    compiled = real_bytes(jax.jit(step, donate_argnums=0).lower(state, x).compile())
    assert planned == pytest.approx(compiled, rel=rel)


def weights():
    return [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS


@pytest.mark.parametrize("choice", CHOICES)
def test_the_peak_of_an_update_by_branches_is_xlas(choice):
    def step(weights, x):
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        branches = [BRANCHES[name] for name in choice.split()]
        return jax.lax.switch(jnp.int32(loss), branches, weights, gradients), loss

    assert_peak_is_xlas(step, weights(), rel=0.02)


@pytest.mark.parametrize(("number", "runs"), [(0, "sin"), (1, "cos"), (7, "cos"), (-3, "sin")])
def test_of_branches_chosen_by_a_constant_the_one_that_runs_is_left(number, runs):
    open_cond = jax.make_jaxpr(lambda n, x: jax.lax.switch(n, [jnp.sin, jnp.cos], x))(0, 1.0)
    (eqn,) = [eqn for eqn in open_cond.eqns if eqn.primitive.name == "cond"]
    traced = jax.make_jaxpr(lambda x: eqn.primitive.bind(jnp.int32(number), x, **eqn.params))(1.0)
    program, _ = program_of(traced)
    assert [one.primitive.name for one in program.walk()] == [runs]


def test_gradients_summed_by_the_optimizer_need_what_xla_says():
    """Its cond chooses by a constant: XLA keeps the branch that runs alone."""
    optimizer = optax.MultiSteps(optax.sgd(1e-3), 2)

    def step(state, x):
        weights, inner = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        updates, inner = optimizer.update(gradients, inner, weights)
        return (optax.apply_updates(weights, updates), inner), loss

    assert_peak_is_xlas(step, (weights(), jax.eval_shape(optimizer.init, weights())), rel=0.1)
