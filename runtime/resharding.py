"""Move arrays from one mesh to another, whatever the two meshes and layouts are.

In: arrays and the sharding that each is to have. Out: arrays with those shardings. `reshard_plan` says what crosses
which link; this module performs it, for many arrays at once in few calls: one executable per sender cuts boxes out of tiles, a
single `jax.device_put` copies everything, one executable per receiver joins boxes and one on the target mesh gathers shares.
Every call is asynchronous: none waits for the program that computes its operands. Layouts are never changed by an identity
under `jax.jit` with other shardings: in 0.12 XLA's partitioner aborts the process for some pairs of mesh shapes.

`send` holds the source side's calls and the copy, `receive` those of the target side, so that the thread that drives a mesh
can make all calls that run on it: two threads launching programs of several devices on the same mesh may deadlock.
What can go wrong: memory shared between source and result. A result never shares memory with its source, even on the same
device, so either may be deleted or donated. (`device_put(donate=True)` between meshes crashes in JAX 0.10 and 0.12.)
Arrays whose devices belong to several processes travel by an `Exchange`, one program for all of them, which every such process
has to launch; in a process without any of the devices, an array is one without shards, and nothing is done.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.errors import ArgumentError
from autopar.runtime.exchange import Exchange, Passage
from autopar.runtime.processes import absent, is_global, is_here, processes_of
from autopar.runtime.reshard_plan import ReshardPlan, Send, plan_reshard
from autopar.runtime.tiles import Box, Links, Tiling, extent, intersect, relative_to

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Move:
    """One array's shape and type, the sharding it has and the sharding it is to have."""

    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    target: NamedSharding

    @classmethod
    def of(cls, array: Array, target: NamedSharding) -> Move:
        """The move of an existing array."""
        return cls(array.shape, array.dtype, array.sharding, target)

    @property
    def is_key(self) -> bool:
        """Whether the array holds PRNG keys; these travel as their words."""
        return bool(jnp.issubdtype(self.dtype, jax.dtypes.prng_key))

    def words(self) -> Move:
        """The move of the numbers that the array is made of: itself unless it holds PRNG keys."""
        if not self.is_key:
            return self
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(self.shape, self.dtype))
        return dataclasses.replace(self, shape=data.shape, dtype=data.dtype)

    def absent(self) -> Array:
        """What stands for the array in a process without a device of the source."""
        return absent(self.shape, self.dtype, self.source)

    def plan(self, links: Links | None) -> ReshardPlan:
        """What crosses which link."""
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


def reshard(array: Array, target: NamedSharding) -> Array:
    """The array under another sharding, on any devices; what is prepared for it is kept for the next such array."""
    return reshard_all([array], [target])[0]


def reshard_all(arrays: Sequence[Array], targets: Sequence[NamedSharding]) -> list[Array]:
    """Several arrays under other shardings, together; what is prepared is kept for the next such arrays."""
    return _prepared(tuple(map(Move.of, arrays, targets)))(arrays)


def brought_here(values: Sequence[Any], devices: Sequence[jax.Device]) -> list[Any]:
    """Global arrays as arrays on one device of this process; other values as they are. Every process with devices calls it."""
    first: dict[int, jax.Device] = {}
    for device in devices:
        first.setdefault(device.process_index, device)
    if jax.process_index() not in first:
        raise ArgumentError(
            f"process {jax.process_index()} has none of the {len(devices)} devices of the step, they are those of processes "
            f"{', '.join(map(str, sorted(first)))}: gather there, and pass on what is wanted elsewhere"
        )
    mesh = jax.sharding.Mesh(np.array(list(first.values())), ("process",))
    numbers = [n for n, value in enumerate(values) if is_global(value)]
    found = list(values)
    copies = reshard_all([values[n] for n in numbers], [NamedSharding(mesh, PartitionSpec())] * len(numbers))
    for n, array in zip(numbers, copies, strict=True):
        found[n] = array.addressable_data(0)
    return found


# Keeps compiled programs and no results, as `jax.jit` does.
@functools.lru_cache(maxsize=1024)
def _prepared(moves: tuple[Move, ...]) -> BatchResharder:
    return BatchResharder(moves)


