"""The driver's transfers: groups of arrays go from the mesh of the task that makes them to the mesh of their readers.

In: for every slot the shardings in which its readers want its arrays, and the arrays' shapes where they are made. Out:
`Transfers`, which the driver calls in the sending mesh's thread; it returns a `Parcel` that the receiving mesh's thread opens.
What can go wrong: the processes of a transfer prepare for different arrays; if there are several, the plan alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from autopar.runtime.processes import are_here
from autopar.runtime.resharding.reshard import Resharder, Sent, reshard
from autopar.runtime.resharding.routes import Move
from autopar.schedules.instructions import Value


class Parcel:
    """Arrays on their way; the receiving mesh's thread finishes the transfer, once."""

    def __init__(self, resharder: Resharder, sent: Sent) -> None:
        self._resharder, self._sent = resharder, sent
        self._arrays: list[jax.Array] | None = None

    def arrays(self) -> list[jax.Array]:
        """The arrays on the receiving mesh."""
        if self._arrays is None:
            self._arrays = self._resharder.receive(self._sent)
            del self._sent
        return self._arrays


Group: TypeAlias = Sequence[jax.Array] | Parcel
"""The arrays of a slot, on this mesh or on their way to it."""


def arrays_of(group: Group) -> Sequence[jax.Array]:
    """The arrays of a group; a parcel is opened."""
    return group.arrays() if isinstance(group, Parcel) else group


def in_sharding(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array in the sharding that an executable wants; between stages on one mesh they may differ."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    moved: jax.Array = jax.device_put(array, sharding) if are_here(sharding.device_set) else reshard(array, sharding)
    return moved


class Transfers:
    """Starts the transfers of a step; the transfer of a slot is prepared when it first starts."""

    def __init__(
        self,
        targets: Mapping[str, Sequence[NamedSharding]],
        shapes: Callable[[str, int], Sequence[jax.ShapeDtypeStruct]],
        *,
        several_processes: bool,
    ) -> None:
        """`targets` by slot; `shapes(slot, mesh)` are those of the slot's arrays on a mesh, with shardings."""
        self._targets, self._shapes = targets, shapes
        self._several = several_processes
        self._resharders: dict[str, Resharder] = {}

    def __call__(self, group: Group | None, value: Value, source_mesh: int, target_mesh: int) -> Parcel:
        """Start to move a group of arrays; None in place of arrays that lie on no device of this process."""
        arrays = None if group is None else arrays_of(group)
        if value.name not in self._resharders:
            self._resharders[value.name] = Resharder(self._moves(value.name, arrays, source_mesh))
        resharder = self._resharders[value.name]
        if arrays is None:
            arrays = [move.absent() for move in resharder.moves]
        return Parcel(resharder, resharder.send(arrays))

    def _moves(self, slot: str, arrays: Sequence[jax.Array] | None, source_mesh: int) -> list[Move]:
        """The moves of a transfer; if several processes take part, from facts that all of them know."""
        targets = self._targets[slot]
        if arrays is not None and not self._several:
            return [Move.of(x, target) for x, target in zip(arrays, targets, strict=True)]
        shapes = self._shapes(slot, source_mesh)
        return [Move(x.shape, x.dtype, x.sharding, target) for x, target in zip(shapes, targets, strict=True)]
