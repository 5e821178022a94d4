"""A lower bound on a pairwise choice problem, and the choices it rules out.

The problem's value does not change when costs are shifted between a node and its edges (a reparametrisation):

    c_v[p] + m_e[p],   R_e[p, q] - m_e[p].

After any shifts the sum of all minima is a lower bound; dual ascent shifts so that it grows. Forward and backward sweeps over
the nodes collect at each node what its edges imply, m_e[p] = min_q R_e[p, q], and hand equal shares on to the edges
ahead (sequential message passing, the pairwise case of Kolmogorov's SRMP, 2015). A choice p of node v cannot be part of
a better solution than one of value U if

    bound - min c_v + c_v[p] + sum_e (min_q R_e[p, q] - min R_e) > U.

In: a reduced problem. Out: an equivalent one with fewer choices, the bound, and the best solution seen. What can go wrong:
the bound stops short of the optimum where the linear relaxation has a gap; an integer program settles the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

Edges = Mapping[tuple[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Bounded:
    """Lower bound and best value, the best choice per node, by how much each choice of a node raises the bound,
    and the shifted costs and edges: an equivalent problem."""

    lower: float
    upper: float
    choice: Mapping[int, int]
    rise: Mapping[int, np.ndarray]
    costs: Mapping[int, np.ndarray]
    edges: Edges

    def below(self, value: float) -> dict[int, np.ndarray]:
        """Choices that may be part of a solution of at most `value`."""
        slack = value - self.lower + 1e-9 * abs(value)
        return {v: rise <= slack for v, rise in self.rise.items()}

    def near_optimal(self, relative: float) -> dict[int, np.ndarray]:
        """Choices that raise the bound by at most this part of it."""
        return self.below(self.lower + relative * abs(self.lower))


def bound_problem(
    costs: Mapping[int, np.ndarray],
    edges: Edges,
    *,
    sweeps: int,
    gap: float = 1e-9,
    start: Mapping[int, int] | None = None,
    cutoff: float = np.inf,
) -> Bounded:
    """Run up to `sweeps` forward-backward sweeps, fewer if bound and best value meet within `gap` (relative) or the bound
    reaches `cutoff`."""
    return _Ascent(costs, edges).run(sweeps, gap, start, cutoff)


class _Ascent:
    def __init__(self, costs: Mapping[int, np.ndarray], edges: Edges) -> None:
        self.original, self.original_edges = costs, edges
        self.order = sorted(costs)
        self.cost = {v: np.array(costs[v], dtype=float) for v in self.order}
        finite = sum(float(np.max(np.where(np.isfinite(m), m, 0.0), initial=0.0)) for m in edges.values())
        finite += sum(float(np.max(np.where(np.isfinite(c), c, 0.0), initial=0.0)) for c in costs.values())
        self.big = 4.0 * finite + 1.0
        for v in self.order:
            self.cost[v][~np.isfinite(self.cost[v])] = self.big
        self.matrix = {pair: np.where(np.isfinite(m), m, self.big) for pair, m in edges.items()}
        self.ahead: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in self.order}
        self.behind: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in self.order}
        for (u, v), m in sorted(self.matrix.items(), key=lambda item: item[0]):
            self.ahead[u].append((v, m))
            self.behind[v].append((u, m.T))

    def run(self, sweeps: int, gap: float, start: Mapping[int, int] | None, cutoff: float) -> Bounded:
        best = dict(start) if start is not None else self._decoded(forward=True)
        upper, lower = self.value(best), -np.inf
        for number in range(sweeps):
            self._sweep(forward=True)
            self._sweep(forward=False)
            if number % 8 != 7:
                continue
            trial = self._decoded(forward=False)
            value = self.value(trial)
            if value < upper:
                upper, best = value, trial
            before, lower = lower, self._lower()
            if lower >= cutoff or upper - lower <= gap * abs(upper) or lower - before <= 1e-7 * abs(upper):
                break
        best = improved(best, self.original, self.original_edges)
        upper = self.value(best)
        return Bounded(min(self._lower(), upper), upper, best, self._rises(), self.cost, self.matrix)

    def value(self, choice: Mapping[int, int]) -> float:
        """The objective of a choice, in the original costs."""
        total = sum(float(self.original[v][choice[v]]) for v in self.order)
        return total + sum(float(m[choice[u], choice[v]]) for (u, v), m in self.original_edges.items())

    def _sweep(self, *, forward: bool) -> None:
        order = self.order if forward else self.order[::-1]
        ahead, behind = (self.ahead, self.behind) if forward else (self.behind, self.ahead)
        for v in order:
            cost = self.cost[v]
            for _, m in (*ahead[v], *behind[v]):
                least = np.minimum.reduce(m, axis=1)
                cost += least
                m -= least[:, None]
            if ahead[v]:
                share = cost / max(len(ahead[v]), len(behind[v]))
                for _, m in ahead[v]:
                    m += share[:, None]
                cost -= share * len(ahead[v])

    def _decoded(self, *, forward: bool) -> dict[int, int]:
        """Greedy choices in sweep order, given those already made."""
        order = self.order if forward else self.order[::-1]
        behind = self.behind if forward else self.ahead
        choice: dict[int, int] = {}
        for v in order:
            total = self.cost[v].copy()
            for u, m in behind[v]:
                total += m[:, choice[u]]
            for _, m in self.ahead[v] if forward else self.behind[v]:
                total += np.minimum.reduce(m, axis=1)
            choice[v] = int(np.argmin(total))
        return choice

    def _lower(self) -> float:
        total = sum(float(np.minimum.reduce(c)) for c in self.cost.values())
        return total + sum(float(np.minimum.reduce(m, axis=None)) for m in self.matrix.values())

    def _rises(self) -> dict[int, np.ndarray]:
        rises = {}
        for v in self.order:
            rise = self.cost[v] - self.cost[v].min()
            for _, m in (*self.ahead[v], *self.behind[v]):
                least = np.minimum.reduce(m, axis=1)
                rise = rise + least - np.minimum.reduce(least)
            rises[v] = rise
        return rises


def improved(choice: Mapping[int, int], costs: Mapping[int, np.ndarray], edges: Edges) -> dict[int, int]:
    """Change single choices while that lowers the objective."""
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in costs}
    for (u, v), m in edges.items():
        near[u].append((v, m))
        near[v].append((u, m.T))
    best = dict(choice)
    pending: Sequence[int] = sorted(costs)
    while pending:
        touched: set[int] = set()
        for v in pending:
            total = costs[v] + sum(m[:, best[w]] for w, m in near[v])
            p = int(np.argmin(total))
            if np.isfinite(total[p]) and total[best[v]] - total[p] > 1e-12 * abs(total[p]):
                best[v] = p
                touched.update(w for w, _ in near[v])
        pending = sorted(touched)
    return best