class Resharder:
    """Moves arrays of one shape, type and sharding; prepared once, called often, from any thread."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        source_sharding: Sharding,
        target_sharding: NamedSharding,
        *,
        links: Links | None = None,
    ) -> None:
        """Plan the move and prepare its programs; they are compiled at the first call."""
        self._batch = BatchResharder([Move(tuple(shape), dtype, source_sharding, target_sharding)], links=links)

    @property
    def plan(self) -> ReshardPlan:
        """What crosses which link."""
        return self._batch.plans[0]

    def __call__(self, array: Array) -> Array:
        """The array under the target sharding; does not wait for it to be computed."""
        return self._batch([array])[0]


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One box of one of the arrays, from a device to another."""

    move: int
    send: Send


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What one device holds of one of the arrays, before the copy or after it."""

    side: Literal["source", "target"]
    move: int
    device: int


# A value on its way: an array by its number, a box, a tile.
Key = int | Parcel | _Tile


@dataclasses.dataclass(frozen=True)
class Sent:
    """What `BatchResharder.send` hands to `receive`."""

    values: Mapping[Key, Array]


@dataclasses.dataclass(frozen=True)
class _Step:
    """One executable: the values that it takes and those that it gives."""

    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    run: Callable[..., Sequence[Array]]

    def apply(self, values: dict[Key, Array]) -> None:
        """Add the outputs, in place of older values of the same keys."""
        values.update(zip(self.outputs, self.run(*[values[key] for key in self.inputs]), strict=True))


class BatchResharder:
    """Moves several arrays together: all copies are one call of `jax.device_put`."""

    def __init__(self, moves: Sequence[Move], *, links: Links | None = None) -> None:
        """Plan every move and prepare the programs; they are compiled at the first call."""
        self._routes = tuple(_Route(number, move, links) for number, move in enumerate(moves))
        self._tiled = tuple(route for route in self._routes if route.kind == "tiles")
        self._cuts = _cutters(self._tiled)
        self._joins = _joiners(self._tiled)
        self._exchanged = tuple(route for route in self._routes if route.kind == "exchange")
        self._exchange = _exchange(self._exchanged) if self._exchanged else None
        arriving = (route for route in self._routes if route.kind in ("copy", "tiles", "exchange"))
        self._gathers = _gatherers([route for route in arriving if route.plan.cuts and is_here(route.target)])
        self._outgoing: dict[Key, Sharding] = {
            route.number: route.between for route in self._routes if route.kind == "copy"
        }
        for route in self._tiled:
            self._outgoing.update({parcel: route.on_device(parcel.send.receiver) for parcel in route.parcels})

    @property
    def moves(self) -> tuple[Move, ...]:
        """What was prepared for, array by array."""
        return tuple(route.move for route in self._routes)

    @property
    def plans(self) -> tuple[ReshardPlan, ...]:
        """What crosses which link, array by array."""
        return tuple(route.plan for route in self._routes)

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays under their target shardings, in order; does not wait for them to be computed."""
        return self.receive(self.send(arrays))

    def send(self, arrays: Sequence[Array]) -> Sent:
        """Make the calls that run on the source meshes, and start the copies.

        Processes without a device of the source pass arrays without shards, see `Move.absent`.
        """
        values: dict[Key, Array] = {
            route.number: route.opened(array)
            for route, array in zip(self._routes, arrays, strict=True)
            if route.kind != "elsewhere"
        }
        for route in self._tiled:
            values.update(route.tiles(values[route.number]))
        for step in self._cuts:
            step.apply(values)
        copies = jax.device_put([values[key] for key in self._outgoing], [*self._outgoing.values()], may_alias=False)
        sent: dict[Key, Array] = dict(zip(self._outgoing, copies, strict=True))
        if self._exchange is not None:
            held = [_tiles_by_device(values[route.number]) for route in self._exchanged]
            for route, tiles in zip(self._exchanged, self._exchange(held), strict=True):
                sent[route.number] = route.between_array([tiles[device] for device in route.frames if device in tiles])
        return Sent(sent)

    def receive(self, sent: Sent) -> list[Array]:
        """Make the calls that run on the target meshes."""
        values = dict(sent.values)
        for step in self._joins:
            step.apply(values)
        for route in self._tiled:
            values[route.number] = route.assembled(values)
        for step in self._gathers:
            step.apply(values)
        return [route.closed(values.get(route.number)) for route in self._routes]


