"""Acceptance cases 1 to 8 and 18: data, tensor and ZeRO parallelism of a six-layer perceptron, and dropout."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost_model.hardware import Cluster
from tests.acceptance.models import dropout_mlp, mlp
from tests.acceptance.planning import (
    EITHER_AXIS,
    ONES,
    all_reduce_cost,
    assert_costs_at_most,
    assert_split,
    assert_whole,
    compiled,
    layout,
)
from tests.oracles import assert_same_as_jit, census

LAYERS = 6
SLOW_THEN_FAST = (1.0, 0.1)


def kernel(number):
    return f"state/params/Dense_{number}/kernel"


@pytest.mark.parametrize("mesh_shape", EITHER_AXIS)
def test_case_1_a_wide_batch_is_data_parallel(mesh_shape):
    problem = mlp(256, 32)
    program = compiled(problem, mesh_shape)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(problem.leaf_bytes()), found
    assert len(found.operands) == 12
    assert_whole(program, "state/params")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.parametrize("mesh_shape", EITHER_AXIS)
def test_case_2_wide_layers_are_split_by_column_and_row_in_turn(mesh_shape):
    batch, hidden = 32, 256
    problem = mlp(batch, hidden)
    program = compiled(problem, mesh_shape)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [batch * hidden * 4] * (LAYERS - 1), found
    axis = ("x",) if mesh_shape[0] > 1 else ("y",)
    for number in range(LAYERS):
        assert layout(program, kernel(number)) == (((), axis) if number % 2 == 0 else (axis, ()))
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_3_two_axes_combine_data_and_tensor_parallelism():
    """Column biases are split with their kernels; row biases are whole, or split and gathered along the fast axis."""
    batch, hidden = 256, 32
    problem = mlp(batch, hidden)
    program = compiled(problem, (2, 2), beta=SLOW_THEN_FAST, constraints=autopar.data_parallel("x"))
    found = census(program)
    gradients = found.bytes_of("all-reduce", axis=0)
    assert gradients[-LAYERS:] == [hidden * hidden * 4 // 2] * LAYERS, found
    assert LAYERS * hidden * 4 // 2 <= sum(gradients[:-LAYERS]) <= LAYERS * hidden * 4, found
    assert found.bytes_of("all-reduce", axis=1) == [batch * hidden * 4 // 2] * (LAYERS - 1), found
    assert_costs_at_most(program, case_3_cost(batch, hidden), beta=SLOW_THEN_FAST)
    for number in range(LAYERS):
        assert layout(program, kernel(number)) == (((), ("y",)) if number % 2 == 0 else (("y",), ()))
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def case_3_cost(batch, hidden):
    """Six gradients and biases along the slow axis, five activations along the fast one."""
    gradients = all_reduce_cost(hidden * hidden * 4 / 2, 2) + all_reduce_cost(hidden * 4, 2)
    activation = all_reduce_cost(batch * hidden * 4 / 2, 2, beta=0.1)
    return LAYERS * gradients + (LAYERS - 1) * activation


def test_case_3_without_constraints_costs_no_more():
    """Free to split the batch along both axes, the planner may find something cheaper than data x tensor parallel."""
    problem = mlp(256, 32)
    program = compiled(problem, (2, 2), beta=SLOW_THEN_FAST)
    assert_costs_at_most(program, case_3_cost(256, 32), beta=SLOW_THEN_FAST)
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.parametrize("mesh_shape", [(4, 1), (2, 2)])
def test_case_4_forced_data_parallelism_only_reduces_gradients(mesh_shape):
    """Where one reduction may span both axes: paid axis by axis, a scatter, a reduction and a gather are cheaper."""
    problem = mlp(32, 256)
    cluster = dataclasses.replace(Cluster.uniform(alpha=ONES, beta=ONES), joint_reductions=True)
    program = compiled(problem, mesh_shape, constraints=autopar.data_parallel(), cluster=cluster)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(problem.leaf_bytes()), found
    assert_whole(program, "state")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_5_a_batch_kept_on_an_axis_of_size_one_leaves_tensor_parallelism():
    batch, hidden = 32, 256
    problem = mlp(batch, hidden)
    program = compiled(problem, (1, 4), constraints=autopar.data_parallel("x"))
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [batch * hidden * 4] * (LAYERS - 1), found


def test_case_6_zero_2_scatters_gradients_and_gathers_parameters():
    problem = mlp(256, 32)
    program = compiled(problem, (4, 1), constraints=autopar.zero2())
    found = census(program)
    assert found.kinds() == {"reduce-scatter", "all-gather"}, found
    assert found.bytes_of("reduce-scatter") == sorted(problem.leaf_bytes()), found
    assert found.bytes_of("all-gather") == sorted(problem.leaf_bytes()), found
    assert_split(program, "state/opt_state", 4)
    assert_whole(program, "state/params")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_7_zero_3_gathers_parameters_forward_and_backward():
    """The first kernel is not needed backward, for the data has no gradient; biases are needed forward only."""
    problem = mlp(256, 32)
    program = compiled(problem, (4, 1), constraints=autopar.zero3())
    found = census(program)
    assert found.kinds() == {"reduce-scatter", "all-gather"}, found
    assert found.bytes_of("reduce-scatter") == sorted(problem.leaf_bytes()), found
    kernels, biases = [32 * 32 * 4] * (2 * LAYERS - 1), [32 * 4] * LAYERS
    assert found.bytes_of("all-gather") == sorted(kernels + biases), found
    assert_split(program, "state/params", 4)
    assert_split(program, "state/opt_state", 4)
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_7_a_memory_limit_alone_leads_to_zero_3():
    """A limit just above what ZeRO-3 needs, and below what ZeRO-2 needs."""
    problem = mlp(256, 32)
    zero3 = compiled(problem, (4, 1), constraints=autopar.zero3())
    zero2 = compiled(problem, (4, 1), constraints=autopar.zero2())
    assert zero3.plan.peak_bytes < zero2.plan.peak_bytes
    program = compiled(problem, (4, 1), memory_limit_bytes=zero3.plan.peak_bytes)
    assert_split(program, "state/params", 4)
    assert_split(program, "state/opt_state", 4)
    assert not census(program).bytes_of("all-reduce")


def test_case_8_two_axes_with_zero_2_split_the_optimizer_four_ways():
    batch, hidden = 256, 32
    problem = mlp(batch, hidden)
    constraints = [autopar.data_parallel("x"), autopar.zero2()]
    program = compiled(problem, (2, 2), beta=SLOW_THEN_FAST, constraints=constraints)
    found = census(program)
    assert found.bytes_of("all-reduce", axis=1) == [batch * hidden * 4 // 2] * (LAYERS - 1), found
    assert not found.bytes_of("all-reduce", axis=0), found
    scattered = found.bytes_of("reduce-scatter", axis=0)
    assert scattered[-LAYERS:] == [hidden * hidden * 4 // 2] * LAYERS, found
    assert_split(program, "state/opt_state", 4)
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_18_dropout_adds_no_communication_and_drops_the_same_entries():
    """The mask that the step returns is boolean, so it is compared bit for bit."""
    problem = dropout_mlp()
    program = compiled(problem, (4, 1))
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(problem.leaf_bytes()), found
    _, _, mask = assert_same_as_jit(problem.step, program, problem.state, problem.batch)
    assert 0.05 < mask.mean() < 0.15


@pytest.mark.parametrize("mesh_shape", [(1, 4), (2, 2)])
def test_case_18_holds_however_the_activations_are_split(mesh_shape):
    """The key is whole everywhere; each shard draws its own slice of the bits."""
    problem = dropout_mlp()
    constraints = {"state/params/Dense_0/kernel": P(None, "y")}
    program = compiled(problem, mesh_shape, constraints=constraints)
    assert_same_as_jit(problem.step, program, problem.state, problem.batch)
