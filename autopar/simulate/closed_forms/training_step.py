"""A training step under a plan: seconds, bytes and where they go.

In: for each pipeline stage the work of its layers and how many devices share it (`StageWork`), the schedule and the formats
of states (`StepPlan`), a cluster. Out: a `StepPrediction`. With F_i and B_i seconds of one microbatch on stage i, forward and
backward with what is recomputed, exposed collectives and sends included,

    step = pipeline(F_i + B_i) + max_i (gradient reduction that backward does not hide + optimizer)

The pipeline's time is that of `schedule_time`, the hiding that of `overlap`, the bytes those of `memory`. Gradients are
reduced once per step, or for ZeRO 2 and 3, which keep only a part of them, for every microbatch, unless the plan says when.
What can go wrong: a stage whose layers differ much in memory: the peak takes a mean layer for interleaved schedules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from autopar.cost_model import overlap
from autopar.cost_model.machine import Cluster, Overlap
from autopar.cost_model.overlap import Communication, Kind
from autopar.simulate.closed_forms.data_reductions import PassSeconds, exchange_each_microbatch, reduce_once
from autopar.simulate.closed_forms.memory import layers_in_flight
from autopar.simulate.closed_forms.operations import Exchange, Group, MatrixProduct, Operation
from autopar.simulate.closed_forms.prices import DTYPES, FITTED, NARROW, InTraining, StagePrices, multiplies_narrow
from autopar.simulate.closed_forms.schedule_time import pipeline_s
from autopar.simulate.closed_forms.stage_work import StageWork, StepPlan

# Bytes that an optimizer moves per parameter. Adam reads a gradient, a parameter and two moments and writes three of
# them (28); mixed precision also looks for infinities while it unscales (8), takes the norm (4), clips (8) and writes
# half-precision parameters (6). Momentum has one moment; Adafactor none, but reads the gradient once more.
_OPTIMIZER_BYTES = {"adam": (54.0, 28.0), "momentum": (46.0, 20.0), "adafactor": (42.0, 16.0)}  # mixed, float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes on the fullest device."""

    states_bytes: float
    layer_states_bytes: float
    activation_bytes: float
    transient_bytes: float
    stage: int

    @property
    def peak_bytes(self) -> float:
        """All of them together."""
        return self.states_bytes + self.activation_bytes + self.transient_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Seconds of a step and their parts; the parts of the slowest stage add up to the step.

    `communication`: by kind, in all and exposed, on the slowest stage, per step. `compute_s` has no communication, bubble or
    optimizer in it.
    """

    step_s: float
    compute_s: float
    bubble_s: float
    optimizer_s: float
    communication: Mapping[Kind, Communication]
    memory: MemoryPrediction
    fits: bool

    @property
    def comm_s(self) -> float:
        """Seconds of communication, hidden or not."""
        return sum(part.total_s for part in self.communication.values())

    @property
    def exposed_comm_s(self) -> float:
        """Seconds that the step waits for communication."""
        return sum(part.exposed_s for part in self.communication.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StageTime:
    """One stage: seconds per microbatch, and per step what comes after the pipeline."""

    forward_s: float
    backward_s: float
    per_microbatch: tuple[Communication, ...]
    per_step: tuple[Communication, ...]
    optimizer_s: float

    @property
    def microbatch_s(self) -> float:
        return self.forward_s + self.backward_s + sum(part.exposed_s for part in self.per_microbatch)

    @property
    def after_s(self) -> float:
        return self.optimizer_s + sum(part.exposed_s for part in self.per_step)


_KINDS: Mapping[Group, Kind] = {
    "tensor": "tensor",
    "context": "context",
    "data": "data_parallel",
    "expert": "expert",
}
_Crossings: TypeAlias = tuple[bool | None, bool | None]
"""Whether the boundaries before and after a stage lie between nodes; None where there is none."""


def predict_step(
    cluster: Cluster, plan: StepPlan, stages: Sequence[StageWork], *, reached: InTraining = FITTED
) -> StepPrediction:
    """Predict one step. Raises ValueError if the stages need more devices than the cluster can join."""
    cluster = dataclasses.replace(cluster, overlap=_overlap(cluster.overlap, plan))
    total = sum(stage.devices for stage in stages)
    starts = [sum(stage.devices for stage in stages[:i]) for i in range(len(stages) + 1)]
    crossings = [_crosses_node(cluster, start, total) for start in starts]
    between = [(crossings[i], crossings[i + 1]) for i in range(len(stages))]
    known: dict[tuple[int, _Crossings], _StageTime] = {}
    for stage, ends in zip(stages, between, strict=True):
        if (id(stage), ends) not in known:
            prices = _prices(_machine_of(cluster, stage), plan, stage, total, reached)
            known[id(stage), ends] = _stage_time(prices, plan, stage, ends)
    times = [known[id(stage), ends] for stage, ends in zip(stages, between, strict=True)]
    busy_s = [time.microbatch_s for time in times]
    slowest = max(range(len(stages)), key=busy_s.__getitem__)
    pipe_s = pipeline_s(busy_s, microbatches=plan.microbatches, virtual_stages=plan.virtual_stages)
    last = max(times, key=lambda time: time.after_s)
    memories = [_memory(plan, stages, i) for i in range(len(stages))]
    memory = max(memories, key=lambda found: found.peak_bytes)
    slow = times[slowest]
    repeated = [part.times(plan.microbatches) for part in slow.per_microbatch]
    return StepPrediction(
        step_s=pipe_s + last.after_s,
        compute_s=(slow.forward_s + slow.backward_s) * plan.microbatches,
        bubble_s=pipe_s - busy_s[slowest] * plan.microbatches,
        optimizer_s=last.optimizer_s,
        communication=overlap.sum_by_kind([*repeated, *last.per_step]),
        memory=memory,
        fits=all(
            memories[i].peak_bytes <= _machine_of(cluster, stages[i]).usable_memory_bytes for i in range(len(stages))
        ),
    )


def _overlap(usual: Overlap, plan: StepPlan) -> Overlap:
    """What a framework's options leave of the cluster file's overlap."""
    option = plan.overlap
    hidden = dict(usual.hidden) | {"context": 1.0}  # a ring's sends beside its blocks of attention; it is made for that
    if option == "blocking":
        hidden = {}
    if option == "none":
        hidden |= {"data_parallel": 0.0, "zero3": 0.0}
    if option in ("gradients", "all"):
        hidden |= {"data_parallel": 1.0, "zero3": 1.0}
    if option in ("tensor", "all"):
        hidden |= {"tensor": 1.0}
    return Overlap(hidden, usual.interference, plan.bucket_bytes or usual.bucket_bytes)


def _machine_of(cluster: Cluster, stage: StageWork) -> Cluster:
    """The nodes on which a stage runs."""
    return cluster.of_kind(stage.device_kind) if stage.device_kind else cluster


def _prices(cluster: Cluster, plan: StepPlan, stage: StageWork, total: int, reached: InTraining) -> StagePrices:
    if plan.precision == "fp8" and not multiplies_narrow(cluster):
        raise ValueError(f"the device {cluster.device.name} states no peak of {NARROW}, which precision fp8 needs")
    inner = (
        stage.data_ranks // stage.copies if stage.copies > 1 else stage.expert_ranks
    )  # copies of states stand outside
    outer = stage.data_ranks // inner
    mesh = (max(1, total // stage.devices), outer, inner, stage.context_ranks, stage.tensor_ranks)
    if plan.offload != "none" and not cluster.device.host_bytes_per_s:
        raise ValueError(f"the device {cluster.device.name} states no host_bytes_per_s, which offload needs")
    return StagePrices(
        cluster=cluster, dtype=DTYPES[plan.precision], element_bytes=plan.element_bytes, mesh=mesh, reached=reached
    )


def _crosses_node(cluster: Cluster, start: int, total: int) -> bool | None:
    """Whether the boundary before device `start` lies between nodes; None at both ends, where there is no boundary."""
    if start in (0, total):
        return None
    node = cluster.devices_per_node
    return node is not None and start % node == 0


def _stage_time(prices: StagePrices, plan: StepPlan, stage: StageWork, crossings: _Crossings) -> _StageTime:
    """`crossings`: of the boundaries before and after this stage."""
    passes: list[PassSeconds] = []
    comm: list[Communication] = []
    for work, count in stage.works:
        ahead_s, parts = _run(prices, work.forward)
        back_s, again = _run(prices, (*work.recomputed, *work.backward))
        passes.append(PassSeconds(ahead_s * count, back_s * count))
        comm += [part.times(count) for part in (*parts, *again)]
    forward_s, backward_s = (sum(seconds) for seconds in zip(*passes, strict=True))
    if plan.virtual_stages > 1 and prices.mesh[0] > 1:  # the last stage's chunks go back to the first
        crossings = (crossings[0] or False, crossings[1] or False) if any(crossings) else (False, False)
    comm += [
        _send(prices, plan, stage, crosses, forward_s + backward_s) for crosses in crossings if crosses is not None
    ]
    comm += exchange_each_microbatch(prices, plan, stage, passes)
    once = reduce_once(prices, plan, stage, passes)
    comm = overlap.share_compute(comm, forward_s + backward_s)
    left_s = forward_s + backward_s - sum(part.hidden_s for part in comm)
    return _StageTime(
        forward_s=forward_s,
        backward_s=backward_s,
        per_microbatch=tuple(comm),
        per_step=tuple(overlap.share_compute(once, left_s)),
        optimizer_s=_optimizer_s(prices, plan, stage),
    )


def _run(prices: StagePrices, operations: Sequence[Operation]) -> tuple[float, list[Communication]]:
    """Seconds of the compute, and the communication among it."""
    priced = [(operation, prices.seconds(operation)) for operation in operations]
    compute_s = sum(seconds for operation, seconds in priced if not isinstance(operation, Exchange))
    over_tensor = sum(isinstance(operation, Exchange) and operation.group == "tensor" for operation in operations)
    comm = []
    for number, (operation, seconds) in enumerate(priced):
        if not isinstance(operation, Exchange):
            continue
        kind = _KINDS[operation.group]
        if operation.behind == "nothing" and operation.group != "tensor":
            comm.append(overlap.alone(kind, seconds))
        elif operation.behind == "nothing":
            comm.append(_cut_up(prices, seconds, compute_s / over_tensor))
        else:
            product = next(op for op in operations[number:] if isinstance(op, MatrixProduct))
            other_s = prices.product_s(product)
            comm.append(overlap.beside(prices.cluster.overlap, kind, comm_s=seconds, compute_s=other_s))
    return compute_s, comm


def _cut_up(prices: StagePrices, comm_s: float, compute_s: float) -> Communication:
    """A collective of t ranks in t pieces, each beside the part of its product that needs the piece before; one stands alone."""
    share = 1 - 1 / prices.mesh[-1]
    return overlap.beside(prices.cluster.overlap, "tensor", comm_s=comm_s, compute_s=share * min(comm_s, compute_s))


def _send(prices: StagePrices, plan: StepPlan, stage: StageWork, crosses: bool, compute_s: float) -> Communication:
    """Activations to the next stage, or their gradients to the one before, once per chunk of layers.

    Links carry both directions at once, so a stage pays for what it sends and not for what it receives meanwhile.
    """
    boundary = max((work.boundary_bytes for work, _ in stage.layers), default=0.0)
    send_s = plan.virtual_stages * prices.send_s(boundary, crosses_node=crosses, split=plan.sequence_parallel)
    return overlap.beside(prices.cluster.overlap, "pipeline", comm_s=send_s, compute_s=compute_s)


def _optimizer_s(prices: StagePrices, plan: StepPlan, stage: StageWork) -> float:
    owners = stage.owners if plan.zero_stage >= 1 else 1
    mixed, single = _OPTIMIZER_BYTES[plan.optimizer]
    moved = (single if plan.precision == "fp32" else mixed) * stage.parameters / owners
    # States come from the host and go back, one after the other: a link that is full both ways at once has less each way.
    carried = 2 * _on_host(plan, stage, stage.parameters, stage.expert_parameters)
    return prices.fused_s(moved) + (carried / prices.cluster.device.host_bytes_per_s if carried else 0.0)


def _memory(plan: StepPlan, stages: Sequence[StageWork], index: int) -> MemoryPrediction:
    stage = stages[index]
    owners_of_experts = max(1, stage.owners // stage.expert_ranks)
    per_dense, per_expert = (
        plan.states.per_parameter(plan.zero_stage, owners, whole_gradients=plan.whole_gradients)
        for owners in (stage.owners, owners_of_experts)
    )
    states = (stage.parameters - stage.expert_parameters) * per_dense + stage.expert_parameters * per_expert
    layers = sum(work.parameters * count for work, count in stage.layers) * per_dense
    count = max(1, stage.layer_count)
    kept = sum(work.kept_bytes * number for work, number in stage.layers) / count
    in_flight = layers_in_flight(
        count * len(stages),
        stages=len(stages),
        virtual_stages=plan.virtual_stages,
        microbatches=plan.microbatches,
        stage=index,
    )
    ends = [work for work in (stage.first, stage.last) if work]
    once = sum(work.kept_bytes for work in ends) * math.ceil(in_flight / count if stage.first else 1)
    transient = max((work.transient_bytes for work, _ in stage.works), default=0.0)
    if plan.zero_stage >= 3 and stage.owners > 1:
        # Two layers' parameters are whole at a time: the one that runs and the one gathered ahead.
        transient += 2 * plan.element_bytes * max(work.parameters for work, _ in stage.works)
    activations = kept * in_flight + once
    on_host = _on_host(plan, stage, stage.parameters, stage.expert_parameters)
    # The update has two layers' optimizer states on the device: those in use, and those that come or go.
    largest = max((work for work, _ in stage.works), key=lambda work: work.parameters)
    updated = min(on_host, 2 * _on_host(plan, stage, largest.parameters, largest.expert_parameters))
    return MemoryPrediction(
        states_bytes=states - on_host,
        layer_states_bytes=layers,
        activation_bytes=activations,
        transient_bytes=max(transient, updated - activations),
        stage=index,
    )


def _on_host(plan: StepPlan, stage: StageWork, parameters: float, of_experts: float) -> float:
    """Bytes of optimizer states in the host's memory for one device, of so many parameters, those of experts among them."""
    owners_of_experts = max(1, stage.owners // stage.expert_ranks)
    dense = plan.offloaded_bytes(parameters - of_experts, stage.owners)
    return dense + plan.offloaded_bytes(of_experts, owners_of_experts)
