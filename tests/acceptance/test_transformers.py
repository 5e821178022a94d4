"""Acceptance cases 9 to 13 and 23: BERT layers, recomputation, masked language modelling, attention alone."""

import math

import pytest

import autopar
from tests.acceptance.planning import (
    ALL_REDUCE,
    FIRST_AXIS,
    all_reduce_cost,
    assert_costs_at_most,
    assert_whole,
    compiled,
    layout,
)
from tests.acceptance.transformers import attention_forward, bert, bert_masked_lm
from tests.oracles import assert_same_as_jit, census

LAYERS = 2
BY_COLUMN = ("attention/qkv/kernel", "ffn1/kernel")
BY_ROW = ("attention/out/kernel", "ffn2/kernel")


HALVED = (*BY_COLUMN, *BY_ROW, "attention/qkv/bias", "ffn1/bias")


def parameters(program):
    """The parameter leaves of a plan."""
    return [leaf for leaf in program.plan.inputs if leaf.path.startswith("state/params")]


def leaf_bytes(leaf):
    """Bytes of a whole float32 leaf."""
    return math.prod(leaf.shape) * 4


def assert_megatron(program, axis, root="state/params/"):
    """In every layer the first kernel of each pair is split by column, the second by row."""
    for number in range(LAYERS):
        for name in BY_COLUMN:
            assert layout(program, f"{root}layer_{number}/{name}") == ((), (axis,))
        for name in BY_ROW:
            assert layout(program, f"{root}layer_{number}/{name}") == ((axis,), ())


@pytest.mark.sweep
@pytest.mark.parametrize("mesh_shape", FIRST_AXIS)
def test_case_9_many_tokens_and_small_layers_are_data_parallel(mesh_shape):
    problem = bert(64, 64, 32)
    program = compiled(problem, mesh_shape)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(problem.leaf_bytes()), found
    assert_whole(program, "state/params")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.parametrize("mesh_shape", FIRST_AXIS)
def test_case_10_few_tokens_and_large_layers_are_split_as_in_megatron(mesh_shape):
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden)
    program = compiled(problem, mesh_shape)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4] * (4 * LAYERS - 1), found
    assert_megatron(program, "x" if mesh_shape[0] > 1 else "y")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.sweep
def test_case_10_dropout_changes_nothing():
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden, dropout=0.1)
    program = compiled(problem, (1, 4))
    found = census(program)
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4] * (4 * LAYERS - 1), found
    assert found.kinds() == {"all-reduce"}, found
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.sweep
def test_case_11_two_axes_combine_data_parallelism_and_megatron():
    """Half of what Megatron splits is reduced along the slow axis, and what it keeps whole, which is only vectors."""
    batch, seq, hidden = 8, 8, 128
    alpha, beta = (2.0, 2.0), (1.0, 0.1)
    problem = bert(batch, seq, hidden)
    constraints = autopar.data_parallel("x")
    program = compiled(problem, (2, 2), alpha=alpha, beta=beta, constraints=constraints, collectives=ALL_REDUCE)
    found = census(program)
    activation = batch * seq * hidden * 4 // 2
    assert found.bytes_of("all-reduce", axis=1) == [activation] * (4 * LAYERS - 1), found
    gradients = [leaf_bytes(leaf) // (2 if leaf.path.endswith(HALVED) else 1) for leaf in parameters(program)]
    assert found.bytes_of("all-reduce", axis=0) == sorted(gradients), found
    assert sum(gradients) < 1.01 * sum(problem.leaf_bytes()) / 2
    assert_megatron(program, "y")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.sweep
def test_case_11_with_all_collectives_sums_the_same_if_only_one_axis_may_split_the_batch():
    """Some activations are scattered and gathered, which is no dearer."""
    batch, seq, hidden = 8, 8, 128
    alpha, beta = (2.0, 2.0), (1.0, 0.1)
    program = compiled(bert(batch, seq, hidden), (2, 2), alpha=alpha, beta=beta, constraints=autopar.data_parallel("x"))
    found = census(program)
    activation = batch * seq * hidden * 4 // 2
    assert [size for size in found.sums(axis=1) if size >= activation] == [activation] * (4 * LAYERS - 1), found
    assert_megatron(program, "y")


@pytest.mark.slow
def test_case_11_with_all_collectives_costs_less():
    """Splitting every kernel over both axes needs no reduction of gradients at all."""
    batch, seq, hidden = 8, 8, 128
    alpha, beta = (2.0, 2.0), (1.0, 0.1)
    problem = bert(batch, seq, hidden)
    program = compiled(problem, (2, 2), alpha=alpha, beta=beta)
    gradients = sum(all_reduce_cost(size / 2, 2, alpha=2.0) for size in problem.leaf_bytes())
    activation = all_reduce_cost(batch * seq * hidden * 4 / 2, 2, alpha=2.0, beta=0.1)
    assert_costs_at_most(program, gradients + (4 * LAYERS - 1) * activation, alpha, beta)
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_12_recomputing_each_layer_repeats_its_forward_reductions():
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden, remat=True)
    program = compiled(problem, (1, 4), collectives=ALL_REDUCE)
    found = census(program)
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4] * (6 * LAYERS - 1), found
    assert_megatron(program, "y")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.sweep
