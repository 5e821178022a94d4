"""When values that are computed in another order count as equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.verify import values


def signs(*turned):
    """A thousand steps of one size, some of them in the other direction."""
    found = np.where(np.arange(1000) % 2, 1e-3, -1e-3).astype(np.float32)
    found[list(turned)] *= -1
    return found


def verdict(found, *, nudged=None, far=None):
    wanted = signs()
    row = values._row("p", found, wanted, wanted if nudged is None else nudged)
    return row if far is None else values._on_average(row, found, wanted, far)


def test_an_entry_that_rounding_turns_around_differs_by_itself_and_matches_on_average():
    far = signs(*range(20))
    assert verdict(signs(7)).verdict == "differs"
    row = verdict(signs(7), far=far)
    assert row.verdict == "matches"
    assert (row.planned, row.compiled) == (pytest.approx(0.04), pytest.approx(0.002))
    assert "on average" in row.note


@pytest.mark.parametrize("turned", [range(30), range(1000)])
def test_more_turned_entries_than_rounding_makes_are_told(turned):
    assert verdict(signs(*turned), far=signs(*range(20))).verdict == "differs"


def test_an_entry_that_rounding_does_not_move_so_far_is_told_however_many_others_there_are():
    wanted = np.linspace(0.1, 1.0, 10**6, dtype=np.float32)
    broken = wanted.copy()
    broken[5] = 0.9
    row = values._row("p", broken, wanted, wanted * np.float32(1 + 1e-6))
    assert values._on_average(row, broken, wanted, wanted * np.float32(1 + 8e-6)).verdict == "differs"


def test_other_shapes_and_infinities_are_told_on_average_too():
    broken = signs()
    broken[3] = np.inf
    assert verdict(broken, far=signs(*range(20))).verdict == "differs"
    assert verdict(signs()[:-1], far=signs(*range(20))).verdict == "differs"


def test_adam_from_nothing_in_16_bits_is_verified():
    """Adapters whose second factor begins at zero: Adam goes one step in the direction of a gradient in bfloat16."""
    keys = iter(jax.random.split(jax.random.key(5), 20))
    optimizer = optax.adamw(1e-3)

    def step(state, batch):
        def loss_of(adapters):
            x = batch["x"].astype(jnp.bfloat16)
            for w, down, up in zip(state["base"], adapters["down"], adapters["up"], strict=True):
                w, down, up = (one.astype(jnp.bfloat16) for one in (w, down, up))
                x = jnp.tanh(x @ w + (x @ down) @ up) + x
            return ((x.astype(jnp.float32) - batch["y"]) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["adapters"])
        updates, opt = optimizer.update(gradients, state["opt"], state["adapters"])
        return {**state, "adapters": optax.apply_updates(state["adapters"], updates), "opt": opt}, loss

    base = [0.05 * jax.random.normal(next(keys), (128, 128)) for _ in range(3)]
    down = [0.05 * jax.random.normal(next(keys), (128, 8)) for _ in base]
    adapters = {"down": down, "up": [jnp.zeros((8, 128)) for _ in base]}
    state = {"base": base, "adapters": adapters, "opt": optimizer.init(adapters)}
    batch = {name: jax.random.normal(next(keys), (64, 128)) for name in "xy"}
    found = autopar.parallelize(step, devices=8, mesh_shape=(4, 2)).verify(state, batch, values=True)
    assert [row for row in found.rows if row.topic == "values" and row.verdict != "matches"] == []
