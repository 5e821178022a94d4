"""Numbers of devices on which layers are planned before others are: a few sizes tell what the rest may take.

In: the sizes that stages may have, and the machine. Out: those to begin with. What can go wrong: nothing is planned that need
not be, but the wrong sizes first cost time.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from autopar.cost_model.machine import Cluster


def first_sizes(
    sizes: Collection[int], layers: int, cluster: Cluster, *, devices: int, smallest_first: bool
) -> set[int]:
    """The numbers of devices on which layers are planned at first: those within a node.

    Where all `devices` are more than layers on a node each can use, the least number that divides them evenly.
    """
    if smallest_first:
        return {min(sizes)}
    per_node = cluster.devices_per_node or math.inf
    even = [size for size in sizes if size * layers >= devices and devices % size == 0]
    if per_node * layers >= devices or not even:
        return {size for size in sizes if size <= per_node}
    return {min(even)}


def first_across_nodes(devices: int, planned: Collection[int], sizes: Collection[int], cluster: Cluster) -> int:
    """The number of devices on which to plan layers so that more is known of `devices`: themselves, or fewer before them.

    Within a node nothing is learnt of links between nodes, so larger sizes look better than they are. What layers wait on the
    fewest nodes tells, before many larger sizes are planned for what they promise.

    Args:
        devices: what a choice takes an estimate of.
        planned: the sizes on which layers are planned.
        sizes: all that stages may have.
        cluster: the machine.
    """
    per_node = cluster.devices_per_node or math.inf
    if devices <= per_node or any(size > per_node for size in planned):
        return devices
    return min(size for size in sizes if size > per_node)
