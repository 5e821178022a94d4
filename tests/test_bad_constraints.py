"""A batch that does not divide and constraints that cannot be get a message in the user's own names. Tested by words."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import AutoparWarning, ConstraintError
from tests.oracles import assert_trees_close
from tests.refusals import make_batch, make_state, planned, refused, train_step

PARAMS = "state/params"


def test_data_parallelism_over_a_batch_that_does_not_divide_names_every_such_leaf_and_both_numbers():
    refused(
        ConstraintError,
        lambda: planned(batch=make_batch(12), constraints=autopar.data_parallel(), mesh_shape=(2, 4)),
        "mesh axes x, y splits the batch 8 ways, but batch/x has 12 examples (shape (12, 8)), which 8 does not divide",
        "batch/y has 12 examples",
        "Use a batch that is a multiple of 8",
    )


def test_a_batch_that_no_mesh_axis_divides_is_a_warning_and_the_result_is_right():
    state, batch = make_state(), make_batch(15)
    step = autopar.parallelize(train_step)
    with pytest.warns(AutoparWarning) as caught:
        _, loss = step(state, batch)
    messages = [str(warning.message) for warning in caught]
    (message,) = messages
    assert "batch/x has 15 examples (shape (15, 8)), batch/y has 15 examples (shape (15, " in message
    assert "which no mesh axis of size 2, 4, 8 divides" in message
    assert "Pad or drop examples to a multiple of 2" in message
    np.testing.assert_allclose(loss, jax.jit(train_step)(make_state(), batch)[1], rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "how",
    [
        {"mesh_shape": (8,), "constraints": autopar.data_parallel()},
        {"mesh_shape": (2,), "num_microbatches": 4, "constraints": autopar.zero3()},
        {"mesh_shape": (1,), "num_microbatches": 4, "num_stages": 2},
    ],
    ids=["data parallel", "microbatches", "stages"],
)
@pytest.mark.filterwarnings("ignore:.*(no mesh axis of size|of the forward work):autopar.AutoparWarning")
def test_a_last_batch_that_cannot_be_cut_as_asked_is_planned_again_once_and_the_state_stays_where_it_is(how, caplog):
    step, state, expected = autopar.parallelize(train_step, **how), make_state(), make_state()
    sizes, plain = (32, 15, 32, 15), jax.jit(train_step)
    for size in sizes:
        state, loss = step(state, make_batch(size))
        expected, wanted = plain(expected, make_batch(size))
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_trees_close(step.gather(state), expected)
    (said,) = [record.message for record in caplog.records if "planned again" in record.message]
    assert said == "train_step is planned again for 15 examples, which what was asked for batches of 32 does not divide"
    if "num_stages" not in how:
        plans = [step.plan(make_state(), make_batch(size)) for size in sizes[:2]]
        first, second = ({v.path: v.spec for v in plan.inputs if v.role == "state"} for plan in plans)
        assert first == second


def test_more_examples_than_before_that_cannot_be_cut_are_refused():
    step = autopar.parallelize(train_step, mesh_shape=(8,), num_microbatches=4)
    step.plan(make_state(), make_batch(32))
    refused(ValueError, lambda: step.plan(make_state(), make_batch(33)), "batch/x has 33")


def test_a_constraint_on_no_leaf_lists_the_nearest_leaves():
    refused(
        ConstraintError,
        lambda: planned(constraints={f"{PARAMS}/up/kernel": P("x")}),
        "constraint 'state/params/up/kernel' matches no leaf",
        "there are: state/count, state/params/down, state/params/up, batch/x, batch/y",
    )


def test_a_constraint_on_no_leaf_lists_only_leaves_with_its_last_word_if_there_are_some():
    message = refused(ConstraintError, lambda: planned(constraints={"params/up": P("x")}), "there are: state/params/up")
    assert "down" not in message


@pytest.mark.parametrize("preset", [autopar.zero1, autopar.zero2])
def test_stages_that_split_the_optimizer_state_say_that_there_is_none(preset):
    refused(
        ConstraintError,
        lambda: planned(constraints=preset()),
        f"{preset.__name__} splits the state of an optimizer, and finds none: the step updates no leaf of its state",
        "and no path matches '*opt_state*'",
        f"{preset.__name__}(optimizer=GLOB), where the state has 'state/count', 'state/params/*'",
    )
    glob = f"the glob is that of {preset.__name__}(optimizer=...)"
    refused(ConstraintError, lambda: planned(constraints=preset(optimizer="*/mu/*")), "'*/mu/*' matches no", glob)


def test_a_constraint_with_a_mesh_axis_that_there_is_not_lists_those_there_are():
    refused(
        ConstraintError,
        lambda: planned(constraints={f"{PARAMS}/up": P("model")}),
        "state/params/up names mesh axis 'model'; the mesh has x",
        "mesh_shape={'data': 2, 'model': 4}",
    )


def test_a_spec_with_more_entries_than_dimensions_is_refused_with_both_numbers():
    refused(
        ConstraintError,
        lambda: planned(constraints={f"{PARAMS}/up": P("x", None, None)}),
        "has 3 entries, state/params/up has 2 dimensions (8, 16)",
    )


def test_a_spec_that_does_not_divide_its_dimension_is_refused_with_both_numbers():
    refused(
        ConstraintError,
        lambda: planned(make_state(12), constraints={f"{PARAMS}/up": P(None, "x")}),
        "splits dimension 1 of state/params/up 8 ways, but its size 12 is not a multiple of 8",
    )


def test_a_spec_that_uses_an_axis_twice_is_refused():
    refused(ConstraintError, lambda: planned(constraints={f"{PARAMS}/up": P("x", "x")}), "uses a mesh axis twice")


def test_all_constraints_that_fail_are_reported_at_once():
    wrong = {f"{PARAMS}/up": P("model"), f"{PARAMS}/down": P(None, None, "x"), "state/bias": P()}
    refused(
        ConstraintError, lambda: planned(constraints=wrong), "'model'", "has 3 entries", "'state/bias' matches no leaf"
    )


def test_a_constraint_that_is_no_layout_says_what_a_layout_is():
    refused(
        ConstraintError, lambda: planned(constraints={f"{PARAMS}/up": "x"}), "'x', a str", "PartitionSpec", "Split()"
    )


@pytest.mark.parametrize("axes", [0, ("x", 1), ("x", "x")])
@pytest.mark.parametrize("made", [autopar.Split, autopar.Replicated, autopar.data_parallel, autopar.zero3])
def test_axes_that_are_no_names_are_refused_where_they_are_given(made, axes):
    name = made.__name__
    refused(ConstraintError, lambda: made(axes), f"{name}({axes!r}): names of mesh axes are expected, each once")


def test_one_axis_may_be_given_by_its_name_alone():
    assert autopar.Split("data") == autopar.Split(("data",)) == autopar.Split(["data"])
    refused(ConstraintError, lambda: planned(constraints={f"{PARAMS}/up": autopar.Split("data")}), "mesh axis 'data'")


def test_a_spec_of_what_is_no_name_and_a_path_that_is_none_are_refused():
    open_spec = {f"{PARAMS}/up": P(P.UNCONSTRAINED)}
    refused(ConstraintError, lambda: planned(constraints=open_spec), "for each dimension the name of a mesh axis")
    refused(ConstraintError, lambda: planned(constraints={3: P()}), "the constraint on 3 names no leaf")


def test_constraints_that_are_no_mapping_say_what_is_expected():
    refused(ConstraintError, lambda: planned(constraints="data_parallel"), "is a str", "autopar.data_parallel()")
