"""The devices that share a fast link, and the least that must cross the slow links between two tilings.

Two devices of one node have a fast link between them, two of different nodes a slow one. With R(n) the elements that the
devices of node n need and H(n) those that they hold,

    lower bound = sum over nodes n of |R(n) - H(n)|    elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.runtime.resharding.box import Box
from autopar.runtime.resharding.tiling import Tiling
from autopar.runtime.resharding.tuning import TUNING, Tuning


@dataclasses.dataclass(frozen=True)
class Links:
    """The node of each device, and the price of work beside the copy."""

    node_of: Mapping[int, int]
    tuning: Tuning = TUNING

    @classmethod
    def between(cls, source: Tiling, target: Tiling) -> Links:
        """Make the target mesh one node, and all devices outside it another."""
        return cls(dict.fromkeys(source.devices, 0) | dict.fromkeys(target.devices, 1))

    def node(self, device: int) -> int:
        """Return the node of a device."""
        return self.node_of[device]

    def is_slow(self, a: int, b: int) -> bool:
        """Whether the link between two devices is a slow one."""
        return self.node(a) != self.node(b)


def replica_axes(tiling: Tiling, links: Links) -> tuple[int, ...]:
    """Return the mesh axes along which neither the tile nor the node changes."""
    held = [(box, links.node(device)) for device, box in zip(tiling.devices, tiling.boxes, strict=True)]
    numbers: dict[tuple[Box, int], int] = {}
    for tile_and_node in held:
        numbers.setdefault(tile_and_node, len(numbers))
    grid = np.array([numbers[tile_and_node] for tile_and_node in held]).reshape(tiling.mesh_shape)
    return tuple(
        axis
        for axis, size in enumerate(tiling.mesh_shape)
        if size > 1 and bool((grid == np.take(grid, [0], axis=axis)).all())
    )


def lower_bound(source: Tiling, target: Tiling, links: Links) -> int:
    """Count the elements that must cross slow links: for each node, those that its devices need and none of them holds."""
    edges = [
        sorted({edge for box in (*source.boxes, *target.boxes) for edge in box[dim]})
        for dim in range(len(target.boxes[0]))
    ]
    sizes = np.ones((1,) * len(edges), dtype=np.int64)
    for dim, places in enumerate(edges):
        sizes = sizes * np.diff(places).reshape([-1 if axis == dim else 1 for axis in range(len(edges))])
    total = 0
    for node in {links.node(device) for device in target.devices}:
        needed = _cells_of(target, links, node, edges=edges) & ~_cells_of(source, links, node, edges=edges)
        total += int(sizes[needed].sum())
    return total


def _cells_of(tiling: Tiling, links: Links, node: int, *, edges: Sequence[Sequence[int]]) -> np.ndarray:
    """Mark the cells of the grid of all tile edges that the devices of one node hold."""
    covered = np.zeros([len(places) - 1 for places in edges], dtype=bool)
    for device, box in zip(tiling.devices, tiling.boxes, strict=True):
        if links.node(device) == node:
            cells = tuple(slice(places.index(a), places.index(b)) for places, (a, b) in zip(edges, box, strict=True))
            covered[cells] = True
    return covered
