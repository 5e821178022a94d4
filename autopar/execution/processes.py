"""The processes that have devices of a pipeline's meshes, and how the leaves of a call reach them.

In: the stages on their devices, and the leaves of a call. Out: `PipelineProcesses`, and leaves that lie where tasks want them, or
on one device of every process. What can go wrong: processes that decide differently wait for each other without end. So every
decision depends on shardings alone, which are the same in every process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from autopar.execution.calls import Given
from autopar.execution.inputs import StepInputs
from autopar.execution.pipeline_tasks import PlannedStage
from autopar.execution.state import gather_to_one
from autopar.runtime.processes import is_global
from autopar.split_array import LeafPieces, SplitArray


@dataclasses.dataclass(frozen=True)
class PipelineProcesses:
    """The processes that have devices of each mesh, and the devices of all meshes."""

    of_mesh: tuple[frozenset[int], ...]
    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, stages: Sequence[PlannedStage]) -> PipelineProcesses:
        """Return the processes and devices of these stages."""
        devices = {stage.mesh: stage.device_mesh.devices for stage in stages}
        found = tuple(frozenset(d.process_index for d in devices[mesh].flat) for mesh in sorted(devices))
        return cls(found, tuple(d for mesh in sorted(devices) for d in devices[mesh].flat))

    @property
    def all(self) -> tuple[int, ...]:
        """Every process that has a device of some mesh."""
        return tuple(sorted(frozenset().union(*self.of_mesh)))

    @property
    def are_several(self) -> bool:
        """Whether more than one process runs the step."""
        return len(self.all) > 1


def bring_leaves(
    leaves: Sequence[Given], held: Sequence[LeafPieces], inputs: StepInputs, *, devices: Sequence[jax.Device]
) -> list[Given]:
    """Bring leaves that do not lie where tasks want them to one device of every process, which then cuts them."""
    ready = [_lies_well(leaf, pieces, inputs) for leaf, pieces in zip(leaves, held, strict=True)]
    moved = iter(gather_to_one([leaf for leaf, is_ready in zip(leaves, ready, strict=True) if not is_ready], devices))
    return [leaf if is_ready else next(moved) for leaf, is_ready in zip(leaves, ready, strict=True)]


def _lies_well(leaf: Given, pieces: LeafPieces, inputs: StepInputs) -> bool:
    """Whether a leaf is a host value, or all its parts lie where every task wants them."""
    if isinstance(leaf, SplitArray):
        parts = leaf.pieces if (leaf.dim, leaf.bounds) == (pieces.dim, pieces.bounds) else ()
    elif not is_global(leaf):
        return True
    else:
        parts = () if pieces.bounds else (leaf,)
    return bool(parts) and all(
        wanted is not None and part.sharding.is_equivalent_to(wanted, part.ndim)
        for k, part in enumerate(parts)
        for wanted in inputs.wanted[pieces.first + k]
    )
