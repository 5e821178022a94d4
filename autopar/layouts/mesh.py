"""Logical meshes and the layout of a value on one.

A `LogicalMesh` is an N-D arrangement of devices. A `Layout` says, for every mesh axis, what it does to one value:
shards a dimension, replicates, or leaves partial results that a monoid (sum, max, ...) still has to combine. It is
written from the value's side: for each dimension the mesh axes that shard it, major to minor, and the partial axes with
their monoids; an axis named nowhere replicates. What can go wrong: a dimension that its axes do not divide, such as one of
no elements; `fits` tells, and no layout that fails it is ever planned.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import SupportsIndex

import jax

from autopar.errors import ArgumentError

AXIS_NAMES = ("x", "y", "z", "u", "v", "w")

Axes = tuple[int, ...]


def whole_number(value: object) -> int | None:
    """A whole number of any type, NumPy's too, as Python's own; None for truths and for all else."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array has an index only if it holds one whole number
        return None


@dataclasses.dataclass(frozen=True)
class LogicalMesh:
    """Sizes and names of the mesh axes, in row-major device order."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    @classmethod
    def of(cls, shape: Sequence[int] | Mapping[str, int]) -> LogicalMesh:
        """A mesh from sizes, named x, y, z, ..., or from a mapping of names to sizes."""
        names: tuple[object, ...] = tuple(shape) if isinstance(shape, Mapping) else AXIS_NAMES[: len(shape)]
        sizes = tuple(shape.values()) if isinstance(shape, Mapping) else tuple(shape)
        if not sizes or len(sizes) > len(AXIS_NAMES):
            raise ArgumentError(f"mesh_shape={shape!r}: a mesh has 1 to {len(AXIS_NAMES)} axes, this has {len(sizes)}")
        for name in names:
            if not isinstance(name, str) or not name:
                raise ArgumentError(
                    f"mesh_shape={shape!r}: every axis needs a name such as 'data', {name!r} is not one"
                )
        whole = tuple((whole_number(size) or 0) for size in sizes)
        for size, number in zip(sizes, whole, strict=True):
            if number < 1:
                raise ArgumentError(
                    f"mesh_shape={shape!r}: every axis needs a positive whole size, {size!r} is not one"
                )
        return cls(whole, tuple(map(str, names)))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def ways(self, axes: Collection[int]) -> int:
        """Into how many parts `axes` together split."""
        return math.prod(self.shape[axis] for axis in axes)

    def divides(self, axes: Sequence[int], size: int) -> bool:
        """Whether `axes` together cut so many elements into equal parts with something in each; nothing divides no elements."""
        ways = self.ways(axes)
        return ways == 1 or (size > 0 and size % ways == 0)

    def index(self, axis: int) -> jax.Array:
        """This device's place along an axis; only inside a per-device program."""
        index: jax.Array = jax.lax.axis_index(self.axis_names[axis])
        return index

    def names(self, axes: Sequence[int]) -> tuple[str, ...]:
        """The names of `axes`."""
        return tuple(self.axis_names[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one value lies on a mesh; see the module's text."""

    dims: tuple[Axes, ...]
    partial: tuple[tuple[int, str], ...] = ()

    @classmethod
    def replicated(cls, rank: int) -> Layout:
        """Every device holds the whole value."""
        return cls(((),) * rank)

    @property
    def partial_axes(self) -> Axes:
        """The axes along which devices hold terms still to be combined."""
        return tuple(axis for axis, _ in self.partial)

    @property
    def mixes_monoids(self) -> bool:
        """Whether it is partial under several monoids, such as sum and min.

        Then it matters which is combined first: where neutral elements of min are added up, integers wrap around.
        """
        return len({monoid for _, monoid in self.partial}) > 1

    @property
    def sharded_axes(self) -> Axes:
        """The axes that shard some dimension."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def is_ascending(self) -> bool:
        """Whether axes that share a dimension are in the mesh's order."""
        return all(list(axes) == sorted(axes) for axes in self.dims)

    def fits(self, shape: Sequence[int], mesh: LogicalMesh) -> bool:
        """Whether every dimension is divided exactly by the axes that shard it."""
        return all(mesh.divides(axes, size) for size, axes in zip(shape, self.dims, strict=True))

    def local_shape(self, shape: Sequence[int], mesh: LogicalMesh) -> tuple[int, ...]:
        """The shape that one device holds."""
        return tuple(size // mesh.ways(axes) if axes else size for size, axes in zip(shape, self.dims, strict=True))

    def local_bytes(self, shape: Sequence[int], itemsize: int, mesh: LogicalMesh) -> int:
        """The bytes that one device holds."""
        return math.prod(self.local_shape(shape, mesh)) * itemsize

    def prepend(self) -> Layout:
        """The layout of a stack of such values along a new, whole leading dimension."""
        return Layout(((), *self.dims), self.partial)

    def spec(self, mesh: LogicalMesh) -> tuple[tuple[str, ...], ...]:
        """Mesh axis names per dimension; () is a whole dimension."""
        return tuple(mesh.names(axes) for axes in self.dims)

    def show(self, mesh: LogicalMesh) -> str:
        """The layout as text, e.g. `[x, -] partial(y: sum)`."""
        dims = ", ".join("".join(mesh.names(axes)) or "-" for axes in self.dims)
        partial = ", ".join(f"{mesh.axis_names[axis]}: {monoid}" for axis, monoid in self.partial)
        return f"[{dims}]" + (f" partial({partial})" if partial else "")
