"""Rows that go round: what makes up a roll, and the transpose of one, is one operation, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters.ad import add_jaxvals

from autopar.program.from_jaxpr import program_of

VALUES = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def rolls_of(fun, *arguments):
    """(dimension, shift) of each roll of a program, in order."""
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments), rearranged=True)
    return [(e.params["dimension"], e.params["shift"]) for e in program.walk() if e.primitive.name == "roll"]


def names_of(fun, *arguments):
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments), rearranged=True)
    return {eqn.primitive.name for eqn in program.walk()}


def turned(x):
    """Written out by hand, along the last dimension."""
    return jnp.concatenate([x[:, 6:], x[:, :6]], axis=1)


def turned_beside(x):
    """The cotangent of x has three parts: each slice's is added by itself."""
    return (x * turned(x) ** 2).sum()


ROLLED = {
    "forward": (lambda x: jnp.roll(x, 3, axis=1), [(1, 3)]),
    "backward": (lambda x: jnp.roll(x, -3, axis=1), [(1, 5)]),
    "of two dimensions": (lambda x: jnp.roll(x, (1, -2), (0, 1)), [(0, 1), (1, 6)]),
    "by hand": (turned, [(1, 2)]),
    "as one row": (lambda x: jnp.roll(x, 5), [(0, 5)]),
    "of a vmap": (jax.vmap(lambda row: jnp.roll(row, 2)), [(1, 2)]),
    "in a loop": (lambda x: lax.fori_loop(0, 3, lambda _, y: jnp.roll(y, 1, axis=1), x), [(1, 1)]),
    "in a gradient": (jax.grad(lambda x: (x * jnp.roll(x, 3, axis=1)).sum()), [(1, 3), (1, 5)]),
    "in a gradient, by hand": (jax.grad(turned_beside), [(1, 2), (1, 6)]),
    "of integers": (lambda x: jnp.roll(x.astype(jnp.int8), 3, axis=0), [(0, 3)]),
}


@pytest.mark.parametrize("name", ROLLED)
def test_a_roll_is_one_operation(name):
    fun, expected = ROLLED[name]
    assert rolls_of(fun, VALUES) == expected
    assert not names_of(fun, VALUES) & {"concatenate", "slice", "split", "pad"}


OTHERS = {
    "in order": lambda x: jnp.concatenate([x[:, :3], x[:, 3:]], axis=1),
    "rows are missing": lambda x: jnp.concatenate([x[:, 6:], x[:, :5]], axis=1),
    "rows stand twice": lambda x: jnp.concatenate([x[:, 5:], x[:, :6]], axis=1),
    "of two arrays": lambda x: jnp.concatenate([x[:, 6:], (2 * x)[:, :6]], axis=1),
    "every second": lambda x: jnp.concatenate([x[:, 4::2], x[:, :4:2]], axis=1),
    "beside each other": lambda x: jnp.concatenate([x[:, 4:], x[:, :4]], axis=0),
    "cut twice": lambda x: jnp.concatenate([x[1:, 6:], x[1:, :6]], axis=1),
    "of nothing": lambda x: lax.concatenate([lax.iota(jnp.int32, 2), lax.iota(jnp.int32, 6)], 0),
    "of three": lambda x: jnp.concatenate([x[:, 6:], x[:, :6], x[:, :1]], axis=1),
    "a sum that is read twice": lambda x: _sums(x, is_shared=True),
    "pieces put where they were": lambda x: _placed(x, first=0, last=5),
}


def _placed(x, *, first, last):
    """Two pieces of five and three columns, each put at a column among zeros, and their sum as transposing makes it."""

    def columns(piece, at):
        return lax.pad(piece, np.float32(0), ((0, 0, 0), (at, 8 - at - piece.shape[1], 0)))

    return add_jaxvals(columns(x[:, :5], first), columns(x[:, 5:], last))


def _sums(x, *, is_shared):
    one = add_jaxvals(jnp.sin(x), lax.pad(x[:, :5], np.float32(0), ((0, 0, 0), (3, 0, 0))))
    two = add_jaxvals(one, lax.pad(x[:, 5:], np.float32(0), ((0, 0, 0), (0, 5, 0))))
    return (one * two) if is_shared else two


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_a_roll_stays(name):
    assert rolls_of(OTHERS[name], VALUES) == []


def test_a_sum_in_two_parts_that_nothing_else_reads_has_its_roll():
    assert rolls_of(lambda x: _sums(x, is_shared=False), VALUES) == [(1, 3)]
    assert rolls_of(lambda x: _placed(x, first=3, last=0), VALUES) == [(1, 3)]


def test_random_keys_are_left_alone():
    keys = jax.random.split(jax.random.key(0), 8)
    assert rolls_of(lambda k: jnp.concatenate([k[6:], k[:6]]), keys) == []
