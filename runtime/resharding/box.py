"""Boxes of an array: along each dimension the elements from `start` up to `stop`."""

from __future__ import annotations

import math
from collections.abc import Sequence

Interval = tuple[int, int]
Box = tuple[Interval, ...]
"""(start, stop) of each dimension."""


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box of the elements in both boxes; None if there are none."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def relative_to(box: Box, frame: Box) -> Box:
    """Return the box with positions counted from the corner of `frame`."""
    return tuple((start - corner, stop - corner) for (start, stop), (corner, _) in zip(box, frame, strict=True))


def part_of(interval: Interval, index: int, parts: int) -> Interval:
    """Return part number `index` of an interval that is cut into `parts` of equal size, rounded up."""
    start, stop = interval
    chunk = -(-(stop - start) // parts)
    return min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop)


def index_along(place: Sequence[int], axes: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """Return the number of a device among those along some mesh axes. The first axis is major."""
    index = 0
    for axis in axes:
        index = index * mesh_shape[axis] + place[axis]
    return index
