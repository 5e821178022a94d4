"""Rejoin scans that were divided into single layers for a search: only the stages that it found divide them afterwards.

In: a divided step in microbatches and the places where its forward chain is cut. Out: the step divided only where a cut lies
between two layers, in microbatches, and the same cuts as places in its chain: a place has the same work before it. What can go
wrong: work that no longer adds up, because an operation was not done piece by piece; the nearest place is taken.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from autopar.microbatches.loop import TimeLoop
from autopar.program.loops import LoopEquation
from autopar.stages.chain import ForwardEquation, forward_chain
from autopar.stages.scan_stacks import ForwardWork, ScanCuts, find_stacks, forward_work
from autopar.stages.split_scans import SplitStep, split_scans
from autopar.stages.time_loops import make_loops


def rejoin_scans(split: SplitStep, loop: TimeLoop, cuts: Sequence[int]) -> tuple[SplitStep, TimeLoop, tuple[int, ...]]:
    """Put the pieces of each stage's layers together again; returns the step, its loop and its cuts.

    The loop has the phases that the layers had: for another number of microbatches they may be others.
    """
    chain = forward_chain(loop)
    needed = _needed(split, chain, cuts)
    if needed is None or needed == split.cuts:
        return split, loop, tuple(cuts)
    coarse = split_scans(split.whole, needed)
    count, phases_from = loop.plan.microbatches, loop.plan.taken_from
    again = make_loops(coarse, phases_from or count)(count)
    return coarse, again, _same_places(chain, forward_chain(again), cuts)


def _needed(split: SplitStep, chain: Sequence[ForwardEquation], cuts: Sequence[int]) -> ScanCuts | None:
    """The layers at which some stage begins; None if the chain's scans are not those of the step."""
    stacks = find_stacks(split.whole)
    scans = [work for work in forward_work(split.whole, stacks) if _is_loop(work)]
    places = [place for place, link in enumerate(chain) if _is_loop(link)]
    found: list[set[int]] = [set() for _ in stacks]
    for work in scans:
        bounds = (0, *split.cuts[work.stack]) if work.stack is not None and split.cuts else (0,)
        own, places = places[: len(bounds)], places[len(bounds) :]
        stages = [bisect.bisect_right(cuts, place) for place in own]
        is_reversed = isinstance(work.equation, LoopEquation) and work.equation.loop.is_reversed
        stages = stages[::-1] if is_reversed else stages
        if len(stages) < len(bounds):
            return None
        if work.stack is not None:
            pairs = zip(bounds[1:], itertools.pairwise(stages), strict=True)
            found[work.stack] |= {layer for layer, (before, after) in pairs if before != after}
    return None if places else tuple(tuple(sorted(layers)) for layers in found)


def _same_places(
    before: Sequence[ForwardEquation], after: Sequence[ForwardEquation], cuts: Sequence[int]
) -> tuple[int, ...]:
    """For each place of one chain the place of another with the same work before it, ascending."""
    done, same = (list(itertools.accumulate((link.flops for link in chain), initial=0.0)) for chain in (before, after))
    found: list[int] = []
    for cut in cuts:
        first = found[-1] + 1 if found else 1
        found.append(min(range(first, len(after)), key=lambda i: abs(same[i] - done[cut])))
    return tuple(found)


def _is_loop(link: ForwardEquation | ForwardWork) -> bool:
    return isinstance(link.equation, LoopEquation) and link.equation.loop.kind == "scan"
