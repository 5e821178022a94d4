"""A lower bound on a pairwise choice problem, and the choices it rules out.

The problem's value does not change when costs are shifted between a node and its edges (a reparametrisation):

    c_v[p] + m_e[p],   R_e[p, q] - m_e[p].

After any shifts the sum of all minima is a lower bound; dual ascent shifts so that it grows. Forward and backward sweeps over
the nodes collect at each node what its edges imply, m_e[p] = min_q R_e[p, q], and hand equal shares on to the edges
ahead (sequential message passing, the pairwise case of Kolmogorov's SRMP, 2015). A choice p of node v cannot be part of
a better solution than one of value U if

    bound - min c_v + c_v[p] + sum_e (min_q R_e[p, q] - min R_e) > U.

In: a reduced objective. Out: the bound, the best choice seen, the shifted costs, and which choices they rule out. What can go
wrong: the bound stops short of the optimum where the linear relaxation has a gap; an integer program settles the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.local_search import improve_choice
from autopar.solver.messages import End, Level
from autopar.solver.problem import Costs
from autopar.solver.tuning import TUNING, Tuning

ROUNDING = 1e-9
"""A choice is ruled out only if it is worse by more than this part of the value to beat."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bounded:
    """What dual ascent came to.

    Attributes:
        lower: seconds that no choice goes below.
        upper: seconds of the best choice seen; infinite if none was possible.
        choice: that choice, of every node.
        rise: seconds by which each choice of a node raises the bound, a float array (choices,) per node.
        shifted: the shifted costs, without infinities: an equivalent objective.
    """

    lower: float
    upper: float
    choice: Mapping[int, int]
    rise: Mapping[int, np.ndarray]
    shifted: Costs

    def below(self, value: float) -> dict[int, np.ndarray]:
        """Which choices may be part of a solution of at most `value` seconds, a bool array (choices,) per node."""
        slack = value - self.lower + ROUNDING * abs(value)
        return {v: rise <= slack for v, rise in self.rise.items()}

    def near_optimal(self, relative: float) -> dict[int, np.ndarray]:
        """Which choices raise the bound by at most this part of it, a bool array (choices,) per node."""
        return self.below(self.lower + relative * abs(self.lower))


def bound_costs(
    costs: Costs,
    *,
    gap: float | None = None,
    start: Mapping[int, int] | None = None,
    cutoff: float = np.inf,
    tuning: Tuning = TUNING,
    budget: Budget | None = None,
) -> Bounded:
    """Bound an objective by forward and backward sweeps.

    Args:
        costs: the objective.
        gap: the sweeps end when bound and best choice are this near (relative); `tuning.bound_gap` if it is not given.
        start: a choice of every node to begin with, instead of a greedy one.
        cutoff: the sweeps end when the bound reaches these seconds.
        tuning: how many sweeps.
        budget: ends the sweeps early; the bound is one all the same.
    """
    budget = budget or Budget()
    return _Ascent(costs, budget).run(start, tuning.bound_gap if gap is None else gap, cutoff, tuning)


def pass_messages(
    costs: Costs, weights: Mapping[tuple[int, int], float], *, sweeps: int, budget: Budget
) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """What the ends of edges take over in some sweeps, if edge e of a larger problem stands `weights[e]` times.

    Returns:
        For edge (u, v) the seconds that u and v take over: two float arrays (choices of u,), (choices of v,).
    """
    ascent = _Ascent(costs, budget, weights)
    for _ in range(sweeps):
        ascent.sweep()
    return {
        (u, end.other): (ascent.messages[end.here], ascent.messages[end.there])
        for u in ascent.order
        for end in ascent.ends[u]
        if u < end.other
    }


