"""Exact elimination of nodes one after the other (bucket elimination; Dechter 1999), where tables stay small.

Eliminating v replaces all tables that hold it by one over its neighbours w1, w2, ...:

    T(w1, w2, ...) = min_p  c_v[p] + sum over the tables T' that hold v of T'(p, ...)

In: an objective. Out: its optimum, or nothing if the tables would be too large. The order is greedy: next comes the node whose
table, itself included, is the smallest. Infinities need no care: an infinite optimum is a proof that nothing is possible. What
can go wrong: the tables' sizes are products, so a few more neighbours make it hopeless; the order is found first, and says so.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.problem import Costs

Scope = tuple[int, ...]
"""The nodes of a table, ascending: one axis each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Eliminated:
    """An optimal choice of every node and its value, infinite if none is possible."""

    choice: Mapping[int, int]
    value: float


def find_order(costs: Costs, most_entries: float) -> list[int] | None:
    """The order of elimination, or None if its tables have more than `most_entries` together."""
    size = {v: len(cost) for v, cost in costs.nodes.items()}
    near: dict[int, set[int]] = {v: set() for v in costs.nodes}
    for u, v in costs.edges:
        near[u].add(v)
        near[v].add(u)

    def entries(v: int) -> float:
        return math.prod((float(size[w]) for w in near[v]), start=float(size[v]))

    table = {v: entries(v) for v in near}
    heap = [(count, v) for v, count in table.items()]
    heapq.heapify(heap)
    order, total = [], 0.0
    while heap:
        count, v = heapq.heappop(heap)
        if v not in near or count != table[v]:
            continue
        total += count
        if total > most_entries:
            return None
        order.append(v)
        around = near.pop(v)
        for w in around:
            near[w] |= around
            near[w] -= {v, w}
        for w in around:
            table[w] = entries(w)
            heapq.heappush(heap, (table[w], w))
    return order


def eliminate(costs: Costs, order: Sequence[int], budget: Budget) -> Eliminated | None:
    """Eliminate the nodes in this order; None if the budget ends first."""
    place = {v: i for i, v in enumerate(order)}
    buckets: dict[int, list[tuple[Scope, np.ndarray]]] = {v: [((v,), cost)] for v, cost in costs.nodes.items()}
    for (u, v), matrix in costs.edges.items():
        both = ((u, v), matrix) if u < v else ((v, u), matrix.T)
        buckets[min(u, v, key=place.__getitem__)].append(both)
    constant = 0.0
    for v in order:
        if budget.is_over:
            return None
        scope, table = _add_tables(buckets[v])
        budget.spend(table.size)
        rest, least = _without(scope, v), table.min(axis=scope.index(v))
        if rest:
            buckets[min(rest, key=place.__getitem__)].append((rest, least))
        else:
            constant += float(least)
    choice: dict[int, int] = {}
    for v in reversed(order):
        total = np.zeros(len(costs.nodes[v]))
        for scope, table in buckets[v]:
            total = total + table[tuple(slice(None) if w == v else choice[w] for w in scope)]
        choice[v] = int(np.argmin(total))
    return Eliminated({v: choice[v] for v in costs.nodes}, constant)


def _without(scope: Scope, v: int) -> Scope:
    return tuple(w for w in scope if w != v)


def _add_tables(tables: Sequence[tuple[Scope, np.ndarray]]) -> tuple[Scope, np.ndarray]:
    """The sum of tables over the union of their nodes, the largest last so that most additions are small."""
    scope = tuple(sorted({v for each, _ in tables for v in each}))
    total: np.ndarray = np.zeros((1,) * len(scope))
    for each, table in sorted(tables, key=lambda item: item[1].size):
        axes = iter(table.shape)
        total = total + table.reshape([next(axes) if v in each else 1 for v in scope])
    return scope, total
