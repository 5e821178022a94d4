"""A training job as a table's row states it, and what is impossible about it.

In: a model's sizes and a plan. Out: a `TrainingJob`, and its `problems` by column, each with a way out. The columns read as
follows: a microbatch is that of one data-parallel rank; layers are divided evenly over pp x virtual stages or, if only
layers + 2 divide, with embedding and head in the place of one layer each; a residual network's blocks are divided by FLOPs;
expert ranks are some of the data-parallel ranks; a microbatch or a number of virtual stages that was not published is None.
What can go wrong: a plan whose parts do not divide; `problems` says which, and what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from autopar.simulate.closed_forms.layer_split import ContextExchange, Recompute
from autopar.simulate.closed_forms.memory import StateBytes, layers_in_flight, states_of
from autopar.simulate.closed_forms.residual_network import (
    BLOCKS_PER_STAGE,
    ResidualNetworkShape,
)
from autopar.simulate.closed_forms.stage_work import OffloadOption, Optimizer, OverlapOption, Precision, ReduceOption
from autopar.simulate.closed_forms.transformer_shape import TransformerShape


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """One stage's share: its layers, and the data and tensor ranks it runs on."""

    layers: int
    data_ranks: int
    tensor_ranks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model and a plan. `microbatch` or `virtual_stages` None: not known, the fastest that fits is taken.

    `stage_layouts`, when given, says what each stage has; `data_ranks` x `microbatch` is then still what a microbatch holds.
    `stage_kinds`: of a mixed cluster, the kind of node of each stage. `shard_ranks`: over how many of the data ranks ZeRO divides
    states, all of them unless it is stated; the others hold copies (hybrid sharding, Zhao et al. 2023, PyTorch FSDP).
    `context_ranks`: among which each sequence is divided; they share states as data ranks do. `context_exchange`: how they see
    each other's keys and values, gathered (Llama Team 2024, arXiv 2407.21783, section 3.3.2) or in a ring beside the blocks of
    attention (Liu et al. 2023, arXiv 2310.01889). `reduce_gradients`: over data ranks, once a step or in every microbatch.
    `offload`: whether the optimizer's states lie in the host's memory between steps. `bucket_bytes`: of gradients that are
    reduced together; 0 if the run does not say: then as the cluster file says, or else layer by layer.
    """

    shape: TransformerShape | ResidualNetworkShape
    devices: int
    global_batch: int
    microbatch: int | None
    data_ranks: int
    tensor_ranks: int
    stages: int
    virtual_stages: int | None
    expert_ranks: int = 1
    zero_stage: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    precision: Precision = "bf16"
    fused_attention: bool = False
    accumulate_fp32: bool = True
    optimizer: Optimizer = "adam"
    overlap: OverlapOption = "usual"
    stage_layouts: tuple[StageLayout, ...] = ()
    stage_kinds: tuple[str, ...] = ()
    shard_ranks: int | None = None
    context_ranks: int = 1
    context_exchange: ContextExchange = "all-gather"
    reduce_gradients: ReduceOption = "usual"
    offload: OffloadOption = "none"
    bucket_bytes: float = 0.0

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has; `microbatch` must be known."""
        assert self.microbatch is not None
        return max(1, self.global_batch // (self.data_ranks * self.microbatch))

    @property
    def element_bytes(self) -> int:
        """Of parameters and activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def block_count(self) -> int:
        """Layers that stages share: encoder and decoder of a T5, bottlenecks of a residual network."""
        return len(self.shape.blocks)

    @property
    def layers_in_flight(self) -> float:
        """Layers' worth of activations that the first stage holds at its peak."""
        p, v = self.stages, self.virtual_stages or 1
        return layers_in_flight(self.block_count, stages=p, virtual_stages=v, microbatches=self.microbatches)

    @property
    def states(self) -> StateBytes:
        """Formats of parameters, gradients and optimizer state."""
        return states_of(self.precision, optimizer=self.optimizer, accumulate_fp32=self.accumulate_fp32)

    @property
    def divides_gradients(self) -> bool:
        """Whether a data rank keeps only its part of the gradients: ZeRO 2 and 3, unless they are reduced once a step."""
        return self.zero_stage >= 2 and self.reduce_gradients != "once"

    @property
    def model_flops(self) -> float:
        """FLOPs per step as the sources count them: three passes; blocks a fourth time if they are recomputed in full."""
        forward = self.shape.forward_flops(self.global_batch)
        if self.recompute != "full":
            return 3 * forward
        if isinstance(self.shape, ResidualNetworkShape):
            return 4 * forward
        logits = 2.0 * self.global_batch * self.shape.seq_len * self.shape.hidden * self.shape.vocab
        return 4 * forward - logits


def problems(job: TrainingJob) -> Iterator[tuple[str, str]]:
    """What cannot work, as (column, fact and fix)."""
    dp, tp, pp, cp = job.data_ranks, job.tensor_ranks, job.stages, job.context_ranks
    alike = all((layout.data_ranks, layout.tensor_ranks) == (dp, tp) for layout in job.stage_layouts)
    if dp * tp * pp * cp != job.devices and alike:
        names, sizes = ("dp x tp x pp", f"{dp} x {tp} x {pp}")
        if cp > 1:
            names, sizes = f"{names} x context_parallel", f"{sizes} x {cp}"
        yield "devices", f"is {job.devices}, but {names} is {sizes} = {dp * tp * pp * cp}: make them equal"
    if isinstance(job.shape, TransformerShape):
        yield from _transformer_problems(job, job.shape)
        yield from _context_problems(job, job.shape)
    else:
        yield from _residual_problems(job, job.shape)
    yield from _sharding_problems(job)
    samples = dp * (job.microbatch or 1)
    if job.global_batch % samples:
        yield (
            "global_batch",
            f"is {job.global_batch}, which dp x microbatch = {dp} x {job.microbatch or 1} = {samples} does not divide: use "
            f"{max(1, round(job.global_batch / samples)) * samples}, or another microbatch",
        )
    elif (job.virtual_stages or 1) > 1 and job.global_batch // samples % pp:
        yield (
            "virtual_stages",
            f"is {job.virtual_stages}: the interleaved schedule needs a number of microbatches that pp = {pp} divides, "
            f"there are {job.global_batch // samples}: change global_batch or microbatch, or use 1",
        )


def _sharding_problems(job: TrainingJob) -> Iterator[tuple[str, str]]:
    ranks, dp = job.shard_ranks, job.data_ranks
    if ranks is None or ranks == dp:
        return
    if not job.zero_stage:
        yield (
            "shard_ranks",
            f"is {ranks}, but zero_stage is 0, which divides nothing: leave it empty, or use zero_stage 1 to 3",
        )
    if dp % ranks:
        yield "shard_ranks", f"is {ranks}, which does not divide dp = {dp}: use one of {_divisors(dp, ranks)}"
    if job.expert_ranks > 1:
        yield (
            "shard_ranks",
            f"is {ranks}, and ep is {job.expert_ranks}: experts are divided among all data ranks, leave it empty",
        )


def _residual_problems(job: TrainingJob, shape: ResidualNetworkShape) -> Iterator[tuple[str, str]]:
    tp, pp = job.tensor_ranks, job.stages
    if job.virtual_stages not in (None, 1):
        yield "virtual_stages", f"is {job.virtual_stages}, but blocks of a residual network differ: use 1"
    if pp > job.block_count:
        yield "pp", f"is {pp}, but the network has {job.block_count} blocks: use at most {job.block_count}"
    if shape.channels % tp:
        near = _divisors(shape.channels, tp)
        yield "tp", f"is {tp}, which does not divide the base channels, hidden = {shape.channels}: use one of {near}"
    if job.precision == "fp8":
        yield "precision", "is 'fp8', but convolutions have no price in it: use bf16"
    if job.context_ranks > 1:
        yield "context_parallel", f"is {job.context_ranks}, but images have no sequence to divide: use 1"
    if job.recompute in ("selective", "dots"):
        yield (
            "recompute",
            f"is {job.recompute!r}, but a residual network has no attention to recompute: use none or full",
        )


def _transformer_problems(job: TrainingJob, shape: TransformerShape) -> Iterator[tuple[str, str]]:
    tp, pp, ep, v = job.tensor_ranks, job.stages, job.expert_ranks, job.virtual_stages or 1
    if shape.hidden % shape.heads and shape.head_width is None:
        yield (
            "heads",
            f"is {shape.heads}, which does not divide hidden = {shape.hidden}: use one of its divisors, or state head_width",
        )
    if shape.heads % shape.kv_heads:
        yield "kv_heads", f"is {shape.kv_heads}, which does not divide heads = {shape.heads}: use one of its divisors"
    for name, size in (("heads", shape.heads), ("ffn_hidden", shape.ffn_hidden)):
        if size % tp:
            yield "tp", f"is {tp}, which does not divide {name} = {size}: use one of {_divisors(size, tp)}"
    if shape.kv_heads != shape.heads and shape.kv_heads % tp and tp % shape.kv_heads:
        yield "tp", f"is {tp}; it must divide kv_heads = {shape.kv_heads} or be its multiple: use {shape.kv_heads}"
    if job.sequence_parallel and shape.seq_len % tp:
        yield "sequence_parallel", f"is 1, but tp = {tp} does not divide seq_len = {shape.seq_len}: change one of them"
    if job.recompute == "dots" and shape.experts > 1:
        yield (
            "recompute",
            "is 'dots', which keeps products without batch dimensions; those of experts have one: use none, selective or full",
        )
    with_ends = ends_count_as_layers(job, shape)
    if job.block_count % (pp * v) and not with_ends and not job.stage_layouts:
        yield (
            "layers",
            f"has {job.block_count} layers, which pp x virtual_stages = {pp} x {v} = {pp * v} does not divide: use "
            f"{max(1, round(job.block_count / (pp * v))) * pp * v} layers, or other numbers of stages",
        )
    if v > 1 and pp == 1:
        yield "virtual_stages", f"is {v}, but there is one pipeline stage: use 1, or more stages"
    if job.data_ranks % ep:
        yield "ep", f"is {ep}; expert ranks are some of the dp = {job.data_ranks} ranks: use one of its divisors"
    if ep > 1 and shape.experts % ep:
        yield (
            "ep",
            f"is {ep}, which does not divide the {shape.experts} experts: use one of {_divisors(shape.experts, ep)}",
        )


def _context_problems(job: TrainingJob, shape: TransformerShape) -> Iterator[tuple[str, str]]:
    c = job.context_ranks
    if c == 1:
        return
    if shape.seq_len % (2 * c):
        yield (
            "context_parallel",
            f"is {c}: each rank has one piece of both halves of the sequence, so that causal attention is even, but 2 x {c} does "
            f"not divide seq_len = {shape.seq_len}: use one of {_divisors(shape.seq_len // 2, c)}",
        )
    elif job.sequence_parallel and shape.seq_len // c % job.tensor_ranks:
        yield (
            "context_parallel",
            f"is {c}, which leaves {shape.seq_len // c} tokens of a sequence to a rank; tp = {job.tensor_ranks} does not divide "
            "them: use fewer ranks, or no sequence_parallel",
        )
    if job.context_exchange == "ring" and not job.fused_attention:
        yield (
            "context_exchange",
            "is 'ring', but attention is unfused: a ring adds up blocks by the sums that a fused kernel gives; use all-gather, "
            "or fused attention",
        )


def ends_count_as_layers(job: TrainingJob, shape: TransformerShape) -> bool:
    """Whether stages are even with embedding and head as one layer each, which is done where they are no lighter than one."""
    even = job.stages > 2 and (job.virtual_stages or 1) == 1 and (job.block_count + 2) % job.stages == 0
    return even and shape.vocab * shape.hidden >= shape.block_parameters(shape.blocks[0])


def _divisors(size: int, near: int) -> str:
    found = [d for d in range(1, size + 1) if size % d == 0]
    return ", ".join(map(str, sorted(found, key=lambda d: abs(d - near))[:4]))


KNOWN_DEPTHS = tuple(BLOCKS_PER_STAGE)
