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
    """Once per step: all-reduce of gradients, or a reduce-scatter and the gather of the new parameters."""
    gradient = plan.states.gradient
    if plan.zero_stage == 0:
        comm_s = _gradients(prices, stage, "all-reduce", gradient)
        return [_in_buckets(prices, stage, "data_parallel", comm_s=comm_s, compute_s=backward_s)]
    parts = []
    if plan.zero_stage == 1:
        comm_s = _gradients(prices, stage, "reduce-scatter", gradient)
        parts.append(_in_buckets(prices, stage, "data_parallel", comm_s=comm_s, compute_s=backward_s))
    gather_s = _gradients(prices, stage, "all-gather", plan.element_bytes)
    return [*parts, _in_buckets(prices, stage, "data_parallel", comm_s=gather_s, compute_s=forward_s)]


def exchange_each_microbatch(
    prices: StagePrices, plan: StepPlan, stage: StageWork, *, forward_s: float, backward_s: float
) -> list[Communication]:
    """For every microbatch: gradients to the rank that keeps them; ZeRO 3 gathers parameters in forward and backward."""
    scatter_s = _gradients(prices, stage, "reduce-scatter", plan.states.gradient)
    parts = [_in_buckets(prices, stage, "data_parallel", comm_s=scatter_s, compute_s=backward_s)]
    if plan.zero_stage >= 3:
        gather_s = _gradients(prices, stage, "all-gather", plan.element_bytes)
        parts += [
            _in_buckets(prices, stage, "zero3", comm_s=gather_s, compute_s=compute_s)
            for compute_s in (forward_s, backward_s)
        ]
    return parts


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
