"""Acceptance cases 9 to 13 and 23: BERT layers, recomputation, masked language modelling, attention alone."""

import pytest

import autopar
from tests.acceptance.models import attention_forward, bert, bert_masked_lm
from tests.acceptance.planning import EITHER_AXIS, all_reduce_cost, assert_costs_at_most, assert_whole, compiled, layout
from tests.oracles import assert_same_as_jit, census

LAYERS = 2
BY_COLUMN = ("attention/qkv/kernel", "ffn1/kernel")
BY_ROW = ("attention/out/kernel", "ffn2/kernel")


def assert_megatron(program, axis, root="state/params/"):
    """In every layer the first kernel of each pair is split by column, the second by row."""
    for number in range(LAYERS):
        for name in BY_COLUMN:
            assert layout(program, f"{root}layer_{number}/{name}") == ((), (axis,))
        for name in BY_ROW:
            assert layout(program, f"{root}layer_{number}/{name}") == ((axis,), ())


@pytest.mark.parametrize("mesh_shape", EITHER_AXIS)
def test_case_9_many_tokens_and_small_layers_are_data_parallel(mesh_shape):
    problem = bert(64, 64, 32)
    program = compiled(problem, mesh_shape)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == sorted(problem.leaf_bytes()), found
    assert_whole(program, "state/params")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


@pytest.mark.parametrize("mesh_shape", EITHER_AXIS)
def test_case_10_few_tokens_and_large_layers_are_split_as_in_megatron(mesh_shape):
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden)
    program = compiled(problem, mesh_shape)
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4] * (4 * LAYERS - 1), found
    assert_megatron(program, "x" if mesh_shape[0] > 1 else "y")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_10_dropout_changes_nothing():
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden, dropout=0.1)
    program = compiled(problem, (1, 4))
    found = census(program)
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4] * (4 * LAYERS - 1), found
    assert found.kinds() == {"all-reduce"}, found
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_11_two_axes_combine_data_parallelism_and_megatron():
    """Vectors that Megatron keeps whole may be reduced whole, or in halves that the fast axis gathers."""
    batch, seq, hidden = 8, 8, 128
    alpha, beta = (2.0, 2.0), (1.0, 0.1)
    problem = bert(batch, seq, hidden)
    program = compiled(problem, (2, 2), alpha=alpha, beta=beta, constraints=autopar.data_parallel("x"))
    found = census(program)
    activation = batch * seq * hidden * 4 // 2
    large = [size for size in found.bytes_of("all-reduce", axis=1) if size > 8 * hidden * 4]
    assert large == [activation] * (4 * LAYERS - 1), found
    sizes = problem.leaf_bytes()
    vectors = sum(size for size in sizes if size <= 4 * hidden * 4)
    assert sum(sizes) / 2 <= sum(found.bytes_of("all-reduce", axis=0)) <= sum(sizes) / 2 + vectors / 2, found
    assert_megatron(program, "y")
    whole = sum(all_reduce_cost(size / 2, 2, alpha=2.0) for size in sizes) + vectors / 2
    assert_costs_at_most(
        program, whole + (4 * LAYERS - 1) * all_reduce_cost(activation, 2, alpha=2.0, beta=0.1), alpha, beta
    )


def test_case_12_recomputing_each_layer_repeats_its_forward_reductions():
    batch, seq, hidden = 8, 8, 128
    problem = bert(batch, seq, hidden, remat=True)
    program = compiled(problem, (1, 4))
    found = census(program)
    assert found.kinds() == {"all-reduce"}, found
    assert found.bytes_of("all-reduce") == [batch * seq * hidden * 4] * (6 * LAYERS - 1), found
    assert_megatron(program, "y")
    assert_same_as_jit(problem.step, program, problem.state, problem.batch, adam_lr=1e-2, steps=1)


def test_case_13_a_tied_embedding_is_split_by_vocabulary():
    """Along y: 4 L activations, the embedding's result and the head's gradient, and the softmax's statistics, which are
    a number per token. Along x: the gradients."""
    batch, seq, hidden, vocabulary = 4, 4, 512, 4096
    alpha, beta = (2.0, 2.0), (1.0, 0.1)
    problem = bert_masked_lm(batch, seq, hidden, vocabulary)
    program = compiled(
        problem,
        (2, 2),
        alpha=alpha,
        beta=beta,
        constraints=autopar.data_parallel("x"),
        allow_redundant_compute=True,
    )
    found = census(program)
    activations = [size for size in found.bytes_of("all-reduce", axis=1) if size >= batch * seq * hidden * 4 // 2]
    assert activations == [batch * seq * hidden * 4 // 2] * (4 * LAYERS + 2), found
    statistics = [size for size in found.bytes_of("all-reduce", axis=1) if size == batch * seq * 4 // 2]
    assert 2 <= len(statistics) <= 3, found
    assert layout(program, "state/params/tokens/embedding") == (("y",), ())
    assert_megatron(program, "y", "state/params/layers/")


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
