"""The pairwise choice problem: one choice per node, at the least cost, within memory.

Nodes v have choices p = 0, 1, ...; a choice s takes one of each, s_v. Minimise

    sum_v c_v[s_v] + sum_(u,v) R_uv[s_u, s_v]

subject to, for every memory row t,

    fixed_t + sum_(v in t) m_t,v[s_v] <= limit.

Costs are seconds, infinite where a choice or a pair of choices is impossible; memory is bytes. `Costs` is the objective,
`MemoryRow` one constraint, `ChoiceProblem` all that `solve.choose` is asked. `FlatCosts` is the objective as flat arrays, for
code that looks at all nodes or edges at once: a *place* is one choice of one node, a *pair* one entry of one edge's matrix; both
are numbered in the order of the objective's nodes and edges, choice after choice, row after row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.memory_rows import MemoryRow as MemoryRow
from autopar.solver.memory_rows import SpanRows, Spans
from autopar.solver.tuning import TUNING, Tuning

T = TypeVar("T")
Edges = Mapping[tuple[int, int], np.ndarray]
"""R_uv by (u, v), u < v: seconds, a float array (choices of u, choices of v)."""
Classes = Sequence[np.ndarray]
"""For each node the class number of each choice, an int array (choices,), counted from 0 without gaps."""


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """The objective. Nodes have numbers, not always without gaps: a reduction leaves some out.

    Attributes:
        nodes: c_v by node in ascending order: seconds, a float array (choices of v,).
        edges: R_uv by pair of nodes: seconds, a float array (choices of u, choices of v).
    """

    nodes: Mapping[int, np.ndarray]
    edges: Edges

    @classmethod
    def of(cls, costs: Sequence[np.ndarray], edges: Edges) -> Costs:
        """The costs of nodes 0, 1, ... in order."""
        return cls(dict(enumerate(costs)), edges)

    @property
    def pairs(self) -> int:
        """Pairs of choices over all edges: how large the problem is."""
        return sum(matrix.size for matrix in self.edges.values())

    def value(self, choice: Mapping[int, int] | Sequence[int]) -> float:
        """Seconds of a choice: sum_v c_v[s_v] + sum_(u,v) R_uv[s_u, s_v]."""
        total = sum(float(cost[choice[v]]) for v, cost in self.nodes.items())
        return total + sum(float(matrix[choice[u], choice[v]]) for (u, v), matrix in self.edges.items())

    def restrict(self, left: Mapping[int, np.ndarray]) -> Costs:
        """The objective over the choices `left` of each node, an int array (choices left,); they are renumbered from 0."""
        nodes = {v: cost[left[v]] for v, cost in self.nodes.items()}
        return Costs(nodes, {(u, v): matrix[np.ix_(left[u], left[v])] for (u, v), matrix in self.edges.items()})

    def renumber(self) -> Costs:
        """The same objective of nodes 0, 1, ... in the same order."""
        number = {v: i for i, v in enumerate(self.nodes)}
        return Costs.of(tuple(self.nodes.values()), {(number[u], number[v]): m for (u, v), m in self.edges.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class Ties:
    """The problem in which alike nodes choose alike: one node per class of nodes (`repeated_layers.py` finds them).

    Attributes:
        class_of: the class of each node of the whole problem, an int array (nodes,), counted from 0 without gaps.
        costs: the objective over classes: of a choice that respects the ties it has the value of the whole problem.
    """

    class_of: np.ndarray
    costs: Costs

    def extend(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The choice of every node of the whole problem, given one per class."""
        return tuple(numbers[c] for c in self.class_of.tolist())

    def take_first(self, values: Sequence[T]) -> list[T]:
        """Of values that nodes have, those of the first node of each class."""
        _, first = np.unique(self.class_of, return_index=True)
        return [values[v] for v in first.tolist()]

    def sum_row(self, row: MemoryRow) -> MemoryRow:
        """A memory row over classes."""
        total: dict[int, np.ndarray] = {}
        for v, used in row.bytes_of.items():
            c = int(self.class_of[v])
            total[c] = total[c] + used if c in total else used
        return dataclasses.replace(row, bytes_of=total)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ChoiceProblem:
    """What `solve.choose` is asked.

    Attributes:
        costs: the objective, of nodes 0, 1, ... without gaps.
        rows: the memory rows; none means that memory does not matter.
        limit_bytes: the limit of every row.
        cutoff_s: only choices that take less matter.
        at_least_s: no choice that keeps the rows takes less, as is known before.
        classes: which choices of a node an exchange of equal mesh axes makes alike (`classes.py`); None if unknown.
        ties: which nodes are to choose alike; None solves the whole problem. `repeated_layers.tie_layers` sets them.
        is_proven: whether a problem with ties is to have a bound of the whole problem; without, the bound is that of the
            problem in which alike nodes choose alike.
        proof: the gap between choice and bound, relative, at which the caller is content; None: `Tuning.good_enough`.
        is_quick: whether a choice and a bound that cost little are enough, as for one of many candidates.
        budget: when it is over, the best choice met is returned with the bound reached.
        tuning: when to stop, and when to use which method.
    """

    costs: Costs
    rows: Sequence[MemoryRow] = ()
    limit_bytes: float = np.inf
    cutoff_s: float = np.inf
    at_least_s: float = -np.inf
    classes: Classes | None = None
    ties: Ties | None = None
    is_proven: bool = True
    proof: float | None = None
    is_quick: bool = False
    budget: Budget = dataclasses.field(default_factory=Budget)
    tuning: Tuning = TUNING

    @functools.cached_property
    def spans(self) -> Spans:
        """The memory rows as spans."""
        return Spans.of(self.rows)

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether a choice keeps every row within the limit."""
        if isinstance(self.rows, SpanRows):
            return bool((self.spans.used_by(np.asarray(choice)) <= self.limit_bytes).all())
        return all(row.used(choice) <= self.limit_bytes for row in self.rows)

    def least_bytes(self) -> float:
        """A limit below which no choice fits."""
        if isinstance(self.rows, SpanRows):
            return float(self.spans.least().max(initial=0.0))
        return max((row.least() for row in self.rows), default=0.0)

    def restrict(self, left: Sequence[np.ndarray]) -> ChoiceProblem:
        """The problem over the choices `left` of each node, an int array (choices left,), without classes and ties."""
        costs = self.costs.restrict(dict(enumerate(left)))
        rows: Sequence[MemoryRow]
        if isinstance(self.rows, SpanRows):
            rows = SpanRows(self.spans.restrict(left))
        else:
            rows = [dataclasses.replace(r, bytes_of={v: b[left[v]] for v, b in r.bytes_of.items()}) for r in self.rows]
        return dataclasses.replace(self, costs=costs, rows=rows, classes=None, ties=None)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FlatCosts:
    """The objective of nodes 0, 1, ... in flat arrays.

    Attributes:
        numbers: each node's number in the objective that this was made of.
        first: the first place of each node, and the number of places at the end, ints (nodes + 1,).
        cost: c_v, seconds (places,).
        ends: the two nodes of each edge, ints (edges, 2).
        begin: the first pair of each edge, and the number of pairs at the end, ints (edges + 1,).
        value: R_uv, seconds (pairs,).
    """

    numbers: tuple[int, ...]
    first: np.ndarray
    cost: np.ndarray
    ends: np.ndarray
    begin: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, costs: Costs) -> FlatCosts:
        """Lay an objective out flat."""
        numbers = tuple(costs.nodes)
        index = {v: i for i, v in enumerate(numbers)}
        ends = np.array([(index[u], index[v]) for u, v in costs.edges], dtype=np.int64).reshape(-1, 2)
        return cls(
            numbers=numbers,
            first=_starts([len(cost) for cost in costs.nodes.values()]),
            cost=_join(list(costs.nodes.values())),
            ends=ends,
            begin=_starts([matrix.size for matrix in costs.edges.values()]),
            value=_join([matrix.ravel() for matrix in costs.edges.values()]),
        )

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """The number of choices of each node, ints (nodes,)."""
        return np.diff(self.first)

    @functools.cached_property
    def node_of(self) -> np.ndarray:
        """The node of each place, ints (places,)."""
        return np.repeat(np.arange(len(self.numbers)), self.sizes)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Values of all places (places,), node by node."""
        return np.split(values, self.first[1:-1]) if self.numbers else []

    def pair_choices(self) -> tuple[np.ndarray, np.ndarray]:
        """The choices of u and of v that each pair joins, counted from 0, ints (pairs,) each."""
        counts = np.diff(self.begin)
        width = np.repeat(self.sizes[self.ends[:, 1]], counts)
        within = np.arange(len(self.value)) - np.repeat(self.begin[:-1], counts)
        return within // np.maximum(width, 1), within % np.maximum(width, 1)

    def places_of(self, choice: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The places and the pairs that a choice takes, ints (nodes,) and (edges,)."""
        each = np.array([choice[v] for v in self.numbers], dtype=np.int64)
        u, v = self.ends[:, 0], self.ends[:, 1]
        return self.first[:-1] + each, self.begin[:-1] + each[u] * self.sizes[v] + each[v]


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(float) if arrays else np.zeros(0)
