"""The inter-operator problem and its answer, as data.

In: what ranges of layers cost on submeshes (`CostTable`), the cluster, the microbatches, the schedule, and what the user
has decided (`Manual`). Out: the stages chosen, and how many candidates were ruled out and why (`StageChoice`).
`choose_stages.py` solves it. What can go wrong: the arrays of a `CostTable` may disagree about which choices have a
plan; `seconds` decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.inter_op.dynamic_program.submeshes import Submesh, kind_of, size_of
from autopar.schedules.schedules import ScheduleName


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCost:
    """What some layers cost on a submesh; bytes are per device.

    `seconds_per_microbatch`: forward and backward. `once_s`: reduction of gradients and update. `transfer_s`: to the next
    stage and back. `weight_bytes`: parameters, optimizer state, accumulators. `activation_bytes`:
    what one microbatch in flight keeps. `working_bytes`: what a task needs while it runs; of the chunks of a mesh one runs at a
    time. `least_bytes`: what the stage needs in all, however few microbatches are in flight.
    """

    seconds_per_microbatch: float
    once_s: float = 0.0
    transfer_s: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    working_bytes: float = 0.0
    least_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CostTable:
    """Arrays (option, first layer, end layer) of the figures of `StageCost`; `seconds` is infinite where there is no plan."""

    seconds: np.ndarray
    once_s: np.ndarray
    transfer_s: np.ndarray
    weight_bytes: np.ndarray
    activation_bytes: np.ndarray
    working_bytes: np.ndarray
    least_bytes: np.ndarray

    @classmethod
    def of(cls, layers: int, options: int, cost_of: Callable[[int, int, int], StageCost | None]) -> CostTable:
        """From a function of (first layer, end layer, number of the option); None where there is no plan."""
        seconds, once_s, transfer_s, *sizes = np.zeros((7, options, layers, layers + 1))
        weight_bytes, activation_bytes, working_bytes, least_bytes = sizes
        seconds[:] = np.inf
        for z in range(options):
            for i in range(layers):
                for j in range(i + 1, layers + 1):
                    cost = cost_of(i, j, z)
                    if cost is not None:
                        seconds[z, i, j] = cost.seconds_per_microbatch
                        once_s[z, i, j], transfer_s[z, i, j] = cost.once_s, cost.transfer_s
                        weight_bytes[z, i, j], activation_bytes[z, i, j] = cost.weight_bytes, cost.activation_bytes
                        working_bytes[z, i, j], least_bytes[z, i, j] = cost.working_bytes, cost.least_bytes
        return cls(
            seconds=seconds,
            once_s=once_s,
            transfer_s=transfer_s,
            weight_bytes=weight_bytes,
            activation_bytes=activation_bytes,
            working_bytes=working_bytes,
            least_bytes=least_bytes,
        )

    def with_divided_state(self, devices: Sequence[int], chosen: Sequence[bool]) -> CostTable:
        """The same if chosen submeshes kept of the state what they would if they divided that of the smallest one evenly.

        `devices`, `chosen`: of each submesh; the options are these as often as there are shares of work that is done again.
        """
        kept = self.weight_bytes.reshape(-1, len(devices), *self.weight_bytes.shape[1:])
        sizes = np.array(devices)[:, None, None]
        divided = np.minimum(kept, kept[:, [int(np.argmin(devices))]] * min(devices) / sizes)
        least = np.where(np.array(chosen)[:, None, None], divided, kept).reshape(self.weight_bytes.shape)
        return dataclasses.replace(
            self, weight_bytes=least, least_bytes=np.maximum(0.0, self.least_bytes - (self.weight_bytes - least))
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StageProblem:
    """See the module's text. `options` may list a submesh several times, for instance with and without recomputation.

    `parts`: of a mixed cluster its nodes of each kind, as (nodes, devices per node, kind), in the order in which the pipeline
    goes through them; `cluster` says nothing then. No stage has devices of two kinds.
    """

    costs: CostTable
    options: tuple[Submesh, ...]
    cluster: Submesh
    microbatches: int
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    memory_bytes: float = math.inf
    parts: tuple[Submesh, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.costs.seconds.shape[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each option."""
        return tuple(map(size_of, self.options))

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return sum(map(size_of, self.parts)) if self.parts else size_of(self.cluster)

    @property
    def reach(self) -> tuple[tuple[int, int], ...]:
        """For each option, the devices that it may be among, counted from the end of the pipeline: (first, behind the last)."""
        ends, behind = {}, self.devices
        for part in self.parts:
            ends[kind_of(part)] = behind - size_of(part), behind
            behind -= size_of(part)
        return tuple(ends.get(kind_of(option), (0, self.devices)) for option in self.options)

    @property
    def machine_text(self) -> str:
        """The cluster in words."""
        return " and ".join(f"{part[0]} nodes x {part[1]} devices" for part in self.parts or (self.cluster,))


@dataclasses.dataclass(frozen=True)
class Manual:
    """What the user has decided: the number of meshes, the first layers of all stages but the first, each mesh's submesh."""

    num_stages: int | None = None
    cuts: tuple[int, ...] | None = None
    submeshes: tuple[Submesh, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenStage:
    """Layers `first_layer` to `end_layer` - 1 on a mesh; `option` is the number of the option taken.

    Where a mesh has several chunks, `in_flight` is the part of a chunk of what all have in flight together, and `working_bytes`
    of what the one that runs needs.
    """

    first_layer: int
    end_layer: int
    mesh: int
    option: int
    submesh: Submesh
    stage_s: float
    once_s: float
    in_flight: float
    weight_bytes: float
    activation_bytes: float
    working_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """Bytes per device."""
        return self.weight_bytes + self.in_flight * self.activation_bytes + self.working_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageChoice:
    """The stages in order. `bottleneck`: the number of the slowest. `bound_s`: no choice takes less. `devices`: of each mesh."""

    stages: tuple[ChosenStage, ...]
    step_s: float
    bound_s: float
    bottleneck: int
    devices: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class SlowerStages:
    """No stages take less than this many seconds."""

    at_least_s: float
