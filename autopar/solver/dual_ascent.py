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
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.local_search import improve_choice
from autopar.solver.messages import Board, argmin_of_parts
from autopar.solver.problem import Costs, FlatCosts
from autopar.solver.tuning import TUNING, Tuning

ROUNDING = 1e-9
"""A choice is ruled out only if it is worse by more than this part of the value to beat."""
LAYING_OUT = 10.0
"""To lay an objective out takes as long as so many looks at all edges."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
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
    return Ascent(costs, budget).run(start, tuning.bound_gap if gap is None else gap, cutoff, tuning)


def pass_messages(
    costs: Costs, weights: Mapping[tuple[int, int], float], *, sweeps: Sequence[int], budget: Budget
) -> Iterator[dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]]:
    """What the ends of edges take over in some sweeps, if edge e of a larger problem stands `weights[e]` times.

    Args:
        costs: the objective.
        weights: see above.
        sweeps: after how many sweeps to say so, ascending.
        budget: pays for the sweeps.

    Yields:
        For edge (u, v) the seconds that u and v take over: two float arrays (choices of u,), (choices of v,).
    """
    ascent = Ascent(costs, budget, weights)
    for before, after in itertools.pairwise((0, *sweeps)):
        for _ in range(after - before):
            ascent.sweep()
        parts = np.split(ascent.messages.copy(), ascent.board.edge_parts()[1:])
        yield {pair: (parts[2 * i], parts[2 * i + 1]) for i, pair in enumerate(costs.edges)}


class Ascent:
    """The state of dual ascent: the messages of all ends of all edges, in one flat array (`messages.py`).

    Nodes' costs may be given anew between sweeps, as prices on memory do; messages stay valid.
    """

    def __init__(self, costs: Costs, budget: Budget, weights: Mapping[tuple[int, int], float] | None = None) -> None:
        """Start with messages of zero; `weights`: how many edges of a larger problem each edge stands for, one by default."""
        self.original, self.budget = costs, budget
        flat = FlatCosts.of(costs)
        finite = sum(_largest(cost) for cost in (*costs.nodes.values(), *costs.edges.values()))
        big = 4.0 * finite + 1.0  # takes the place of infinity: more than any possible choice costs
        self.flat = dataclasses.replace(
            flat,
            cost=np.where(np.isfinite(flat.cost), flat.cost, big),
            value=np.where(np.isfinite(flat.value), flat.value, big),
        )
        self.given = self.flat.cost
        each = [1.0] * len(costs.edges) if weights is None else [weights[pair] for pair in costs.edges]
        self.board = Board.of(self.flat, np.array(each, dtype=float))
        self.messages = np.zeros(len(self.board.place_of))
        budget.spend(LAYING_OUT * self.board.work)

    def sweep(self) -> None:
        """Once up and once down."""
        self.budget.spend(2 * self.board.work)
        for level in self.board.levels:
            level.shift(self.messages, self.given, True)
        for level in self.board.levels[::-1]:
            level.shift(self.messages, self.given, False)

    def decode(self) -> np.ndarray:
        """Choose greedily from the lowest node up, given the choices already made: ints (nodes,).

        A sweep down has brought to each node what the higher ones imply, so where the bound is tight this order meets it; the
        opposite order rarely does.
        """
        self.budget.spend(1.5 * self.board.work)
        choice = argmin_of_parts(self.given, self.flat.first[:-1])
        for level in self.board.levels:
            level.decode(self.messages, self.given, choice)
        return choice

    def lower(self) -> float:
        """The bound."""
        if not len(self.given):
            return 0.0
        self.budget.spend(self.board.work)
        costs = self.board.costs(self.messages, self.given)
        total = float(np.minimum.reduceat(costs, self.flat.first[:-1]).sum())
        if not len(self.messages):
            return total
        return total + float(np.minimum.reduceat(self.board.least(self.messages), self.board.edge_parts())[::2].sum())

    def rises(self) -> np.ndarray:
        """By how much each choice raises the bound (places,)."""
        if not len(self.given):
            return np.zeros(0)
        self.budget.spend(self.board.work)
        costs, least = self.board.costs(self.messages, self.given), self.board.least(self.messages)
        rise: np.ndarray = costs - np.repeat(np.minimum.reduceat(costs, self.flat.first[:-1]), self.flat.sizes)
        if len(least):
            parts = self.board.edge_parts()
            above = least - np.repeat(np.minimum.reduceat(least, parts), np.diff(np.append(parts, len(least))))
            rise = rise + np.bincount(self.board.place_of, above, len(rise))
        return rise

    def shifted(self) -> Costs:
        """The shifted costs."""
        flat, board = self.flat, self.board
        costs = flat.split(board.costs(self.messages, self.given))
        nodes = dict(zip(flat.numbers, costs, strict=True))
        edges = {}
        for pair, begin, (u, v), (here, there) in zip(
            self.original.edges, flat.begin.tolist(), flat.ends.tolist(), board.begins.tolist(), strict=False
        ):
            height, width = int(flat.sizes[u]), int(flat.sizes[v])
            matrix = flat.value[begin : begin + height * width].reshape(height, width)
            edges[pair] = matrix - self.messages[here : here + height, None] - self.messages[there : there + width]
        return Costs(nodes, edges)

    def run(self, start: Mapping[int, int] | None, gap: float, cutoff: float, tuning: Tuning) -> Bounded:
        """Sweep until one of the limits is reached."""
        best = dict(start) if start is not None else self._name(self.decode())
        upper, lower = self.original.value(best), -np.inf
        for number in range(tuning.sweeps):
            if self.budget.is_over:
                break
            self.sweep()
            if (number + 1) % tuning.check_every:
                continue
            trial = self._name(self.decode())
            value = self.original.value(trial)
            if value < upper:
                upper, best = value, trial
            before, lower = lower, self.lower()
            if lower >= cutoff or upper - lower <= gap * abs(upper) or lower - before <= tuning.stalled * abs(upper):
                break
        best = improve_choice(best, self.original, self.budget)
        upper = self.original.value(best)
        rise = dict(zip(self.flat.numbers, self.flat.split(self.rises()), strict=True))
        return Bounded(lower=min(self.lower(), upper), upper=upper, choice=best, rise=rise, shifted=self.shifted())

    def _name(self, choice: np.ndarray) -> dict[int, int]:
        return dict(zip(self.flat.numbers, choice.tolist(), strict=True))


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.where(np.isfinite(values), values, 0.0), initial=0.0))