class _Route:
    """How one array of a batch moves."""

    def __init__(self, number: int, move: Move, links: Links | None) -> None:
        self.number = number
        self.move = move
        self.words = move.words()
        self.key_impl = _key_impl(move.dtype) if move.is_key else None
        self.target = self.words.target
        self.plan = self.words.plan(links)
        self.kind = self._kind()
        self.between = _between_sharding(self.words, self.plan)
        self.parcels = tuple(Parcel(number, send) for send in self.plan.sends) if self.kind == "tiles" else ()
        self.tile_of = dict(zip(self.plan.source.devices, self.plan.source.boxes, strict=True))
        pairs = zip(self.plan.between.devices, self.plan.between.boxes, strict=True)
        self.frames = {device: self._frame(box) for device, box in pairs}
        self.arrivals = {device: self._arrival(device) for device in self.frames}

    def _kind(self) -> Literal["empty", "elsewhere", "exchange", "copy", "tiles"]:
        """What this process does: nothing if all devices are those of others; they work together if there are several."""
        if jax.process_index() not in self.move.processes:
            return "elsewhere"
        if 0 in self.words.shape:
            return "empty"
        return "exchange" if len(self.move.processes) > 1 else self.plan.kind

    def opened(self, array: Array) -> Array:
        """The numbers of an array of this move."""
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

    def closed(self, words: Array | None) -> Array:
        """The array of this move that is made of these numbers; an array of size zero is made of none."""
        if not is_here(self.target):
            return absent(self.move.shape, self.move.dtype, self.move.target)
        if words is None:
            empty = np.zeros(self.words.shape, self.words.dtype)
            words = jax.make_array_from_callback(empty.shape, self.target, lambda index: empty[index])
        return words if self.key_impl is None else jax.random.wrap_key_data(words, impl=self.key_impl)

    def tiles(self, array: Array) -> dict[Key, Array]:
        """What each sender holds, and the boxes among it that are whole tiles."""
        held = _tiles_by_device(array)
        values: dict[Key, Array] = {_Tile("source", self.number, device): tile for device, tile in held.items()}
        values.update({parcel: held[parcel.send.sender] for parcel in self.parcels if not self.is_cut(parcel)})
        return values

    def is_cut(self, parcel: Parcel) -> bool:
        """Whether a box is less than its sender holds."""
        return parcel.send.box != self.tile_of[parcel.send.sender]

    def on_device(self, device: int) -> SingleDeviceSharding:
        """One device of the target mesh, in the target's kind of memory."""
        (found,) = (one for one in self.target.mesh.devices.flat if one.id == device)
        return SingleDeviceSharding(found, memory_kind=self.target.memory_kind)

    def _frame(self, box: Box) -> Box:
        """A target device's tile of `between`, as long as the longest: the last shares may be shorter."""
        frame = list(box)
        for cut in self.plan.cuts:
            start, _ = box[cut.dim]
            frame[cut.dim] = (start, start + cut.chunk)
        return tuple(frame)

    def _arrival(self, device: int) -> Key:
        """What becomes a device's tile: the one box that it receives, or boxes joined."""
        arriving = [parcel for parcel in self.parcels if parcel.send.receiver == device]
        if len(arriving) == 1 and arriving[0].send.box == self.frames[device]:
            return arriving[0]
        return _Tile("target", self.number, device)

    def assembled(self, values: Mapping[Key, Array]) -> Array:
        """The array under `between` that the received tiles make."""
        return self.between_array([values[key] for key in self.arrivals.values()])

    def between_array(self, tiles: Sequence[Array]) -> Array:
        """The array under `between` of which this process holds these tiles."""
        shape = list(self.words.shape)
        for cut in self.plan.cuts:
            parts = math.prod(self.plan.target.mesh_shape[axis] for axis in cut.axes)
            shape[cut.dim] = shape[cut.dim] // self._tile_size(cut.dim) * parts * cut.chunk
        return jax.make_array_from_single_device_arrays(tuple(shape), self.between, tiles, dtype=self.words.dtype)

    def gathered(self, shares: Array) -> Array:
        """Traced: the target's tiles from their shares."""

        def gather(array: Array) -> Array:
            # The leading dimension last: there the parts lie one behind the other and need no copy.
            for cut in reversed(self.plan.cuts):
                names = tuple(self.target.mesh.axis_names[axis] for axis in cut.axes)
                whole = jax.lax.all_gather(array, names, axis=cut.dim, tiled=True)
                array = jax.lax.slice_in_dim(whole, 0, self._tile_size(cut.dim), axis=cut.dim)
            return array

        return _per_device(gather, self.target.mesh, specs=(self.between.spec, self.target.spec))(shares)

    def _tile_size(self, dim: int) -> int:
        return extent(self.plan.target.boxes[0])[dim]


def _exchange(routes: Sequence[_Route]) -> Exchange:
    devices = {number: device for route in routes for number, device in route.move.devices.items()}
    return Exchange([Passage(route.plan, route.frames, route.words.dtype) for route in routes], devices)


def _tiles_by_device(array: Array) -> dict[int, Array]:
    return {shard.device.id: shard.data for shard in array.addressable_shards}


