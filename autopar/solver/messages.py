"""Messages of dual ascent: what each end of each edge has taken over from it, and sweeps over many nodes at once.

With matrices R, a message x per end and the given costs c, the shifted costs are c_v + sum_e x_v and the shifted edges
R[p, q] - x_u[p] - x_v[q]. All messages lie in one flat array: edge after edge, first those of the choices of u, then those of v.
A node looks only at its own edges, so nodes that no edge joins can be looked at together: a `Level` lays their matrices out
flat, and a sweep over it is one row of array operations. In: an objective without infinities. Out: its `Board`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.solver.budget import CALL
from autopar.solver.problem import FlatCosts


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Level:
    """Nodes that no edge joins, all their matrices in one flat array.

    Choices are sorted by node. Rows, the entries of one matrix for one choice here, are sorted by node, choice and edge.

    Attributes:
        nodes: the nodes, ascending ints (nodes,).
        begins: the first choice of each node, ints (nodes,).
        places: the place of each choice in the objective, ints (choices,).
        values: all matrices' entries, row after row (entries,).
        others: the place of the message that meets each entry (entries,).
        starts: the first entry of each row (rows,).
        rows: the place of each row's own message (rows,).
        groups: the first row of each choice (choices,).
        group_of: the choice of each row (rows,).
        neighbour: the node at the other end of each row's edge (rows,).
        is_lower: whether that is a lower node (rows,).
        up: what part of a choice's cost each row gets in a sweep up; the rows of higher nodes get some (rows,).
        down: the same in a sweep down, of lower nodes.
    """

    nodes: np.ndarray
    begins: np.ndarray
    places: np.ndarray
    values: np.ndarray
    others: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    groups: np.ndarray
    group_of: np.ndarray
    neighbour: np.ndarray
    is_lower: np.ndarray
    up: np.ndarray
    down: np.ndarray

    def least(self, messages: np.ndarray) -> np.ndarray:
        """The message of each row if it took all that its edge has to give (rows,)."""
        least: np.ndarray = np.minimum.reduceat(self.values - messages.take(self.others), self.starts)
        return least

    def shift(self, messages: np.ndarray, given: np.ndarray, upwards: bool) -> None:
        """Take over from all edges and hand on equal shares to those ahead, in place; `given` are c of all places."""
        least = self.least(messages)
        cost = given.take(self.places) + np.add.reduceat(least, self.groups)
        messages[self.rows] = least - cost.take(self.group_of) * (self.up if upwards else self.down)

    def decode(self, messages: np.ndarray, given: np.ndarray, choice: np.ndarray) -> None:
        """Choose greedily here, in place, given the choices of lower nodes and what higher ones would give."""
        met = self.values.take(self.starts + choice.take(self.neighbour) * self.is_lower)
        row = np.where(self.is_lower, met, self.least(messages))
        total = given.take(self.places) + np.add.reduceat(row, self.groups)
        choice[self.nodes] = argmin_of_parts(total, self.begins)


def argmin_of_parts(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Of each part of an array the place of its first least value, counted from the part's begin: ints (parts,)."""
    if not len(begins):
        return np.zeros(0, dtype=np.int64)
    sizes = np.diff(np.append(begins, len(values)))
    least = np.repeat(np.minimum.reduceat(values, begins), sizes)
    (at,) = np.nonzero(values == least)
    first: np.ndarray = at[np.searchsorted(at, begins)] - begins
    return first


@dataclasses.dataclass(frozen=True, eq=False)
class Board:
    """All messages of an objective, and the levels that sweep over them.

    Attributes:
        flat: the objective.
        begins: the first message of each edge's end at u and at v, ints (edges, 2).
        place_of: the place in the objective of each message, ints (messages,).
        levels: of the nodes with edges, by the longest way to them from lower ones.
    """

    flat: FlatCosts
    begins: np.ndarray
    place_of: np.ndarray
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, flat: FlatCosts, weights: np.ndarray) -> Board:
        """Lay an objective out; `weights` says how many edges of a larger problem each edge stands for (edges,)."""
        sizes = flat.sizes[flat.ends]
        begins = (np.cumsum(sizes) - sizes.ravel()).reshape(-1, 2)
        counts = sizes.ravel()
        within = np.arange(counts.sum()) - np.repeat(begins.ravel(), counts)
        place_of = np.repeat(flat.first[flat.ends].ravel(), counts) + within
        return cls(flat, begins, place_of, _lay_out(flat, begins, within, weights))

    def costs(self, messages: np.ndarray, given: np.ndarray) -> np.ndarray:
        """The shifted costs (places,)."""
        shifted: np.ndarray = given + np.bincount(self.place_of, messages, len(given))
        return shifted

    def least(self, messages: np.ndarray) -> np.ndarray:
        """The least shifted cost of each end of each edge, for each choice there, in the places of the messages (messages,)."""
        least = np.zeros_like(messages)
        for level in self.levels:
            least[level.rows] = level.least(messages)
        return np.asarray(least - messages)

    @property
    def work(self) -> float:
        """Units of work of a look at all edges from both ends; rows, choices and levels cost time beside their entries."""
        entries, rows, choices = len(self.flat.value), len(self.place_of), len(self.flat.cost)
        return entries + 4.0 * rows + 10.0 * choices + CALL * len(self.levels)

    def edge_parts(self) -> np.ndarray:
        """The first message of each end, edge after edge, ints (2 edges,)."""
        return self.begins.ravel()


