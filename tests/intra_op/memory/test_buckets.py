"""Collectives of one kind are combined up to a number of bytes, in an order in which the block can still run."""

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from autopar.intra_op.memory.buckets import combine_in_buckets
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value

BYTES = 8
VALUES = [Value(name=f"v{i}", shape=(2,), dtype="", bytes=BYTES, var=None, itemsize=4) for i in range(100)]


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


class Plainly:
    """The same buckets by the rule itself, which looks at all that is around all members each time."""

    def __init__(self, operations, limit):
        self.operations, self.limit = operations, limit
        self.number = {op: at for at, op in enumerate(operations)}
        self.place = {op: (at, 0) for at, op in enumerate(operations)}
        self.bucket = {}

    def around(self, op, before):
        found, stack = [], [op]
        while stack:
            here = stack.pop()
            for one in self.operations:
                near = (one.outputs[0] in here.inputs) if before else (here.outputs[0] in one.inputs)
                if near and one not in found:
                    (stack if one.kind in (Kind.CHEAP, Kind.ALIAS) else found).append(one)
        return found

    def run(self):
        """The members of every bucket."""
        is_open = {}
        for op in self.operations:
            if op.group is not None and not self.join(is_open.get(op.group), op):
                is_open[op.group] = self.bucket[op] = [op]
        return {tuple(one.outputs[0] for one in members) for members in self.bucket.values()}

    def join(self, members, op):
        if members is None or (len(members) + 1) * BYTES > self.limit:
            return False
        if any(self.bucket.get(one) is members for one in self.around(op, True)):
            return False
        all_of_them = [*members, op]
        made = [self.place[one] for member in all_of_them for one in self.around(member, True)]
        read = [self.place[one] for member in all_of_them for one in self.around(member, False)]
        place = max([*made, self.place[members[0]]])[0], len(self.bucket) + 1
        if read and min(read) <= place:
            return False
        members.append(op)
        self.bucket[op] = members
        self.place.update(dict.fromkeys(members, place))
        return True


def random_operations(drawn):
    """As `blocks`, but seldom as short as hypothesis likes them."""
    operations = []
    for number in range(drawn.randint(2, 24)):
        read = drawn.sample(range(number + 1), min(number + 1, drawn.randint(1, 3)))
        kind = drawn.choice([Kind.WHOLE, Kind.WHOLE, Kind.WHOLE, Kind.CHEAP, Kind.ALIAS])
        group = drawn.choice([None, "a", "b"]) if kind is Kind.WHOLE else None
        operations.append(operation(read, number + 1, group=group, kind=kind))
    return operations


@pytest.mark.parametrize("members", range(1, 7))
def test_buckets_are_those_of_the_rule_taken_at_its_word(members):
    drawn = random.Random(members)
    for _ in range(100):
        operations = random_operations(drawn)
        found = combined(operations, [len(operations)], members * BYTES)
        assert {op.outputs for op in found if op.group} == Plainly(operations, members * BYTES).run()