def _per_device(
    body: Callable[[Array], Array], mesh: Any, *, specs: tuple[PartitionSpec, PartitionSpec]
) -> Callable[[Array], Array]:
    return jax.shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def _key_impl(dtype: Any) -> Any:
    """The generator of a key type, which JAX tells of an array or a traced one."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def _between_sharding(move: Move, plan: ReshardPlan) -> NamedSharding:
    """The sharding on the target mesh right after the copy."""
    target = move.target
    if not plan.cuts:
        return target
    spec: list[Any] = [*target.spec, *[None] * (len(move.shape) - len(target.spec))]
    for cut in plan.cuts:
        names = spec[cut.dim] or ()
        names = (names,) if isinstance(names, str) else tuple(names)
        spec[cut.dim] = (*names, *(target.mesh.axis_names[axis] for axis in cut.axes))
    return NamedSharding(target.mesh, PartitionSpec(*spec), memory_kind=target.memory_kind)


def _gatherers(routes: Sequence[_Route]) -> list[_Step]:
    """One executable per target mesh that completes the tiles of all arrays there."""
    by_mesh: dict[tuple[int, ...], list[_Route]] = defaultdict(list)
    for route in routes:
        by_mesh[route.plan.target.devices].append(route)
    steps = []
    for group in by_mesh.values():
        numbers = tuple(route.number for route in group)
        run = jax.jit(functools.partial(_gather_all, group), out_shardings=tuple(route.target for route in group))
        steps.append(_Step(numbers, numbers, run))
    return steps


def _gather_all(routes: Sequence[_Route], *arrays: Array) -> tuple[Array, ...]:
    return tuple(route.gathered(array) for route, array in zip(routes, arrays, strict=True))


def _cutters(routes: Sequence[_Route]) -> list[_Step]:
    """One executable per sender that cuts all boxes out of its tiles."""
    by_sender: dict[int, dict[Parcel, Box]] = defaultdict(dict)
    for route in routes:
        for parcel in filter(route.is_cut, route.parcels):
            by_sender[parcel.send.sender][parcel] = relative_to(parcel.send.box, route.tile_of[parcel.send.sender])
    steps = []
    for sender, boxes in by_sender.items():
        tiles: tuple[Key, ...] = tuple(dict.fromkeys(_Tile("source", parcel.move, sender) for parcel in boxes))
        places = [(tiles.index(_Tile("source", parcel.move, sender)), box) for parcel, box in boxes.items()]
        steps.append(_Step(tiles, tuple(boxes), jax.jit(functools.partial(_cut, places))))
    return steps


def _cut(places: Sequence[tuple[int, Box]], *tiles: Array) -> list[Array]:
    """Boxes of tiles, each given by its tile's number and its place there."""
    return [
        jax.lax.slice(tiles[number], [start for start, _ in box], [stop for _, stop in box]) for number, box in places
    ]


def _joiners(routes: Sequence[_Route]) -> list[_Step]:
    """One executable per receiver that joins boxes to tiles."""
    by_receiver: dict[int, list[tuple[_Route, Box]]] = defaultdict(list)
    for route in routes:
        for device, frame in route.frames.items():
            if isinstance(route.arrivals[device], _Tile):
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
        steps.append(_Step(tuple(parcels), outputs, run))
    return steps


@dataclasses.dataclass(frozen=True)
class _Join:
    """The boxes that make a tile; what they leave open at its end is filled with zeros."""

    frame: Box
    boxes: tuple[Box, ...]
    dtype: Any


def _join_all(joins: Sequence[_Join], *arrays: Array) -> list[Array]:
    remaining = iter(arrays)
    return [_join(join.frame, [(box, next(remaining)) for box in join.boxes], join.dtype) for join in joins]


def _join(frame: Box, parts: Sequence[tuple[Box, Array]], dtype: Any) -> Array:
    """The array of a frame from boxes in it: cut the frame where no box is cut, join both sides, concatenate."""
    if not parts:
        return jnp.zeros(extent(frame), dtype)
    if len(parts) == 1 and parts[0][0] == frame:
        return parts[0][1]
    dim, place = _free_cut(frame, [box for box, _ in parts])
    start, stop = frame[dim]
    sides = []
    for interval in ((start, place), (place, stop)):
        side = (*frame[:dim], interval, *frame[dim + 1 :])
        sides.append(_join(side, [part for part in parts if intersect(part[0], side) is not None], dtype))
    return jnp.concatenate(sides, axis=dim)


def _free_cut(frame: Box, boxes: Sequence[Box]) -> tuple[int, int]:
    """A dimension and a place inside the frame at which no box is cut."""
    for dim, (start, stop) in enumerate(frame):
        for place in sorted({edge for box in boxes for edge in box[dim]}):
            if start < place < stop and not any(box[dim][0] < place < box[dim][1] for box in boxes):
                return dim, place
    raise AssertionError(f"the boxes {boxes} in {frame} cannot be separated")
