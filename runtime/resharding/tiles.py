"""Which box of an array each device holds, and which devices share a fast link: pure data, no device is touched.

In: a sharding, or a mesh's shape and a partition spec. Out: a `Tiling`; with the `Links`, the least that must cross the slow
link between two tilings. With R(n) the elements that the devices of node n need and H(n) those that they hold,

    lower bound = sum over nodes n of |R(n) - H(n)|    elements.

What can go wrong: tiles of one side that overlap without being equal; no sharding produces them and `Tiling` refuses them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes; None if there are none."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def relative_to(box: Box, frame: Box) -> Box:
    """The same elements counted from the corner of `frame`."""
    return tuple((start - corner, stop - corner) for (start, stop), (corner, _) in zip(box, frame, strict=True))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The box that each device holds, devices in row-major order of their mesh. Equal boxes are replicas."""

    mesh_shape: tuple[int, ...]
    devices: tuple[int, ...]
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        """Refuse tiles that are not those of a grid: along each dimension two are equal or apart."""
        for dim in range(len(self.boxes[0])):
            spans = sorted({box[dim] for box in self.boxes if volume(box)})
            for a, b in itertools.pairwise(spans):
                if b[0] < a[1]:
                    raise ValueError(
                        f"tiles {a[0]}:{a[1]} and {b[0]}:{b[1]} of dimension {dim} overlap without being equal; "
                        "every sharding cuts a dimension into tiles that are equal or apart"
                    )

    @classmethod
    def of_sharding(cls, sharding: jax.sharding.Sharding, shape: Sequence[int]) -> Tiling:
        """The tiles of an array of this shape under a JAX sharding."""
        held: dict[Any, Any] = dict(sharding.devices_indices_map(tuple(shape)))
        boxes = tuple(
            tuple(index.indices(size)[:2] for index, size in zip(indices, shape, strict=True))
            for indices in held.values()
        )
        mesh_shape = sharding.mesh.devices.shape if isinstance(sharding, jax.sharding.NamedSharding) else (len(held),)
        return cls(mesh_shape, tuple(device.id for device in held), boxes)

    @classmethod
    def of_spec(
        cls, shape: Sequence[int], spec: Sequence[Sequence[int]], *, mesh_shape: Sequence[int], first_device: int = 0
    ) -> Tiling:
        """The tiles under a partition spec: per dimension the numbers of the mesh axes that split it, major to minor.

        A dimension that its axes do not divide is cut into parts of ceil(size / parts), the last ones smaller.
        """
        boxes = []
        for place in np.ndindex(*mesh_shape):
            box = []
            for size, axes in zip(shape, spec, strict=True):
                parts = math.prod(mesh_shape[axis] for axis in axes)
                box.append(part_of((0, size), index_along(place, axes, mesh_shape), parts))
            boxes.append(tuple(box))
        return cls(tuple(mesh_shape), tuple(range(first_device, first_device + len(boxes))), tuple(boxes))

    @property
    def holders(self) -> dict[Box, tuple[int, ...]]:
        """The devices that hold each distinct tile with anything in it."""
        held: dict[Box, tuple[int, ...]] = {}
        for device, box in zip(self.devices, self.boxes, strict=True):
            if volume(box):
                held[box] = (*held.get(box, ()), device)
        return held

    def replica_axes(self, links: Links) -> tuple[int, ...]:
        """The mesh axes along which neither the tile nor the node changes."""
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(self._tile_and_node(links)))}
        grid = np.array([kinds[kind] for kind in self._tile_and_node(links)]).reshape(self.mesh_shape)
        return tuple(
            axis
            for axis, size in enumerate(self.mesh_shape)
            if size > 1 and bool((grid == np.take(grid, [0], axis=axis)).all())
        )

    def _tile_and_node(self, links: Links) -> list[tuple[Box, int]]:
        return [(box, links.node(device)) for device, box in zip(self.devices, self.boxes, strict=True)]


def part_of(interval: Interval, index: int, parts: int) -> Interval:
    """Part number `index` of an interval cut into `parts` of equal size, rounded up."""
    start, stop = interval
    chunk = -(-(stop - start) // parts)
    return min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop)


def index_along(place: Sequence[int], axes: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """The number of a device among those along some mesh axes, the first axis major."""
    index = 0
    for axis in axes:
        index = index * mesh_shape[axis] + place[axis]
    return index


@dataclasses.dataclass(frozen=True)
class Links:
    """Which devices share a fast link, and what work beside the copy is worth in bytes over the slow one.

    Two devices of one node have a fast link between them, two of different nodes a slow one. `slack_bytes` is how many
    bytes more than necessary may cross where that saves calls: an executable costs about 0.1 ms of host time.
    `fast_ratio` is the cost of a byte over the fast link, `local_ratio` of a byte copied within a device, `call_bytes` of a call
    into the runtime and `message_bytes` of a box, all in bytes over the slow link.
    """

    node_of: Mapping[int, int]
    slack_bytes: int = 1 << 16
    fast_ratio: float = 0.1
    local_ratio: float = 0.05
    call_bytes: int = 1 << 18
    message_bytes: int = 1 << 13

    @classmethod
    def between(cls, source: Tiling, target: Tiling) -> Links:
        """The target mesh is one node, all devices outside it another."""
        return cls(dict.fromkeys(source.devices, 0) | dict.fromkeys(target.devices, 1))

    def node(self, device: int) -> int:
        """The node of a device."""
        return self.node_of[device]

    def slow(self, a: int, b: int) -> bool:
        """Whether the link between two devices is a slow one."""
        return self.node(a) != self.node(b)


def lower_bound(source: Tiling, target: Tiling, links: Links) -> int:
    """Elements that must cross the slow link: for each node those that its devices need and none of them holds."""
    edges = [
        sorted({edge for box in (*source.boxes, *target.boxes) for edge in box[dim]})
        for dim in range(len(target.boxes[0]))
    ]
    sizes = np.ones((1,) * len(edges), dtype=np.int64)
    for dim, places in enumerate(edges):
        sizes = sizes * np.diff(places).reshape([-1 if axis == dim else 1 for axis in range(len(edges))])
    total = 0
    for node in {links.node(device) for device in target.devices}:
        needed = _covered(target, links, node, edges=edges) & ~_covered(source, links, node, edges=edges)
        total += int(sizes[needed].sum())
    return total


def _covered(tiling: Tiling, links: Links, node: int, *, edges: Sequence[Sequence[int]]) -> np.ndarray:
    """Which cells of the grid of all tile edges the devices of one node hold."""
    covered = np.zeros([len(places) - 1 for places in edges], dtype=bool)
    for device, box in zip(tiling.devices, tiling.boxes, strict=True):
        if links.node(device) == node:
            cells = tuple(slice(places.index(a), places.index(b)) for places, (a, b) in zip(edges, box, strict=True))
            covered[cells] = True
    return covered
