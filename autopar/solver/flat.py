"""An objective as flat arrays, for code that looks at all nodes or edges at once.

In: `Costs`. Out: `FlatCosts`. A *place* is one choice of one node, a *pair* one entry of one edge's matrix; both are numbered in
the order of the objective's nodes and edges, choice after choice, row after row. What can go wrong: nothing; infinities stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.problem import Costs


@dataclasses.dataclass(frozen=True, eq=False)
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
            numbers,
            _starts([len(cost) for cost in costs.nodes.values()]),
            _join(list(costs.nodes.values())),
            ends,
            _starts([matrix.size for matrix in costs.edges.values()]),
            _join([matrix.ravel() for matrix in costs.edges.values()]),
        )

    @property
    def sizes(self) -> np.ndarray:
        """The number of choices of each node, ints (nodes,)."""
        return np.diff(self.first)

    @property
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

    def taken(self, choice: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The places and the pairs that a choice takes, ints (nodes,) and (edges,)."""
        each = np.array([choice[v] for v in self.numbers], dtype=np.int64)
        u, v = self.ends[:, 0], self.ends[:, 1]
        return self.first[:-1] + each, self.begin[:-1] + each[u] * self.sizes[v] + each[v]


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(float) if arrays else np.zeros(0)
