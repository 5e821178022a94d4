"""A training job's step on a cluster: its stages' parts, priced and put together.

In: a `TrainingJob`, a cluster. Out: a `JobPrediction`. A stage is made of parts: blocks and ends. Each is a `Work`, in closed
form or as a `Timing` gives it, through which a planner can say what a part does. Where no microbatch or number of virtual
stages was published, the fastest that fits is taken. What can go wrong: more devices than the cluster joins, a ValueError.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence

from autopar.cost_model.machine import Cluster
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import Work
from autopar.simulate.closed_forms.prices import FITTED, InTraining
from autopar.simulate.closed_forms.residual_network import (
    Block,
    BlockSplit,
    ResidualNetworkShape,
    bottleneck_work,
    linear_head_work,
    stem_work,
)
from autopar.simulate.closed_forms.stage_work import StageWork, StepPlan
from autopar.simulate.closed_forms.training_job import StageLayout, TrainingJob, problems
from autopar.simulate.closed_forms.training_step import StepPrediction, predict_step
from autopar.simulate.closed_forms.transformer import block_work, embedding_work, head_work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

_MICROBATCHES_TRIED = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class JobPrediction:
    """A prediction with the job as it was priced: microbatch and virtual stages are known."""

    job: TrainingJob
    step: StepPrediction

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs, as the sources count them, per second and device, in 10^12."""
        return self.job.model_flops / self.step.step_s / self.job.devices / 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a stage does many times: a kind of block ("plain", "expert", "decoder", or a residual network's), or one of its ends
    ("embedding", "head", "stem", "classifier"), and how the stage runs it; `device_kind`: of a mixed cluster."""

    kind: str | Block
    shape: TransformerShape | ResidualNetworkShape
    split: LayerSplit | BlockSplit
    data_ranks: int
    device_kind: str = ""


Timing = Callable[[Part, Work], Work]
"""From a part and its work in closed form to the work that counts."""


def as_it_is(part: Part, work: Work) -> Work:
    """The closed form."""
    return work


def predict(cluster: Cluster, job: TrainingJob, *, reached: InTraining = FITTED) -> JobPrediction:
    """Price a job; what is not published is the fastest choice that fits, or the smallest if none does."""
    found = [JobPrediction(choice, _price(cluster, choice, reached)) for choice in _choices(job)]
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


def _price(cluster: Cluster, job: TrainingJob, reached: InTraining) -> StepPrediction:
    return predict_step(cluster, step_plan(job), stages_of(job), reached=reached)


def predict_with(cluster: Cluster, job: TrainingJob, timing: Timing, *, reached: InTraining = FITTED) -> JobPrediction:
    """Price a job whose microbatch and virtual stages are known, its parts as `timing` says."""
    return JobPrediction(job, predict_step(cluster, step_plan(job), stages_of(job, timing), reached=reached))


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
        overlap=job.overlap,
        reduce_gradients=job.reduce_gradients,
        offload=job.offload,
        bucket_bytes=job.bucket_bytes,
    )


def stages_of(job: TrainingJob, timing: Timing = as_it_is) -> tuple[StageWork, ...]:
    """The work of every stage; stages that are alike are one object."""
    layouts = job.stage_layouts or _even_layouts(job)
    starts = [sum(layout.layers for layout in layouts[:i]) for i in range(len(layouts))]
    made: dict[Hashable, StageWork] = {}
    keys: list[Hashable] = []
    kinds_of_nodes = job.stage_kinds or ("",) * len(layouts)
    for start, layout, device_kind in zip(starts, layouts, kinds_of_nodes, strict=True):
        end = start + layout.layers
        place = _Place(first=start == 0, last=end == job.block_count, device_kind=device_kind)
        keys.append((layout, job.shape.blocks[start:end], place))
        if keys[-1] in made:
            continue
        if isinstance(job.shape, TransformerShape):
            kinds = job.shape.blocks[start:end]
            made[keys[-1]] = _transformer_stage(job, job.shape, layout, kinds=kinds, place=place, timing=timing)
        else:
            blocks = job.shape.blocks[start:end]
            made[keys[-1]] = _residual_stage(job, job.shape, layout, blocks=blocks, place=place, timing=timing)
    return tuple(made[key] for key in keys)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Whether a stage has the embedding or the stem, and whether it has the head; and the kind of node on which it runs."""

    first: bool
    last: bool
    device_kind: str = ""


def _even_layouts(job: TrainingJob) -> tuple[StageLayout, ...]:
    if isinstance(job.shape, TransformerShape):
        counts = _layers_per_stage(job.block_count, job.stages)
    else:
        counts = _even_cuts([sum(conv.flops for conv in block.convolutions) for block in job.shape.blocks], job.stages)
    return tuple(StageLayout(count, job.data_ranks, job.tensor_ranks) for count in counts)


def _layers_per_stage(layers: int, stages: int) -> list[int]:
    """The same number for each stage; if only layers + 2 divide, embedding and head stand for one layer each."""
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
    place: _Place,
    timing: Timing,
) -> StageWork:
    split = _layer_split(job, layout)

    def timed(kind: str, work: Work) -> Work:
        return timing(
            Part(
                kind=kind,
                shape=shape,
                split=split,
                data_ranks=job.shard_ranks or layout.data_ranks,
                device_kind=place.device_kind,
            ),
            work,
        )

    distinct = {kind: timed(kind, block_work(shape, split, kind)) for kind in dict.fromkeys(kinds)}
    head = timed("head", head_work(shape, split)) if place.last else None
    if head and place.first and not shape.untied:  # one matrix for both
        head = dataclasses.replace(head, parameters=0.0)
    return StageWork(
        layers=tuple((work, kinds.count(kind)) for kind, work in distinct.items()),
        data_ranks=layout.data_ranks,
        tensor_ranks=layout.tensor_ranks,
        expert_ranks=split.expert_ranks,
        context_ranks=job.context_ranks,
        shard_ranks=job.shard_ranks,
        device_kind=place.device_kind,
        first=timed("embedding", embedding_work(shape, split)) if place.first else None,
        last=head,
    )


