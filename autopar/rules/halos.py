"""Neighbour exchange: a window that slides along a dimension which devices hold in parts.

In: how a window slides along a dimension, a `Slide`; local operands. Out: operands with the rows of the neighbours that their
windows reach, the padding with which the operation then gives the local result, and what that sends. Rows are those of one
device's part; each device sends some of its last rows to the next one and of its first to the one before, or further where
the parts are shorter than the reach. Outside of the whole dimension are rows of padding.

Parts line up if a device's windows begin as far from the first row that it holds as those of any other: if `stride * steps` is
`dilation * size`. Where they do not, as in a convolution without padding, each device gets as many rows as any of them needs, and
takes those that its windows look at. Rows with holes that do not line up are left whole. What can go wrong: padding that is not
zero, as a maximum has; `fill` is its value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.layouts.mesh import Axes, LogicalMesh
from autopar.layouts.perform import is_shorter_than_a_byte
from autopar.rules.exchanges import Exchange
from autopar.rules.on_shard import LocalCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slide:
    """How a window slides along one dimension, which has positions: rows with dilation - 1 holes after each.

    Attributes:
        size: rows of the dimension.
        steps: how many places the window takes; these are divided together with the rows.
        stride: positions from one place to the next.
        span: positions from the first that a window looks at to the last, both included.
        low: positions of padding before the first row.
        dilation: positions of a row.
    """

    size: int
    steps: int
    stride: int
    span: int
    low: int
    dilation: int = 1

    @property
    def lines_up(self) -> bool:
        """Whether the windows of each device begin equally far from the first row that it holds."""
        return self.steps > 1 and self.stride * self.steps == self.dilation * self.size

    @property
    def may_be_divided(self) -> bool:
        """Whether the dimension may be divided together with the places of the window."""
        is_near = self.dilation == 1 and abs(self.stride * self.steps - self.size) < self.span
        return self.lines_up or (self.steps > 1 and is_near)

    def reach(self, ways: int) -> tuple[int, int]:
        """Rows that one of so many devices needs before its own and after them, whichever it is."""
        if self.lines_up:
            after = (self.span - 1 - self.low - self.stride) // self.dilation + 1
            return max(0, self.low // self.dilation), max(0, after)
        first, last = -self.low, (ways - 1) * self.shift(ways) - self.low
        return max(0, -min(first, last)), max(0, max(first, last) + self.rows(ways) - self.size // ways)

    def rows(self, ways: int) -> int:
        """Positions at which the windows of one of so many devices look."""
        return self.stride * (self.steps // ways - 1) + self.span

    def shift(self, ways: int) -> int:
        """How much later in its rows than the device before it one of so many devices begins to look; rows have no holes."""
        return (self.stride * self.steps - self.size) // ways

    def padding(self, ways: int) -> tuple[int, int]:
        """Positions to be padded around the rows that one of so many devices has with what it needs; negative ones are cut."""
        before, after = self.reach(ways)
        rows = self.size // ways + before + after
        low = self.low - before * self.dilation
        return low, self.rows(ways) - ((rows - 1) * self.dilation + 1) - low


def with_neighbours(
    call: LocalCall, x: jax.Array, dim: int, factor: str, slide: Slide, *, fill: float | int | None = None
) -> tuple[jax.Array, tuple[int, int]]:
    """(the rows at which a device's windows look, the padding that these still need along the dimension)."""
    ways = call.ways(factor)
    reach = slide.reach(ways)
    extended = extend(call, x, dim, factor, reach, fill=fill)
    if slide.lines_up:
        return extended, slide.padding(ways)
    start = reach[0] - slide.low + call.shard_index(factor) * slide.shift(ways)
    return lax.dynamic_slice_in_dim(extended, start, slide.rows(ways), axis=dim), (0, 0)


def extend(
    call: LocalCall, x: jax.Array, dim: int, factor: str, reach: tuple[int, int], *, fill: float | int | None = None
) -> jax.Array:
    """An array with as many of its neighbours' rows before and after its own along a dimension; outside are zeros, or `fill`."""
    names, ranks = call.line(factor)
    index, ways = call.shard_index(factor), len(ranks)

    def receive(rows: jax.Array, distance: int) -> jax.Array:
        """The same of the device at a distance."""
        pairs = [(ranks[i], ranks[i - distance]) for i in range(ways) if 0 <= i - distance < ways]
        sent = send(rows, names, pairs) if pairs else jnp.zeros_like(rows)
        if fill is None:
            return sent
        is_inside = jnp.logical_and(index + distance >= 0, index + distance < ways)
        return jnp.where(is_inside, sent, jnp.asarray(fill, x.dtype))

    size, (before, after) = x.shape[dim], reach
    first = [receive(lax.slice_in_dim(x, size - n, size, axis=dim), -hop) for hop, n in _hops(before, size)]
    last = [receive(lax.slice_in_dim(x, 0, n, axis=dim), hop) for hop, n in _hops(after, size)]
    return jnp.concatenate([*reversed(first), x, *last], axis=dim) if first or last else x


def send(rows: jax.Array, names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """The rows that another device sends, by pairs (from, to) of places along mesh axes; zeros if none does."""
    bytes_ = rows.astype(jnp.int8) if is_shorter_than_a_byte(rows) else rows
    received: jax.Array = lax.ppermute(bytes_, names, pairs).astype(rows.dtype)
    return received


def sent(
    place: int,
    shape: Sequence[int],
    itemsize: int,
    reaches: Mapping[int, tuple[Axes, tuple[int, int]]],
    mesh: LogicalMesh,
    *,
    fill: float | None = None,
) -> Iterator[Exchange]:
    """What a device sends while `extend` goes through the dimensions of a local operand, in this order.

    reaches: for a dimension the axes that divide it, and its reach.
    """
    local, there = list(shape), list[Hashable]()
    for dim, (axes, reach) in reaches.items():
        rest = math.prod(n for d, n in enumerate(local) if d != dim) * itemsize
        for side, rows in enumerate(reach):
            for hop, n in _hops(rows, local[dim]):
                part = (dim, side, hop, n, *there)
                if hop < mesh.ways(axes):
                    along = crossed(axes, hop, mesh)
                    yield Exchange(value=place, axes=along, bytes=n * rest, count=1, is_beside_work=False, part=part)
        local[dim] += sum(reach)
        there.append((dim, reach, fill))


def crossed(axes: Axes, distance: int, mesh: LogicalMesh) -> Axes:
    """Of the axes that divide a dimension, major to minor, those along which devices at a distance in it differ."""
    while axes and distance % mesh.shape[axes[-1]] == 0:
        axes, distance = axes[:-1], distance // mesh.shape[axes[-1]]
    return axes


def _hops(rows: int, size: int) -> list[tuple[int, int]]:
    """(distance, rows) of the devices that have the rows, the nearest first, if each has `size`."""
    return [(hop, min(size, rows - (hop - 1) * size)) for hop in range(1, math.ceil(rows / size) + 1)]
