"""Infinities are constraints: choices that no neighbour can meet go, and nodes whose choice a neighbour decides follow it.

In: a problem. Out: `Led`, a smaller one with the same optimum and the way back, or the proof that nothing is possible.

    arc consistency   a choice goes if some neighbour has no choice left that is finite with it; until nothing changes
    followers         if each choice p of u leaves v one choice f(p), then v follows u: c_u[p] += c_v[f(p)] + R_uv[p, f(p)], the
                      other edges of v and the memory of v become those of u

Both are exact, with memory rows or without. Most infinities are of this kind where two operations must use one layout. What can
go wrong: a node with many more choices than its follower makes the follower's edges larger; such pairs stay as they are.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.solver.budget import CALL, Budget
from autopar.solver.memory_rows import SpanRows, Spans
from autopar.solver.outcomes import Numbers, Unreachable
from autopar.solver.problem import ChoiceProblem, Costs


@dataclasses.dataclass(frozen=True, eq=False)
class Led:
    """A problem of leaders.

    Attributes:
        problem: over the nodes that lead, renumbered, and the choices that are left.
        leader: the leader of each node of the whole problem.
        choice_of: of each node of the whole problem, what it takes under each choice of its leader, ints (leader's choices,).
    """

    problem: ChoiceProblem
    leader: Sequence[int]
    choice_of: Sequence[np.ndarray]

    def extend(self, numbers: Sequence[int]) -> Numbers:
        """The choice of every node under a choice of the leaders."""
        return tuple(int(f[numbers[u]]) for u, f in zip(self.leader, self.choice_of, strict=True))

    def restrict(self, numbers: Sequence[int]) -> Numbers | None:
        """The leaders' part of a choice of all nodes; None if it takes what is gone."""
        left: list[int | None] = [None] * len(self.problem.costs.nodes)
        agreed = [np.ones(len(cost), dtype=bool) for cost in self.problem.costs.nodes.values()]
        for number, u, f in zip(numbers, self.leader, self.choice_of, strict=True):
            agreed[u] &= f == number
        left = [int(np.argmax(each)) if each.any() else None for each in agreed]
        return None if None in left else tuple(p for p in left if p is not None)


def follow(problem: ChoiceProblem) -> Led | Unreachable | None:
    """Apply both reductions until neither applies.

    Args:
        problem: its classes and ties are not used.

    Returns:
        The problem of the leaders; that nothing is possible; None if nothing changes.
    """
    if all(np.isfinite(matrix).all() for matrix in problem.costs.edges.values()):
        return None
    state = _Leaders(problem.costs, problem.budget)
    before = -1
    while before != state.size:
        before = state.size
        if not state.drop_unsupported():
            return Unreachable()
        state.merge_followers()
    if state.size == sum(len(cost) for cost in problem.costs.nodes.values()):
        return None
    return state.lead(problem)


class _Leaders:
    """The objective while nodes join others."""

    def __init__(self, costs: Costs, budget: Budget) -> None:
        self.budget = budget
        self.cost = {v: np.asarray(c, dtype=float) for v, c in costs.nodes.items()}
        self.near: dict[int, dict[int, np.ndarray]] = {v: {} for v in self.cost}
        for (u, v), matrix in costs.edges.items():
            self._add_edge(u, v, matrix)
        self.followers: dict[int, list[tuple[int, np.ndarray]]] = {
            v: [(v, np.arange(len(c)))] for v, c in self.cost.items()
        }

    @property
    def size(self) -> int:
        """Choices of all leaders."""
        return sum(len(cost) for cost in self.cost.values())

    def _add_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        if v in self.near[u]:
            matrix = self.near[u][v] + matrix
        if matrix.shape[0] == 1 or matrix.shape[1] == 1:  # the cost of one end's choices
            one, other, row = (u, v, matrix[0]) if matrix.shape[0] == 1 else (v, u, matrix[:, 0])
            self.cost[other] = self.cost[other] + row
            self.near[one].pop(other, None)
            self.near[other].pop(one, None)
        else:
            self.near[u][v], self.near[v][u] = matrix, matrix.T

    def drop_unsupported(self) -> bool:
        """Arc consistency; false if some node has no choice left."""
        queue = collections.deque(self.cost)
        waiting = set(queue)
        while queue and not self.budget.is_over:
            v = queue.popleft()
            waiting.discard(v)
            alive = np.isfinite(self.cost[v])
            for matrix in self.near[v].values():
                self.budget.spend(matrix.size + CALL)
                alive &= np.isfinite(matrix).any(axis=1)
            if not alive.any():
                return False
            if not alive.all():
                around = list(self.near[v])
                self._keep(v, alive)
                queue.extend(w for w in around if w not in waiting)
                waiting.update(around)
        return True

    def _keep(self, v: int, alive: np.ndarray) -> None:
        self.cost[v] = self.cost[v][alive]
        self.followers[v] = [(w, f[alive]) for w, f in self.followers[v]]
        for w, matrix in list(self.near[v].items()):
            del self.near[v][w], self.near[w][v]
            self._add_edge(v, w, matrix[alive])

    def merge_followers(self) -> None:
        """Let nodes join those that decide on them; both ends of each edge are looked at when it changes."""
        queue = collections.deque((u, v) for u in self.near for v in self.near[u])
        while queue and not self.budget.is_over:
            u, v = queue.popleft()
            if u not in self.near or v not in self.near[u]:
                continue
            matrix = self.near[u][v]
            self.budget.spend(matrix.size + CALL)
            possible = np.isfinite(matrix)
            if (np.count_nonzero(possible, axis=1) == 1).all() and self._is_worth_it(u, v):
                around = self._merge(u, v, possible.argmax(axis=1))
                queue.extend((u, w) for w in around)
                queue.extend((w, u) for w in around)

    def _is_worth_it(self, u: int, v: int) -> bool:
        """Whether v's edges do not grow by more than the edge that goes, or keep their size and are not many more than u's."""
        here, there = len(self.cost[u]), len(self.cost[v])
        around = sum(len(self.cost[w]) for w in self.near[v] if w != u)
        if here == there:
            return len(self.near[v]) <= len(self.near[u])  # else u follows v: f is then one to one
        return (here - there) * around <= here * there

    def _merge(self, u: int, v: int, f: np.ndarray) -> list[int]:
        """Let v follow u by f; the neighbours that u has gained or whose edges to u have changed."""
        matrix = self.near[u].pop(v)
        del self.near[v][u]
        self.cost[u] = self.cost[u] + self.cost.pop(v)[f] + matrix[np.arange(len(f)), f]
        self.followers[u] += [(w, g[f]) for w, g in self.followers.pop(v)]
        around = self.near.pop(v)
        for w, other in around.items():
            del self.near[w][v]
            self.budget.spend(len(f) * other.shape[1] + CALL)
            self._add_edge(u, w, other[f])
        return [w for w in around if w in self.near[u]]

    def lead(self, problem: ChoiceProblem) -> Led:
        """What is left, as a problem."""
        number = {v: i for i, v in enumerate(self.cost)}
        leader, choice_of = [0] * len(problem.costs.nodes), [np.zeros(0, dtype=np.int64)] * len(problem.costs.nodes)
        for u, followers in self.followers.items():
            for v, f in followers:
                leader[v], choice_of[v] = number[u], f
        edges = {
            (number[u], number[v]): m for u, near in self.near.items() for v, m in near.items() if number[u] < number[v]
        }
        costs = Costs.of(tuple(self.cost.values()), edges)
        rows = SpanRows(_lead_spans(problem.spans, leader, choice_of)) if problem.rows else ()
        left = dataclasses.replace(problem, costs=costs, rows=rows, classes=None, ties=None)
        return Led(left, leader, choice_of)


def _lead_spans(spans: Spans, leader: Sequence[int], choice_of: Sequence[np.ndarray]) -> Spans:
    """The spans of the leaders: each takes over those of its followers; what does not depend on the choice is fixed."""
    led, fixed = [], []
    nodes = zip(spans.node.tolist(), spans.begin.tolist(), spans.end.tolist(), spans.each(), strict=True)
    for v, begin, end, each in nodes:
        used = each[choice_of[v]]
        least = float(used.min())
        fixed.append(least)
        if used.max() > least:
            led.append((leader[v], begin, end, used - least))
    return Spans.join(led, spans.sum_over_rows(np.array(fixed)))
