"""Collectives of one kind are combined up to a number of bytes, in an order in which the block can still run."""

import itertools

import hypothesis.strategies as st
from hypothesis import given, settings

from autopar.intra_op.memory.buckets import combine_in_buckets
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value

BYTES = 8
VALUES = [Value(name=f"v{i}", shape=(2,), dtype="", bytes=BYTES, key=None, itemsize=4) for i in range(100)]


def operation(inputs, output, *, group=None, kind=Kind.WHOLE):
    return Operation(kind=kind, inputs=tuple(inputs), outputs=(output,), group=group)


def combined(operations, outputs, limit):
    return combine_in_buckets(Block(tuple(operations), tuple(outputs)), VALUES, limit).operations


def gradients(number):
    """Each is made from the one before and reduced; all reduced ones are read at the end."""
    made = [operation([i], i + 1) for i in range(number)]
    reduced = [operation([i + 1], 50 + i, group="reduce") for i in range(number)]
    last = operation([50 + i for i in range(number)], 99)
    return [op for pair in zip(made, reduced, strict=True) for op in pair] + [last]


def test_a_bucket_holds_as_many_bytes_as_it_may_and_runs_when_its_last_operand_is_there():
    found = combined(gradients(6), [99], 2 * BYTES)
    buckets = [op for op in found if op.group]
    assert [op.inputs for op in buckets] == [(1, 2), (3, 4), (5, 6)]
    assert [found.index(op) for op in buckets] == [2, 5, 8]


def test_without_room_for_two_nothing_is_combined():
    operations = gradients(4)
    assert combined(operations, [99], BYTES) == tuple(operations)


def test_what_waits_for_each_other_is_not_combined():
    chain = [operation([i], i + 1, group="reduce") for i in range(4)]
    assert combined(chain, [4], 100) == tuple(chain)
    through_folded = [
        operation([0], 1, group="reduce"),
        operation([1], 2, kind=Kind.CHEAP),
        operation([2], 3, group="reduce"),
    ]
    assert combined(through_folded, [3], 100) == tuple(through_folded)


def test_weights_are_gathered_before_the_first_is_read():
    gathers = [operation([i], 10 + i, group="gather") for i in range(3)]
    reads = [operation([10 + i, 20 + i], 21 + i) for i in range(3)]
    found = combined([op for pair in zip(gathers, reads, strict=True) for op in pair], [23], 100)
    assert found[0].inputs == (0, 1, 2)
    assert len(found) == 4


@st.composite
def blocks(draw):
    """Operations that read from earlier ones, some folded, some collectives of one of two groups."""
    operations = []
    for number in range(draw(st.integers(2, 24))):
        read = draw(st.lists(st.integers(0, number), max_size=3, unique=True))
        kind = draw(st.sampled_from([Kind.WHOLE, Kind.WHOLE, Kind.CHEAP, Kind.ALIAS]))
        group = draw(st.sampled_from([None, "a", "b"])) if kind is Kind.WHOLE else None
        operations.append(operation(read or [0], number + 1, group=group, kind=kind))
    return operations


@settings(max_examples=400, deadline=None)
@given(blocks(), st.integers(1, 6))
def test_every_operation_still_runs_once_and_after_what_it_reads(operations, members):
    found = combined(operations, [len(operations)], members * BYTES)
    made = list(itertools.chain.from_iterable(op.outputs for op in found))
    assert sorted(made) == sorted(op.outputs[0] for op in operations)
    there = {0}
    for op in found:
        assert set(op.inputs) <= there
        there.update(op.outputs)
    for op in found:
        assert len(op.outputs) <= max(members, 1)
        assert {one.group for one in operations if one.outputs[0] in op.outputs} == {op.group}
