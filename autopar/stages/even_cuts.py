"""Where to cut the chain of forward operations into stages of equal work, if nothing else says it.

In: the forward chain (`chain.forward_chain`) and the number of stages. Out: places of the chain: the user's layer boundaries if
there are any, otherwise places near equal shares of the work where few bytes cross. What can go wrong: one operation is much
more than a stage's share; a warning names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.compat import source_line
from autopar.errors import ArgumentError, warn
from autopar.program.layer_boundary import layer_boundary_p
from autopar.program.loops import LoopEquation
from autopar.stages.chain import ForwardEquation
from autopar.stages.tuning import TUNING, Tuning

ACCUMULATED_BY_HAND = (
    ". If the step adds up gradients in a lax.scan over parts of the batch, compute the loss of the whole batch instead and "
    "give num_microbatches"
)


def choose_even_cuts(
    chain: Sequence[ForwardEquation], num_stages: int, *, work: Sequence[float] | None = None, tuning: Tuning = TUNING
) -> tuple[int, ...]:
    """Places that share the work equally, moved by at most `tuning.slack` of a share to where the fewest bytes cross.

    Args:
        chain: the forward operations.
        num_stages: how many stages to cut them into.
        work: of each operation, in any unit; its floating-point operations unless it is given.
        tuning: how far a cut may be from an equal share.
    """
    done = np.cumsum([0.0, *([e.flops for e in chain] if work is None else work)])
    share = done[-1] / num_stages
    cuts: list[int] = []
    for k in range(1, num_stages):
        first = cuts[-1] + 1 if cuts else 1
        window = [i for i in range(first, len(chain)) if abs(done[i] - k * share) <= tuning.slack * share]
        if not window:
            window = [min(range(first, len(chain)), key=lambda i: abs(done[i] - k * share), default=0)]
        if window == [0] or len(chain) - window[0] < num_stages - k:
            operations = "1 forward operation" if len(chain) == 1 else f"{len(chain)} forward operations"
            raise ArgumentError(
                f"the step has {operations}, too few for {num_stages} stages of equal work; use fewer "
                f"stages{'' if chain else ACCUMULATED_BY_HAND}"
            )
        cuts.append(min(window, key=lambda i: (chain[i].cut_bytes, abs(done[i] - k * share))))
    return tuple(cuts)


def boundaries(chain: Sequence[ForwardEquation]) -> tuple[int, ...]:
    """Places of the user's layer boundaries; several in a row, of one tree, are one."""
    marked = [i for i, place in enumerate(chain) if place.equation.primitive is layer_boundary_p]
    return tuple(i for i in marked if i > 0 and i - 1 not in marked)


def choose_cuts(chain: Sequence[ForwardEquation], num_stages: int) -> tuple[int, ...]:
    """Cuts of equal work: at the user's layer boundaries if there are any, else where few bytes cross."""
    marked = boundaries(chain)
    if not marked or num_stages == 1:
        return choose_even_cuts(chain, num_stages)
    if len(marked) < num_stages - 1:
        raise ArgumentError(
            f"the step has {len(marked)} layer boundaries, {num_stages} stages need {num_stages - 1}; add calls of "
            "layer_boundary, or remove them all to let autopar choose"
        )
    done = np.cumsum([0.0, *(e.flops for e in chain)])
    cuts: list[int] = []
    for k in range(1, num_stages):
        left = [i for i in marked if not cuts or i > cuts[-1]]
        left = left[: len(left) - (num_stages - 1 - k)]
        cuts.append(min(left, key=lambda i: abs(done[i] - k * done[-1] / num_stages)))
    return tuple(cuts)


def find_indivisible_work(
    chain: Sequence[ForwardEquation], num_stages: int, *, divided: bool = False
) -> ForwardEquation | None:
    """An operation that is much more than a stage's share of the chain, such as a scan over time.

    `divided`: scans over layers have been divided as evenly as their layers allow.
    """
    places = [place for place in chain if not (divided and isinstance(place.equation, LoopEquation))]
    total = sum(place.flops for place in chain)
    largest = max(places, key=lambda place: place.flops, default=None)
    is_too_large = largest is not None and num_stages > 1 and largest.flops > 1.5 * total / num_stages
    return largest if is_too_large else None


def warn_of_indivisible_work(chain: Sequence[ForwardEquation], num_stages: int, *, divided: bool) -> None:
    """One warning if there is such an operation; the arguments are those of `find_indivisible_work`."""
    largest = find_indivisible_work(chain, num_stages, divided=divided)
    if largest is not None:
        total = sum(place.flops for place in chain)
        warn(
            f"{largest.flops / total:.0%} of the forward work is one operation, {largest.equation.primitive.name} at "
            f"{source_line(largest.equation) or 'an unknown line'}, which stays on one of {num_stages} stages: the others will "
            "wait for it. Only scans over stacked layers can be cut inside; write other loops as operations one after the other."
        )
