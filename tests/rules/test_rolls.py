"""Rolls along divided dimensions: parts come from the devices that have them, and periodic stencils equal `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import rule_for
from autopar.testing import run_with_random_strategies
from tests.oracles import assert_same_as_jit
from tests.program.test_rolls import ROLLED

ROWS = 16
VALUES = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
SHIFTS = (1, 3, 4, 7, 8, 13, -1)


def heat(state, batch):
    """Two steps of a fluid on a torus, by differences to the neighbours; a loss, and its gradient by the state."""

    def loss_of(u):
        for _ in range(2):
            neighbours = [jnp.roll(u, shift, axis) for axis in (0, 1) for shift in (1, -1)]
            u = u + 0.1 * (sum(neighbours) - 4 * u)
        return jnp.mean((u - batch) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return state - 0.1 * gradient, loss


def test_rows_and_where_they_go_are_divided_together():
    program, _ = program_of(jax.make_jaxpr(ROLLED["forward"][0])(np.zeros((4, 8), np.float32)), rearranged=True)
    (eqn,) = program.equations
    assert str(rule_for(eqn)) == "a b -> a c | whole: b c | together: b c | linear: 0 | any"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (8,)])
def test_rolls_and_their_gradients_are_those_of_jit_under_random_strategies(mesh_shape, seed):
    def all_of(x):
        made = [jnp.roll(x, shift, 0) for shift in SHIFTS]
        gradients = [jax.grad(lambda y, s=shift: (jnp.roll(y, s, 0) ** 3).sum())(x) for shift in SHIFTS]
        return made, gradients

    actual = run_with_random_strategies(all_of, VALUES, mesh_shape=mesh_shape, seed=seed)
    jax.tree.map(np.testing.assert_array_equal, actual, jax.jit(all_of)(VALUES))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", [P("x"), P(None, "x"), P("x", "y"), P(("y", "x"))])
def test_a_periodic_stencil_sends_its_borders_alone(layout):
    state, batch = VALUES, np.roll(VALUES, 1)
    parallel = autopar.parallelize(
        heat,
        mesh_shape=(4, 2) if "y" in str(layout) else (4,),
        constraints={"state": layout, "batch": layout},
        collectives=("collective-permute", "all-reduce"),
        num_microbatches=1,
        recompute="none",
    )
    compiled = parallel.compile(state, batch)
    sent = [one for one in compiled.plan.collectives if one.overlap == "within"]
    assert {one.kind for one in sent} == {"collective-permute"}
    assert max(one.bytes for one in sent) <= 4 * max(VALUES.shape)
    differing = [row for row in parallel.verify(state, batch).differing if row.where == "collectives"]
    assert differing == []
    assert_same_as_jit(heat, parallel, state, batch, steps=2, rtol_of_scale=1e-5)


def test_rows_that_go_far_cross_the_axes_along_which_their_devices_differ():
    def step(state, batch):
        loss, gradient = jax.value_and_grad(lambda u: jnp.mean((jnp.roll(u, 4, 0) - batch) ** 2 * u))(state)
        return state - 0.1 * gradient, loss

    parallel = autopar.parallelize(
        step,
        mesh_shape=(4, 2),
        constraints={"state": P(("x", "y")), "batch": P(("x", "y"))},
        collectives=("collective-permute", "all-reduce"),
        num_microbatches=1,
    )
    sent = {one.axes for one in parallel.plan(VALUES, VALUES).collectives if one.kind == "collective-permute"}
    assert sent == {("x",)}, "two parts of two rows each are one place along x"
    assert [row for row in parallel.verify(VALUES, VALUES).differing if row.where == "collectives"] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_examples_that_go_round_in_microbatches_meet_before_they_do(num_stages):
    def step(state, batch):
        def loss_of(w):
            made = batch @ w
            return jnp.mean((made - jnp.roll(made, 1, axis=0)) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(state)
        return state - 0.1 * gradient, loss

    parallel = autopar.parallelize(step, devices=jax.devices()[:4], num_microbatches=2, num_stages=num_stages)
    assert_same_as_jit(step, parallel, np.eye(8, dtype=np.float32), VALUES, steps=2)
