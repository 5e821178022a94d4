"""What each argument of a step is, by what the step returns: the roles of leaves in a traced step, which no planner has seen."""

import jax
import jax.numpy as jnp
import pytest

from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace


def roles(fun, *args, batch=(1,)):
    """Role of each leaf by its path, and the paths of those that are donated."""
    signature = CallSignature(fun, batch, (), "auto")
    inputs = trace(signature, bind_arguments(signature, args, {})).inputs
    return {leaf.path: leaf.role for leaf in inputs}, {leaf.path for leaf in inputs if leaf.donated}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_lone_scalar_is_never_state_though_a_loss_of_its_type_comes_out(shape):
    found, donated = roles(lambda rate, batch: rate * jnp.sum(batch), array(*shape), array(8))
    assert found == {"rate": "other" if shape == () else "state", "batch": "batch"}
    assert donated == (set() if shape == () else {"rate"})


def test_a_scalar_in_a_tree_that_comes_back_is_state():
    def step(state, batch):
        return {"w": state["w"] - jnp.mean(batch), "count": state["count"] + 1}, jnp.sum(batch)

    found, donated = roles(step, {"w": array(4), "count": array()}, array(8))
    assert found == {"state/count": "state", "state/w": "state", "batch": "batch"}
    assert donated == {"state/count", "state/w"}


def test_of_two_arguments_of_one_type_the_first_is_state_if_only_one_comes_back():
    found, donated = roles(lambda one, batch, other: one + other + jnp.sum(batch), array(4), array(8), array(4))
    assert found == {"one": "state", "batch": "batch", "other": "other"}
    assert donated == {"one"}
