"""What Alpa's methods were free to choose, chosen again: pipelines, splits of stages, hybrids of images and channels.

In: a published run and a cluster. Out: its prediction. The published plans give the devices of a stage, not which dimensions they
split, and the baselines give no plan at all; each takes the fastest choice of its kind that fits. What can go wrong: a
choice that Alpa's own cost estimates did not like.
"""

from __future__ import annotations

import dataclasses
import itertools

from alpa_rows import PublishedRun

from autopar.cost_model.hardware import Cluster
from autopar.simulate.closed_forms.job_prediction import JobPrediction, Timing, as_it_is, predict, stages_of, step_plan
from autopar.simulate.closed_forms.prices import FITTED, InTraining
from autopar.simulate.closed_forms.training_job import StageLayout, TrainingJob
from autopar.simulate.closed_forms.training_step import StepPrediction, predict_step


def price(cluster: Cluster, run: PublishedRun) -> JobPrediction:
    """The prediction for a run that has a job, with what its method was free to choose."""
    assert run.job is not None
    if run.method == "ppdp":
        return _with_best_pipeline(cluster, run.job)
    if run.model == "wresnet" and run.method in ("auto", "intra_only"):
        return with_best_layouts(cluster, run.job)
    return predict(cluster, run.job)


def _with_best_pipeline(cluster: Cluster, job: TrainingJob) -> JobPrediction:
    """Pipeline and data parallelism alone: the fastest number of stages that fits."""
    assert job.microbatch is not None
    counts = [p for p in range(1, job.devices + 1) if job.devices % p == 0 and p <= job.block_count]
    found = []
    for stages in counts:
        ranks = job.devices // stages
        microbatch = max(1, job.microbatch // ranks)
        choice = dataclasses.replace(
            job, stages=stages, data_ranks=ranks, microbatch=microbatch, stage_layouts=(), zero_stage=0
        )
        found.append(predict(cluster, choice))
    return min(found, key=_order)


def with_best_layouts(cluster: Cluster, job: TrainingJob) -> JobPrediction:
    """A residual network's stages, each with the fastest split of its devices: what the search inside operators decides.

    The published plans give the devices of a stage, not which dimensions they split. Stage after stage, the split that makes
    the whole step fastest is taken, among those that fit; the first try keeps the memory of a device lowest.
    """
    found = [_improved(cluster, dataclasses.replace(job, zero_stage=zero)) for zero in (1, 3)]
    return min(found, key=_order)


def _order(found: JobPrediction) -> tuple[bool, float]:
    return (not found.step.fits, found.step.step_s if found.step.fits else found.step.memory.peak_bytes)


def _improved(cluster: Cluster, job: TrainingJob) -> JobPrediction:
    best = predict(cluster, job)
    for number, layout in enumerate(job.stage_layouts):
        devices = layout.data_ranks * layout.tensor_ranks
        for tensor in (t for t in range(1, devices + 1) if devices % t == 0):
            layouts = list(best.job.stage_layouts)
            layouts[number] = StageLayout(layout.layers, devices // tensor, tensor)
            tried = predict(cluster, dataclasses.replace(job, stage_layouts=tuple(layouts)))
            best = min(best, tried, key=_order)
    return best


def hybrid(cluster: Cluster, job: TrainingJob) -> TrainingJob:
    """A residual network whose first blocks split images and whose last ones split channels, cut where that is fastest.

    This is what the search inside operators finds for networks of small late images and large late weights. The two layouts are
    the result's stages, which `both_parts` prices as one.
    """
    pairs = [(job.devices // t, t) for t in range(1, job.devices + 1) if job.devices % t == 0]
    found = []
    for cut in range(1, job.block_count):
        for early, late in itertools.combinations(pairs, 2):
            layouts = (StageLayout(cut, *early), StageLayout(job.block_count - cut, *late))
            tried = dataclasses.replace(job, stage_layouts=layouts)
            step = both_parts(cluster, tried)
            found.append((not step.fits, step.step_s, tried))
    return min(found, key=lambda triple: triple[:2])[2]


def both_parts(
    cluster: Cluster, job: TrainingJob, *, timing: Timing = as_it_is, reached: InTraining = FITTED
) -> StepPrediction:
    """Two stages on all devices, one after the other; between them each device gathers the images of the others."""
    plan = step_plan(job)
    first, second = stages_of(job, timing)
    one, two = (predict_step(cluster, plan, [part], reached=reached) for part in (first, second))
    ranks = first.data_ranks // second.data_ranks
    whole = max(work.boundary_bytes for work, _ in first.layers[-1:]) * ranks
    gathered_s = cluster.mesh_costs((first.data_ranks // ranks, ranks)).all_gather_s(whole, (1,)) if ranks > 1 else 0.0
    memory = dataclasses.replace(
        one.memory,
        states_bytes=one.memory.states_bytes + two.memory.states_bytes,
        activation_bytes=one.memory.activation_bytes + two.memory.activation_bytes,
        transient_bytes=max(one.memory.transient_bytes, two.memory.transient_bytes),
    )
    return dataclasses.replace(
        one,
        step_s=one.step_s + two.step_s + gathered_s * plan.microbatches,
        memory=memory,
        fits=memory.peak_bytes <= cluster.usable_memory_bytes,
    )
