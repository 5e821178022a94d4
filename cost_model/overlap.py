"""How much communication hides behind compute, and the four overlap ratios of a step.

In: seconds of communication by kind, each with the compute that runs beside it, and the cluster's `Overlap`. Out: the
seconds that remain visible, and for each kind hidden seconds over all its seconds:

    data parallel   gradient reductions beside the backward pass of the last microbatch (its layers but the first are done
                    while later gradients are still to come), gathers of parameters beside the next forward pass
    zero3           gathers of a layer's parameters beside the layer before it
    tensor          a collective of the backward pass beside the weight gradient of the same product, which does not need it
    pipeline        a stage's send beside its next microbatch
    context         keys and values of the next block of a sequence that is divided, beside attention to the block before

What part can hide is a property of the cluster's file, since it depends on links, copy engines and the software of its
time. What can go wrong: both sides compete for memory bandwidth and cores; `interference` prices that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from autopar.cost_model.machine import Overlap

Kind = Literal["data_parallel", "zero3", "tensor", "pipeline", "context", "expert"]
KINDS: tuple[Kind, ...] = ("data_parallel", "zero3", "tensor", "pipeline", "context", "expert")


@dataclasses.dataclass(frozen=True)
class Communication:
    """Seconds of one kind of communication per step: in all, and what the step waits for."""

    kind: Kind
    total_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds per step that it does not add to the step."""
        return self.total_s - self.exposed_s

    def times(self, count: float) -> Communication:
        """The same, `count` times."""
        return Communication(self.kind, self.total_s * count, self.exposed_s * count)


def beside(overlap: Overlap, kind: Kind, *, comm_s: float, compute_s: float) -> Communication:
    """`comm_s` run beside `compute_s` of independent work."""
    if kind == "expert":
        return alone(kind, comm_s)
    return Communication(kind, comm_s, overlap.exposed_s(kind, comm_s=comm_s, compute_s=compute_s))


def alone(kind: Kind, comm_s: float) -> Communication:
    """Communication that the next operation needs: all of it is waited for."""
    return Communication(kind, comm_s, comm_s)


def in_order(
    overlap: Overlap, kind: Kind, exchanges: Iterable[tuple[float, float]], *, compute_s: float
) -> Communication:
    """Exchanges one after the other, each (seconds of the compute after which it may begin, its own seconds).

        end of one = max(end of the one before, when it may begin) + its seconds
        exposed    = max(end of the last, compute) - compute, and what the hidden ones slow the compute by

    All of it is waited for if the kind does not hide.
    """
    found, end_s = list(exchanges), 0.0
    total_s = sum(seconds for _, seconds in found)
    if kind == "expert" or not overlap.hidden_part(kind):
        return alone(kind, total_s)
    for begins_s, seconds in found:
        end_s = max(end_s, begins_s) + seconds
    exposed_s = max(0.0, end_s - compute_s)
    return Communication(kind, total_s, exposed_s + overlap.interference * (total_s - exposed_s))


def share_compute(parts: Iterable[Communication], compute_s: float) -> list[Communication]:
    """The same where together they hide no more than the compute beside all of them: a second of it hides one second.

    Each keeps its part of what they would hide alone. Without this a faster device could lengthen a step.
    """
    found = list(parts)
    hidden_s = sum(part.hidden_s for part in found)
    if hidden_s <= compute_s or not hidden_s:
        return found
    share = max(0.0, compute_s) / hidden_s
    return [Communication(part.kind, part.total_s, part.total_s - share * part.hidden_s) for part in found]


def sum_by_kind(parts: Iterable[Communication]) -> dict[Kind, Communication]:
    """The sum of each kind, none left out."""
    sums = {kind: Communication(kind) for kind in KINDS}
    for part in parts:
        known = sums[part.kind]
        sums[part.kind] = Communication(part.kind, known.total_s + part.total_s, known.exposed_s + part.exposed_s)
    return sums


def overlap_ratio(communication: Communication) -> float | None:
    """Hidden seconds over all seconds of a kind; None where there is no such communication."""
    if not communication.total_s:
        return None
    return max(0.0, 1.0 - communication.exposed_s / communication.total_s)
