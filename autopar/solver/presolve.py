"""Exact reductions of a pairwise choice problem (`problem.py` states it).

In: the objective. Out: a smaller one with the same optimum, and the way back: a choice for the nodes that are left extends to an
optimal choice for all. The reductions, each exact:

    infinity      a choice that no neighbour can meet goes
    separable     R[p, q] = a[p] + b[q]: a and b join the node costs, the edge goes
    degree 0      the cheapest choice
    degree 1      c_v[q] += min_p c_u[p] + R_uv[p, q]
    degree 2      R_vw[q, r] += min_p c_u[p] + R_uv[p, q] + R_uw[p, r]
    dominance     p' goes if some p is never worse: c[p'] - c[p] + sum_e min_q (R_e[p', q] - R_e[p, q]) >= 0

Where the nodes left are narrow, eliminating goes on to the end (bucket elimination; Dechter 1999): eliminating v replaces all
tables that hold it by one over its neighbours w1, w2, ..., in an order that next takes the node of the smallest table,

    T(w1, w2, ...) = min_p  c_v[p] + sum over the tables T' that hold v of T'(p, ...)

The tables' sizes are products, so a few more neighbours make it hopeless; `find_order` says so before any table is made.

Chains of operations with one user each, which other planners merge into followers by rule of thumb, are what degree 1
and 2 remove. Nodes named in `keep` stay: their choice matters beyond the objective (memory); dominance among them also
asks that p uses no more memory than p' (`usage`). What can go wrong: rounding; a dominance within 1e-12 of the costs' scale
keeps the earlier choice, so the optimum is reached up to that.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar.solver.budget import CALL, Budget
from autopar.solver.problem import Costs

Scope = tuple[int, ...]
"""The nodes of a table, ascending: one axis each."""
ROUNDING = 1e-12
"""Differences of at most this part of the largest cost count as none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """What is left of an objective.

    Attributes:
        costs: the objective over the nodes left, with their original numbers, and the choices left, renumbered from 0.
        open_choices: the original number of each choice left, by node: an ascending int array (choices left,).
        constant: seconds that every choice of the nodes left costs less than the original choice that it extends to.
    """

    costs: Costs
    open_choices: Mapping[int, np.ndarray]
    constant: float
    _steps: tuple[_Step, ...]

    def extend(self, choice: Mapping[int, int]) -> dict[int, int]:
        """An optimal choice of every original node in ascending order, given one of the nodes left."""
        full = {v: int(self.open_choices[v][p]) for v, p in choice.items()}
        for step in reversed(self._steps):
            total = step.cost.copy()
            for other, matrix, choices in step.neighbours:
                total += matrix[:, int(np.searchsorted(choices, full[other]))]
            full[step.node] = int(step.choices[int(np.argmin(total))])
        return {node: full[node] for node in sorted(full)}

    def restrict(self, numbers: Sequence[int]) -> dict[int, int]:
        """The choice of the nodes left under a choice of all; what it takes must be open."""
        return {v: int(np.searchsorted(self.open_choices[v], numbers[v])) for v in self.costs.nodes}


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """The removal of a node: its choices and costs then, and its neighbours with their edges (choices, choices of theirs)."""

    node: int
    choices: np.ndarray
    cost: np.ndarray
    neighbours: tuple[tuple[int, np.ndarray, np.ndarray], ...]


def reduce_costs(
    costs: Costs,
    *,
    keep: frozenset[int] = frozenset(),
    usage: Sequence[np.ndarray] | None = None,
    dominance: bool = True,
    budget: Budget | None = None,
) -> Reduced:
    """Apply the reductions until none applies or the budget is over; deterministic.

    Args:
        costs: the objective.
        keep: nodes that stay.
        usage: bytes of each node's choices at several points, a float array (choices, points) per node; only nodes of `keep`
            are looked up. None: memory does not matter.
        dominance: whether to drop dominated choices, which may be needed if the objective is a relaxation.
        budget: pays for the entries looked at.

    Returns:
        What is left.
    """
    return _Reducer(costs, keep, usage, dominance, budget or Budget()).run()


