"""Move arrays between meshes whose devices belong to several processes: one program over the devices of both sides.

In: for each array its `ReshardPlan`, its type, and this process's tiles of it. Out: the tiles of `plan.between` on this
process's target devices. Every process that has a device of either side launches the same program. In it the boxes of the
plan travel in *rounds*. In a round each device sends at most one box and receives at most one, all of one shape, so a round
is one `ppermute`, with tables that say where each device cuts its box out and where it puts the box that it got.

`jax.device_put` between processes is no alternative. It carries whole tiles only. And where one process leaves out a
transfer, or several arrays of one device each travel together, values arrive in each other's place without an error
(JAX 0.10 and 0.12, CPU).

What can go wrong: the processes launch their programs in different orders and wait for each other forever. Nothing here
can see that; the caller has to keep one order (`autopar.schedules.launch_order`). A device that sends nothing takes part
with zeros in place of a tile, which occupy as much memory as a source's tile; equal ones of one exchange are one array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.resharding.box import Box, extent, relative_to
from autopar.runtime.resharding.plan import BoxSend, ReshardPlan

Array = jax.Array
AXIS = "device"


@dataclasses.dataclass(frozen=True)
class Passage:
    """One array on its way: its plan, the boxes in which it arrives, and its type."""

    plan: ReshardPlan
    frames: Mapping[int, Box]
    dtype: np.dtype


class Exchange:
    """Moves the tiles of several arrays at once. Every process with a device of either side has to call it."""

    def __init__(
        self, passages: Sequence[Passage], devices: Mapping[int, jax.Device], *, is_rare: bool = False
    ) -> None:
        """Prepare the program; it is compiled at the first call.

        Args:
            passages: The arrays to move.
            devices: The devices of both sides, by id. The program's mesh has them in the order of their ids, because it has
                to be one order in all processes.
            is_rare: Make the zeros anew at each call, so that no memory is held between two calls.
        """
        self._passages, self._is_rare = tuple(passages), is_rare
        self.devices = tuple(devices[number] for number in sorted(devices))
        auto = (jax.sharding.AxisType.Auto,)
        self._sharding = NamedSharding(Mesh(np.array(self.devices), (AXIS,), axis_types=auto), PartitionSpec(AXIS))
        place = {device.id: n for n, device in enumerate(self.devices)}
        self._journeys = tuple(_plan_journey(passage, place) for passage in self._passages)
        here = jax.process_index()
        self._local = tuple(device for device in self.devices if device.process_index == here)
        specs = (PartitionSpec(AXIS),) * len(self._journeys)
        traced = jax.shard_map(self._body, mesh=self._sharding.mesh, in_specs=specs, out_specs=specs, check_vma=False)
        self._run = jax.jit(traced, out_shardings=(self._sharding,) * len(self._journeys))

    def __call__(self, tiles: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
        """Move the arrays without waiting: from this process's source tiles to its received tiles, by device."""
        zeros = self._make_zeros() if self._is_rare else self._kept_zeros
        operands = [self._make_operand(n, held, zeros) for n, held in enumerate(tiles)]
        return [self._collect(n, result) for n, result in enumerate(self._run(*operands))]

    def _make_operand(self, number: int, held: Mapping[int, Array], zeros: Mapping[tuple[int, int], Array]) -> Array:
        shape = self._journeys[number].tile
        tiles = [
            held[device.id].reshape(shape) if device.id in held else zeros[number, device.id] for device in self._local
        ]
        whole = (len(self.devices) * shape[0], *shape[1:])
        return jax.make_array_from_single_device_arrays(whole, self._sharding, tiles)

    @functools.cached_property
    def _kept_zeros(self) -> dict[tuple[int, int], Array]:
        return self._make_zeros()

    def _make_zeros(self) -> dict[tuple[int, int], Array]:
        """Make the zeros that devices without a source tile put in, by (array, device). Equal ones are one array."""
        made: dict[tuple[tuple[int, ...], np.dtype, int], Array] = {}
        found = {}
        for n, (passage, journey) in enumerate(zip(self._passages, self._journeys, strict=True)):
            for device in self._local:
                if device.id not in passage.plan.source.devices:
                    key = (journey.tile, passage.dtype, device.id)
                    if key not in made:
                        made[key] = jax.device_put(np.zeros(journey.tile, passage.dtype), device)
                    found[n, device.id] = made[key]
        return found

    def _collect(self, number: int, result: Array) -> dict[int, Array]:
        frames = self._passages[number].frames
        return {
            shard.device.id: shard.data.reshape(extent(frames[shard.device.id]))
            for shard in result.addressable_shards
            if shard.device.id in frames
        }

    def _body(self, *tiles: Array) -> tuple[Array, ...]:
        """Traced: turns what each device holds into what it receives."""
        return tuple(journey.trace(tile) for journey, tile in zip(self._journeys, tiles, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Round:
    """One `ppermute`: boxes of one shape. Rows of the three tables are devices in the order of the mesh."""

    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    cut_at: np.ndarray
    put_at: np.ndarray
    receives: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Journey:
    """The way of one array from tiles to frames. A scalar travels as an array of one element."""

    tile: tuple[int, ...]
    frame: tuple[int, ...]
    rounds: tuple[_Round, ...]

    def trace(self, tile: Array) -> Array:
        """Traced: turns this device's tile into its frame."""
        me = jax.lax.axis_index(AXIS)
        frame = jnp.zeros(self.frame, tile.dtype)
        for turn in self.rounds:
            starts = jnp.asarray(turn.cut_at)[me]
            box = jax.lax.dynamic_slice(tile, list(starts), turn.shape)
            arrived = jax.lax.ppermute(box, AXIS, list(turn.pairs))
            if turn.shape != self.frame:
                arrived = jax.lax.dynamic_update_slice(frame, arrived, list(jnp.asarray(turn.put_at)[me]))
            frame = jnp.where(jnp.asarray(turn.receives)[me], arrived, frame) if len(self.rounds) > 1 else arrived
        return frame


def _plan_journey(passage: Passage, place: Mapping[int, int]) -> _Journey:
    plan = passage.plan
    tile_of = dict(zip(plan.source.devices, plan.source.boxes, strict=True))
    tile = extent(plan.source.boxes[0]) or (1,)
    frame = extent(next(iter(passage.frames.values()))) or (1,)
    rounds = []
    for sends in _group_in_rounds(plan.sends):
        cut_at, put_at = (np.zeros((len(place), len(tile)), np.int32) for _ in range(2))
        receives = np.zeros(len(place), bool)
        for send in sends:
            cut_at[place[send.sender]] = [start for start, _ in relative_to(send.box, tile_of[send.sender])] or [0]
            put_at[place[send.receiver]] = [
                start for start, _ in relative_to(send.box, passage.frames[send.receiver])
            ] or [0]
            receives[place[send.receiver]] = True
        pairs = tuple((place[send.sender], place[send.receiver]) for send in sends)
        shape = extent(sends[0].box) or (1,)
        rounds.append(_Round(shape=shape, pairs=pairs, cut_at=cut_at, put_at=put_at, receives=receives))
    return _Journey(tile, frame, tuple(rounds))


def _group_in_rounds(sends: Sequence[BoxSend]) -> list[list[BoxSend]]:
    """Group the sends: each joins the first group of its shape in which both its ends are free."""
    rounds: dict[tuple[int, ...], list[list[BoxSend]]] = defaultdict(list)
    for send in sends:
        groups = rounds[extent(send.box)]
        for group in groups:
            if all(send.sender != other.sender and send.receiver != other.receiver for other in group):
                group.append(send)
                break
        else:
            groups.append([send])
    return [group for groups in rounds.values() for group in groups]
