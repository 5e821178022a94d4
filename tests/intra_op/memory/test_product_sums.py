"""A sum that a matrix product's call makes has one buffer, and holds the product's operands no longer than the product does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.intra_op.memory.compilers import XLA_CPU, XLA_GPU
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value
from autopar.intra_op.memory.footprint import footprint_of
from autopar.intra_op.memory.product_sums import add_into_products
from tests.intra_op.memory.test_compilers import SQUARE, kept

LEFT, RIGHT, MADE, TOTAL, SUMMAND, ROW, SPREAD, WIDE, OTHER, END = range(10)


def value(elements=64, itemsize=4, shape=(8, 8)):
    return Value(name="v", shape=shape, dtype="", bytes=elements * itemsize, var=None, itemsize=itemsize)


VALUES = [value() for _ in range(END + 1)]
VALUES[ROW] = value(8, shape=(8,))
VALUES[MADE] = dataclasses.replace(VALUES[MADE], name="product")


def operation(kind, inputs, *outputs, **fields):
    return Operation(kind=kind, inputs=inputs, outputs=outputs, **fields)


PRODUCT = operation(Kind.WHOLE, (LEFT, RIGHT), MADE, multiplies=True)


def total(*summands, out=TOTAL):
    return operation(Kind.CHEAP, summands, out, adds=True)


def rewritten(operations, *, outputs=(TOTAL,), values=VALUES, compiler=XLA_GPU):
    """(kind, inputs, outputs, over) of what runs."""
    block = add_into_products(Block(tuple(operations), outputs, compiler=compiler), values)
    return [(op.kind, op.inputs, op.outputs, op.over) for op in block.operations]


@pytest.mark.parametrize("summands", [(SUMMAND, MADE), (MADE, SUMMAND)])
def test_a_product_writes_its_sum_over_the_summand_in_its_own_place(summands):
    between = operation(Kind.WHOLE, (LEFT,), OTHER)
    found = rewritten([PRODUCT, between, total(*summands)], outputs=(TOTAL, OTHER))
    assert found[0] == (Kind.WHOLE, (LEFT, RIGHT, SUMMAND), (TOTAL,), (SUMMAND,))
    assert len(found) == 2


def test_it_waits_for_a_summand_that_is_made_later():
    late = operation(Kind.WHOLE, (LEFT,), SUMMAND)
    found = rewritten([PRODUCT, late, total(SUMMAND, MADE)])
    assert [outputs for _, _, outputs, _ in found] == [(SUMMAND,), (TOTAL,)]


def test_a_row_and_then_a_summand_are_added_by_one_call():
    spread = operation(Kind.CHEAP, (ROW,), SPREAD)
    first, second = total(MADE, SPREAD, out=WIDE), total(SUMMAND, WIDE)
    found = rewritten([spread, PRODUCT, first, second])
    assert found[1:] == [(Kind.WHOLE, (LEFT, RIGHT, ROW, SUMMAND), (TOTAL,), (SUMMAND,))]


def test_two_products_are_added_by_the_second():
    other = operation(Kind.WHOLE, (LEFT, SUMMAND), OTHER, multiplies=True)
    found = rewritten([PRODUCT, other, total(MADE, OTHER)])
    assert found == [
        (Kind.WHOLE, (LEFT, RIGHT), (MADE,), ()),
        (Kind.WHOLE, (LEFT, SUMMAND, MADE), (TOTAL,), (MADE,)),
    ]


def narrow():
    """Values of which the product and what is read of it are half as wide."""
    values = list(VALUES)
    values[MADE] = value(itemsize=2)
    return values


def test_what_is_widened_on_the_way_is_added_only_into_a_result():
    widened = operation(Kind.CHEAP, (MADE,), WIDE)
    steps = [PRODUCT, widened, total(SUMMAND, WIDE)]
    assert rewritten(steps, values=narrow()) == [(Kind.WHOLE, (LEFT, RIGHT, SUMMAND), (TOTAL,), (SUMMAND,))]
    reader = operation(Kind.WHOLE, (TOTAL,), END)
    assert len(rewritten([*steps, reader], outputs=(END,), values=narrow())) == 4


@pytest.mark.parametrize(
    ("steps", "outputs", "compiler"),
    [
        pytest.param([PRODUCT, total(SUMMAND, MADE)], (TOTAL, MADE), XLA_GPU, id="the product is read by others"),
        pytest.param([PRODUCT, total(SUMMAND, MADE)], (TOTAL,), XLA_CPU, id="on CPUs"),
        pytest.param(
            [dataclasses.replace(PRODUCT, multiplies=False), total(SUMMAND, MADE)], (TOTAL,), XLA_GPU, id="no product"
        ),
        pytest.param([PRODUCT, dataclasses.replace(total(SUMMAND, MADE), adds=False)], (TOTAL,), XLA_GPU, id="no sum"),
    ],
)
def test_other_sums_stay(steps, outputs, compiler):
    assert len(rewritten(steps, outputs=outputs, compiler=compiler)) == len(steps)


def test_other_names_of_a_sum_stay():
    name = operation(Kind.ALIAS, (TOTAL,), OTHER)
    found = rewritten([PRODUCT, total(SUMMAND, MADE), name], outputs=(OTHER,))
    assert found[-1] == (Kind.ALIAS, (TOTAL,), (OTHER,), ())


def test_gradients_that_are_summed_have_no_buffer_beside_the_sum_on_gpus():
    def adds_products(x, y, total):
        return x @ y + total

    def adds_more(x, y, total):
        return x @ y + x @ total

    for function, on_cpus, on_gpus in ((adds_products, 1, 0), (adds_more, 2, 1)):
        counts = [kept(function, compiler, *[SQUARE] * 3).count("dot_general") for compiler in (XLA_CPU, XLA_GPU)]
        assert counts == [on_cpus, on_gpus]


def test_integers_are_added_apart():
    square = jax.ShapeDtypeStruct((128, 128), jnp.int32)
    assert kept(lambda x, y, total: x @ y + total, XLA_GPU, *[square] * 3) == ["dot_general"]


def test_nothing_is_written_over_what_a_library_made():
    """Its result is one of two, beside the library's workspace."""
    for has_workspace, last in ((False, 0), (True, 1)):
        made = dataclasses.replace(PRODUCT, has_workspace=has_workspace)
        block = Block((made, operation(Kind.CHEAP, (MADE,), TOTAL)), (TOTAL,), compiler=XLA_GPU)
        spans = {span.value: span.last for span in footprint_of(block, VALUES).spans}
        assert spans[MADE] == last
