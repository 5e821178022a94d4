"""Submeshes are parts of a node or whole nodes, and those that add up to a cluster fill it."""

import dataclasses
import itertools

import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op.dynamic_program.places import first_places
from autopar.inter_op.dynamic_program.submeshes import (
    machine_shape,
    place,
    send_s,
    size_of,
    submeshes,
    tiles,
)


def test_submeshes_are_parts_of_a_node_and_whole_nodes():
    assert submeshes(2, 8) == ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))
    assert submeshes(3, 1) == ((1, 1), (2, 1), (3, 1))
    assert submeshes(1, 6) == ((1, 1), (1, 2), (1, 6))
    assert submeshes(1, 12) == ((1, 1), (1, 2), (1, 4), (1, 12))
    assert [nodes for nodes, part in submeshes(128, 8) if part == 8] == [*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128]
    assert [nodes for nodes, part in submeshes(50, 1)] == [*range(1, 9), 10, 12, 16, 24, 25, 32, 48, 50]


def sums(sizes, total):
    """All multisets of sizes that add up to a total, as lists of numbers of sizes."""
    if not sizes:
        return [[]] if total == 0 else []
    head, *rest = sizes
    return [[n, *more] for n in range(total // head + 1) for more in sums(rest, total - n * head)]


@pytest.mark.parametrize(
    "cluster", [(1, 1), (1, 4), (1, 8), (2, 4), (2, 8), (4, 2), (3, 4), (2, 6), (1, 12), (2, 9), (5, 1), (3, 3)]
)
def test_submeshes_that_add_up_to_the_cluster_fill_it_without_straddling_nodes(cluster):
    nodes, part = cluster
    options = submeshes(nodes, part)
    for counts in sums([n * m for n, m in options], nodes * part):
        choice = [option for option, count in zip(options, counts, strict=True) for _ in range(count)]
        for order in (choice, choice[::-1], choice[1::2] + choice[::2]):
            assert tiles(order, nodes, part)
            assert_that_none_straddles(first_places([size_of(one) for one in order], part), order, part)
            devices = place(order, nodes, part)
            assert sorted(d for one in devices for d in one) == list(range(nodes * part))
            for (count, size), one in zip(order, devices, strict=True):
                assert list(one) == list(range(one[0], one[0] + count * size))
                first, last = one[0] // part, one[-1] // part
                assert last - first + 1 == count
                assert count == 1 or one[0] % part == 0


def assert_that_none_straddles(starts, order, devices_per_node):
    """Each submesh has devices of its own, of as few nodes as it needs."""
    taken = sorted(start + n for start, one in zip(starts, order, strict=True) for n in range(size_of(one)))
    assert taken == list(range(len(taken)))
    for start, one in zip(starts, order, strict=True):
        assert (start + size_of(one) - 1) // devices_per_node - start // devices_per_node + 1 == one[0]


@pytest.mark.parametrize(
    ("sizes", "per_node", "starts"),
    [
        ([1, 1, 2, 4], 8, [0, 1, 2, 4]),
        ([4, 8, 4], 8, [0, 8, 4]),  # one after the other, the second would lie on both nodes
        ([1, 2, 1], 4, [2, 0, 3]),  # or on no pair of the machine
        ([3, 5], 8, [0, 3]),
        ([6, 6, 4], 8, [0, 6, 12]),  # no order helps
        ([2, 2], None, [0, 2]),
    ],
)
def test_meshes_follow_each_other_unless_one_would_straddle(sizes, per_node, starts):
    assert first_places(sizes, per_node) == starts


@pytest.mark.parametrize(
    ("sizes", "crossings"),
    [
        ([2, 4, 2, 4, 4], 1),  # one after the other, the second would lie on two halves of a node
        ([4, 2, 8, 2], 2),
        ([1, 2, 1, 4, 16, 4, 1, 2, 1], 2),
        ([2, 4, 4, 4, 2], 2),  # the last one goes back to the room that the second four left on the first node
        ([2, 4, 4, 2, 2, 2], 2),  # the fourth stays with the third, though the first node has room as well
        ([4, 4, 4, 4, 8, 16], 3),
    ],
)
def test_meshes_that_cannot_follow_each_other_stay_on_the_node_of_the_one_before_where_they_can(sizes, crossings):
    starts = first_places(sizes, 8)
    nodes = [(start // 8, (start + size - 1) // 8) for start, size in zip(starts, sizes, strict=True)]
    assert sum(before[1] != after[0] for before, after in itertools.pairwise(nodes)) == crossings
    assert sorted(d for start, size in zip(starts, sizes, strict=True) for d in range(start, start + size)) == list(
        range(sum(sizes))
    )


def test_submeshes_that_do_not_fill_the_cluster_are_told():
    assert not tiles([(1, 2)], 1, 4)
    assert not tiles([(1, 4), (1, 1)], 1, 4)
    assert not tiles([(1, 3), (1, 3), (1, 2)], 2, 4)
    assert not tiles([(2, 2), (1, 4)], 2, 4)
    fractions = [(1, s) for s in (15, 10, 10, 6, 6, 6, 6, 1)]
    assert sum(size for _, size in fractions) == 60
    assert not tiles(fractions, 2, 30)


def test_devices_of_a_machine_are_counted_in_nodes():
    inner, *outer = preset("p3.16xlarge").tiers
    machine = dataclasses.replace(preset("p3.16xlarge"), tiers=(dataclasses.replace(inner, devices=2), *outer))
    assert (machine_shape(machine, 4), machine_shape(preset("cpu"), 8)) == ((2, 2), (1, 8))
    assert machine_shape(machine, 2) == (1, 2)


MACHINES = (("p3.16xlarge", 8), ("p3.16xlarge", 32), ("dgx-a100-80gb", 24), ("cpu", 4))


@pytest.mark.parametrize(
    ("name", "devices", "each"), [(*one, each) for one in MACHINES for each in (1, 2, 4, 8) if each < one[1]]
)
def test_a_send_between_equal_meshes_takes_the_mean_over_all_neighbours(name, devices, each):
    cluster, size = preset(name), 10**8
    places = range(each, devices, each)
    all_s = [cluster.transfer_s(size, source=range(at - each, at), target=range(at, at + each)) for at in places]
    mean_s, most_s = send_s(cluster, size, devices=devices, each=each)
    assert mean_s == pytest.approx(sum(all_s) / len(all_s))
    assert most_s == pytest.approx(max(all_s))
