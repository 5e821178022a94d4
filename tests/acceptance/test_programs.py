"""Acceptance cases 21, 22, 24 and 25: small programs, each with one thing to find."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from tests.acceptance.models import Problem, gather_mlp, noise
from tests.acceptance.planning import compiled
from tests.oracles import assert_same_as_jit, census

BIG, SMALL = 2048, 128


def product_of_transposes(state, batch):
    return {"out": batch["x"].T @ batch["y"].T}


def sum_of_products(state, batch):
    return {"out": batch["a"] @ batch["b"] + batch["c"] @ batch["d"]}


def one_reduction(step, batch):
    """A step over factors too large to be whole, whose result every device needs."""
    problem = Problem(step, {"out": jnp.zeros((SMALL, SMALL))}, batch)
    constraints = {"batch/*": autopar.Split(), "state/out": autopar.Replicated()}
    program = compiled(problem, (1, 4), constraints=constraints)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [SMALL * SMALL * 4], found
    assert_same_as_jit(step, program, problem.state, batch, steps=1)


def test_case_21_a_contraction_of_split_factors_needs_one_reduction():
    one_reduction(product_of_transposes, {"x": noise(BIG, SMALL), "y": noise(SMALL, BIG, seed=2)})


def test_case_22_a_sum_of_two_partial_products_is_reduced_once():
    tall, wide = (BIG, SMALL), (SMALL, BIG)
    batch = {"a": noise(*wide), "b": noise(*tall, seed=2), "c": noise(*wide, seed=3), "d": noise(*tall, seed=4)}
    one_reduction(sum_of_products, batch)


def test_case_24_tiles_that_change_places_are_permuted():
    def step(state, batch):
        return {"tiles": batch["tiles"] * 2}

    problem = Problem(step, {"tiles": jnp.zeros((64, 64))}, {"tiles": noise(64, 64)})
    constraints = {"state/tiles": P("y", "x"), "batch/tiles": P("x", "y")}
    program = compiled(problem, (2, 2), constraints=constraints)
    found = census(program)
    assert found.kinds() == {"collective-permute"}, found
    assert found.bytes_of("collective-permute") == [64 * 64 * 4 // 4], found
    assert_same_as_jit(step, program, problem.state, problem.batch, steps=1)


def argmax_of_columns(state, batch):
    return state, jnp.argmax(batch["x"] @ state["weights"], axis=0)


def argsort(state, batch):
    return state, jnp.argsort(batch["x"])


def uneven_reshape(state, batch):
    return state, batch["x"].reshape(8, 18) * state["weights"]


PROGRAMS = {
    "argmax of columns": (argmax_of_columns, {"weights": (144, 144)}, (144, 144)),
    "argsort": (argsort, {"weights": (4,)}, (1024,)),
    "uneven reshape": (uneven_reshape, {"weights": (8, 18)}, (144,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_case_25_awkward_operations_compile_and_never_reduce_the_whole_array(name):
    step, state_shapes, shape = PROGRAMS[name]
    state = {key: noise(*of, seed=3) for key, of in state_shapes.items()}
    problem = Problem(step, state, {"x": noise(*shape)})
    program = compiled(problem, (4, 1))
    assert not census(program).operands, str(census(program))
    assert_same_as_jit(step, program, state, problem.batch, steps=1)


def test_case_25_an_indexed_column_range_stays_data_parallel():
    problem = gather_mlp()
    program = compiled(problem, (4, 1))
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(leaf.nbytes for leaf in jax.tree.leaves(problem.state.params)), found
    assert_same_as_jit(problem.step, program, problem.state, problem.batch)
