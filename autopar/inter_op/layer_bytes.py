"""The bytes of ranges of layers, from those of the layers: what is in flight, and what a task needs beside it.

In: figures of layers, and how the step runs. Out: arrays [i, j] of layers i to j - 1. What can go wrong: a sum leaves out what
layers share, so the chosen stages are planned as wholes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.inter_op.planned_layers import LayerFigures
from autopar.intra_op.memory import tuning as memory_tuning
from autopar.stages.tasks.stage_memory import split_in_flight


def sums(values: Sequence[float]) -> np.ndarray:
    """[i, j]: the sum of values i to j - 1; 0 where there are none."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return np.triu(before[None, :] - before[:-1, None], 1)


def largest(values: Sequence[float]) -> np.ndarray:
    """[i, j]: the largest of values i to j - 1."""
    found = np.zeros((len(values), len(values) + 1))
    for i in range(len(values)):
        found[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return found


@dataclasses.dataclass(frozen=True)
class CostCase:
    """How a step runs: the number of microbatches, what part of forward is done again, and whether backward is split in two."""

    count: int
    share: float
    split: bool


def in_flight_bytes(figures: Sequence[LayerFigures], case: CostCase, meshes: int) -> np.ndarray:
    """[i, j]: what each microbatch in flight keeps of layers i to j - 1.

    `meshes`: the most that there may be; as many microbatches or more fill the pipeline.
    """
    residual, late, cotangents = (
        sums([getattr(one, name) for one in figures])
        for name in ("residual_bytes", "late_residual_bytes", "cotangent_bytes")
    )
    if not case.split:
        kept, again = residual, 0.0
    else:
        kept = split_in_flight(residual - late, late, cotangents, is_full=case.count >= meshes)
        again = late + cotangents
    if not case.share:
        return np.asarray(kept)
    received = _received_bytes(figures)
    return np.asarray(case.share * (received + again) + (1 - case.share) * np.maximum(kept, received))


def _received_bytes(figures: Sequence[LayerFigures]) -> np.ndarray:
    """[i, j]: what a microbatch keeps of layers i to j - 1 where backward does all of them again.

    Each layer keeps what it received; or the first alone, and backward makes all results at once, where that is less.
    """
    first = np.array([one.received_bytes for one in figures])[:, None]
    return np.where(_repeats_by_layers(figures), sums([one.received_bytes for one in figures]), first)


def _repeats_by_layers(figures: Sequence[LayerFigures]) -> np.ndarray:
    """[i, j]: whether less is kept by as many microbatches as there are layers left if layers are done again one at a time."""
    received, residual = [one.received_bytes for one in figures], [one.residual_bytes for one in figures]
    in_flight = np.arange(len(figures), 0, -1)[:, None]
    by_layers = in_flight * sums(received) + largest(residual)
    return np.asarray(by_layers < in_flight * np.array(received)[:, None] + sums(residual))


def working_bytes(figures: Sequence[LayerFigures], case: CostCase) -> np.ndarray:
    """[i, j]: what backward makes again of layers i to j - 1, with the margin for it and for what is kept of a microbatch."""
    margin = memory_tuning.TUNING.temporaries_margin
    residual = sums([one.residual_bytes for one in figures])
    if not case.share:
        return np.asarray(residual / margin - residual)
    kept = (1.0 - case.share) * residual
    again = np.where(_repeats_by_layers(figures), largest([one.residual_bytes for one in figures]), residual)
    return np.asarray(np.minimum(kept + again, residual) / margin - kept)
