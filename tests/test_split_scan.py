"""Scans over layers divided between stages: the same function in pieces, and one leaf to the user."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.compat import Literal
from autopar.evaluate import bound
from autopar.split_array import in_pieces, joined
from autopar.split_scans import split_scans
from autopar.stacks import cuts_for_stages, every_layer, find_stacks
from autopar.trace import CallSignature, bind_arguments, trace
from tests import scanned_steps
from tests.oracles import assert_trees_close
from tests.pipeline_steps import WIDTH, rows
from tests.scanned_steps import LAYERS


def traced(step, state, batch):
    """The traced step."""
    signature = CallSignature(step, (1,), (), "auto")
    return trace(signature, bind_arguments(signature, (state, batch), {}))


def evaluated(split, state, batch):
    """What a divided step computes, equation by equation."""
    step = split.step

    def run(inputs):
        values = dict(zip(step.program.invars, inputs, strict=True))

        def read(atom):
            return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

        for eqn in step.program.equations:
            values.update(zip(eqn.outvars, bound(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in step.program.outvars]

    leaves = in_pieces(jax.tree.leaves((state, batch)), split.inputs)
    flat = joined(jax.jit(run)([*leaves, *step.constants]), split.outputs)
    return jax.tree.unflatten(split.whole.out_tree, flat)


def names(split):
    """How often each operation occurs."""
    return [eqn.primitive.name for eqn in split.step.program.equations]


def assert_same_function(example, split):
    """The divided step computes what the step does."""
    step, state, batch = example
    assert_trees_close(evaluated(split, state, batch), jax.jit(step)(state, batch))


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", scanned_steps.ALL, ids=lambda make: make.__name__)
def test_a_step_in_pieces_computes_the_same(make):
    example = make()
    step = traced(*example)
    draw = random.Random(make.__name__)
    stacks = find_stacks(step)
    assert stacks
    cuts = tuple(tuple(sorted(draw.sample(range(1, s.length), draw.randint(1, s.length - 1)))) for s in stacks)
    assert_same_function(example, split_scans(step, cuts))


