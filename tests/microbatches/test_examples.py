"""Of alike operations those on examples are told from those on weights."""

import jax.numpy as jnp

from autopar.intra_op.choices.known_equations import RuleBook
from autopar.microbatches.examples import find_example_factors
from tests.inter_op.test_search import traced_step


def step(w, x):
    return w - jnp.sin(w @ w) + jnp.sin(x @ w)


def test_alike_operations_are_on_examples_by_what_they_read():
    square = jnp.ones((8, 8))
    traced = traced_step(square, square, fun=step)
    for loosely in (False, True):
        found = find_example_factors(traced, RuleBook(), loosely=loosely)
        for name in ("dot_general", "sin"):
            kinds = [bool(factors) for eqn, factors in found.items() if eqn.primitive.name == name]
            assert kinds == [False, True]