def test_case_12_with_all_collectives_costs_less():
    """A recomputed sum that is only normalised again need not be gathered: 11 sums still, some of them scattered."""
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden, remat=True)
    program = compiled(problem, (1, 4))
    found = census(program)
    activation, count = batch * seq * hidden * 4, 6 * LAYERS - 1
    assert [size for size in found.sums() if size > 2 * batch * seq * 4] == [activation] * count, found
    assert_costs_at_most(program, count * all_reduce_cost(activation, 4))
    assert_megatron(program, "y")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.slow
def test_case_13_a_tied_embedding_is_split_by_vocabulary():
    """13 reductions: 4 L activations, the embedding's result and the head's gradient, two numbers per token for the
    softmax, and the gradients (one operand per leaf). The transform before the head is repeated on both devices of y.

    The softmax may take a third number: it costs 5 of 18 million seconds, which is less than the gap at which the search ends.
    """
    batch, seq, hidden, vocabulary = 4, 4, 512, 4096
    problem = bert_masked_lm(batch, seq, hidden, vocabulary)
    options = {"constraints": autopar.data_parallel("x"), "allow_redundant_compute": True, "collectives": ALL_REDUCE}
    program = compiled(problem, (2, 2), alpha=(2.0, 2.0), beta=(1.0, 0.1), **options)
    found = census(program)
    activation, statistic = batch * seq * hidden * 4 // 2, batch * seq * 4 // 2
    reduced = found.bytes_of("all-reduce", axis=1)
    assert reduced in [[statistic] * count + [activation] * (4 * LAYERS + 2) for count in (2, 3)], found
    assert len(found.bytes_of("all-reduce", axis=0)) == len(problem.leaf_bytes()), found
    assert layout(program, "state/params/tokens/embedding") == (("y",), ())
    assert layout(program, "state/params/transform/kernel") == ((), ())
    assert_megatron(program, "y", "state/params/layers/")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_23_attention_with_split_kernels_needs_one_reduction():
    """Kernels too large to be whole, and a result that every device needs."""
    batch, seq, hidden = 4, 128, 512
    problem = attention_forward(batch, seq, hidden, 16)
    constraints = {"state/params/*/kernel": autopar.Split(), "state/out": autopar.Replicated()}
    program = compiled(problem, (1, 4), constraints=constraints)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4], found
    assert layout(program, "state/params/qkv/kernel") == ((), ("y",))
    assert layout(program, "state/params/out/kernel") == (("y",), ())
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, steps=1)
