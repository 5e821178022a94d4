"""Communication over data ranks: the reduction of gradients, and what ZeRO gathers.

In: prices of a stage's devices, its work, the plan, seconds of its passes. Out: `Communication` once per step, or for every
microbatch. Layers are reduced beside the passes of the others. What can go wrong: a framework that begins only when the last
backward pass has ended; the column `overlap` says so.
"""

from __future__ import annotations

from autopar.cost_model import overlap
from autopar.cost_model.machine import Hidden
from autopar.cost_model.overlap import Communication
from autopar.simulate.closed_forms.prices import StagePrices
from autopar.simulate.closed_forms.stage_work import StageWork, StepPlan


def _gradients(prices: StagePrices, stage: StageWork, kind: str, bytes_each: float) -> float:
    """Seconds of one collective over all parameters' gradients, or parameters, of a device."""
    if stage.copies > 1:
        return prices.hybrid_gradient_s(kind, stage.parameters * bytes_each)
    dense_s = prices.dense_gradient_s(kind, (stage.parameters - stage.expert_parameters) * bytes_each)
    return dense_s + prices.expert_gradient_s(kind, stage.expert_parameters * bytes_each)


def reduce_once(
    prices: StagePrices, plan: StepPlan, stage: StageWork, *, forward_s: float, backward_s: float
) -> list[Communication]:
    """Once per step: the reduction of gradients, unless every microbatch has its own, and ZeRO's gather of the new parameters."""
    parts = [] if plan.reduces_each else [_reduction(prices, plan, stage, backward_s)]
    if plan.zero_stage not in (1, 2):
        return parts
    gather_s = _gradients(prices, stage, "all-gather", plan.element_bytes)
    return [*parts, _in_buckets(prices, stage, "data_parallel", comm_s=gather_s, compute_s=forward_s)]


def exchange_each_microbatch(
    prices: StagePrices, plan: StepPlan, stage: StageWork, *, forward_s: float, backward_s: float
) -> list[Communication]:
    """For every microbatch: the reduction of its gradients, if it has one; ZeRO 3 gathers parameters in forward and backward."""
    parts = [_reduction(prices, plan, stage, backward_s)] if plan.reduces_each else []
    if plan.zero_stage >= 3:
        gather_s = _gradients(prices, stage, "all-gather", plan.element_bytes)
        parts += [
            _in_buckets(prices, stage, "zero3", comm_s=gather_s, compute_s=compute_s)
            for compute_s in (forward_s, backward_s)
        ]
    return parts


def _reduction(prices: StagePrices, plan: StepPlan, stage: StageWork, backward_s: float) -> Communication:
    """Gradients to all ranks, or under ZeRO to those that update them."""
    kind = "reduce-scatter" if plan.zero_stage else "all-reduce"
    comm_s = _gradients(prices, stage, kind, plan.states.gradient)
    return _in_buckets(prices, stage, "data_parallel", comm_s=comm_s, compute_s=backward_s)


def _in_buckets(
    prices: StagePrices, stage: StageWork, kind: Hidden, *, comm_s: float, compute_s: float
) -> Communication:
    """A stage's gradients, or parameters, layer by layer beside the passes of the other layers.

    With n layers, c seconds of communication and b of compute each, the pipe of both ends max(0, c - b) later for every layer
    after the first, and one layer's communication stands alone at its end: exposed = c + (n - 1) max(0, c - b), so that
    (n-1)/n min(n c, n b) hides. A single layer has two buckets.
    """
    share = 1 - 1 / max(2, stage.layer_count)
    return overlap.beside(prices.cluster.overlap, kind, comm_s=comm_s, compute_s=share * min(comm_s, compute_s))