def _levels_of(flat: FlatCosts) -> np.ndarray:
    """The length of the longest way to each node from lower ones, ints (nodes,)."""
    level = [0] * len(flat.numbers)
    lower, higher = flat.ends.min(axis=1), flat.ends.max(axis=1)
    order = np.argsort(higher, kind="stable")
    for u, v in zip(lower[order].tolist(), higher[order].tolist(), strict=True):
        level[v] = max(level[v], level[u] + 1)
    return np.array(level, dtype=np.int64)


def _lay_out(flat: FlatCosts, begins: np.ndarray, within: np.ndarray, weights: np.ndarray) -> tuple[Level, ...]:
    """The levels. First all rows are put in order, then each level is cut out."""
    here, there = flat.ends.ravel(), flat.ends[:, ::-1].ravel()
    counts = flat.sizes[here]
    end_of = np.repeat(np.arange(len(here)), counts)
    level_of, rank = _levels_of(flat), np.lexsort(flat.ends.T[::-1])
    edge_rank = np.empty(len(rank), dtype=np.int64)
    edge_rank[rank] = np.arange(len(rank))
    node = here[end_of]
    order = np.lexsort((edge_rank[end_of // 2], within, node, level_of[node]))
    cuts = np.searchsorted(level_of[node[order]], np.arange(level_of.max(initial=-1) + 2))
    share = _shares(flat, weights)
    levels = []
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        if low < high:
            rows = order[low:high]
            end = end_of[rows]
            values, others, starts = _entries_of(flat, begins, end, within[rows])
            levels.append(_cut(flat, rows, end, within[rows], (values, others, starts), share, there))
    return tuple(levels)


def _shares(flat: FlatCosts, weights: np.ndarray) -> np.ndarray:
    """What part of a node's cost each end of each edge gets: its weight by that of the heavier side (2 edges,)."""
    count = len(flat.numbers)
    lower, higher = flat.ends.min(axis=1), flat.ends.max(axis=1)
    above, below = np.bincount(lower, weights, count), np.bincount(higher, weights, count)
    share: np.ndarray = np.repeat(weights, 2) / np.maximum(above, below)[flat.ends.ravel()]
    return share


def _entries_of(
    flat: FlatCosts, begins: np.ndarray, end: np.ndarray, choice: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries of rows: values, the places of the messages that meet them, and the first of each row."""
    edge, is_second = end // 2, end % 2
    u, v = flat.ends[edge].T
    width = flat.sizes[v]
    counts = np.where(is_second == 1, flat.sizes[u], width)
    starts = np.cumsum(counts) - counts
    q = np.arange(counts.sum()) - np.repeat(starts, counts)
    origin = flat.begin[edge] + np.where(is_second == 1, choice, choice * width)
    step = np.where(is_second == 1, width, 1)
    values = flat.value[np.repeat(origin, counts) + q * np.repeat(step, counts)]
    return values, np.repeat(begins[edge, 1 - is_second], counts) + q, starts


def _cut(
    flat: FlatCosts,
    rows: np.ndarray,
    end: np.ndarray,
    choice: np.ndarray,
    entries: tuple[np.ndarray, np.ndarray, np.ndarray],
    share: np.ndarray,
    there: np.ndarray,
) -> Level:
    node, neighbour = flat.ends.ravel()[end], there[end]
    place = flat.first[node] + choice
    groups = np.flatnonzero(np.diff(place, prepend=-1))
    owner = node[groups]
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    is_lower = neighbour < node
    return Level(
        nodes=owner[begins],
        begins=begins,
        places=place[groups],
        values=entries[0],
        others=entries[1],
        starts=entries[2],
        rows=rows,
        groups=groups,
        group_of=np.repeat(np.arange(len(groups)), np.diff(np.append(groups, len(rows)))),
        neighbour=neighbour,
        is_lower=is_lower,
        up=np.where(is_lower, 0.0, share[end]),
        down=np.where(is_lower, share[end], 0.0),
    )
