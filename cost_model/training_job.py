"""A training job as a table's row states it, checked, and turned into the stages of a training step.

In: a model's sizes and a plan (`TrainingJob`). Out: what is impossible about it, by column; the `StageWork`s and the
`StepPlan` that `training_step` prices; the prediction on a cluster. The columns read as follows: a microbatch is that of one
data-parallel rank; layers are divided evenly over pp x virtual stages or, if only layers + 2 divide, with embedding and head
in the place of one layer each; a residual network's blocks are divided by FLOPs; expert ranks are some of the data-parallel
ranks; without a published microbatch or number of virtual stages the fastest that fits is taken. `Timing` lets somebody else,
such as a planner, say what the parts of a stage do. What can go wrong: a plan whose parts do not divide; `problems` says which,
and what to do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from autopar.cost_model.machine import Cluster
from autopar.cost_model.memory import StateBytes, layers_in_flight, states_of
from autopar.cost_model.operations import Work
from autopar.cost_model.prices import FITTED, InTraining
from autopar.cost_model.residual_network import (
    BLOCKS_PER_STAGE,
    Block,
    BlockSplit,
    ResidualNetworkShape,
    bottleneck_work,
    linear_head_work,
    stem_work,
)
from autopar.cost_model.training_step import Optimizer, Precision, StageWork, StepPlan, StepPrediction, predict_step
from autopar.cost_model.transformer import (
    LayerSplit,
    Recompute,
    block_work,
    embedding_work,
    head_work,
)
from autopar.cost_model.transformer_shape import TransformerShape

_MICROBATCHES_TRIED = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """One stage's share: its layers, and the data and tensor ranks it runs on."""

    layers: int
    data_ranks: int
    tensor_ranks: int


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A model and a plan. `microbatch` or `virtual_stages` None: not known, the fastest that fits is taken.

    `stage_layouts`, when given, says what each stage has; `data_ranks` x `microbatch` is then still what a microbatch holds.
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
    stage_layouts: tuple[StageLayout, ...] = ()

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
    dp, tp, pp = job.data_ranks, job.tensor_ranks, job.stages
    if dp * tp * pp != job.devices and not job.stage_layouts:
        yield "devices", f"is {job.devices}, but dp x tp x pp is {dp} x {tp} x {pp} = {dp * tp * pp}: make them equal"
    if isinstance(job.shape, TransformerShape):
        yield from _transformer_problems(job, job.shape)
    else:
        if job.virtual_stages not in (None, 1):
            yield "virtual_stages", f"is {job.virtual_stages}, but blocks of a residual network differ: use 1"
        if pp > job.block_count:
            yield "pp", f"is {pp}, but the network has {job.block_count} blocks: use at most {job.block_count}"
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


def _transformer_problems(job: TrainingJob, shape: TransformerShape) -> Iterator[tuple[str, str]]:
    tp, pp, ep, v = job.tensor_ranks, job.stages, job.expert_ranks, job.virtual_stages or 1
    if shape.hidden % shape.heads:
        yield "heads", f"is {shape.heads}, which does not divide hidden = {shape.hidden}: use one of its divisors"
    if shape.heads % shape.kv_heads:
        yield "kv_heads", f"is {shape.kv_heads}, which does not divide heads = {shape.heads}: use one of its divisors"
    for name, size in (("heads", shape.heads), ("ffn_hidden", shape.ffn_hidden)):
        if size % tp:
            yield "tp", f"is {tp}, which does not divide {name} = {size}: use one of {_divisors(size, tp)}"
    if shape.kv_heads != shape.heads and shape.kv_heads % tp and tp % shape.kv_heads:
        yield "tp", f"is {tp}; it must divide kv_heads = {shape.kv_heads} or be its multiple: use {shape.kv_heads}"
    if job.sequence_parallel and shape.seq_len % tp:
        yield "sequence_parallel", f"is 1, but tp = {tp} does not divide seq_len = {shape.seq_len}: change one of them"
    with_ends = _ends_count_as_layers(job, shape)
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


