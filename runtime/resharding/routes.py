"""The route of one array to another mesh: the values that stand for it on the way, and the array at the end.

In: a `Move`, that is, an array's shape and type and its two shardings. Out: a `Route`. It knows the keys of the values on the
way (tiles of the source, boxes, tiles of the target), turns an array into the first of them and the last into an array. No
program is launched here except for PRNG keys, which travel as their words. What can go wrong: an array that is not the one
that was prepared for; the error names both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.errors import ArgumentError
from autopar.runtime.processes import absent, is_here, processes_of
from autopar.runtime.resharding.box import Box, extent
from autopar.runtime.resharding.links import Links
from autopar.runtime.resharding.plan import BoxSend, ReshardPlan
from autopar.runtime.resharding.planner import plan_reshard
from autopar.runtime.resharding.tiling import Tiling

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Move:
    """One array's shape and type, the sharding it has and the sharding it is to have."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Sharding
    target: NamedSharding

    @classmethod
    def of(cls, array: Array, target: NamedSharding) -> Move:
        """Return the move of an existing array to a sharding."""
        return cls(array.shape, array.dtype, array.sharding, target)

    @property
    def is_key(self) -> bool:
        """Whether the array holds PRNG keys, which travel as their words."""
        return bool(jnp.issubdtype(self.dtype, jax.dtypes.prng_key))

    def in_words(self) -> Move:
        """The move of the words of an array of PRNG keys; for another array the move itself."""
        if not self.is_key:
            return self
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(self.shape, self.dtype))
        return dataclasses.replace(self, shape=data.shape, dtype=data.dtype)

    def absent(self) -> Array:
        """Return a stand-in for the array in a process without a device of the source."""
        return absent(self.shape, self.dtype, self.source)

    def plan(self, links: Links | None) -> ReshardPlan:
        """Plan the boxes that cross each link."""
        source, target = (Tiling.of_sharding(sharding, self.shape) for sharding in (self.source, self.target))
        if links is None and len(self.processes) > 1:
            links = Links({device.id: device.process_index for device in self.devices.values()})
        return plan_reshard(self.shape, np.dtype(self.dtype).itemsize, source, target, links=links)

    @property
    def devices(self) -> dict[int, jax.Device]:
        """The devices of both sides, by id."""
        return {device.id: device for device in (*self.source.device_set, *self.target.device_set)}

    @property
    def processes(self) -> frozenset[int]:
        """The processes that have devices of either side."""
        return processes_of(self.source) | processes_of(self.target)


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One box of one of the arrays, from a device to another."""

    move: int
    send: BoxSend


@dataclasses.dataclass(frozen=True)
class Tile:
    """The part of one array that a device holds, before the copy or after it."""

    side: Literal["source", "target"]
    move: int
    device: int


Key = int | Parcel | Tile
"""A value on its way: an array by its number, a box, a tile."""


class Route:
    """The route of one array of those that move together."""

    def __init__(self, number: int, move: Move, links: Links | None) -> None:
        self.number = number
        self.move = move
        self.words = move.in_words()
        self.key_impl = _key_impl(move.dtype) if move.is_key else None
        self.target = self.words.target
        self.plan = self.words.plan(links)
        self.kind = self._find_kind()
        self.between = _between_sharding(self.words, self.plan)
        self.parcels = tuple(Parcel(number, send) for send in self.plan.sends) if self.kind == "tiles" else ()
        self.tile_of = dict(zip(self.plan.source.devices, self.plan.source.boxes, strict=True))
        pairs = zip(self.plan.between.devices, self.plan.between.boxes, strict=True)
        self.frames = {device: self._frame(box) for device, box in pairs}
        self.arrivals = {device: self._find_arrival(device) for device in self.frames}

    def _find_kind(self) -> Literal["empty", "elsewhere", "exchange", "copy", "tiles"]:
        """Find the part of this process: none without a device of its own; an exchange if several processes have devices."""
        if jax.process_index() not in self.move.processes:
            return "elsewhere"
        if 0 in self.words.shape:
            return "empty"
        return "exchange" if len(self.move.processes) > 1 else self.plan.kind

    def to_words(self, array: Array) -> Array:
        """Return the array, or the words of its PRNG keys. Raises ArgumentError if the array is not that of the move."""
        wanted = self.move.source
        if array.shape != self.move.shape or array.dtype != self.move.dtype:
            raise ArgumentError(
                f"array {self.number} to move is {array.dtype}{array.shape}; this transfer was prepared for "
                f"{self.move.dtype}{self.move.shape}; prepare another Resharder for it"
            )
        if array.sharding != wanted and not array.sharding.is_equivalent_to(wanted, array.ndim):
            raise ArgumentError(
                f"array {self.number} to move has the sharding {array.sharding}; this transfer was prepared for {wanted}; "
                "prepare another Resharder for it, or call reshard"
            )
        if self.key_impl is None:
            return array
        return jax.random.key_data(array) if is_here(wanted) else self.words.absent()

    def from_words(self, words: Array | None) -> Array:
        """Make the array of this move from its words. From None it makes an array of size zero."""
        if not is_here(self.target):
            return absent(self.move.shape, self.move.dtype, self.move.target)
        if words is None:
            empty = np.zeros(self.words.shape, self.words.dtype)
            words = jax.make_array_from_callback(empty.shape, self.target, lambda index: empty[index])
        return words if self.key_impl is None else jax.random.wrap_key_data(words, impl=self.key_impl)

    def tiles(self, array: Array) -> dict[Key, Array]:
        """Return the tile of each sender, and the boxes that are whole tiles."""
        held = tiles_by_device(array)
        values: dict[Key, Array] = {Tile("source", self.number, device): tile for device, tile in held.items()}
        values.update({parcel: held[parcel.send.sender] for parcel in self.parcels if not self.is_cut(parcel)})
        return values

    def is_cut(self, parcel: Parcel) -> bool:
        """Whether a box is smaller than the tile of its sender."""
        return parcel.send.box != self.tile_of[parcel.send.sender]

    def on_device(self, device: int) -> SingleDeviceSharding:
        """Return the sharding on one device of the target mesh, in the target's kind of memory."""
        (found,) = (one for one in self.target.mesh.devices.flat if one.id == device)
        return SingleDeviceSharding(found, memory_kind=self.target.memory_kind)

    def _frame(self, box: Box) -> Box:
        """Return a tile of `between`, extended to the longest length, because the last shares may be shorter."""
        frame = list(box)
        for cut in self.plan.cuts:
            start, _ = box[cut.dim]
            frame[cut.dim] = (start, start + cut.chunk)
        return tuple(frame)

    def _find_arrival(self, device: int) -> Key:
        """Return the key of the value that becomes a device's tile: the one box that it receives, or boxes joined."""
        arriving = [parcel for parcel in self.parcels if parcel.send.receiver == device]
        if len(arriving) == 1 and arriving[0].send.box == self.frames[device]:
            return arriving[0]
        return Tile("target", self.number, device)

    def assemble(self, values: Mapping[Key, Array]) -> Array:
        """Make the array under `between` from the received tiles."""
        return self.make_between([values[key] for key in self.arrivals.values()])

    def make_between(self, tiles: Sequence[Array]) -> Array:
        """Make the array under `between` of which this process holds these tiles."""
        shape = list(self.words.shape)
        for cut in self.plan.cuts:
            parts = math.prod(self.plan.target.mesh_shape[axis] for axis in cut.axes)
            shape[cut.dim] = shape[cut.dim] // self._tile_size(cut.dim) * parts * cut.chunk
        return jax.make_array_from_single_device_arrays(tuple(shape), self.between, tiles, dtype=self.words.dtype)

    def gather(self, shares: Array) -> Array:
        """Traced: make the target's tiles from their shares."""

        def complete(array: Array) -> Array:
            # The leading dimension comes last: its parts lie one behind the other and need no copy.
            for cut in reversed(self.plan.cuts):
                names = tuple(self.target.mesh.axis_names[axis] for axis in cut.axes)
                whole = jax.lax.all_gather(array, names, axis=cut.dim, tiled=True)
                array = jax.lax.slice_in_dim(whole, 0, self._tile_size(cut.dim), axis=cut.dim)
            return array

        return _per_device(complete, self.target.mesh, specs=(self.between.spec, self.target.spec))(shares)

    def _tile_size(self, dim: int) -> int:
        return extent(self.plan.target.boxes[0])[dim]


def tiles_by_device(array: Array) -> dict[int, Array]:
    """Return the part of an array on each device of this process."""
    return {shard.device.id: shard.data for shard in array.addressable_shards}


def _per_device(
    body: Callable[[Array], Array], mesh: Mesh | AbstractMesh, *, specs: tuple[PartitionSpec, PartitionSpec]
) -> Callable[[Array], Array]:
    return jax.shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def _key_impl(dtype: np.dtype) -> Hashable:
    """Return the generator of a key type. JAX tells it only of an array, so one is traced."""
    found: list[Hashable] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def _between_sharding(move: Move, plan: ReshardPlan) -> NamedSharding:
    """Return the sharding on the target mesh right after the copy."""
    target = move.target
    if not plan.cuts:
        return target
    spec: list[str | tuple[str, ...] | None] = [*target.spec, *[None] * (len(move.shape) - len(target.spec))]
    for cut in plan.cuts:
        names = spec[cut.dim] or ()
        names = (names,) if isinstance(names, str) else tuple(names)
        spec[cut.dim] = (*names, *(target.mesh.axis_names[axis] for axis in cut.axes))
    return NamedSharding(target.mesh, PartitionSpec(*spec), memory_kind=target.memory_kind)
