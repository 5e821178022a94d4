"""What one pipeline stage does in a training step, and what holds for all stages.

In: the work of layers and ends, the ranks that share it, the formats of states. Out: frozen values that `training_step` prices.
What can go wrong: parameters that embedding and head share; who makes the stages counts them once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from autopar.simulate.closed_forms.memory import StateBytes
from autopar.simulate.closed_forms.operations import Work

Precision = Literal["fp16", "bf16", "fp32", "fp8"]
"""Of products; fp8 is bf16 but for those of the linear layers of blocks."""
Optimizer = Literal["adam", "momentum", "adafactor"]
OverlapOption = Literal["usual", "blocking", "none", "gradients", "tensor", "all"]
"""What a run's framework lets hide: as the cluster file says; nothing at all, as launches wait for each other; nothing over data
ranks, whose reductions begin when the last backward pass has ended; gradients and parameters, bucket by bucket; tensor-parallel
collectives, cut up with their products; these and gradients."""
ReduceOption = Literal["usual", "once", "each"]
"""When gradients are summed over data ranks: as ZeRO needs it, for every microbatch of ZeRO 2 and 3 and else once a step; once a
step, until when each rank adds up all of them (PyTorch's `no_sync`); in every microbatch."""
OffloadOption = Literal["none", "optimizer"]
"""What lies in the host's memory between steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageWork:
    """One pipeline stage: `layers` are (work of one, how many), in order; `first` and `last` come once per microbatch.

    `shard_ranks`: the data ranks among which ZeRO divides states, all unless stated. `context_ranks` divide the
    sequence and share states with the data ranks. `device_kind`: of a mixed cluster.
    """

    layers: tuple[tuple[Work, int], ...]
    data_ranks: int
    tensor_ranks: int = 1
    expert_ranks: int = 1
    context_ranks: int = 1
    shard_ranks: int | None = None
    device_kind: str = ""
    first: Work | None = None
    last: Work | None = None

    @property
    def owners(self) -> int:
        """Ranks among which ZeRO divides states: data ranks, each with its context ranks."""
        return (self.shard_ranks or self.data_ranks) * self.context_ranks

    @property
    def copies(self) -> int:
        """How many groups of data ranks hold the states each for itself; 1 but for hybrid sharding."""
        return self.data_ranks // (self.shard_ranks or self.data_ranks)

    @property
    def devices(self) -> int:
        """Devices of this stage."""
        return self.data_ranks * self.context_ranks * self.tensor_ranks

    @property
    def layer_count(self) -> int:
        """Layers without embedding and head."""
        return sum(count for _, count in self.layers)

    @property
    def works(self) -> tuple[tuple[Work, int], ...]:
        """Everything, in order."""
        before = ((self.first, 1),) if self.first else ()
        after = ((self.last, 1),) if self.last else ()
        return (*before, *self.layers, *after)

    @property
    def parameters(self) -> float:
        """Parameters that one device holds before ZeRO divides them."""
        return sum(work.parameters * count for work, count in self.works)

    @property
    def expert_parameters(self) -> float:
        """The part of `parameters` that belongs to experts."""
        return sum(work.expert_parameters * count for work, count in self.works)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What holds for all stages."""

    microbatches: int
    precision: Precision
    states: StateBytes
    virtual_stages: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    optimizer: Optimizer = "adam"
    overlap: OverlapOption = "usual"
    reduce_gradients: ReduceOption = "usual"
    offload: OffloadOption = "none"
    bucket_bytes: float = 0.0

    @property
    def element_bytes(self) -> int:
        """Of parameters and activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def reduces_each(self) -> bool:
        """Whether every microbatch sums gradients over data ranks."""
        return self.zero_stage >= 2 if self.reduce_gradients == "usual" else self.reduce_gradients == "each"

    @property
    def whole_gradients(self) -> bool:
        """Whether every rank adds up all gradients of its microbatches; only ZeRO 2 and 3 can do with a part."""
        return self.zero_stage < 2 or not self.reduces_each

    def offloaded_bytes(self, parameters: float, owners: int) -> float:
        """Bytes of so many parameters' optimizer states that each of the ranks that may share them has in the host's memory."""
        if self.offload == "none":
            return 0.0
        return self.states.optimizer * parameters / (owners if self.zero_stage >= 1 else 1)
