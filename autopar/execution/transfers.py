"""The driver's transfers: they move groups of arrays from the mesh of their task to the mesh of their readers.

In: for every slot the shardings in which its readers want its arrays, and the arrays' shapes where they are made. Out:
`Transfers`, which the driver calls in the sending mesh's thread; it returns a `Parcel` that the receiving mesh's thread opens.
What can go wrong: the processes of a transfer prepare for different arrays; if there are several, the plan alone decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding, Sharding

from autopar.compat import words_of
from autopar.runtime.processes import are_here
from autopar.runtime.resharding.reshard import Resharder, Sent, reshard
from autopar.runtime.resharding.routes import Move
from autopar.schedules.instructions import Value


class Parcel:
    """Arrays on their way. The thread of the receiving mesh finishes the transfer, once."""

    def __init__(self, resharder: Resharder, sent: Sent) -> None:
        self._resharder, self._sent = resharder, sent
        self._arrays: list[jax.Array] | None = None

    def arrays(self) -> list[jax.Array]:
        """Return the arrays on the receiving mesh."""
        if self._arrays is None:
            self._arrays = self._resharder.receive(self._sent)
            del self._sent
        return self._arrays


Group: TypeAlias = Sequence[jax.Array] | Parcel
"""The arrays of a slot, on this mesh or on their way to it."""


def arrays_of(group: Group) -> Sequence[jax.Array]:
    """Return the arrays of a group, and open it if it is a parcel."""
    return group.arrays() if isinstance(group, Parcel) else group


def in_sharding(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Move an array to the sharding that an executable wants. Shardings may differ between stages on one mesh."""
    lies_in = words_of(array)
    if _are_equivalent(lies_in.sharding, sharding, lies_in.ndim):
        return array
    moved: jax.Array = jax.device_put(array, sharding) if are_here(sharding.device_set) else reshard(array, sharding)
    return moved


@functools.lru_cache(maxsize=4096)
def _are_equivalent(one: Sharding, other: Sharding, ndim: int) -> bool:
    """Say whether two shardings place an array alike. It is asked for each array that a task reads, in every step."""
    return one.is_equivalent_to(other, ndim)


class Transfers:
    """Starts the transfers of a step. The transfer of a slot is prepared when it first starts."""

    def __init__(
        self,
        targets: Mapping[str, Sequence[NamedSharding]],
        shapes: Callable[[str, int], Sequence[jax.ShapeDtypeStruct]],
        *,
        several_processes: bool,
    ) -> None:
        """Take the target shardings of each slot. `shapes(slot, mesh)` returns shapes and shardings of its arrays on a mesh."""
        self._targets, self._shapes = targets, shapes
        self._several = several_processes
        self._resharders: dict[str, Resharder] = {}

    def __call__(self, group: Group | None, value: Value, source_mesh: int, target_mesh: int) -> Parcel:
        """Start to move a group of arrays. `group` is None if they lie on no device of this process."""
        arrays = None if group is None else arrays_of(group)
        if value.name not in self._resharders:
            self._resharders[value.name] = Resharder(self._moves(value.name, arrays, source_mesh))
        resharder = self._resharders[value.name]
        if arrays is None:
            arrays = [move.absent() for move in resharder.moves]
        return Parcel(resharder, resharder.send(arrays))

    def _moves(self, slot: str, arrays: Sequence[jax.Array] | None, source_mesh: int) -> list[Move]:
        """Return the moves of a transfer. If several processes take part, they follow from facts that all of them know."""
        targets = self._targets[slot]
        if arrays is not None and not self._several:
            return [Move.of(x, target) for x, target in zip(arrays, targets, strict=True)]
        shapes = self._shapes(slot, source_mesh)
        return [Move(x.shape, x.dtype, x.sharding, target) for x, target in zip(shapes, targets, strict=True)]
