"""All-reduces that XLA's compiler for CPUs combines: which of them meet depends on the order of fused operations."""

import pytest

import autopar
from autopar.intra_op.memory.device_operations import Block, Kind, Operation
from autopar.intra_op.memory.merged_groups import merge_groups
from tests.intra_op.two_towers import arguments_of_two_towers, two_towers


def summed(inputs, output):
    return Operation(kind=Kind.WHOLE, inputs=inputs, outputs=(output,), group="all-reduce")


def whole(inputs, output):
    return Operation(kind=Kind.WHOLE, inputs=inputs, outputs=(output,))


def pointwise(inputs, output, kind=Kind.CHEAP):
    return Operation(kind=kind, inputs=inputs, outputs=(output,))


def merged(block):
    return [op.outputs for op in merge_groups(block).operations if op.group is not None]


def test_all_that_do_not_wait_for_each_other_are_one():
    block = Block((summed((0,), 3), summed((1,), 4), summed((2,), 5), whole((3, 4, 5), 6)), (6,))
    assert merged(block) == [(3, 4, 5)]


@pytest.mark.parametrize("reads", [(3, 4, 6), (6, 4, 3)])
def test_one_that_waits_for_another_joins_what_is_reached_after_it(reads):
    """6 waits for 3, so that 4 joins the one that comes right before it."""
    block = Block((summed((0,), 3), summed((1,), 4), whole((3,), 5), summed((5,), 6), whole(reads, 7)), (7,))
    assert merged(block) == ([(3, 4), (6,)] if reads[0] == 3 else [(3,), (6, 4)])


def test_a_fused_sum_is_read_from_its_last_term_to_its_first():
    """(a + b) + c is one operation: c stands first, since the sum of a and b is fused into its place at the end."""
    a, b, c, waited, first, total = 10, 11, 12, 13, 14, 15
    operations = (
        summed((0,), a),
        summed((1,), waited),
        whole((waited,), 2),
        summed((2,), c),
        summed((3,), b),
        pointwise((a, b), first),
        pointwise((first, c), total),
    )
    assert merged(Block(operations, (total,))) == [(waited,), (c, a, b)]
    whole_sum = (*operations[:5], whole((a, b), first), whole((first, c), total))
    assert merged(Block(whole_sum, (total,))) == [(a, b, waited), (c,)]


@pytest.mark.parametrize(
    "how",
    [
        {"mesh_shape": (8,), "constraints": autopar.zero3()},
        {"mesh_shape": (8,), "constraints": autopar.zero2()},
        {"num_stages": 2, "num_microbatches": 1},
    ],
    ids=["zero3", "zero2", "two stages"],
)
def test_the_peak_of_two_towers_is_what_xla_needs(how):
    """The gradients of one tower wait for a sum that the other does not need; of the norm the last term comes first."""
    state, batch = arguments_of_two_towers()
    step = autopar.parallelize(two_towers, devices=8, **how)
    rows = [row for row in step.verify(state, batch).rows if row.topic == "memory"]
    assert [row for row in rows if row.verdict != "matches"] == []