def _ends_count_as_layers(job: TrainingJob, shape: TransformerShape) -> bool:
    """Whether stages are even with embedding and head as one layer each, which is done where they are no lighter than one."""
    even = job.stages > 2 and (job.virtual_stages or 1) == 1 and (job.block_count + 2) % job.stages == 0
    return even and shape.vocab * shape.hidden >= shape.block_parameters(shape.blocks[0])


def _divisors(size: int, near: int) -> str:
    found = [d for d in range(1, size + 1) if size % d == 0]
    return ", ".join(map(str, sorted(found, key=lambda d: abs(d - near))[:4]))


@dataclasses.dataclass(frozen=True)
class JobPrediction:
    """A prediction with the job as it was priced: microbatch and virtual stages are known."""

    job: TrainingJob
    step: StepPrediction

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs, as the sources count them, per second and device, in 10^12."""
        return self.job.model_flops / self.step.step_s / self.job.devices / 1e12


@dataclasses.dataclass(frozen=True)
class Part:
    """What a stage does many times: a kind of block ("plain", "expert", "decoder", or a residual network's), or one of its ends
    ("embedding", "head", "stem", "classifier"), and how the stage runs it."""

    kind: str | Block
    shape: TransformerShape | ResidualNetworkShape
    split: LayerSplit | BlockSplit
    data_ranks: int


Timing = Callable[[Part, Work], Work]
"""From a part and its work in closed form to the work that counts."""


def as_it_is(part: Part, work: Work) -> Work:
    """The closed form."""
    return work


def predict(cluster: Cluster, job: TrainingJob, *, reached: InTraining = FITTED) -> JobPrediction:
    """Price a job; what is not published is the fastest choice that fits, or the smallest if none does."""
    found = [JobPrediction(choice, _priced(cluster, choice, reached)) for choice in _choices(job)]
    fitting = [choice for choice in found if choice.step.fits]
    if fitting:
        return min(fitting, key=lambda choice: choice.step.step_s)
    return min(found, key=lambda choice: choice.step.memory.peak_bytes)


def _choices(job: TrainingJob) -> list[TrainingJob]:
    sizes: Sequence[int | None] = [job.microbatch] if job.microbatch else _MICROBATCHES_TRIED
    per_stage = job.block_count // job.stages
    chunks: Sequence[int | None] = [job.virtual_stages]
    if job.virtual_stages is None:
        chunks = [v for v in range(1, per_stage + 1) if per_stage % v == 0] if job.stages > 1 else [1]
    pairs = itertools.product(sizes, chunks)
    choices = [dataclasses.replace(job, microbatch=size, virtual_stages=v) for size, v in pairs]
    return [choice for choice in choices if not any(problems(choice))] or choices[:1]


def _priced(cluster: Cluster, job: TrainingJob, reached: InTraining) -> StepPrediction:
    return predict_step(cluster, step_plan(job), stages_of(job), reached=reached)


def predict_with(cluster: Cluster, job: TrainingJob, timing: Timing) -> JobPrediction:
    """Price a job whose microbatch and virtual stages are known, its parts as `timing` says."""
    return JobPrediction(job, predict_step(cluster, step_plan(job), stages_of(job, timing)))


def step_plan(job: TrainingJob) -> StepPlan:
    """What holds for all stages of a job whose microbatch is known."""
    return StepPlan(
        microbatches=job.microbatches,
        precision=job.precision,
        states=job.states,
        virtual_stages=job.virtual_stages or 1,
        zero_stage=job.zero_stage,
        sequence_parallel=job.sequence_parallel,
        optimizer=job.optimizer,
    )


def stages_of(job: TrainingJob, timing: Timing = as_it_is) -> tuple[StageWork, ...]:
    """The work of every stage."""
    layouts = job.stage_layouts or _even_layouts(job)
    starts = [sum(layout.layers for layout in layouts[:i]) for i in range(len(layouts))]
    made = []
    for start, layout in zip(starts, layouts, strict=True):
        end = start + layout.layers
        ends = _Ends(first=start == 0, last=end == job.block_count)
        if isinstance(job.shape, TransformerShape):
            kinds = job.shape.blocks[start:end]
            made.append(_transformer_stage(job, job.shape, layout, kinds=kinds, ends=ends, timing=timing))
        else:
            blocks = job.shape.blocks[start:end]
            made.append(_residual_stage(job, job.shape, layout, blocks=blocks, ends=ends, timing=timing))
    return tuple(made)


@dataclasses.dataclass(frozen=True)
class _Ends:
    """Whether a stage has the embedding or the stem, and whether it has the head."""

    first: bool
    last: bool


def _even_layouts(job: TrainingJob) -> tuple[StageLayout, ...]:
    if isinstance(job.shape, TransformerShape):
        counts = _layers_per_stage(job.block_count, job.stages)
    else:
        counts = _even_cuts([sum(conv.flops for conv in block.convolutions) for block in job.shape.blocks], job.stages)
    return tuple(StageLayout(count, job.data_ranks, job.tensor_ranks) for count in counts)


def _layers_per_stage(layers: int, stages: int) -> list[int]:
    """As many for each; if only layers + 2 divide, embedding and head stand for one layer each."""
    if layers % stages == 0:
        return [layers // stages] * stages
    each = (layers + 2) // stages
    return [each - 1, *[each] * (stages - 2), each - 1]


def _even_cuts(weights: Sequence[float], parts: int) -> list[int]:
    """How many consecutive weights each part takes so that the heaviest part is as light as can be."""

    @functools.cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(weights[start:]), (len(weights) - start,)
        options = []
        for end in range(start + 1, len(weights) - left + 2):
            rest, counts = best(end, left - 1)
            options.append((max(sum(weights[start:end]), rest), (end - start, *counts)))
        return min(options)

    return list(best(0, parts)[1])


def _transformer_stage(
    job: TrainingJob,
    shape: TransformerShape,
    layout: StageLayout,
    *,
    kinds: Sequence[str],
    ends: _Ends,
    timing: Timing,
) -> StageWork:
    split = LayerSplit(
        samples=_samples(job, layout),
        tensor_ranks=layout.tensor_ranks,
        expert_ranks=min(job.expert_ranks, layout.data_ranks),
        sequence_parallel=job.sequence_parallel,
        recompute=job.recompute,
        fused_attention=job.fused_attention,
        element_bytes=job.element_bytes,
        gradient_bytes=int(job.states.gradient),
    )

    def timed(kind: str, work: Work) -> Work:
        return timing(Part(kind, shape, split, layout.data_ranks), work)

    distinct = {kind: timed(kind, block_work(shape, split, kind)) for kind in dict.fromkeys(kinds)}
    head = timed("head", head_work(shape, split)) if ends.last else None
    if head and ends.first and not shape.untied:  # one matrix for both
        head = dataclasses.replace(head, parameters=0.0)
    return StageWork(
        tuple((work, kinds.count(kind)) for kind, work in distinct.items()),
        layout.data_ranks,
        layout.tensor_ranks,
        split.expert_ranks,
        first=timed("embedding", embedding_work(shape, split)) if ends.first else None,
        last=head,
    )


def _residual_stage(
    job: TrainingJob,
    shape: ResidualNetworkShape,
    layout: StageLayout,
    *,
    blocks: Sequence[Block],
    ends: _Ends,
    timing: Timing,
) -> StageWork:
    split = BlockSplit(
        samples=_samples(job, layout),
        tensor_ranks=layout.tensor_ranks,
        sequence_parallel=job.sequence_parallel,
        element_bytes=job.element_bytes,
        recompute=job.recompute == "full",
    )

    def timed(kind: str | Block, work: Work) -> Work:
        return timing(Part(kind, shape, split, layout.data_ranks), work)

    works = {block: timed(block, bottleneck_work(block, split)) for block in dict.fromkeys(blocks)}
    return StageWork(
        tuple((work, blocks.count(block)) for block, work in works.items()),
        layout.data_ranks,
        layout.tensor_ranks,
        first=timed("stem", stem_work(shape, split)) if ends.first else None,
        last=timed("classifier", linear_head_work(shape, split)) if ends.last else None,
    )


def _samples(job: TrainingJob, layout: StageLayout) -> float:
    assert job.microbatch is not None
    return job.microbatch * job.data_ranks / layout.data_ranks


KNOWN_DEPTHS = tuple(BLOCKS_PER_STAGE)
