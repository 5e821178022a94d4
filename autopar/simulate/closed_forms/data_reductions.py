"""Communication over data ranks: the reduction of gradients, and what ZeRO gathers.

In: prices of a stage's devices, its work, the plan, seconds of its passes. Out: `Communication` once per step, or for every
microbatch. Layers are reduced beside the passes of the others; where buckets are stated, one bucket after the other, in the order
in which backward makes gradients, the head's first and the embedding's last. New parameters are gathered in the opposite order
beside the forward pass, which waits for each bucket: the same read backwards. What can go wrong: a framework that begins only
when the last backward pass has ended; the column `overlap` says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.cost_model import overlap
from autopar.cost_model.machine import Hidden
from autopar.cost_model.overlap import Communication
from autopar.simulate.closed_forms.prices import StagePrices
from autopar.simulate.closed_forms.stage_work import StageWork, StepPlan


class PassSeconds(NamedTuple):
    """Seconds of one kind of work of a stage, all of its layers of that kind together, in one microbatch."""

    forward_s: float
    backward_s: float


def _exchange_s(prices: StagePrices, stage: StageWork, kind: str, bytes_each: float) -> float:
    """Seconds of one collective over all parameters' gradients, or parameters, of a device."""
    if stage.copies > 1:
        return prices.hybrid_gradient_s(kind, stage.parameters * bytes_each)
    dense_s = prices.dense_gradient_s(kind, (stage.parameters - stage.expert_parameters) * bytes_each)
    return dense_s + prices.expert_gradient_s(kind, stage.expert_parameters * bytes_each)


def reduce_once(
    prices: StagePrices, plan: StepPlan, stage: StageWork, passes: Sequence[PassSeconds]
) -> list[Communication]:
    """Once per step: the reduction of gradients, unless every microbatch has its own, and ZeRO's gather of the new parameters."""
    parts = [] if plan.reduces_each else [_reduction(prices, plan, stage, passes)]
    if plan.zero_stage not in (1, 2):
        return parts
    beside = [one.forward_s for one in passes]
    return [*parts, _in_buckets(prices, stage, "all-gather", plan.element_bytes, beside)]


def exchange_each_microbatch(
    prices: StagePrices, plan: StepPlan, stage: StageWork, passes: Sequence[PassSeconds]
) -> list[Communication]:
    """For every microbatch: the reduction of its gradients, if it has one; ZeRO 3 gathers parameters in forward and backward."""
    parts = [_reduction(prices, plan, stage, passes)] if plan.reduces_each else []
    if plan.zero_stage >= 3:
        gather_s = _exchange_s(prices, stage, "all-gather", plan.element_bytes)
        parts += [
            _by_layers(prices, stage, "zero3", comm_s=gather_s, compute_s=sum(seconds))
            for seconds in zip(*passes, strict=True)
        ]
    return parts


def _reduction(prices: StagePrices, plan: StepPlan, stage: StageWork, passes: Sequence[PassSeconds]) -> Communication:
    """Gradients to all ranks, or under ZeRO to those that update them."""
    kind = "reduce-scatter" if plan.zero_stage else "all-reduce"
    return _in_buckets(prices, stage, kind, plan.states.gradient, [one.backward_s for one in passes])


def _in_buckets(
    prices: StagePrices, stage: StageWork, kind: str, bytes_each: float, seconds: Sequence[float]
) -> Communication:
    """A stage's gradients, or new parameters, bucket by bucket beside a pass, which takes so long in each kind of work.

    With equal layers as buckets that is `_by_layers`. Within a kind of work gradients come evenly.
    """
    size, compute_s, whole = prices.cluster.overlap.bucket_bytes, sum(seconds), stage.parameters * bytes_each
    if not size or not whole:
        comm_s = _exchange_s(prices, stage, kind, bytes_each)
        return _by_layers(prices, stage, "data_parallel", comm_s=comm_s, compute_s=compute_s)
    made = [work.parameters * count * bytes_each for work, count in stage.works]
    bytes_by, seconds_by = ([0.0, *itertools.accumulate(reversed(one))] for one in (made, seconds))
    full = math.ceil(whole / size) - 1
    ends = [*(size * number for number in range(1, full + 1)), whole]
    full_s, last_s = (
        _exchange_s(prices, stage, kind, bytes_each * part / whole) for part in (size, whole - full * size)
    )
    begins = np.interp(ends, bytes_by, seconds_by).tolist()
    return overlap.in_order(
        prices.cluster.overlap,
        "data_parallel",
        zip(begins, [*itertools.repeat(full_s, full), last_s], strict=True),
        compute_s=compute_s,
    )


def _by_layers(
    prices: StagePrices, stage: StageWork, kind: Hidden, *, comm_s: float, compute_s: float
) -> Communication:
    """A stage's gradients, or parameters, layer by layer beside the passes of the other layers.

    With n layers, c seconds of communication and b of compute each, the pipe of both ends max(0, c - b) later for every layer
    after the first, and one layer's communication stands alone at its end: exposed = c + (n - 1) max(0, c - b), so that
    (n-1)/n min(n c, n b) hides. A single layer has two buckets.
    """
    share = 1 - 1 / max(2, stage.layer_count)
    return overlap.beside(prices.cluster.overlap, kind, comm_s=comm_s, compute_s=share * min(comm_s, compute_s))
