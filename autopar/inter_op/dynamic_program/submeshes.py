"""Which parts of a cluster stages may have, and where they lie.

In: nodes and devices per node. Out: the sizes of submeshes that may be used, and for a choice of them the devices of each. What
can go wrong: submeshes whose sizes add up and which still do not fill the nodes; `submeshes` offers only sizes that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from autopar.cost_model.hardware import Cluster

Submesh: TypeAlias = tuple[int, ...]
"""(nodes, devices per node); of a mixed cluster (nodes, devices per node, number of the kind of node)."""
ALL_UP_TO = 8
"""Nodes of a submesh up to which every number is one. A machine of 64 devices in nodes of 8 has all of them."""

MOST_NEIGHBOURS = 8
"""Neighbours within a node whose links are looked at: all in a hybrid cube mesh. Those of larger nodes are alike."""


def size_of(submesh: Submesh) -> int:
    """Devices of a submesh."""
    return submesh[0] * submesh[1]


def kind_of(submesh: Submesh) -> int:
    """The number of its kind of node; 0 where all nodes are alike."""
    return submesh[2] if len(submesh) > 2 else 0


def submeshes(nodes: int, devices_per_node: int) -> tuple[Submesh, ...]:
    """The submeshes that may be used: parts of a node, each dividing the next, one node, and several to all nodes.

    Of many nodes not every number is one: up to eight, those that divide all, and above eight 12, 16, 24, 32, 48 and so on.
    The time of the dynamic program grows with their number times that of the nodes.

    Parts: 1, then multiplied by the prime factors of a node in ascending order (8: 1, 2, 4, 8; 6: 1, 2, 6). That each divides
    the next is what `tiles` needs: 3 + 3 and 2 + 2 + 2 would fill nodes of 6, but 15, 10, 10, 6, 6, 6, 6, 1 do not fill two
    nodes of 30.
    """
    parts = [1]
    while parts[-1] < devices_per_node:
        rest = devices_per_node // parts[-1]
        parts.append(parts[-1] * next(f for f in range(2, rest + 1) if rest % f == 0))
    return (*((1, part) for part in parts), *((n, devices_per_node) for n in _node_counts(nodes)))


def _node_counts(nodes: int) -> list[int]:
    """Numbers of whole nodes from 2 on that a submesh may have."""

    def is_round(n: int) -> bool:
        return n.bit_count() == 1 or (n % 3 == 0 and (n // 3).bit_count() == 1)

    return [n for n in range(2, nodes + 1) if n <= ALL_UP_TO or nodes % n == 0 or is_round(n)]


def place(choice: Sequence[Submesh], nodes: int, devices_per_node: int) -> tuple[tuple[int, ...], ...] | None:
    """The devices of each submesh, contiguous, numbered row-major; None if they do not fill the cluster.

    Larger ones first, each at the first node with room. Any choice from `submeshes` whose sizes add up to the cluster fits:
    when a part of size s is placed, all placed before it are multiples of s, and so is a node; thus the free devices of each
    node are a multiple of s, and a node that is not full has room. Whole nodes come before parts and find empty nodes.
    """
    free = [devices_per_node] * nodes
    found: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(choice)), key=lambda i: (-size_of(choice[i]), i)):
        count, part, *_ = choice[i]
        node = next((n for n in range(nodes - count + 1) if min(free[n : n + count]) >= part), None)
        if node is None or (count > 1 and part != devices_per_node):
            return None
        start = (node + 1) * devices_per_node - free[node]
        found[i] = tuple(range(start, start + count * part))
        free[node : node + count] = [f - part for f in free[node : node + count]]
    return None if any(free) else tuple(found[i] for i in range(len(choice)))


def send_s(cluster: Cluster, size_bytes: float, *, devices: int, each: int) -> tuple[float, float]:
    """(mean, most) seconds to send a value from one of equal meshes to the next.

    Args:
        cluster: the machine.
        size_bytes: bytes of the whole value.
        devices: of all meshes.
        each: of each mesh.
    """

    def send_at(place: int) -> float:
        return cluster.transfer_s(size_bytes, source=range(place - each, place), target=range(place, place + each))

    node, meshes = min(cluster.devices_per_node or devices, devices), devices // each
    if each >= node or meshes < 2:
        most = send_at(max(meshes // 2, 1) * each)
        return most, most
    inside = [send_at(place) for place in range(each, node, each)[:MOST_NEIGHBOURS]]
    crossings = devices // node - 1
    across = send_at(node) if crossings else max(inside)
    return (crossings * across + (meshes - 1 - crossings) * sum(inside) / len(inside)) / (meshes - 1), across


def place_in_parts(choice: Sequence[Submesh], parts: Sequence[Submesh]) -> tuple[tuple[int, ...], ...] | None:
    """As `place`, of stages along parts of a mixed cluster in the order of the pipeline, each with submeshes of its own kind.

    Devices are numbered along the pipeline. None if the submeshes of a part do not fill it.
    """
    found: list[tuple[int, ...]] = []
    for part in parts:
        own, first = [one for one in choice if kind_of(one) == kind_of(part)], sum(map(len, found))
        placed = place(own, part[0], part[1])
        if placed is None:
            return None
        found += [tuple(first + device for device in devices) for devices in placed]
    return tuple(found)


def tiles(choice: Sequence[Submesh], nodes: int, devices_per_node: int) -> bool:
    """Whether submeshes together fill the cluster, none straddling a node; see `place` for why equal sums are enough."""
    return place(choice, nodes, devices_per_node) is not None


def machine_shape(machine: Cluster, devices: int) -> tuple[int, int]:
    """(nodes, devices per node) that so many devices of a machine take."""
    per_node = machine.devices_per_node
    if per_node is None or devices <= per_node or devices % per_node:
        return (1, devices)
    return (devices // per_node, per_node)
