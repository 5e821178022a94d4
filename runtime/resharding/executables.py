"""The executables of a transfer: one per sender cuts boxes out of tiles, one per receiver joins boxes, one per mesh gathers.

In: the routes of the arrays that move together. Out: `Step`s, each a jitted function with the keys of what it takes and gives.
What can go wrong: boxes that no straight cut separates; the plans make none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.runtime.resharding.box import Box, extent, intersect, relative_to
from autopar.runtime.resharding.routes import Key, Parcel, Route, Tile

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One executable: the values that it takes and those that it gives."""

    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    run: Callable[..., Sequence[Array]]

    def apply(self, values: dict[Key, Array]) -> None:
        """Run the executable, and put its outputs in `values`, in place of older values of the same keys."""
        values.update(zip(self.outputs, self.run(*[values[key] for key in self.inputs]), strict=True))


def make_gatherers(routes: Sequence[Route]) -> list[Step]:
    """Make one executable per target mesh; it completes the tiles of all arrays there."""
    by_mesh: dict[tuple[int, ...], list[Route]] = defaultdict(list)
    for route in routes:
        by_mesh[route.plan.target.devices].append(route)
    steps = []
    for group in by_mesh.values():
        numbers = tuple(route.number for route in group)
        run = jax.jit(functools.partial(_gather_all, group), out_shardings=tuple(route.target for route in group))
        steps.append(Step(numbers, numbers, run))
    return steps


def _gather_all(routes: Sequence[Route], *arrays: Array) -> tuple[Array, ...]:
    return tuple(route.gather(array) for route, array in zip(routes, arrays, strict=True))


def make_cutters(routes: Sequence[Route]) -> list[Step]:
    """Make one executable per sender; it cuts all boxes out of the sender's tiles."""
    by_sender: dict[int, dict[Parcel, Box]] = defaultdict(dict)
    for route in routes:
        for parcel in filter(route.is_cut, route.parcels):
            by_sender[parcel.send.sender][parcel] = relative_to(parcel.send.box, route.tile_of[parcel.send.sender])
    steps = []
    for sender, boxes in by_sender.items():
        tiles: tuple[Key, ...] = tuple(dict.fromkeys(Tile("source", parcel.move, sender) for parcel in boxes))
        places = [(tiles.index(Tile("source", parcel.move, sender)), box) for parcel, box in boxes.items()]
        steps.append(Step(tiles, tuple(boxes), jax.jit(functools.partial(_cut, places))))
    return steps


def _cut(places: Sequence[tuple[int, Box]], *tiles: Array) -> list[Array]:
    """Cut boxes out of tiles; each is given by the number of its tile and its place there."""
    return [
        jax.lax.slice(tiles[number], [start for start, _ in box], [stop for _, stop in box]) for number, box in places
    ]


def make_joiners(routes: Sequence[Route]) -> list[Step]:
    """Make one executable per receiver; it joins boxes to tiles."""
    by_receiver: dict[int, list[tuple[Route, Box]]] = defaultdict(list)
    for route in routes:
        for device, frame in route.frames.items():
            if isinstance(route.arrivals[device], Tile):
                by_receiver[device].append((route, frame))
    steps = []
    for receiver, tiles in by_receiver.items():
        parcels: list[Key] = []
        joins = []
        for route, frame in tiles:
            arriving = [parcel for parcel in route.parcels if parcel.send.receiver == receiver]
            parcels += arriving
            joins.append(_Join(frame, tuple(parcel.send.box for parcel in arriving), route.words.dtype))
        outputs = tuple(route.arrivals[receiver] for route, _ in tiles)
        run = jax.jit(functools.partial(_join_all, joins), out_shardings=tiles[0][0].on_device(receiver))
        steps.append(Step(tuple(parcels), outputs, run))
    return steps


@dataclasses.dataclass(frozen=True)
class _Join:
    """The boxes that make a tile. Zeros fill the end of the tile that no box covers."""

    frame: Box
    boxes: tuple[Box, ...]
    dtype: np.dtype


def _join_all(joins: Sequence[_Join], *arrays: Array) -> list[Array]:
    remaining = iter(arrays)
    return [_join(join.frame, [(box, next(remaining)) for box in join.boxes], join.dtype) for join in joins]


def _join(frame: Box, parts: Sequence[tuple[Box, Array]], dtype: np.dtype) -> Array:
    """Join boxes to the array of a frame: cut the frame where no box is cut, join both sides, concatenate."""
    if not parts:
        return jnp.zeros(extent(frame), dtype)
    if len(parts) == 1 and parts[0][0] == frame:
        return parts[0][1]
    dim, place = _find_free_cut(frame, [box for box, _ in parts])
    start, stop = frame[dim]
    sides = []
    for interval in ((start, place), (place, stop)):
        side = (*frame[:dim], interval, *frame[dim + 1 :])
        sides.append(_join(side, [part for part in parts if intersect(part[0], side) is not None], dtype))
    return jnp.concatenate(sides, axis=dim)


def _find_free_cut(frame: Box, boxes: Sequence[Box]) -> tuple[int, int]:
    """Find a dimension and a position inside the frame at which no box is cut."""
    for dim, (start, stop) in enumerate(frame):
        for place in sorted({edge for box in boxes for edge in box[dim]}):
            if start < place < stop and not any(box[dim][0] < place < box[dim][1] for box in boxes):
                return dim, place
    raise AssertionError(f"the boxes {boxes} in {frame} cannot be separated")