def _layer_split(job: TrainingJob, layout: StageLayout) -> LayerSplit:
    """How the ranks of a stage divide its layers."""
    return LayerSplit(
        samples=_samples(job, layout),
        tensor_ranks=layout.tensor_ranks,
        expert_ranks=min(job.expert_ranks, layout.data_ranks),
        sequence_parallel=job.sequence_parallel,
        recompute=job.recompute,
        fused_attention=job.fused_attention,
        element_bytes=job.element_bytes,
        gradient_bytes=int(job.states.gradient),
        gradient_owners=(job.shard_ranks or layout.data_ranks) * job.context_ranks if job.divides_gradients else 1,
        context_ranks=job.context_ranks,
        context_exchange=job.context_exchange,
        narrow_products=job.precision == "fp8",
    )


def _residual_stage(
    job: TrainingJob,
    shape: ResidualNetworkShape,
    layout: StageLayout,
    *,
    blocks: Sequence[Block],
    place: _Place,
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
        return timing(
            Part(
                kind=kind,
                shape=shape,
                split=split,
                data_ranks=job.shard_ranks or layout.data_ranks,
                device_kind=place.device_kind,
            ),
            work,
        )

    works = {block: timed(block, bottleneck_work(block, split)) for block in dict.fromkeys(blocks)}
    return StageWork(
        layers=tuple((work, blocks.count(block)) for block, work in works.items()),
        data_ranks=layout.data_ranks,
        tensor_ranks=layout.tensor_ranks,
        shard_ranks=job.shard_ranks,
        device_kind=place.device_kind,
        first=timed("stem", stem_work(shape, split)) if place.first else None,
        last=timed("classifier", linear_head_work(shape, split)) if place.last else None,
    )


def _samples(job: TrainingJob, layout: StageLayout) -> float:
    assert job.microbatch is not None
    return job.microbatch * job.data_ranks / layout.data_ranks
