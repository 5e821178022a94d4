"""What an operation stands for crosses a trace: tags, and the names of tasks."""

import gc
import itertools
import weakref
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.program.from_jaxpr import program_of
from autopar.program.program import fan_out_p
from autopar.program.tags import tag_operations
from autopar.program.task_name import WORK_KINDS, TaskName, WorkKind
from autopar.testing import run_with_random_strategies
from tests.oracles import assert_trees_close

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
FORWARD, UPDATE = TaskName("forward", 1), TaskName("update", 1, 2)


def tagged_step(x):
    """Two tagged parts with a call and a scan inside, and work of no task between them."""

    def forward(x, scales):
        y = jax.jit(jnp.sin)(x) * scales["a"]
        return lax.scan(lambda carry, row: (jnp.cos(carry) + row, row), y[0], y)[0], y

    total, y = tag_operations(forward, FORWARD)(x, {"a": 2.0})
    return tag_operations(lambda y: jnp.tanh(y) - 1, UPDATE)(jnp.exp(y)), total


def untagged_step(x):
    y = jnp.sin(x) * 2.0
    total = lax.scan(lambda carry, row: (jnp.cos(carry) + row, row), y[0], y)[0]
    return jnp.tanh(jnp.exp(y)) - 1, total


def program(fun, *args):
    return program_of(jax.make_jaxpr(fun)(*args))[0]


def test_every_operation_has_the_task_under_which_it_was_traced_and_those_between_have_none():
    tasks = {
        eqn.primitive.name: eqn.task for eqn in program(tagged_step, X).equations if eqn.primitive is not fan_out_p
    }
    assert tasks.pop("exp") is None
    assert {tasks.pop(name) for name in ("tanh", "sub")} == {UPDATE}
    assert {"sin", "mul", "scan"} <= set(tasks)
    assert set(tasks.values()) == {FORWARD}


def test_copies_for_several_users_have_the_task_of_what_they_copy():
    copies = [eqn for eqn in program(tagged_step, X).equations if eqn.primitive is fan_out_p]
    assert {eqn.task for eqn in copies} == {FORWARD}


def test_operations_of_nested_programs_have_no_task():
    scan = next(eqn for eqn in program(tagged_step, X).equations if eqn.regions)
    assert {eqn.tag for region in scan.regions for eqn in region.equations} == {None}


def test_inside_a_nested_program_operations_can_be_tagged():
    def step(x):
        return lax.scan(lambda carry, row: (tag_operations(jnp.sin, FORWARD)(carry) + row, row), x[0], x)

    scan = next(eqn for eqn in program(step, X).equations if eqn.regions)
    tasks = {eqn.primitive.name: eqn.task for eqn in scan.regions[0].equations if eqn.primitive is not fan_out_p}
    assert (tasks["sin"], tasks["add"]) == (FORWARD, None)


def test_the_innermost_tag_counts():
    def outer(x):
        return tag_operations(jnp.sin, UPDATE)(x) + 1

    tasks = {eqn.primitive.name: eqn.task for eqn in program(tag_operations(outer, FORWARD), X).equations}
    assert tasks == {"sin": UPDATE, "add": FORWARD}


def test_tags_change_no_operation_and_no_result():
    tagged, untagged = program(tagged_step, X), program(untagged_step, X)
    assert [eqn.primitive.name for eqn in tagged.walk()] == [eqn.primitive.name for eqn in untagged.walk()]
    found = run_with_random_strategies(tagged_step, X, mesh_shape=(2,), seed=0)
    assert_trees_close(found, untagged_step(X))


def test_a_tag_may_be_an_operation_of_another_program_and_is_let_go_with_the_program():
    def retraced():
        (origin,) = program(jnp.sin, X).equations
        (eqn,) = program(tag_operations(lambda x: lax.cos(x), origin), X).equations
        assert eqn.tag is origin
        assert eqn.task is None
        return weakref.ref(origin)

    origin = retraced()
    gc.collect()
    assert origin() is None


def test_what_is_not_traced_stays_a_constant_of_the_trace():
    (eqn,) = program(
        lambda x: tag_operations(lambda x, n: x * lax.convert_element_type(n, x.dtype), FORWARD)(x, 3), X
    ).equations
    assert eqn.primitive.name == "mul"


def test_a_value_that_a_tagged_function_is_not_given_is_refused():
    with pytest.raises(AssertionError, match="the operations of forward 1 use values that they are not given"):
        jax.make_jaxpr(lambda x: tag_operations(lambda y: x + y, FORWARD)(x))(X)


def test_names_have_texts_of_their_own():
    names = [TaskName(kind, stage) for kind in WORK_KINDS for stage in range(12)]
    names += [TaskName("update", stage, level) for stage in range(12) for level in range(1, 12)]
    assert len({str(name) for name in names}) == len(names)
    assert [str(name) for name in (TaskName("input_gradient", 3), UPDATE)] == ["input_gradient 3", "update 1.2"]


def test_names_are_ordered_as_a_step_runs_them():
    order = [
        TaskName("prologue", 7),
        TaskName("forward", 0),
        TaskName("forward", 1),
        TaskName("backward", 0),
        TaskName("input_gradient", 0),
        TaskName("weight_gradient", 0),
        TaskName("update", 1, 0),
        TaskName("update", 0, 1),
    ]
    assert sorted([*order[1::2], *order[::2]]) == order
    assert all(first < second and not second < first for first, second in itertools.combinations(order, 2))
    assert set(WORK_KINDS) == {kind for part in get_args(WorkKind) for kind in (get_args(part) or (part,))}
    assert [kind for kind in WORK_KINDS if not TaskName(kind, 0).in_loop] == ["prologue", "update"]