class _Ascent:
    """The state of dual ascent: the messages of all ends of all edges, in one flat array (`messages.py`)."""

    def __init__(self, given: Costs, budget: Budget, weights: Mapping[tuple[int, int], float] | None = None) -> None:
        self.original, self.budget, self.work = given, budget, given.pairs
        costs, edges = given.nodes, given.edges
        self.order = sorted(costs)
        finite = sum(float(np.max(np.where(np.isfinite(m), m, 0.0), initial=0.0)) for m in edges.values())
        finite += sum(float(np.max(np.where(np.isfinite(c), c, 0.0), initial=0.0)) for c in costs.values())
        big = 4.0 * finite + 1.0  # takes the place of infinity: more than any possible choice costs
        self.given = {v: np.where(np.isfinite(costs[v]), costs[v], big).astype(float) for v in self.order}
        self.matrix = {pair: np.where(np.isfinite(m), m, big) for pair, m in edges.items()}
        self.ends: dict[int, list[End]] = {v: [] for v in self.order}
        self.begins: list[int] = []
        place = 0
        for (u, v), m in sorted(self.matrix.items(), key=lambda item: item[0]):
            here, there = slice(place, place + len(m)), slice(place + len(m), place + sum(m.shape))
            weight = 1.0 if weights is None else weights[u, v]
            self.ends[u].append(End(v, m, here, there, weight))
            self.ends[v].append(End(u, m.T, there, here, weight))
            self.begins += [here.start, there.start]
            place = there.stop
        self.messages = np.zeros(place)
        self.levels = [Level.of({v: (self.given[v], self.ends[v]) for v in level}) for level in self._by_level()]

    def _by_level(self) -> list[list[int]]:
        """Nodes with edges, by the length of the longest way to them from lower ones."""
        levels: list[list[int]] = []
        level_of: dict[int, int] = {}
        for v in self.order:
            level_of[v] = 1 + max((level_of[end.other] for end in self.ends[v] if end.other < v), default=-1)
            if self.ends[v]:
                levels.extend([] for _ in range(level_of[v] + 1 - len(levels)))
                levels[level_of[v]].append(v)
        return levels

    def sweep(self) -> None:
        """Pass messages to the highest node and back."""
        self.budget.spend(2 * self.work)
        for level in self.levels:
            level.shift(self.messages, level.handed_up)
        for level in self.levels[::-1]:
            level.shift(self.messages, level.handed_down)

    def run(self, start: Mapping[int, int] | None, gap: float, cutoff: float, tuning: Tuning) -> Bounded:
        best = dict(start) if start is not None else self._decode()
        upper, lower = self.original.value(best), -np.inf
        for number in range(tuning.sweeps):
            if self.budget.is_over:
                break
            self.sweep()
            if (number + 1) % tuning.check_every:
                continue
            trial = self._decode()
            value = self.original.value(trial)
            if value < upper:
                upper, best = value, trial
            before, lower = lower, self._lower()
            if lower >= cutoff or upper - lower <= gap * abs(upper) or lower - before <= tuning.stalled * abs(upper):
                break
        best = improve_choice(best, self.original, self.budget)
        upper = self.original.value(best)
        return Bounded(min(self._lower(), upper), upper, best, self._rises(), Costs(self._costs(), self._edges()))

    def _edges(self) -> dict[tuple[int, int], np.ndarray]:
        """The shifted edges."""
        edges = {}
        for u in self.order:
            for end in self.ends[u]:
                if u < end.other:
                    edges[u, end.other] = end.matrix - self.messages[end.here][:, None] - self.messages[end.there]
        return edges

    def _costs(self) -> dict[int, np.ndarray]:
        """The shifted costs."""
        costs = dict(self.given)
        for level in self.levels:
            costs |= level.costs(self.messages)
        return costs

    def _least(self) -> np.ndarray:
        """The least shifted cost of each end of each edge, for each choice there, in the places of the messages (places,)."""
        least = np.zeros_like(self.messages)
        for level in self.levels:
            least[level.rows] = level.least(self.messages)
        return least - self.messages

    def _decode(self) -> dict[int, int]:
        """Choose greedily from the lowest node up, given the choices already made.

        A sweep down has brought to each node what the higher ones imply, so where the bound is tight this order meets it; the
        opposite order rarely does.
        """
        self.budget.spend(self.work)
        choice: dict[int, int] = {}
        least, costs = self._least(), self._costs()
        for v in self.order:
            total = costs[v]
            for end in self.ends[v]:
                if end.other in choice:
                    total = total + end.matrix[:, choice[end.other]] - self.messages[end.here]
                else:
                    total = total + least[end.here]
            choice[v] = int(np.argmin(total))
        return choice

    def _lower(self) -> float:
        total = sum(float(np.minimum.reduce(cost)) for cost in self._costs().values())
        return total + float(np.minimum.reduceat(self._least(), self.begins)[::2].sum()) if self.begins else total

    def _rises(self) -> dict[int, np.ndarray]:
        rises, least, costs = {}, self._least(), self._costs()
        for v in self.order:
            rise = costs[v] - costs[v].min()
            for end in self.ends[v]:
                rise = rise + least[end.here] - np.minimum.reduce(least[end.here])
            rises[v] = rise
        return rises
