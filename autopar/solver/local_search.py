"""A choice made better one node at a time, or made to fit into memory.

In: a choice of an objective. Out: one that is no worse, or one that keeps the memory rows. A node whose followers have joined it
(`followers.py`) moves as the whole bundle. What can go wrong: no single move helps where two together would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.budget import CALL, Budget
from autopar.solver.memory_rows import Spans
from autopar.solver.problem import Costs, FlatCosts

WORTH_IT = 1e-12
"""Relative gain below which a change counts as rounding."""


def improve_choice(choice: Mapping[int, int], costs: Costs, budget: Budget | None = None) -> dict[int, int]:
    """Change the choice of single nodes while that lowers the objective and the budget lasts; deterministic."""
    budget = budget or Budget()
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in costs.nodes}
    for (u, v), m in costs.edges.items():
        near[u].append((v, m))
        near[v].append((u, m.T))
    best = dict(choice)
    pending: Sequence[int] = sorted(costs.nodes)
    while pending:
        touched: set[int] = set()
        for v in pending:
            if budget.is_over:
                return best
            budget.spend((len(costs.nodes[v]) + CALL) * (1 + len(near[v])))
            total = costs.nodes[v] + sum(m[:, best[w]] for w, m in near[v])
            p = int(np.argmin(total))
            if np.isfinite(total[p]) and total[best[v]] - total[p] > WORTH_IT * abs(total[p]):
                best[v] = p
                touched.update(w for w, _ in near[v])
        pending = sorted(touched)
    return best


class Moves:
    """What it costs to change one node of a choice, for all nodes and choices at once, and what memory that takes."""

    def __init__(self, costs: Costs, spans: Spans, limit_bytes: float) -> None:
        """Lay the objective out; the nodes are 0, 1, ... without gaps."""
        given = FlatCosts.of(costs)
        both = np.concatenate([given.cost, given.value])
        big = 4.0 * float(np.abs(both[np.isfinite(both)]).sum()) + 1.0  # takes the place of infinity
        cost, value = np.minimum(given.cost, big), np.minimum(given.value, big)
        flat = dataclasses.replace(given, cost=cost, value=value)
        self.flat, self.spans, self.limit = flat, spans, limit_bytes
        self.first = flat.first
        end = np.repeat(np.arange(2 * len(flat.ends)), flat.sizes[flat.ends.ravel()])
        sizes = flat.sizes[flat.ends.ravel()]
        within = np.arange(len(end)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        width = flat.sizes[flat.ends[end // 2, 1]]
        is_second = end % 2 == 1
        self.place = flat.first[flat.ends.ravel()[end]] + within
        self.other = flat.ends[:, ::-1].ravel()[end]
        self.origin = flat.begin[end // 2] + np.where(is_second, within, within * width)
        self.stride = np.where(is_second, width, 1)
        self.near = _neighbours(flat)
        order = np.argsort(spans.node, kind="stable")
        cuts = np.searchsorted(spans.node[order], np.arange(1, len(flat.numbers)))
        self.spans_of = np.split(order, cuts)

    def costs(self, choice: np.ndarray) -> np.ndarray:
        """The cost of each choice of each node while the others stay (places,)."""
        met = self.flat.value[self.origin + choice[self.other] * self.stride]
        return np.asarray(self.flat.cost + np.bincount(self.place, met, len(self.flat.cost)))

    def value(self, choice: np.ndarray) -> float:
        """The objective of a choice; very large where it is infinite."""
        flat = self.flat
        u, v = flat.ends.T
        pairs = flat.begin[:-1] + choice[u] * flat.sizes[v] + choice[v]
        return float(flat.cost[flat.first[:-1] + choice].sum() + flat.value[pairs].sum())

    def repair(self, choice: np.ndarray, paid: np.ndarray, budget: Budget, *, most_moves: int) -> np.ndarray | None:
        """Change nodes until memory fits, those first that take least cost for the bytes that they free; None if that fails.

        It has failed where the same choice comes again: all that follows would be the same. `paid` are prices that each place
        pays besides its cost, so that a node does not leave one row for another (places,).
        """
        choice, node_of = choice.copy(), self.flat.node_of
        used = self.spans.used_by(choice)
        met, seen = 0, {0}  # a choice by the places that it has left and taken
        for _ in range(most_moves):
            over = np.maximum(used - self.limit, 0.0)
            if not over.any():
                return choice
            if budget.is_over:
                break
            budget.spend(len(self.place) + len(self.spans.used))
            taken = self.first[:-1] + choice
            freed = self.spans.price(over / over.max(), self.first)
            freed = np.repeat(freed[taken], self.flat.sizes) - freed
            cost = self.costs(choice) + paid
            cost = cost - np.repeat(cost[taken], self.flat.sizes)
            is_useful = (freed > 0) & np.isfinite(cost)
            if not is_useful.any():
                break
            ratio = np.where(is_useful, np.maximum(cost, 0.0) / np.where(is_useful, freed, 1.0), np.inf)
            ratio = np.where(is_useful & (cost <= 0), cost - 1.0, ratio)
            best = int(np.argmin(ratio))
            v = int(node_of[best])
            met ^= hash((int(taken[v]),)) ^ hash((best,))
            if met in seen:
                break
            seen.add(met)
            self._move(choice, used, v, best - int(self.first[v]))
        return None

    def improve(self, choice: np.ndarray, budget: Budget) -> np.ndarray:
        """Change single nodes while that lowers the objective and memory fits; nodes that do not touch in one go."""
        choice, node_of = choice.copy(), self.flat.node_of
        used = self.spans.used_by(choice)
        while not budget.is_over:
            budget.spend(2 * len(self.place))
            cost = self.costs(choice)
            gain = np.repeat(cost[self.first[:-1] + choice], self.flat.sizes) - cost
            (better,) = np.nonzero(gain > WORTH_IT * np.abs(cost))
            better = better[np.argsort(-gain[better], kind="stable")]
            touched: set[int] = set()
            budget.spend(2 * CALL * len(better))
            for place in better.tolist():
                v = int(node_of[place])
                p = place - int(self.first[v])
                if v not in touched and self._fits(choice, used, v, p):
                    self._move(choice, used, v, p)
                    touched.update(self.near[v], (v,))
            if not touched:
                break
        return choice

    def _fits(self, choice: np.ndarray, used: np.ndarray, v: int, p: int) -> bool:
        """Whether memory fits if v takes p."""
        of, spans = self.spans_of[v], self.spans
        if not len(of):
            return True
        low, high = int(spans.begin[of].min()), int(spans.end[of].max())
        more = used[low:high].copy()
        self._add(more, low, of, int(choice[v]), p)
        return bool((more <= self.limit).all())

    def _move(self, choice: np.ndarray, used: np.ndarray, v: int, p: int) -> None:
        self._add(used, 0, self.spans_of[v], int(choice[v]), p)
        choice[v] = p

    def _add(self, used: np.ndarray, low: int, of: np.ndarray, before: int, after: int) -> None:
        """Add the difference of two choices of one node to the bytes of the rows from `low` on, in place."""
        spans = self.spans
        for i in of.tolist():
            at = int(spans.first[i])
            used[int(spans.begin[i]) - low : int(spans.end[i]) - low] += (
                spans.used[at + after] - spans.used[at + before]
            )


def _neighbours(flat: FlatCosts) -> list[list[int]]:
    near: list[list[int]] = [[] for _ in flat.numbers]
    for u, v in flat.ends.tolist():
        near[u].append(v)
        near[v].append(u)
    return near
