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
    """The state of dual ascent: what each end of each edge has taken over from it, in one flat array.

    With matrices M, a message x per end and the given costs c, the shifted costs are c_v + sum_e x_v, the shifted edges
    M[p, q] - x_u[p] - x_v[q]. A node looks at its edges alone, so nodes that no edge joins are looked at together, and so all
    of a level of the graph is one row of array operations.
    """

    def __init__(self, costs: Mapping[int, np.ndarray], edges: Edges) -> None:
        self.original, self.original_edges = costs, edges
        self.order = sorted(costs)
        finite = sum(float(np.max(np.where(np.isfinite(m), m, 0.0), initial=0.0)) for m in edges.values())
        finite += sum(float(np.max(np.where(np.isfinite(c), c, 0.0), initial=0.0)) for c in costs.values())
        big = 4.0 * finite + 1.0
        self.given = {v: np.where(np.isfinite(costs[v]), costs[v], big).astype(float) for v in self.order}
        self.matrix = {pair: np.where(np.isfinite(m), m, big) for pair, m in edges.items()}
        self.ends: dict[int, list[_End]] = {v: [] for v in self.order}
        self.begins: list[int] = []
        place = 0
        for (u, v), m in sorted(self.matrix.items(), key=lambda item: item[0]):
            here, there = slice(place, place + len(m)), slice(place + len(m), place + sum(m.shape))
            self.ends[u].append(_End(v, m, here, there))
            self.ends[v].append(_End(u, m.T, there, here))
            self.begins += [here.start, there.start]
            place = there.stop
        self.messages = np.zeros(place)
        self.levels = [_Level.of({v: (self.given[v], self.ends[v]) for v in level}) for level in self._by_level()]

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

    def run(self, sweeps: int, gap: float, start: Mapping[int, int] | None, cutoff: float) -> Bounded:
        best = dict(start) if start is not None else self._decoded()
        upper, lower = self.value(best), -np.inf
        for number in range(sweeps):
            for level in self.levels:
                level.shift(self.messages, level.handed_up)
            for level in self.levels[::-1]:
                level.shift(self.messages, level.handed_down)
            if number % 8 != 7:
                continue
            trial = self._decoded()
            value = self.value(trial)
            if value < upper:
                upper, best = value, trial
            before, lower = lower, self._lower()
            if lower >= cutoff or upper - lower <= gap * abs(upper) or lower - before <= 1e-7 * abs(upper):
                break
        best = improved(best, self.original, self.original_edges)
        upper = self.value(best)
        costs = self._costs()
        edges = {}
        for u in self.order:
            for end in self.ends[u]:
                if u < end.other:
                    edges[u, end.other] = end.matrix - self.messages[end.here][:, None] - self.messages[end.there]
        return Bounded(min(self._lower(), upper), upper, best, self._rises(), costs, edges)

    def value(self, choice: Mapping[int, int]) -> float:
        """The objective of a choice, in the original costs."""
        total = sum(float(self.original[v][choice[v]]) for v in self.order)
        return total + sum(float(m[choice[u], choice[v]]) for (u, v), m in self.original_edges.items())

    def _costs(self) -> dict[int, np.ndarray]:
        """The shifted costs."""
        costs = dict(self.given)
        for level in self.levels:
            costs |= level.costs(self.messages)
        return costs

    def _least(self) -> np.ndarray:
        """Of each end of each edge the least shifted cost for each choice there, in the places of the messages."""
        least = np.zeros_like(self.messages)
        for level in self.levels:
            least[level.rows] = level.least(self.messages)
        return least - self.messages

    def _decoded(self) -> dict[int, int]:
        """Greedy choices, given those already made, from the lowest node up.

        A sweep down has brought to each node what the higher ones imply, so that where the bound is tight this meets it; the
        other way round it rarely does.
        """
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _End:
    """One end of an edge: the node at the other, its matrix with a row per choice here, and where both ends' messages are."""

    other: int
    matrix: np.ndarray
    here: slice
    there: slice


def _places(part: slice) -> np.ndarray:
    return np.arange(part.start, part.stop)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Level:
    """Nodes that no edge joins, all their matrices in one flat array.

    Choices are sorted by node, from `splits` on those of the next one. Rows are sorted by node, choice and edge: a row begins at
    `starts`, its own message is at `rows`, `values[i]` in it meets the message at `others[i]`. The rows of one choice begin at
    `groups`, and `group_of` is the number of a row's choice. What part of a choice's cost a row hands on: `handed_up` to higher
    nodes, `handed_down` to lower ones.
    """

    nodes: tuple[int, ...]
    splits: np.ndarray
    values: np.ndarray
    others: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    groups: np.ndarray
    group_of: np.ndarray
    given: np.ndarray
    handed_up: np.ndarray
    handed_down: np.ndarray

    @classmethod
    def of(cls, nodes: Mapping[int, tuple[np.ndarray, Sequence[_End]]]) -> _Level:
        """Of nodes with their costs and the ends of their edges."""
        splits = np.cumsum([len(given) for given, _ in nodes.values()])[:-1]
        parts: dict[str, list[np.ndarray]] = {field.name: [] for field in dataclasses.fields(cls)[2:]}
        elements = rows = choices = 0
        for v, (given, ends) in nodes.items():
            count, lengths = len(given), [end.matrix.shape[1] for end in ends]
            width, row = sum(lengths), np.arange(count * len(ends))
            up = np.array([end.other > v for end in ends])
            share = 1.0 / max(up.sum(), len(ends) - up.sum())
            begin = np.cumsum([0, *lengths[:-1]])
            parts["values"].append(np.concatenate([end.matrix for end in ends], axis=1).ravel())
            parts["others"].append(np.tile(np.concatenate([_places(end.there) for end in ends]), count))
            parts["starts"].append((elements + width * np.arange(count)[:, None] + begin).ravel())
            parts["rows"].append(np.stack([_places(end.here) for end in ends], axis=1).ravel())
            parts["groups"].append(rows + len(ends) * np.arange(count))
            parts["group_of"].append(choices + row // len(ends))
            parts["given"].append(given)
            parts["handed_up"].append(np.tile(share * up, count))
            parts["handed_down"].append(np.tile(share * ~up, count))
            elements, rows, choices = elements + width * count, rows + len(row), choices + count
        return cls(tuple(nodes), splits, **{name: np.concatenate(arrays) for name, arrays in parts.items()})

    def costs(self, messages: np.ndarray) -> dict[int, np.ndarray]:
        """Of each node its shifted costs."""
        costs = self.given + np.add.reduceat(messages.take(self.rows), self.groups)
        return dict(zip(self.nodes, np.split(costs, self.splits), strict=True))

    def least(self, messages: np.ndarray) -> np.ndarray:
        """Of each row what its message would be if it took all that its edge has to give."""
        return np.minimum.reduceat(self.values - messages.take(self.others), self.starts)

    def shift(self, messages: np.ndarray, handed: np.ndarray) -> None:
        """Take over from all edges, and hand on equal shares to those ahead."""
        least = self.least(messages)
        cost = self.given + np.add.reduceat(least, self.groups)
        messages[self.rows] = least - cost.take(self.group_of) * handed


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
