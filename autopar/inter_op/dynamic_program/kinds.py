"""The kinds of node of a mixed cluster, as the search for stages sees them.

In: a request for a mixed cluster. Out: `KindOfNodes`, each with the request that a stage on such nodes gets: its own device,
links and memory. What can go wrong: the devices of a step are only some of the cluster's, so nobody knows of which kind they are;
whoever plans looks at their number first (`devices_of`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cost_model.hardware import Cluster
from autopar.inter_op.dynamic_program.submeshes import Submesh, size_of
from autopar.intra_op.request import PlanRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindOfNodes:
    """One kind.

    Attributes:
        number: its place among the kinds of the cluster.
        name: its name in the cluster file.
        first_device: the number of its first device among those of the cluster.
        part: its nodes, as (nodes, devices per node, number).
        request: what a stage on such nodes is planned for.
    """

    number: int
    name: str
    first_device: int
    part: Submesh
    request: PlanRequest


def kinds_of(request: PlanRequest) -> tuple[KindOfNodes, ...]:
    """The kinds of node of a request's cluster; none if all nodes are alike.

    A memory limit that the user gave holds for all of them; without one, each kind has the memory of its own device.
    """
    cluster, found, first = request.cluster, list[KindOfNodes](), 0
    limit = request.memory_limit_bytes
    is_given = limit is not None and limit != _memory_of(cluster)
    for number, kind in enumerate(cluster.node_kinds):
        nodes = cluster.of_kind(kind.name)
        memory = _memory_of(nodes)
        if is_given and limit is not None:
            memory = limit if memory is None else min(limit, memory)
        own = dataclasses.replace(request, cluster=nodes, memory_limit_bytes=None if limit is None else memory)
        part = (kind.count, kind.devices_per_node, number)
        found.append(KindOfNodes(number=number, name=kind.name, first_device=first, part=part, request=own))
        first += kind.count * kind.devices_per_node
    return tuple(found)


def _memory_of(cluster: Cluster) -> int | None:
    """Bytes of a device that programs may use; None if there is no limit."""
    return int(cluster.usable_memory_bytes) if math.isfinite(cluster.usable_memory_bytes) else None


def devices_of(kinds: Sequence[KindOfNodes]) -> int:
    """How many devices nodes of these kinds have."""
    return sum(size_of(kind.part) for kind in kinds)
