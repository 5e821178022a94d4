"""Bad input gets a message in the user's own names: the fact with its numbers, the reason, the ways out. Tested by words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar import ArgumentError, AutoparWarning, OutOfMemoryError, PlanError, UnsupportedProgramError
from tests.refusals import loss_only, make_batch, make_state, planned, refused, train_step
from tests.without_rule import halve

# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_mesh_larger_than_the_devices_gives_both_numbers_and_a_way_to_try_it():
    step = autopar.parallelize(train_step, mesh_shape=(4, 4))
    refused(
        ArgumentError,
        lambda: step(make_state(), make_batch()),
        "mesh (4, 4) needs 16 devices, there are 8 (",
        "XLA_FLAGS=--xla_force_host_platform_device_count=16",
    )


def test_a_mesh_larger_than_a_given_number_of_devices_is_refused_when_planning():
    refused(ArgumentError, lambda: planned(mesh_shape=(4, 4)), "mesh_shape=(4, 4) needs 16 devices, there are 8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mesh_shape": (2,), "devices": 8},
            "mesh_shape=(2,) has 2 devices and devices has 8: make them agree, or leave",
        ),
        (
            {"mesh_shape": (1,), "devices": jax.devices()[:4]},
            "mesh_shape=(1,) has 1 device and devices has 4: make them",
        ),
        (
            {"mesh_shape": (2,), "num_stages": 2, "devices": 8},
            "the meshes of all stages have 4 devices and devices has 8",
        ),
        ({"mesh_shape": [(2,), (1,)], "devices": 4}, "the meshes of all stages have 3 devices and devices has 4"),
    ],
)
def test_meshes_that_leave_out_devices_which_are_given_are_refused(options, words):
    refused(ArgumentError, lambda: autopar.parallelize(train_step, **options).plan(make_state(), make_batch()), words)


def test_a_mesh_smaller_than_the_machine_needs_no_number_of_devices():
    assert autopar.parallelize(train_step, mesh_shape=(2,)).plan(make_state(), make_batch()).num_devices == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices=0: at least one device is needed"),
        ({"devices": []}, "devices=[]: at least one device is needed"),
        ({"devices": 2.5}, "devices=2.5: a list of JAX devices such as jax.devices(), or their number, is expected"),
        ({"devices": "cpu"}, "devices='cpu': a list of JAX devices"),
        ({"devices": ["cpu:0"]}, "devices=['cpu:0']: a list of JAX devices"),
        ({"mesh_shape": (0, 8)}, "every axis needs a positive whole size, 0 is not one"),
        ({"mesh_shape": "best"}, "mesh_shape='best': 'auto', sizes, or a list of sizes, one per stage, is expected"),
        ({"mesh_shape": 8}, "mesh_shape=8: the size of each axis is expected, such as (8,), (2, 4) or {'data': 2"),
        ({"mesh_shape": ()}, "a mesh has 1 to 6 axes, this has 0"),
        ({"cluster": "dgx-z9"}, "no cluster preset 'dgx-z9'; there are: cpu"),
        ({"cluster": 8}, "cluster=8: 'auto', the name of a preset or a Cluster is expected"),
        ({"collectives": ["all-reduce", "broadcast"]}, "collectives=['broadcast']: no such kind; there are all-reduce"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes=0: a positive number of bytes"),
        (
            {"memory_limit_bytes": "16GB"},
            "memory_limit_bytes='16GB': a positive number of bytes per device is expected",
        ),
        (
            {"plan": "plan.json"},
            "plan='plan.json' is of type str: a plan is expected; autopar.plan_from_json(pathlib.Path",
        ),
        ({"follow": print}, "is of type builtin_function_or_method: a step that `parallelize` returned is expected"),
        ({"donate_argnums": "all"}, "donate_argnums='all': a number, or a list of numbers"),
        ({"donate_argnums": None}, "donate_argnums=None: a number, or a list of numbers, of positional arguments is"),
        ({"batch_argnums": None}, "batch_argnums=None: a number, or a list of numbers, of positional arguments is"),
        ({"batch_argnums": 1.5}, "batch_argnums=1.5: a number, or a list of numbers, of positional arguments is"),
        ({"static_argnums": [None]}, "is expected; () stands for none"),
        ({"batch_argnums": True}, "batch_argnums=True: a number"),
        (
            {"memory_limit_bytes": float("nan")},
            "memory_limit_bytes=nan: a positive number of bytes per device is expected",
        ),
        (
            {"memory_limit_bytes": float("inf")},
            "memory_limit_bytes=inf: a positive number of bytes per device is expected",
        ),
        ({"memory_limit_bytes": 0.5}, "such as 16e9, or None for the memory of the cluster's devices"),
        ({"num_microbatches": np.array([1, 2])}, "num_microbatches=array([1, 2]): 'auto' or a positive whole number"),
        ({"num_stages": 2.0}, "num_stages=2.0: 'auto' or a positive whole number is expected"),
        ({"planning_processes": np.True_}, "a positive whole number is expected"),
        (
            {"planning_seconds": 0},
            "planning_seconds=0: a positive number of seconds is expected, such as 60, or None for no",
        ),
        ({"planning_seconds": "60"}, "planning_seconds='60': a positive number of seconds"),
        ({"planning_seconds": float("inf")}, "planning_seconds=inf: a positive number of seconds"),
        ({"planning_seconds": True}, "planning_seconds=True: a positive number of seconds"),
        ({"max_programs": 0}, "max_programs=0: a positive whole number is expected, or None for no limit"),
        ({"max_programs": "all"}, "max_programs='all': a positive whole number is expected, or None"),
        ({"collectives": 3}, "collectives=3: None, for all, or a list of kinds is expected, of all-reduce"),
        ({"devices": [jax.devices()[0]] * 2}, "every device is expected once"),
        ({"mesh_shape": {1: 8}}, "every axis needs a name such as 'data', 1 is not one"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_where_it_is_given(options, words):
    refused(ArgumentError, lambda: autopar.parallelize(train_step, **options), words)


@pytest.mark.parametrize(
    "options",
    [
        {"num_microbatches": np.int64(2), "planning_processes": np.uint8(1), "planning_seconds": np.float32(90)},
        {"devices": np.int64(8), "mesh_shape": (np.int64(8),)},
        {"memory_limit_bytes": np.float32(1e9), "batch_argnums": np.int64(1), "donate_argnums": np.array([0])},
        {"mesh_shape": "auto", "num_stages": np.int64(2), "num_microbatches": 2, "memory_limit_bytes": np.int64(10**9)},
    ],
)
def test_numbers_of_numpy_are_taken_as_pythons_own_and_the_plan_can_be_saved(options):
    plan = planned(**options)
    assert autopar.plan_from_json(plan.to_json()) == plan
    assert plan.num_microbatches == options.get("num_microbatches", 1)


@pytest.mark.parametrize(
    "inside",
    [
        lambda step: jax.jit(step)(make_state(), make_batch()),
        lambda step: jax.grad(lambda params: step(make_state() | {"params": params}, make_batch())[1])(
            make_state()["params"]
        ),
        lambda step: jax.eval_shape(step, make_state(), make_batch()),
    ],
)
def test_a_step_inside_a_function_that_jax_traces_is_refused_before_it_is_planned(inside):
    step = autopar.parallelize(train_step)
    refused(
        ArgumentError,
        lambda: inside(step),
        "train_step is called inside a function that JAX traces (jit, grad, vmap, scan, ...): ",
        "call it outside, with arrays, and take gradients inside the step",
    )
    refused(PlanError, step.last_plan, "has not been planned yet")


def test_what_is_not_a_function_is_refused():
    refused(ArgumentError, lambda: autopar.parallelize(3), "parallelize takes a function, not a int (3)")


def test_a_memory_limit_that_nothing_fits_names_the_largest_tensors_and_the_ways_out():
    message = refused(
        OutOfMemoryError,
        lambda: planned(make_state(1024), memory_limit_bytes=10_000),
        "no plan fits 9.8 KiB per device on 8 devices: on mesh (8,)",
        "float32[8, 1024]",
        "Ways out: more devices; a smaller batch; num_microbatches, recompute and layouts left open",
        "This is of the step in 16 microbatches, the leanest of 4 ways that were looked at.",
        "memory_limit_bytes",
    )
    assert "Constraints are in force" not in message


def test_a_memory_limit_that_fails_under_constraints_says_that_they_are_in_force():
    refused(
        OutOfMemoryError,
        lambda: planned(make_state(1024), memory_limit_bytes=40_000, constraints=autopar.data_parallel()),
        "Constraints are in force",
        "state/params/",
    )


# --- the step ---------------------------------------------------------------------------------------------------------


def test_donating_what_the_step_does_not_return_is_refused_by_the_arguments_name():
    step = autopar.parallelize(loss_only, donate_argnums=0)
    message = refused(
        ArgumentError,
        lambda: step(make_state(), make_batch()),
        "loss_only donates argument 0 ('state') but does not return it",
        "Return the new state, or leave it out of donate_argnums.",
    )
    assert "nearest" not in message


def test_the_nearest_output_is_named_when_a_leaf_changes_type():
    def changes_type(state, batch):
        new, loss = train_step(state, batch)
        return new | {"count": new["count"].astype(jnp.float32)}, loss

    refused(
        ArgumentError,
        lambda: autopar.parallelize(changes_type, donate_argnums=(0,))(make_state(), make_batch()),
        "The nearest output differs: state/count goes in as int32[] and comes out as float32[].",
    )


def test_the_nearest_output_is_named_when_a_leaf_is_lost():
    def loses_count(state, batch):
        new, loss = train_step(state, batch)
        return {"params": new["params"]}, loss

    refused(
        ArgumentError,
        lambda: autopar.parallelize(loses_count, donate_argnums=(0,))(make_state(), make_batch()),
        "The nearest output differs: state/count goes in as int32[] and comes out as nothing.",
    )


def test_init_state_needs_a_plan():
    step = autopar.parallelize(train_step)
    refused(ArgumentError, lambda: step.init_state(make_state), "call train_step.plan(state, batch) first")


def test_init_state_needs_a_step_that_returns_its_state():
    step = autopar.parallelize(loss_only, mesh_shape=(8,))
    step.plan(make_state(), make_batch())
    refused(
        ArgumentError,
        lambda: step.init_state(make_state),
        "loss_only does not return its state",
        "A train step returns the new state, e.g. `return state, loss`.",
    )


def test_init_state_refuses_a_state_of_other_sizes():
    step = autopar.parallelize(train_step, mesh_shape=(8,))
    step.plan(make_state(), make_batch())
    refused(ArgumentError, lambda: step.init_state(lambda: make_state(32)), "with the same sizes as were planned")


def test_a_primitive_without_a_rule_is_one_warning_with_its_name_and_line_and_the_result_is_right():
    def step(state, batch):
        gram = batch["x"].T @ batch["x"] + 10 * jnp.eye(8)
        return state, halve(gram) + halve(2 * gram)

    with pytest.warns(AutoparWarning) as caught:
        _, actual = autopar.parallelize(step)(make_state(), make_batch())
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "no factor rule for halve at " in message
    assert "without_rule.py:" in message
    assert "autopar.register_rule" in message
    np.testing.assert_allclose(actual, jax.jit(step)(make_state(), make_batch())[1], rtol=1e-5, atol=1e-5)


def printing(state, batch):
    jax.debug.print("loss {}", batch["x"][0, 0], ordered=True)
    return train_step(state, batch)


def calling_back(state, batch):
    io_callback(lambda x: None, None, batch["x"][0, 0], ordered=True)
    return train_step(state, batch)


@pytest.mark.parametrize(("step", "name"), [(printing, "printing"), (calling_back, "io_callback")])
def test_a_side_effect_is_refused_with_the_users_line(step, name):
    message = refused(
        UnsupportedProgramError,
        lambda: autopar.parallelize(step).plan(make_state(), make_batch()),
        "the step has a Python side effect",
        name,
        "test_bad_input.py:",
        "Return the value as an output and print it outside the step.",
    )
    assert str(step.__code__.co_firstlineno + 1) in message


def test_a_leaf_that_is_neither_an_array_nor_hashable_is_named_by_its_path():
    state = make_state() | {"name": "adam", "schedule": {1, 2}, "nothing": None}
    refused(
        ArgumentError,
        lambda: planned(state),
        "state/schedule is a set, neither an array nor hashable",
        "they must be hashable",
    )


@pytest.mark.parametrize("kind", ["U1", "O", ">f4", "M8[s]"])
def test_a_column_of_the_batch_of_a_type_that_jax_has_not_is_named(kind):
    """Datasets have texts and times beside the numbers."""
    column = np.zeros(16, np.dtype(kind))
    for call in (planned, lambda **given: autopar.parallelize(train_step)(make_state(), given["batch"])):
        words = f"train_step takes arrays, but batch/text is a ndarray with dtype {column.dtype}, which JAX does not support"
        refused(ArgumentError, lambda call=call: call(batch=make_batch() | {"text": column}), words, "or the batch")


def test_a_tensor_of_another_library_is_named():
    class Tensor:
        shape, dtype = (16,), "tensors.float32"

    words = "train_step takes arrays, but batch/mask is a Tensor with dtype tensors.float32, which JAX does not support"
    refused(ArgumentError, lambda: planned(batch=make_batch() | {"mask": Tensor()}), words)


def test_none_in_the_state_is_fine():
    def step(state, batch):
        return {"scale": state["scale"] + 1, "nothing": state["nothing"]}, batch.sum()

    state, total = autopar.parallelize(step)({"scale": jnp.zeros(8), "nothing": None}, jnp.ones((8, 2)))
    assert state["nothing"] is None
    assert total == 16