class _Worklist:
    """A set of nodes that gives the smallest first."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.heap = sorted(nodes)
        self.members = set(self.heap)

    def __bool__(self) -> bool:
        return bool(self.heap)

    def add(self, nodes: Iterable[int]) -> None:
        for node in sorted(nodes):
            if node not in self.members:
                self.members.add(node)
                heapq.heappush(self.heap, node)

    def pop(self) -> int:
        node = heapq.heappop(self.heap)
        self.members.discard(node)
        return node


class _Queue:
    """A set of nodes that gives the one that waits longest: a node with many neighbours is looked at once for all of them."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.line = collections.deque(sorted(nodes))
        self.members = set(self.line)

    def __bool__(self) -> bool:
        return bool(self.line)

    def add(self, nodes: Iterable[int]) -> None:
        new = sorted(set(nodes) - self.members)
        self.members.update(new)
        self.line.extend(new)

    def pop(self) -> int:
        node = self.line.popleft()
        self.members.discard(node)
        return node


class _Reducer:
    """The objective while it shrinks: costs, choices left and neighbours of the nodes left."""

    def __init__(
        self,
        costs: Costs,
        keep: frozenset[int],
        usage: Sequence[np.ndarray] | None,
        dominance: bool,
        budget: Budget,
    ) -> None:
        self.keep, self.usage, self.dominance, self.budget = keep, usage, dominance, budget
        self.constant = 0.0
        self.cost = {v: np.asarray(c, dtype=float) for v, c in costs.nodes.items()}
        self.choices = {v: np.arange(len(c)) for v, c in costs.nodes.items()}
        self.near: dict[int, dict[int, np.ndarray]] = {v: {} for v in self.cost}
        self.steps: list[_Step] = []
        finite = [float(np.max(c[np.isfinite(c)], initial=0.0)) for c in self.cost.values()]
        self.tolerance = ROUNDING * max(finite, default=0.0)
        for (u, v), matrix in costs.edges.items():
            self._add_edge(u, v, matrix)

    def run(self) -> Reduced:
        for v in sorted(self.cost):
            self._drop_infinite(v)
        light, unexamined = _Worklist(self.cost), _Queue(self.cost)
        while (light or unexamined) and not self.budget.is_over:
            if light:
                v = light.pop()
                if v not in self.cost or len(self.near[v]) > 2 or v in self.keep:
                    continue
                changed = self._eliminate(v)
            else:
                v = unexamined.pop()
                changed = self._dominate(v) if v in self.cost else set()
            light.add(changed)
            unexamined.add(changed)
        edges = {(u, v): m for u in sorted(self.cost) for v, m in self.near[u].items() if u < v}
        return Reduced(Costs(dict(self.cost), edges), dict(self.choices), self.constant, tuple(self.steps))

    def _add_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Add a matrix to the edge, fold it into the node costs if it has become separable."""
        if v in self.near[u]:
            matrix = self.near[u][v] + matrix
        folded = self._separate(matrix)
        if folded is None:
            self.near[u][v], self.near[v][u] = matrix, matrix.T
            return
        self.cost[u] = self.cost[u] + folded[0]
        self.cost[v] = self.cost[v] + folded[1]
        self.near[u].pop(v, None)
        self.near[v].pop(u, None)

    def _separate(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(a, b) with matrix = a[p] + b[q], or None; a single row or column is its own b or a, infinite or not."""
        if matrix.shape[0] == 1:
            return np.zeros(1), matrix[0]
        if matrix.shape[1] == 1:
            return matrix[:, 0], np.zeros(1)
        if not np.isfinite(matrix).all():
            return None
        rows, columns = matrix[:, 0], matrix[0] - matrix[0, 0]
        if np.abs(matrix - rows[:, None] - columns[None, :]).max() > self.tolerance:
            return None
        return rows, columns

    def _eliminate(self, u: int) -> set[int]:
        """Remove a node of degree 0, 1 or 2; return the nodes whose surroundings changed."""
        self.budget.spend(CALL)
        neighbours = sorted(self.near[u])
        entries = tuple((v, self.near[u][v], self.choices[v]) for v in neighbours)
        self.steps.append(_Step(u, self.choices[u], self.cost[u], entries))
        cost = self.cost.pop(u)
        for v in neighbours:
            del self.near[v][u]
        if not neighbours:
            self.constant += float(cost.min())
        elif len(neighbours) == 1:
            (v,) = neighbours
            self.budget.spend(self.near[u][v].size)
            self.cost[v] = self.cost[v] + (cost[:, None] + self.near[u][v]).min(axis=0)
            self._drop_infinite(v)
        elif len(neighbours) == 2:
            v, w = neighbours
            self.budget.spend(len(cost) * len(self.cost[v]) * len(self.cost[w]))
            first, second = cost[:, None] + self.near[u][v], self.near[u][w]
            self._add_edge(v, w, min_plus(first.T, second))
        del self.near[u], self.choices[u]
        return set(neighbours)

    def _drop_infinite(self, v: int) -> None:
        alive = np.isfinite(self.cost[v])
        if not alive.all() and alive.any():
            self._keep_choices(v, alive)

    def _keep_choices(self, v: int, alive: np.ndarray) -> None:
        self.cost[v], self.choices[v] = self.cost[v][alive], self.choices[v][alive]
        for w in list(self.near[v]):
            matrix = self.near[v].pop(w)[alive]
            del self.near[w][v]
            self._add_edge(v, w, matrix)

    def _dominate(self, v: int) -> set[int]:
        """Remove the dominated choices of a node, and impossible ones; return the nodes whose surroundings changed."""
        cost = self.cost[v]
        if len(cost) == 1:
            neighbours = sorted(self.near[v])
            self._keep_choices(v, np.array([True]))
            for w in neighbours:
                self._drop_infinite(w)
            return {v, *neighbours} if neighbours else set()
        possible = np.isfinite(cost)
        if possible.any() and not possible.all():
            before = {v, *self.near[v]}
            self._keep_choices(v, possible)
            return before
        if not self.dominance:
            return set()
        beaten = self._find_beaten(v)
        alive = np.ones(len(cost), dtype=bool)
        for p in np.flatnonzero(np.logical_or.reduce(beaten, axis=1))[::-1]:
            if np.logical_or.reduce(beaten[p] & alive):
                alive[p] = False
        if alive.all():
            return set()
        before = {v, *self.near[v]}
        self._keep_choices(v, alive)
        return before

    def _find_beaten(self, v: int) -> np.ndarray:
        """beaten[p', p]: whether p is never worse than p' and, if v stays, uses no more memory; bools (choices, choices)."""
        cost = self.cost[v]
        sizes = [matrix.size for matrix in self.near[v].values()]
        self.budget.spend(len(cost) * sum(sizes) + 2 * CALL * (1 + len(sizes)))
        with np.errstate(invalid="ignore"):
            excess = cost[:, None] - cost[None, :]
            for matrix in self.near[v].values():
                excess = excess + _least_difference(matrix)
                excess[np.isnan(excess)] = -np.inf  # one edge forbids p and another p': neither beats the other
                if np.count_nonzero(np.isfinite(excess)) == len(cost):
                    break  # only the diagonal is left, and what is infinite stays so
        beaten: np.ndarray = excess >= -self.tolerance
        if v in self.keep and self.usage is not None:
            used = self.usage[v][self.choices[v]]
            beaten &= (used[:, None, :] >= used[None, :, :]).all(axis=2)
        np.fill_diagonal(beaten, False)
        return beaten


def _least_difference(matrix: np.ndarray) -> np.ndarray:
    """D[p', p] = min_q matrix[p', q] - matrix[p, q], where two infinities count as equal; NumPy may warn of an invalid value."""
    difference = matrix[:, None, :] - matrix[None, :, :]
    if not np.isfinite(matrix).all():
        difference[np.isnan(difference)] = 0.0
    least: np.ndarray = np.minimum.reduce(difference, axis=2)
    return least


def min_plus(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The (min, +) product (n, k) of arrays (n, m) and (m, k): out[i, k] = min_j left[i, j] + right[j, k]."""
    least: np.ndarray = np.minimum.reduce(left[:, :, None] + right[None, :, :], axis=1)
    return least


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
    """Eliminate the nodes in this order; None if the budget ends first. An infinite optimum: nothing is possible."""
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
