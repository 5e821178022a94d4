"""What ranges of layers take, from the figures of the layers: seconds, bytes in flight, and what a task needs beside these.

In: figures of layers, and how the step runs. Out: arrays [i, j] of layers i to j - 1. What can go wrong: a sum leaves out what
layers share, so the chosen stages are planned as wholes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from autopar.inter_op.candidates.layer_figures import LayerFigures
from autopar.intra_op.memory import tuning as memory_tuning
from autopar.stages.tasks.stage_memory import split_in_flight


@functools.cache
def _is_range(layers: int) -> np.ndarray:
    """[i, j]: whether i is less than j."""
    return np.triu(np.ones((layers, layers + 1), bool), 1)


def sums(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """[i, j]: the sum of values i to j - 1; 0 where there are none."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return np.where(_is_range(len(values)), before[None, :] - before[:-1, None], 0.0)


def largest(values: Sequence[float]) -> np.ndarray:
    """[i, j]: the largest of values i to j - 1; 0 where there are none."""
    is_range = _is_range(len(values))
    each = np.where(is_range, np.array([0.0, *values])[None, :], -np.inf)
    return np.where(is_range, np.maximum.accumulate(each, axis=1), 0.0)


@dataclasses.dataclass(frozen=True)
class Repetition:
    """What backward does again: a part of the forward work, layer by layer or all at once."""

    share: float = 0.0
    by_layers: bool = False


def repetitions(shares: Sequence[float]) -> tuple[Repetition, ...]:
    """The ways to do these parts of the forward work again, in their order."""
    return tuple(
        Repetition(share, by_layers) for share in shares for by_layers in ((True, False) if share else (False,))
    )


@dataclasses.dataclass(frozen=True)
class CostCase:
    """How a step runs: the number of microbatches, what backward does again, and whether backward is split in two."""

    count: int
    again: Repetition = Repetition()
    split: bool = False


def microbatch_seconds(figures: Sequence[LayerFigures], again: Repetition) -> np.ndarray:
    """[i, j]: seconds of forward and backward of a microbatch of layers i to j - 1.

    Backward needs no layer's output again, unless it makes that of the next layer from it.
    """
    forward_s, again_s, backward_s = (
        np.array([getattr(one, name) for one in figures]) for name in ("forward_s", "again_s", "backward_s")
    )
    once_s = sums(forward_s + backward_s)
    if again.by_layers:
        return np.asarray(once_s + again.share * sums(again_s))
    saved_s = np.concatenate([[0.0], forward_s - again_s])[None, :]
    return np.asarray(once_s + again.share * (sums(forward_s) - saved_s * (once_s > 0)))


def in_flight_bytes(figures: Sequence[LayerFigures], case: CostCase, meshes: int) -> np.ndarray:
    """[i, j]: what each microbatch in flight keeps of layers i to j - 1.

    `meshes`: the most that there may be; as many microbatches or more fill the pipeline.
    """
    residual = sums([one.residual_bytes for one in figures])
    if not case.split:
        kept, made = residual, np.zeros_like(residual)
    else:
        late, made = _until_weight_gradient(figures, residual)
        kept = split_in_flight(residual - late, late, made, is_full=case.count >= meshes)
        made[1:] += late[1:]
    share = case.again.share
    if not share:
        return np.asarray(kept)
    received = [one.received_bytes for one in figures]
    read = sums(received) if case.again.by_layers else np.array(received)[:, None]
    return np.asarray(share * (read + made) + (1 - share) * np.maximum(kept, read))


def standing_bytes(figures: Sequence[LayerFigures]) -> np.ndarray:
    """[i, j]: what is there while the loop over microbatches runs, of layers i to j - 1."""
    return sums([one.kept_bytes + one.looped_bytes for one in figures])


def _until_weight_gradient(figures: Sequence[LayerFigures], residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[i, j]: what of forward, and what of an input gradient, waits for the weight gradient of layers i to j - 1.

    The first stage has no input gradient: all that forward keeps waits, and the one cotangent that it receives.
    """
    late, cotangents = (
        sums([getattr(one, name) for one in figures]) for name in ("late_residual_bytes", "cotangent_bytes")
    )
    late[0] = residual[0]
    cotangents[0, 1:] = [*(one.received_bytes for one in figures[1:]), 0.0]
    return late, cotangents


def working_bytes(figures: Sequence[LayerFigures], again: Repetition) -> np.ndarray:
    """[i, j]: what a task of layers i to j - 1 needs while it runs, beside what stands there and what is in flight.

    It has one layer's own temporaries at a time, but the gradients of all layers of a scan. What backward makes again is there
    for one layer at a time, or for all.
    """
    residual, passing = sums([one.residual_bytes for one in figures]), _passing_bytes(figures)
    if not again.share:
        return passing
    kept = (1.0 - again.share) * residual
    return np.asarray(np.minimum(kept + _within_bytes(figures, again), residual + passing) - kept)


def executable_bytes(figures: Sequence[LayerFigures], again: Repetition) -> np.ndarray:
    """[i, j]: what layers i to j - 1 need as one executable, which has one microbatch, with the margin for temporaries."""
    all_of_it = _within_bytes(figures, Repetition())
    within = (1.0 - again.share) * all_of_it + again.share * _within_bytes(figures, again)
    temporaries = sums([one.beside_bytes for one in figures]) + within
    return np.asarray(sums([one.kept_bytes for one in figures]) + temporaries / memory_tuning.TUNING.temporaries_margin)


def _within_bytes(figures: Sequence[LayerFigures], again: Repetition) -> np.ndarray:
    """[i, j]: what comes and goes where forward and backward are in one task: of one layer at a time, or of all.

    The layers of a scan are done again together.
    """
    if again.by_layers:
        together = [one.joined_bytes + one.stacked_bytes for one in figures]
        own = [one.within_bytes - both for one, both in zip(figures, together, strict=True)]
        return np.asarray(sums(together) + largest(own))
    handed_on = sums([one.within_bytes - one.passing_bytes for one in figures])
    return np.asarray(handed_on + _passing_bytes(figures))


def _passing_bytes(figures: Sequence[LayerFigures]) -> np.ndarray:
    """[i, j]: the temporaries of one layer at a time, and the gradients that the layers of a scan make together."""
    stacked = [one.stacked_bytes for one in figures]
    own = [max(0.0, one.passing_bytes - gradients) for one, gradients in zip(figures, stacked, strict=True)]
    return np.asarray(sums(stacked) + largest(own))
