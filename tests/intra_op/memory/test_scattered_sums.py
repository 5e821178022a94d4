"""Sums with gradients of lookups and operands that the program turns around: what XLA's simplifier takes away has no buffer."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_model.hardware import PRESETS
from autopar.intra_op.choices.graph import build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value
from autopar.intra_op.memory.device_program import device_program
from autopar.intra_op.memory.footprint import footprint_of
from autopar.intra_op.memory.scattered_sums import move_sums_into_scatters
from autopar.intra_op.xla_cpu.contraction_orders import of_product
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of

FLOAT = 4
A, B, INDICES, UPDATES, SCATTERED, TOTAL, MORE, END = range(8)
VALUES = [
    Value(name=f"v{i}", shape=(64,), dtype="float32", bytes=64 * FLOAT, var=None, itemsize=FLOAT) for i in range(12)
]
ZEROS = Operation(kind=Kind.CHEAP, inputs=(), outputs=(B,))
SCATTER = Operation(kind=Kind.WHOLE, inputs=(B, INDICES, UPDATES), outputs=(SCATTERED,), over=(B,), adds=True)
MADE = Operation(kind=Kind.WHOLE, inputs=(), outputs=(A,))


def total(*summands, out=TOTAL):
    return Operation(kind=Kind.CHEAP, inputs=summands, outputs=(out,), adds=True)


def read_before_made(operations):
    """What operations read that no earlier one makes."""
    made, missing = set(), set()
    for op in operations:
        missing |= {*op.inputs} - made
        made |= {*op.outputs}
    return missing


def turned(operations, *, outputs=(TOTAL,)):
    """(kind, inputs, outputs, over) of what runs, each after what it reads."""
    block = move_sums_into_scatters(Block(tuple(operations), tuple(outputs)), VALUES)
    assert read_before_made(block.operations) <= read_before_made(operations)
    return [(op.kind, op.inputs, op.outputs, op.over) for op in block.operations if op.inputs]


@pytest.mark.parametrize("summands", [(A, SCATTERED), (SCATTERED, A)])
def test_a_scatter_into_zeros_adds_to_the_other_summand_at_once(summands):
    found = turned([MADE, ZEROS, SCATTER, total(*summands)])
    assert found == [(Kind.WHOLE, (A, INDICES, UPDATES), (TOTAL,), (A,))]


def test_neither_zeros_nor_what_is_scattered_has_a_buffer_and_the_sum_takes_the_place_of_the_summand():
    spans = footprint_of(Block((MADE, ZEROS, SCATTER, total(A, SCATTERED)), (TOTAL,)), VALUES).spans
    assert [(span.value, span.first, span.last) for span in spans] == [(A, 0, 0), (TOTAL, 1, 1)]


def test_what_is_scattered_and_read_by_others_too_stays():
    operations = [MADE, ZEROS, SCATTER, total(A, SCATTERED)]
    kept = [(op.kind, op.inputs, op.outputs, op.over) for op in operations if op.inputs]
    assert turned(operations, outputs=(TOTAL, SCATTERED)) == kept
    read = Operation(kind=Kind.REDUCE, inputs=(SCATTERED,), outputs=(MORE,))
    assert turned([*operations, read])[:2] == kept


def test_what_a_scatter_adds_to_is_added_to_the_summand_first_unless_it_is_constant():
    given = Operation(kind=Kind.WHOLE, inputs=(), outputs=(B,))
    found = turned([MADE, given, SCATTER, total(A, SCATTERED)])
    assert found == [
        (Kind.CHEAP, (A, B), (SCATTERED,), ()),
        (Kind.WHOLE, (SCATTERED, INDICES, UPDATES), (TOTAL,), (SCATTERED,)),
    ]


def test_each_scatter_of_a_sum_adds_to_what_the_next_one_left():
    other = Operation(kind=Kind.WHOLE, inputs=(B, INDICES, UPDATES), outputs=(MORE,), over=(B,), adds=True)
    found = turned([MADE, ZEROS, SCATTER, other, total(SCATTERED, MORE), total(TOTAL, A, out=END)], outputs=(END,))
    assert found == [
        (Kind.WHOLE, (A, INDICES, UPDATES), (TOTAL,), (A,)),
        (Kind.WHOLE, (TOTAL, INDICES, UPDATES), (END,), (TOTAL,)),
    ]


def test_another_name_of_what_is_scattered_is_no_other_reader_and_goes_with_it():
    renamed = Operation(kind=Kind.ALIAS, inputs=(SCATTERED,), outputs=(MORE,))
    assert turned([MADE, ZEROS, SCATTER, renamed, total(MORE, A)]) == turned(
        [MADE, ZEROS, SCATTER, total(SCATTERED, A)]
    )
    given = Operation(kind=Kind.WHOLE, inputs=(), outputs=(B,))
    found = turned([MADE, given, SCATTER, renamed, total(MORE, A)])
    assert found == turned([MADE, given, SCATTER, total(SCATTERED, A)])


def orders(left, right, contracted, batched=((), ())):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]
    (eqn,) = jax.make_jaxpr(lambda a, b: jax.lax.dot_general(a, b, (contracted, batched)))(*shapes).eqns
    return of_product(eqn)


def test_a_product_reads_a_matrix_that_the_program_turned_as_it_was_before():
    assert orders((2, 8, 4), (4, 6), ((2,), (0,))).reads_before(1, (1, 0), (4, 6))
    assert not orders((2, 8, 4), (4, 6), ((2,), (0,))).reads_before(0, (0, 2, 1), (2, 8, 4))
    batched = orders((3, 8, 4), (3, 4, 6), ((2,), (1,)), ((0,), (0,)))
    assert batched.reads_before(0, (0, 2, 1), (3, 8, 4))
    assert not batched.reads_before(0, (2, 1, 0), (3, 8, 4))
    assert not batched.reads_before(0, (0, 2, 1), (1, 8, 4))


def on_one_device(fun, *arguments):
    program, _ = program_of(jax.make_jaxpr(fun)(*arguments))
    free = [None] * len(arguments)
    mesh, options = LogicalMesh.of((1,)), PlannerOptions()
    graph = build_graph(program, mesh, PRESETS["cpu"], options, input_layouts=free, output_layouts=[None])
    return device_program(graph, [f"input {i}" for i in range(len(arguments))], None)


@pytest.mark.parametrize(("second", "expected"), [((2, 0, 1), Kind.ALIAS), ((1, 2, 0), Kind.MOVED)])
def test_two_permutations_are_one_and_another_name_if_they_undo_each_other(second, expected):
    found = on_one_device(lambda x: jnp.transpose(jnp.transpose(x, (1, 2, 0)), second), jnp.zeros((2, 3, 4)))
    last = found.block.operations[-1]
    assert (last.kind, last.inputs) == (expected, found.inputs)


def test_what_is_recomputed_reads_one_element_of_what_it_waits_for():
    layer = jax.checkpoint(lambda w, h: jnp.tanh(jnp.sin(h @ w)))

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(layer(w, layer(w, x))))(w)

    found = on_one_device(gradient, jnp.zeros((64, 64)), jnp.zeros((32, 64)))
    made = {v: op for op in found.block.operations for v in op.outputs}
    numbers = [v for op in found.block.operations for v in op.inputs if found.values[v].shape == () and v in made]
    waited_for = {v for number in numbers if made[number].kind is Kind.MOVED for v in made[number].inputs}
    assert waited_for
    assert all(found.values[v].bytes > FLOAT for v in waited_for)
    assert all(found.values[number].bytes == FLOAT for number in numbers)


def predicted_and_real(step, *arguments):
    compiled = autopar.parallelize(step, devices=1).compile(*arguments)
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    return compiled.plan.peak_bytes, kept + account.temp_size_in_bytes


def test_an_embedding_that_is_also_the_head_needs_what_xla_needs():
    def step(state, batch):
        def loss(table):
            return jnp.sum(jnp.tanh(jnp.tanh(table[batch]) @ table.T))

        return state - 0.1 * jax.grad(loss)(state)

    table, batch = jax.ShapeDtypeStruct((512, 64), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    predicted, real = predicted_and_real(step, table, batch)
    assert predicted == pytest.approx(real, rel=0.02)
