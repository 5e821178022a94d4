"""Donated arguments that XLA copies before the step, and what lies in their memory, or in that of results, until these are there.

`tests/verify` compares whole models; here are the cases that can be reckoned by hand, and one where the copies are most of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Span, Value
from autopar.intra_op.memory.footprint import footprint_of
from autopar.intra_op.memory.lent import Lent, lie_in_lent


def values(*sizes):
    return [
        Value(name=str(n), shape=(size,), dtype="float32", bytes=size, var=None, itemsize=1)
        for n, size in enumerate(sizes)
    ]


def whole(inputs, output):
    return Operation(kind=Kind.WHOLE, inputs=inputs, outputs=(output,))


WEIGHT, GIVEN, LATE, GRADIENT, HANDED_ON, UPDATED = range(6)
UPDATE = Operation(kind=Kind.CHEAP, inputs=(WEIGHT, GRADIENT), outputs=(UPDATED,))


def copied(*operations, outputs=(UPDATED,)):
    """The arguments that are copied where the updated weight takes the place of the weight."""
    block = Block(operations, outputs)
    found = footprint_of(block, values(*[64] * 7), elsewhere=frozenset(outputs), places={UPDATED: WEIGHT})
    return [one.value for one in found.lent]


def lent_memory(value, copied_at, last_read, free_until):
    return Lent(value=value, free_after=copied_at, free_until=free_until, copy=Span(value, copied_at, last_read))


def test_a_weight_is_copied_if_something_reads_it_that_its_update_does_not_wait_for():
    forward, gradient = whole((WEIGHT, GIVEN), LATE), whole((LATE, GIVEN), GRADIENT)
    handed_on = whole((WEIGHT, LATE), HANDED_ON)
    assert copied(forward, gradient, UPDATE) == []
    assert copied(forward, gradient, handed_on, UPDATE, outputs=(UPDATED, HANDED_ON)) == [WEIGHT]


def test_a_weight_is_copied_if_its_update_reads_elements_elsewhere_than_it_writes_them():
    forward, gradient = whole((WEIGHT, GIVEN), LATE), whole((LATE, GIVEN), GRADIENT)
    turned = Operation(kind=Kind.MOVED, inputs=(WEIGHT,), outputs=(6,))
    update = Operation(kind=Kind.CHEAP, inputs=(6, GRADIENT), outputs=(UPDATED,))
    assert copied(forward, gradient, turned, update) == [WEIGHT]


def test_the_copy_is_there_until_its_last_reader_and_the_memory_is_free_until_then():
    operations = (
        whole((WEIGHT, GIVEN), LATE),
        whole((LATE, GIVEN), GRADIENT),
        whole((WEIGHT, LATE), HANDED_ON),
        UPDATE,
    )
    block = Block(operations, (UPDATED, HANDED_ON))
    (one,) = footprint_of(
        block, values(*[64] * 7), elsewhere=frozenset({UPDATED, HANDED_ON}), places={UPDATED: WEIGHT}
    ).lent
    assert (one.free_after, one.free_until, one.copy) == (-1, 2, Span(WEIGHT, -1, 3))


def test_the_memory_of_a_result_is_free_until_the_result_is_made():
    sizes = [0, 64, 64, 32, 64, 48]
    block = Block((whole((0,), 1), whole((1,), 2), whole((2,), 3), whole((3,), 4), whole((4,), 5)), (4, 5))
    found = footprint_of(block, values(*sizes), elsewhere=frozenset({4, 5}), unwritten=[4, 5])
    assert {span.value for span in found.with_own_memory(sizes)} == {2}
    assert [(one.value, one.free_after, one.free_until) for one in found.lent] == [(4, -1, 2), (5, -1, 3)]
    read = Block((whole((0,), 1), Operation(kind=Kind.CHEAP, inputs=(1,), outputs=(2,))), (2,))
    beside = footprint_of(read, values(0, 64, 64), elsewhere=frozenset({2}), unwritten=[2])
    assert {span.value for span in beside.with_own_memory([0, 64, 64])} == {1}, "what it is made of is there beside it"
    donated = footprint_of(block, values(*sizes), elsewhere=frozenset({4, 5}), unwritten=[5])
    assert {span.value for span in donated.with_own_memory(sizes)} == {1, 2}


def test_a_loop_goes_on_in_the_memory_of_its_result_where_it_began_unless_something_else_reads_the_start():
    """XLA puts what a loop starts from, such as a stack of zeros, and its result into one buffer."""
    zeros, scan = Operation(kind=Kind.WHOLE, inputs=(), outputs=(1,)), whole((0, 2, 1), 3)
    scan = dataclasses.replace(scan, over=(1,))
    sizes = [0, 64, 32, 64, 64]

    def found(*operations, outputs=(3,)):
        block = Block(operations, outputs)
        return footprint_of(block, values(*sizes), elsewhere=frozenset(outputs), unwritten=[3])

    begun = found(whole((0,), 2), zeros, scan)
    assert {span.value for span in begun.with_own_memory(sizes)} == {2}
    assert [(one.value, one.free_until) for one in begun.lent] == [(3, -1 if begun.spans[0].first else 0)]
    again = dataclasses.replace(whole((0, 2, 3), 4), over=(3,))
    chained = footprint_of(
        Block((whole((0,), 2), zeros, scan, again), (4,)), values(*sizes), elsewhere=frozenset({4}), unwritten=[4]
    )
    assert {span.value for span in chained.with_own_memory(sizes)} == {2}, "two loops, one after the other"
    read = found(whole((0,), 2), zeros, scan, whole((1, 3), 4), outputs=(3, 4))
    assert {span.value for span in read.with_own_memory(sizes)} == {1, 2}


def test_the_largest_buffers_are_placed_first_each_in_the_smallest_memory_that_is_free():
    sizes = [100, 40, 40, 30, 30, 101]
    lent = [lent_memory(0, -2, 9, 9), lent_memory(1, -1, 9, 5)]
    early, late, too_late, beside, too_large = Span(2, 0, 3), Span(3, 4, 5), Span(4, 5, 7), Span(2, 2, 6), Span(5, 0, 1)
    placed = lie_in_lent([late, early, too_large, too_late, beside], lent, sizes)
    assert placed == {early, late, beside}
    assert lie_in_lent([late, early, too_late], lent, sizes) == {late, early, too_late}


def test_a_copy_lies_in_the_memory_of_an_argument_that_was_copied_before_it_and_not_of_a_later_one():
    lent = [lent_memory(0, -2, 9, 9), lent_memory(1, -1, 5, 5)]
    copies = [one.copy for one in lent]
    assert lie_in_lent(copies, lent, [64, 64]) == {copies[1]}


@pytest.mark.parametrize("batch", [4, 64])
def test_the_copies_of_weights_are_counted_as_xla_counts_them(batch):
    """With few examples the copies are nearly all of the temporaries, with many they matter little."""

    def step(weights, x):
        def loss_of(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return (y**2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    shapes = [jax.ShapeDtypeStruct((96, 96), jnp.float32)] * 3, jax.ShapeDtypeStruct((batch, 96), jnp.float32)
    compiled = autopar.parallelize(step, devices=1, num_microbatches=1, recompute="none").compile(*shapes)
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    temporaries = compiled.plan.peak_bytes - kept
    assert temporaries == pytest.approx(account.temp_size_in_bytes, rel=0.1)
    if batch == 4:
        assert "copy of weights/1" in [
            tensor.name.replace("state/", "weights/") for tensor in compiled.plan.peak_tensors
        ]
