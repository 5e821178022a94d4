"""Calls of a step that cannot be: with arguments, plans or batches of others, or with none. Tested by words, as bad input is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import ArgumentError, ConstraintError, PlanError
from tests.refusals import loss_only, make_batch, make_state, planned, refused, train_step


def test_a_plan_of_another_program_is_refused_by_its_fingerprint():
    plan = planned()
    step = autopar.parallelize(train_step, plan=plan)
    refused(
        PlanError, lambda: step(make_state(32), make_batch()), "made for another step", plan.fingerprint, "plan again"
    )


def test_a_plan_that_chooses_what_there_is_not_is_refused_with_equation_and_line():
    plan = planned()
    changed = dataclasses.replace(plan, equations=plan.equations[:1] * len(plan.equations))
    step = autopar.parallelize(train_step, plan=changed)
    words = ("equation ", "refusals.py:", "cannot be done as [", "plan again")
    refused(PlanError, lambda: step(make_state(), make_batch()), *words)


@pytest.mark.parametrize("equations", [(), ("nothing",)])
def test_a_plan_that_names_no_strategies_is_refused(equations):
    plan = planned()
    changed = dataclasses.replace(plan, equations=equations * len(plan.equations))
    step = autopar.parallelize(train_step, plan=changed)
    refused(PlanError, lambda: step(make_state(), make_batch()), "names no strategy", "plan again")


def test_a_plan_that_promises_other_collectives_than_its_layouts_need_is_refused():
    plan = planned()
    changed = dataclasses.replace(plan, collectives=())
    step = autopar.parallelize(train_step, plan=changed)
    refused(PlanError, lambda: step(make_state(), make_batch()), "says that collective 0 is none; its layouts need")


def test_a_step_to_follow_must_have_been_planned():
    evaluate = autopar.parallelize(loss_only, follow=autopar.parallelize(train_step))
    refused(PlanError, lambda: evaluate(make_state(), make_batch()), "train_step has not been planned yet")


def test_a_compiled_step_names_the_leaves_whose_shape_or_type_is_another():
    compiled = autopar.parallelize(train_step, mesh_shape=(8,)).compile(make_state(), make_batch())
    batch = {"x": make_batch(24)["x"], "y": make_batch()["y"].astype(jnp.bfloat16)}
    refused(
        ArgumentError,
        lambda: compiled(make_state(), batch),
        "batch/x is float32[24, 8], compiled for float32[16, 8]",
        "batch/y is bfloat16[16, 8], compiled for float32[16, 8]",
        "or call the step",
    )


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_call_with_shapes_is_refused_with_what_takes_them(is_compiled):
    step = autopar.parallelize(train_step, mesh_shape=(8,))
    shapes = jax.eval_shape(make_state), make_batch()
    words = (
        "3 of the 5 arrays given to train_step are jax.ShapeDtypeStructs",
        "train_step.plan(...)",
        "with arrays",
        "init_state",
    )
    refused(ArgumentError, lambda: (step.compile(*shapes) if is_compiled else step)(*shapes), *words)


def test_a_compiled_step_refuses_arguments_of_another_structure():
    compiled = autopar.parallelize(train_step, mesh_shape=(8,)).compile(make_state(), make_batch())
    refused(
        ArgumentError, lambda: compiled(make_state()["params"], make_batch()), "train_step was compiled for arguments"
    )


@pytest.mark.parametrize("what", ["batch_argnums", "static_argnums", "donate_argnums"])
@pytest.mark.parametrize("number", [-1, 2, 7])
def test_an_argument_number_that_there_is_not_is_refused_with_those_there_are(what, number):
    step = autopar.parallelize(train_step, **{what: number})
    words = f"{what}=({number},): train_step has 2 positional arguments, numbered from 0 to 1"
    refused(ArgumentError, lambda: step(make_state(), make_batch()), words)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, jnp.ones(2)], ids=["list", "dict", "array"])
def test_a_static_value_that_cannot_be_hashed_is_named(value):
    @autopar.parallelize(static_argnums=2)
    def step(state, batch, sizes):
        return train_step(state, batch)

    refused(
        ArgumentError,
        lambda: step(make_state(), make_batch(), value),
        "static_argnums=(2,): argument 2 ('sizes') is a",
        "which cannot be hashed",
        "a tuple instead of a list",
    )


NO_BATCH = (
    "batch_argnums lists the positional arguments that are batches",
    "without it they are those after the first that the step does not return",
    "a keyword-only argument cannot be one: make it positional",
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_stages": 2}, "num_stages=2 needs a batch, and none of the arrays that the step takes (state/count"),
        ({"mesh_shape": [(4,), (4,)]}, "a step in 2 stages needs a batch, and none of the arrays"),
        ({"num_microbatches": 2}, "num_microbatches=2 needs a batch, and none of the arrays"),
        ({"constraints": autopar.data_parallel()}, "constraint '*' matches no batch leaf of the step's arguments"),
    ],
)
@pytest.mark.parametrize("given", ["keyword-only", "no number", "no arrays"])
def test_what_needs_a_batch_says_that_there_is_none_and_how_one_is_given(options, words, given):
    def by_keyword(state, *, batch):
        return train_step(state, batch)

    if given == "keyword-only":
        step = autopar.parallelize(by_keyword, devices=8, **options)
        refused((ArgumentError, ConstraintError), lambda: step.plan(make_state(), batch=make_batch()), words, *NO_BATCH)
    elif given == "no number":
        step = autopar.parallelize(train_step, devices=8, batch_argnums=(), **options)
        refused((ArgumentError, ConstraintError), lambda: step.plan(make_state(), make_batch()), words, *NO_BATCH)
    else:
        step = autopar.parallelize(lambda state, _: train_step(state, make_batch()), devices=8, **options)
        refused((ArgumentError, ConstraintError), lambda: step.plan(make_state(), {}), words, *NO_BATCH)


def test_a_step_without_a_batch_still_runs_where_nothing_needs_one():
    def by_keyword(state, *, batch):
        return train_step(state, batch)

    _, loss = autopar.parallelize(by_keyword)(make_state(), batch=make_batch())
    np.testing.assert_allclose(loss, jax.jit(train_step)(make_state(), make_batch())[1], rtol=1e-5)


def test_a_batch_of_too_few_examples_is_refused_with_its_shapes():
    def seeded(state, seed):
        x = jax.random.normal(jax.random.key(seed), (16, 8))
        return train_step(state, {"x": x, "y": x})

    one = "num_stages=2 needs a batch of 2 or more examples, along the leading dimension of its arrays, but batch/x has"
    refused(ArgumentError, lambda: planned(batch=make_batch(1), num_stages=2, mesh_shape="auto"), one, "shape (1, 8)")
    step = autopar.parallelize(seeded, devices=8, num_microbatches=2)
    none = "num_microbatches=2 needs a batch, and none of the arrays that the step takes (state/count"
    refused(ArgumentError, lambda: step.plan(make_state(), 3), none)
    step = autopar.parallelize(seeded, devices=8, num_microbatches=2, batch_argnums=1)
    refused(
        ArgumentError, lambda: step.plan(make_state(), 3), "num_microbatches=2 needs a batch of", "seed has shape ()"
    )
    not_dividing = "num_microbatches=2 does not divide the examples of the batch: batch/x has 1 (shape (1, 8))"
    refused(ArgumentError, lambda: planned(batch=make_batch(1), num_microbatches=2), not_dividing)


def test_mistakes_in_the_call_are_pythons_own_errors():
    step = autopar.parallelize(train_step)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        step(make_state())
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        step(make_state(), make_batch(), rate=0.1)
