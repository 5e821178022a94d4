"""Move arrays from one mesh to another, whatever the two meshes and layouts are.

In: arrays, and the sharding that each is to have. Out: arrays with those shardings. `planner.py` decides what crosses which
link; this module performs it, for many arrays at once in few calls. One executable per sender cuts boxes out of tiles, a
single `jax.device_put` copies everything, one executable per receiver joins boxes, and one on the target mesh gathers shares.
Every call is asynchronous: none waits for the program that computes its operands. Layouts are never changed by an identity
under `jax.jit` with other shardings: in 0.12 XLA's partitioner aborts the process for some pairs of mesh shapes.

`send` holds the source side's calls and the copy, `receive` those of the target side, so that the thread that drives a mesh
can make all calls that run on it: two threads that launch programs of several devices on the same mesh may deadlock.

What can go wrong: memory shared between source and result. A result never shares memory with its source, even on the same
device, so either may be deleted or donated. (`device_put(donate=True)` between meshes crashes in JAX 0.10 and 0.12.)

Arrays whose devices belong to several processes travel by an `Exchange`, one program for all of them, which every such
process has to launch. In a process without any of the devices, an array is one without shards, and nothing is done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar.errors import ArgumentError
from autopar.runtime.processes import is_global, is_here
from autopar.runtime.resharding.exchange import Exchange, Passage
from autopar.runtime.resharding.executables import make_cutters, make_gatherers, make_joiners
from autopar.runtime.resharding.links import Links
from autopar.runtime.resharding.plan import ReshardPlan
from autopar.runtime.resharding.routes import Key, Move, Route, tiles_by_device
from autopar.runtime.resharding.tuning import TUNING

Array = jax.Array


def reshard(array: Array, target: NamedSharding) -> Array:
    """Move an array to another sharding, on any devices. Its compiled programs are kept for the next such array."""
    return reshard_all([array], [target])[0]


def reshard_all(arrays: Sequence[Array], targets: Sequence[NamedSharding]) -> list[Array]:
    """Move several arrays to other shardings together. The compiled programs are kept for the next such arrays."""
    return _prepare(tuple(map(Move.of, arrays, targets)))(arrays)


def bring_here(values: Sequence[object], devices: Sequence[jax.Device]) -> list[object]:
    """Bring global arrays to one device of this process; other values stay. Every process with devices has to call it."""
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
    arrays = {n: value for n, value in enumerate(values) if is_global(value)}
    for numbers in _group_in_portions(arrays):
        copies = reshard_all([arrays[n] for n in numbers], [NamedSharding(mesh, PartitionSpec())] * len(numbers))
        for n, array in zip(numbers, copies, strict=True):
            found[n] = array.addressable_data(0)
    return found


def _group_in_portions(arrays: Mapping[int, Array]) -> list[list[int]]:
    """Group the numbers so that one exchange does not take too much memory, or too long to compile."""
    portions: list[list[int]] = []
    left = 0
    for n, array in arrays.items():
        if not portions or len(portions[-1]) == TUNING.portion_arrays or array.nbytes > left:
            portions.append([])
            left = TUNING.portion_bytes
        portions[-1].append(n)
        left -= array.nbytes
    return portions


@functools.lru_cache(maxsize=1024)
def _prepare(moves: tuple[Move, ...]) -> Resharder:
    """Prepare moves. The cache keeps compiled programs and no results, as `jax.jit` does."""
    return Resharder(moves, is_rare=True)


@dataclasses.dataclass(frozen=True)
class Sent:
    """The values that `Resharder.send` passes to `receive`."""

    values: Mapping[Key, Array]


class Resharder:
    """Moves several arrays together: all copies are one call of `jax.device_put`. May be called from any thread."""

    def __init__(self, moves: Sequence[Move], *, links: Links | None = None, is_rare: bool = False) -> None:
        """Plan every move and prepare the programs; they are compiled at the first call.

        Args:
            moves: Shape, type, and the two shardings of each array.
            links: Which devices share a node. By default each target mesh is one node and all devices outside it another;
                where several processes take part, each process is a node.
            is_rare: See `Exchange`.
        """
        self._routes = tuple(Route(number, move, links) for number, move in enumerate(moves))
        self._tiled = tuple(route for route in self._routes if route.kind == "tiles")
        self._cuts = make_cutters(self._tiled)
        self._joins = make_joiners(self._tiled)
        self._exchanged = tuple(route for route in self._routes if route.kind == "exchange")
        self._exchange = _make_exchange(self._exchanged, is_rare=is_rare) if self._exchanged else None
        arriving = (route for route in self._routes if route.kind in ("copy", "tiles", "exchange"))
        self._gathers = make_gatherers([route for route in arriving if route.plan.cuts and is_here(route.target)])
        self._outgoing: dict[Key, Sharding] = {
            route.number: route.between for route in self._routes if route.kind == "copy"
        }
        for route in self._tiled:
            self._outgoing.update({parcel: route.on_device(parcel.send.receiver) for parcel in route.parcels})

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves for which this was prepared, one for each array."""
        return tuple(route.move for route in self._routes)

    @property
    def plans(self) -> tuple[ReshardPlan, ...]:
        """The plans of the moves, one for each array."""
        return tuple(route.plan for route in self._routes)

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Move the arrays to their target shardings, without waiting for their computation."""
        return self.receive(self.send(arrays))

    def send(self, arrays: Sequence[Array]) -> Sent:
        """Make the calls that run on the source meshes, and start the copies.

        Processes without a device of the source pass arrays without shards: `Move.absent`.
        """
        values: dict[Key, Array] = {
            route.number: route.to_words(array)
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
                sent[route.number] = route.make_between([tiles[device] for device in route.frames if device in tiles])
        return Sent(sent)

    def receive(self, sent: Sent) -> list[Array]:
        """Make the calls that run on the target meshes."""
        values = dict(sent.values)
        for step in self._joins:
            step.apply(values)
        for route in self._tiled:
            values[route.number] = route.assemble(values)
        for step in self._gathers:
            step.apply(values)
        return [route.from_words(values.get(route.number)) for route in self._routes]


def _make_exchange(routes: Sequence[Route], *, is_rare: bool) -> Exchange:
    devices = {number: device for route in routes for number, device in route.move.devices.items()}
    passages = [Passage(route.plan, route.frames, route.words.dtype) for route in routes]
    return Exchange(passages, devices, is_rare=is_rare)
