"""Move arrays from one mesh to another, whatever the two meshes and layouts are.

In: arrays and the sharding that each is to have. Out: arrays with those shardings. `plan.py` says what crosses
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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar.errors import ArgumentError
from autopar.runtime.processes import is_global, is_here
from autopar.runtime.resharding.boxes import cutters, gatherers, joiners
from autopar.runtime.resharding.exchange import Exchange, Passage
from autopar.runtime.resharding.plan import ReshardPlan
from autopar.runtime.resharding.routes import Key, Move, Route, tiles_by_device
from autopar.runtime.resharding.tiles import Links

Array = jax.Array
PORTION_ARRAYS, PORTION_BYTES = 64, 1 << 28


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
    found = list(values)
    for numbers in _portions([n for n, value in enumerate(values) if is_global(value)], values):
        copies = reshard_all([values[n] for n in numbers], [NamedSharding(mesh, PartitionSpec())] * len(numbers))
        for n, array in zip(numbers, copies, strict=True):
            found[n] = array.addressable_data(0)
    return found


def _portions(numbers: Sequence[int], values: Sequence[Array]) -> list[list[int]]:
    """The numbers in groups of limited size: an exchange takes memory and time to compile for all that it moves."""
    portions: list[list[int]] = []
    left = 0
    for n in numbers:
        if not portions or len(portions[-1]) == PORTION_ARRAYS or values[n].nbytes > left:
            portions.append([])
            left = PORTION_BYTES
        portions[-1].append(n)
        left -= values[n].nbytes
    return portions


# Keeps compiled programs and no results, as `jax.jit` does.
@functools.lru_cache(maxsize=1024)
def _prepared(moves: tuple[Move, ...]) -> BatchResharder:
    return BatchResharder(moves, is_rare=True)


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
class Sent:
    """What `BatchResharder.send` hands to `receive`."""

    values: Mapping[Key, Array]


class BatchResharder:
    """Moves several arrays together: all copies are one call of `jax.device_put`."""

    def __init__(self, moves: Sequence[Move], *, links: Links | None = None, is_rare: bool = False) -> None:
        """Plan every move and prepare the programs; they are compiled at the first call. See `Exchange` for `is_rare`."""
        self._routes = tuple(Route(number, move, links) for number, move in enumerate(moves))
        self._tiled = tuple(route for route in self._routes if route.kind == "tiles")
        self._cuts = cutters(self._tiled)
        self._joins = joiners(self._tiled)
        self._exchanged = tuple(route for route in self._routes if route.kind == "exchange")
        self._exchange = _exchange(self._exchanged, is_rare=is_rare) if self._exchanged else None
        arriving = (route for route in self._routes if route.kind in ("copy", "tiles", "exchange"))
        self._gathers = gatherers([route for route in arriving if route.plan.cuts and is_here(route.target)])
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
            held = [tiles_by_device(values[route.number]) for route in self._exchanged]
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


def _exchange(routes: Sequence[Route], *, is_rare: bool) -> Exchange:
    devices = {number: device for route in routes for number, device in route.move.devices.items()}
    passages = [Passage(route.plan, route.frames, route.words.dtype) for route in routes]
    return Exchange(passages, devices, is_rare=is_rare)
