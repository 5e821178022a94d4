"""Rejoin scans that were divided into single layers for a search: only the stages that it found divide them afterwards.

In: a divided step in microbatches, the places where its forward chain is cut, and which part of each stage backward does again.
Out: the step divided only where a cut lies between two layers, or where such a part ends, in microbatches, and the same cuts as
places in its chain: a place has the same work before it. What can go wrong: work that no longer adds up, because an operation
was not done piece by piece; the nearest place is taken.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from autopar.microbatches.loop import TimeLoop
from autopar.program.loops import LoopEquation
from autopar.stages.chain import ForwardEquation, forward_chain
from autopar.stages.scan_stacks import ForwardWork, ScanCuts, find_stacks, forward_work, is_scan
from autopar.stages.split_scans import SplitStep, split_scans
from autopar.stages.time_loops import make_loops


def rejoin_scans(
    split: SplitStep, loop: TimeLoop, cuts: Sequence[int], shares: Sequence[float] = ()
) -> tuple[SplitStep, TimeLoop, tuple[int, ...]]:
    """Put the pieces of each stage's layers together again, and divide them where a stage's share of work done again ends.

    A scan is done again as a whole or not at all. The loop has the phases that the layers had: for another number of microbatches
    they may be others.

    Args:
        split: a divided step; single layers can be put together in every way, other pieces are divided further.
        loop: that step in microbatches.
        cuts: the places in its forward chain where stages begin.
        shares: for each stage the part of its forward work that backward does again, 0 to 1; none: nothing.

    Returns:
        The step, its loop and its cuts.
    """
    if not any(map(is_scan, split.whole.program.equations)):
        return split, loop, tuple(cuts)
    chain = forward_chain(loop)
    needed = _needed(split, chain, cuts, shares or (0.0,) * (len(cuts) + 1))
    if needed is None or needed == split.cuts or not (split.cuts or any(needed)):
        return split, loop, tuple(cuts)
    coarse = split_scans(split.whole, needed)
    count, phases_from = loop.plan.microbatches, loop.plan.taken_from
    again = make_loops(coarse, phases_from or count)(count)
    return coarse, again, _same_places(chain, forward_chain(again), cuts)


def _needed(
    split: SplitStep, chain: Sequence[ForwardEquation], cuts: Sequence[int], shares: Sequence[float]
) -> ScanCuts | None:
    """The layers at which a stage begins, or its share ends; None if the chain's scans are not those of the step."""
    stacks = find_stacks(split.whole)
    scans = [work for work in forward_work(split.whole, stacks) if _is_loop(work)]
    places = [place for place, link in enumerate(chain) if _is_loop(link)]
    done = list(itertools.accumulate((link.flops for link in chain), initial=0.0))
    ends = _ends_of_shares(done, cuts, shares)
    found: list[set[int]] = [set() for _ in stacks]
    for work in scans:
        bounds = (0, *split.cuts[work.stack]) if work.stack is not None and split.cuts else (0,)
        own, places = places[: len(bounds)], places[len(bounds) :]
        if len(own) < len(bounds):
            return None
        if work.stack is None:
            continue
        is_reversed = isinstance(work.equation, LoopEquation) and work.equation.loop.is_reversed
        own = own[::-1] if is_reversed else own
        stages = [bisect.bisect_right(cuts, place) for place in own]
        length = stacks[work.stack].length
        layers = {
            layer
            for layer, (before, after) in zip(bounds[1:], itertools.pairwise(stages), strict=True)
            if before != after
        }
        for first, end, place in zip(bounds, (*bounds[1:], length), own, strict=True):
            for target in ends:
                if done[place] <= target <= done[place + 1] > done[place]:
                    part = round((end - first) * (target - done[place]) / (done[place + 1] - done[place]))
                    layers.add(end - part if is_reversed else first + part)
        found[work.stack] |= layers - {0, length}
    return None if places else tuple(tuple(sorted(layers)) for layers in found)


def _ends_of_shares(done: Sequence[float], cuts: Sequence[int], shares: Sequence[float]) -> list[float]:
    """The work before the end of each stage's share, where that is a part of the stage; `done`: the work before each place."""
    bounds = itertools.pairwise(done[place] for place in (0, *cuts, len(done) - 1))
    return [first + share * (end - first) for (first, end), share in zip(bounds, shares, strict=True) if 0 < share < 1]


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
