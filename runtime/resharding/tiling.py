"""The box of an array that each device of a mesh holds: pure data, no device is touched.

What can go wrong: tiles of one side that overlap without being equal. No sharding produces them, and `Tiling` refuses them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from autopar.runtime.resharding.box import Box, index_along, part_of, volume


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The box of each device, in row-major order of the mesh. Equal boxes are replicas."""

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
        """Return the tiles of an array of this shape under a JAX sharding."""
        held: Mapping[jax.Device, tuple[slice, ...]] = dict(sharding.devices_indices_map(tuple(shape)))
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
        """Return the devices that hold each distinct tile that is not empty."""
        held: dict[Box, tuple[int, ...]] = {}
        for device, box in zip(self.devices, self.boxes, strict=True):
            if volume(box):
                held[box] = (*held.get(box, ()), device)
        return held
