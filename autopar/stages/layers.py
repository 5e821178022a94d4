"""Cluster the forward equations of a step into layers: what pipeline stages are made of.

In: the chain of forward equations. Out: the places where layers begin, and which layers are the same. With U the bound on a
layer's flops and c(p) the bytes that a cut before place p sends,

    B(k, q) = min over p < q with flops(p, q) <= U, or q = p + 1, or next to nothing beside one equation,
              of B(k - 1, p) + c(p)       c(0) = 0
    answer    min over k <= max_layers of B(k, n);  among equals the least sum of squared flops, then fewer and earlier cuts

U is (1 + slack) total / max_layers. If no clustering with so few layers meets it, U is the smallest bound that can be met.

Not every place is a candidate for a cut; the numbers are in `tuning.py`. Of places of equal bytes with next to no flops between
them only the first is one, so that equal blocks are cut alike. A chain of up to `exact_places` equations is otherwise solved
exactly. In a longer one the candidates are the cheapest (then the first) place in each stretch of U / `stretches` flops, both
ends of an equation above U, and the places that must be cuts. Time then hardly grows with the chain.

How many layers there are is chosen by their cuts. A cut inside a block sends more than the cheapest places near it on either
side, a cut at the end of a block at most as much as those on one: blocks before it may send more, as in a Wide-ResNet, or after.

What can go wrong: the cheap places of a chain are further apart than U. A layer then begins inside a block, at the cheapest place
there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar.errors import ArgumentError
from autopar.stages.chain import ForwardEquation
from autopar.stages.even_cuts import boundaries
from autopar.stages.tuning import TUNING, Tuning

_SLACK = 1.0
"""By this part of an equal share a layer may be larger, where the number of layers is not given."""


def cluster(
    chain: Sequence[ForwardEquation],
    *,
    max_layers: int,
    slack: float = 0.2,
    boundaries: Sequence[int] = (),
    tuning: Tuning = TUNING,
) -> tuple[int, ...]:
    """Ascending places in (0, len(chain)) where layers begin: at most `max_layers`, or as many as `boundaries` ask for.

    `boundaries` are places that must be cuts. Raises ArgumentError for places and numbers that cannot be used.
    """
    _check(chain, max_layers=max_layers, slack=slack, boundaries=boundaries)
    if not chain:
        return ()
    forced = tuple(sorted(set(boundaries)))
    before, cut_bytes = _flops_and_bytes(chain)
    layers = max(max_layers, len(forced) + 1)
    bound = (1 + slack) * before[-1] / layers
    places = _candidates(before, cut_bytes, bound=bound, forced=forced, tuning=tuning)
    task = _Clustering(
        places=places,
        before=before[places],
        cut_bytes=cut_bytes[places],
        forced=np.searchsorted(places, forced),
        max_layers=layers,
        beside=tuning.same_place,
    )
    return task.solve(task.attainable(bound))


def find_layers(
    chain: Sequence[ForwardEquation],
    counts: Sequence[int],
    *,
    fewest: int = 1,
    is_divisible: bool = False,
    tuning: Tuning = TUNING,
) -> tuple[int, ...]:
    """The places where layers begin: the user's boundaries, or else at the ends of blocks, if the model has blocks.

    `counts`: the numbers of layers that are compared; the one whose cuts are the most natural is taken, the first among equals.
    A cut inside a block sends more than the ends of that block do, on both sides. Blocks of unlike width send unlike bytes, so
    cuts nearby decide; among equals those further away, which are the ends of the block where a model has few.

    `fewest`: so many layers are preferred to fewer, however natural the cuts of these are. `is_divisible`: numbers are left out
    under which most of the work is in equations that are too large to be in a layer with others. Such layers are worth nothing to
    recomputation.
    """
    if marked := boundaries(chain):
        return marked
    before, cut_bytes = _flops_and_bytes(chain)
    best: tuple[int, ...] = ()
    least = (fewest > 1, math.inf, math.inf)
    for count in counts:
        if count < len(chain) and (not is_divisible or _are_divisible(before, count)):
            places = cluster(chain, max_layers=count, slack=_SLACK)
            excesses = [_excesses(place, before, cut_bytes, tuning) for place in places]
            near, far = (max((one[n] for one in excesses), default=math.inf) for n in (0, 1))
            if (most := (len(places) + 1 < fewest, near, far)) < least:
                best, least = places, most
    return best


def _flops_and_bytes(chain: Sequence[ForwardEquation]) -> tuple[np.ndarray, np.ndarray]:
    """(flops before each place, bytes that a cut there sends) of the places 0 to len(chain)."""
    before = np.concatenate([[0.0], np.cumsum([e.flops for e in chain])])
    return before, np.array([0.0, *(e.cut_bytes for e in chain[1:]), 0.0])


def _are_divisible(before: np.ndarray, count: int) -> bool:
    """Whether at least half of the work is in equations that fit into a layer with others, if layers are so many."""
    flops = np.diff(before)
    return bool(flops[flops <= (1 + _SLACK) * before[-1] / count].sum() * 2 >= before[-1])


def _excesses(place: int, before: np.ndarray, cut_bytes: np.ndarray, tuning: Tuning) -> tuple[float, float]:
    """How many times as many bytes a cut sends as the cheapest one beside it, on the side where that sends more; 1 at least.

    First, beside those `nearby`; second, beside those up to `furthest` away, of which one that is d times `nearby` away may send
    1 / (`widening` max(1, d)) of the bytes. The ends of the chain are no cuts.
    """
    away = np.abs(before - before[place]) / (tuning.nearby * before[-1] * (1 + 1e-9))
    sides = slice(1, place), slice(place + 1, len(cut_bytes) - 1)

    def beside(sent: np.ndarray, furthest: float) -> float:
        within = np.where(away <= furthest, sent, math.inf)
        cheapest = max(within[side].min(initial=math.inf) for side in sides)
        if cut_bytes[place] <= cheapest:
            return 1.0
        return float(cut_bytes[place] / cheapest) if cheapest else math.inf

    widened = cut_bytes * tuning.widening * np.maximum(away, 1.0)
    return beside(cut_bytes, 1.0), beside(widened, tuning.furthest / tuning.nearby)


def _check(chain: Sequence[ForwardEquation], *, max_layers: int, slack: float, boundaries: Sequence[int]) -> None:
    wrong = []
    if max_layers < 1:
        wrong.append(f"max_layers={max_layers}: must be at least 1")
    if slack < 0:
        wrong.append(f"slack={slack}: must not be negative")
    outside = [place for place in boundaries if not 0 < place < len(chain)]
    if outside:
        wrong.append(f"boundaries {outside} are not between two of the {len(chain)} forward equations")
    if wrong:
        raise ArgumentError("Layers cannot be made like this:\n" + "\n".join(f"  - {line}" for line in wrong))


def _candidates(
    before: np.ndarray, cut_bytes: np.ndarray, *, bound: float, forced: Sequence[int], tuning: Tuning
) -> np.ndarray:
    """Ascending places, the first and the last of the chain among them; see the module's text."""
    count = len(before) - 1
    heavy = np.flatnonzero(np.diff(before) > bound)
    needed = np.concatenate([[0, count], np.asarray(forced, int), heavy, heavy + 1])
    if bound <= 0:
        return np.unique(needed)
    places = np.arange(count + 1)
    if count > tuning.exact_places:
        stretch = np.floor(before / (bound / tuning.stretches))
        order = np.lexsort((places, cut_bytes, stretch))
        cheapest = order[np.unique(stretch[order], return_index=True)[1]]
        places = np.unique(np.concatenate([needed, cheapest]))
    kept = [0]
    fixed = set(needed.tolist())
    for place in places[1:].tolist():
        alike = (
            cut_bytes[place] == cut_bytes[kept[-1]] and before[place] - before[kept[-1]] <= tuning.same_place * bound
        )
        if place in fixed or not alike:
            kept.append(place)
    return np.array(kept)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Clustering:
    """Candidate places 0..C, flops before each, bytes of a cut there, numbers of those that must be cuts, layers allowed.

    `beside`: the part of the bound that a layer may have beside an equation above it.
    """

    places: np.ndarray
    before: np.ndarray
    cut_bytes: np.ndarray
    forced: np.ndarray
    max_layers: int
    beside: float

    def attainable(self, bound: float) -> float:
        """`bound`, or the least bound that `max_layers` layers can meet, to twelve digits."""
        if self._layers_needed(bound) <= self.max_layers:
            return bound
        low, high = bound, max(float(self.before[-1]), bound)
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._layers_needed(middle) <= self.max_layers else (middle, high)
        return high

    def _starts(self, bound: float) -> np.ndarray:
        """For each candidate the first candidate at which a layer that ends there may begin; itself if there is none."""
        ends = np.arange(len(self.places))
        starts = np.searchsorted(self.before, self.before - bound * (1 + 1e-12), side="left")
        alone = np.concatenate([[False], np.diff(self.places) == 1])
        starts = np.minimum(starts, np.where(alone, ends - 1, ends))
        starts = np.minimum(starts, self._starts_with_heavy(np.flatnonzero(alone), bound))
        past = np.searchsorted(self.forced, ends, side="left")
        last_forced = np.concatenate([[0], self.forced])[past]
        return np.asarray(np.maximum(starts, last_forced))

    def _starts_with_heavy(self, alone: np.ndarray, bound: float) -> np.ndarray:
        """As `_starts`, of layers that have one equation and little beside it; itself if there is none.

        `alone`: the candidates that are one equation behind the candidate before them.
        """
        starts, before = np.arange(len(self.places)), self.before
        beside = self.beside * bound
        for end in alone[np.diff(before)[alone - 1] > bound - beside].tolist():
            last = int(np.searchsorted(before, before[end] + beside, side="right"))
            left = before[end - 1] - (beside - (before[end:last] - before[end]))
            starts[end:last] = np.searchsorted(before, left, side="left")
        return starts

    def _layers_needed(self, bound: float) -> float:
        """The least number of layers that meet a bound: as long as possible from the end backwards."""
        starts = self._starts(bound)
        at, layers = len(self.places) - 1, 0
        while at > 0:
            if starts[at] == at:
                return np.inf
            at, layers = int(starts[at]), layers + 1
        return layers

    def solve(self, bound: float) -> tuple[int, ...]:
        """The cuts."""
        count = len(self.places)
        starts = self._starts(bound)
        width = int(np.max(np.arange(count) - starts))
        begins = np.arange(count)[:, None] - np.arange(width, 0, -1)[None, :]
        allowed = begins >= starts[:, None]
        begins = np.maximum(begins, 0)
        squares = (self.before[:, None] - self.before[begins]) ** 2
        # Of a clustering of what lies before each candidate: (bytes of cuts, sum of squared flops) with k layers.
        sent, uneven = np.full(count, np.inf), np.full(count, np.inf)
        sent[0] = uneven[0] = 0.0
        came_from: list[np.ndarray] = []
        ends: list[tuple[float, float, int]] = []
        for k in range(1, self.max_layers + 1):
            total = np.where(allowed, (sent + self.cut_bytes)[begins], np.inf)
            sent = total.min(axis=1)
            spread = np.where(total == sent[:, None], uneven[begins] + squares, np.inf)
            chosen = spread.argmin(axis=1)
            uneven = spread[np.arange(count), chosen]
            came_from.append(begins[np.arange(count), chosen])
            ends.append((float(sent[-1]), float(uneven[-1]), k))
        return self._cuts(came_from[: min(ends)[2]])

    def _cuts(self, came_from: Sequence[np.ndarray]) -> tuple[int, ...]:
        at, cuts = len(self.places) - 1, []
        for previous in reversed(came_from):
            at = int(previous[at])
            cuts.append(int(self.places[at]))
        return tuple(cuts[-2::-1])
