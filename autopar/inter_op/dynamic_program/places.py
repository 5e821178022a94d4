"""Where the meshes of a pipeline lie among the devices, numbered node by node.

In: the devices of each mesh in the order of the pipeline, and those of a node. Out: where each begins. Neighbours in the pipeline
send each other activations, so they lie on one node where they can. One after the other is best. Where a mesh would then straddle
nodes, or parts of one, each mesh goes to the node of the one before if all that come later still find room, and within a node
larger ones come first. What can go wrong: sizes that do not divide each other may have no such order, and lie as they come.
"""

from __future__ import annotations

from collections.abc import Sequence


def first_places(sizes: Sequence[int], devices_per_node: int | None) -> list[int]:
    """Where the devices of each mesh begin; see the module's text. None: all devices are alike."""
    in_order = [sum(sizes[:number]) for number in range(len(sizes))]
    if devices_per_node is None or _are_aligned(in_order, sizes, devices_per_node):
        return in_order
    found = _by_nodes(sizes, devices_per_node)
    return found if found is not None and _are_aligned(found, sizes, devices_per_node) else in_order


def _are_aligned(starts: Sequence[int], sizes: Sequence[int], devices_per_node: int) -> bool:
    """Whether no mesh straddles nodes, and one that divides a node begins at a multiple of its size."""

    def is_aligned(start: int, size: int) -> bool:
        inside = start % devices_per_node
        if size >= devices_per_node:
            return inside == 0
        return inside + size <= devices_per_node and (devices_per_node % size != 0 or inside % size == 0)

    return all(map(is_aligned, starts, sizes))


def _by_nodes(sizes: Sequence[int], per_node: int) -> list[int] | None:
    """Where each mesh begins, on the node of the one before if that can be; None if no order is found."""
    nodes = -(-sum(sizes) // per_node)
    free = [per_node] * nodes
    node_of: list[int] = []
    for number, size in enumerate(sizes):
        wanted = node_of[-1:] + sorted(range(nodes), key=lambda node: (free[node] == per_node, node))
        for node in wanted:
            left = _without(free, node, size, per_node)
            if left is not None and _have_room(left, sizes[number + 1 :], per_node):
                node_of.append(node)
                free = left
                break
        else:
            return None
    starts, taken = [0] * len(sizes), [0] * nodes
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        node = node_of[number]
        starts[number] = node * per_node + taken[node]
        taken[node] += sizes[number]
    return starts


def _without(free: Sequence[int], node: int, size: int, per_node: int) -> list[int] | None:
    """The devices that are free of each node once a mesh has a part of one, or whole nodes from one on; None without room."""
    count, rest = divmod(size, per_node)
    if size <= per_node:
        return [*free[:node], free[node] - size, *free[node + 1 :]] if free[node] >= size else None
    if rest or list(free[node : node + count]) != [per_node] * count:
        return None
    return [*free[:node], *[0] * count, *free[node + count :]]


def _have_room(free: Sequence[int], sizes: Sequence[int], per_node: int) -> bool:
    """Whether meshes find room, larger ones first, each at the first node that has it: no other order does better where each size
    divides the next."""
    left = list(free)
    for size in sorted(sizes, reverse=True):
        found = (_without(left, node, size, per_node) for node in range(len(left)))
        after = next((one for one in found if one is not None), None)
        if after is None:
            return False
        left = after
    return True
