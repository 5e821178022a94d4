"""Messages of dual ascent: what each end of each edge has taken over from it, and sweeps over many nodes at once.

With matrices R, a message x per end and the given costs c, the shifted costs are c_v + sum_e x_v and the shifted edges
R[p, q] - x_u[p] - x_v[q]. All messages lie in one flat array; an `End` knows its places there. A node looks only at its own
edges, so nodes that no edge joins can be looked at together: a `Level` lays their matrices out flat, and a sweep over it is one
row of array operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class End:
    """One end of an edge.

    Attributes:
        other: the node at the other end.
        matrix: R, seconds, a float array (choices here, choices there).
        here: the places of this end's messages in the flat array of all.
        there: those of the other end's.
        weight: how many edges of a larger problem it stands for.
    """

    other: int
    matrix: np.ndarray
    here: slice
    there: slice
    weight: float = 1.0


def _place_numbers(part: slice) -> np.ndarray:
    return np.arange(part.start, part.stop)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Level:
    """Nodes that no edge joins, all their matrices in one flat array.

    Choices are sorted by node. Rows, the entries of one matrix for one choice here, are sorted by node, choice and edge.

    Attributes:
        nodes: the nodes' numbers, ascending.
        splits: the first choice of each node but the first.
        values: all matrices' entries, row after row (entries,).
        others: the place of the message that meets each entry (entries,).
        starts: the first entry of each row (rows,).
        rows: the place of each row's own message (rows,).
        groups: the first row of each choice (choices,).
        group_of: the choice of each row (rows,).
        given: c_v of each choice, seconds (choices,).
        handed_up: what part of a choice's cost each row hands on in a sweep to higher nodes (rows,).
        handed_down: the same in a sweep to lower ones (rows,).
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
    def of(cls, nodes: Mapping[int, tuple[np.ndarray, Sequence[End]]]) -> Level:
        """Lay out nodes, each given as its costs (choices,) and the ends of its edges."""
        splits = np.cumsum([len(given) for given, _ in nodes.values()])[:-1]
        parts: dict[str, list[np.ndarray]] = {field.name: [] for field in dataclasses.fields(cls)[2:]}
        elements = rows = choices = 0
        for v, (given, ends) in nodes.items():
            count, lengths = len(given), [end.matrix.shape[1] for end in ends]
            width, row = sum(lengths), np.arange(count * len(ends))
            weight = np.array([end.weight for end in ends])
            up = weight * [end.other > v for end in ends]
            share = 1.0 / max(up.sum(), weight.sum() - up.sum())
            begin = np.cumsum([0, *lengths[:-1]])
            parts["values"].append(np.concatenate([end.matrix for end in ends], axis=1).ravel())
            parts["others"].append(np.tile(np.concatenate([_place_numbers(end.there) for end in ends]), count))
            parts["starts"].append((elements + width * np.arange(count)[:, None] + begin).ravel())
            parts["rows"].append(np.stack([_place_numbers(end.here) for end in ends], axis=1).ravel())
            parts["groups"].append(rows + len(ends) * np.arange(count))
            parts["group_of"].append(choices + row // len(ends))
            parts["given"].append(given)
            parts["handed_up"].append(np.tile(share * up, count))
            parts["handed_down"].append(np.tile(share * (weight - up), count))
            elements, rows, choices = elements + width * count, rows + len(row), choices + count
        return cls(tuple(nodes), splits, **{name: np.concatenate(arrays) for name, arrays in parts.items()})

    def costs(self, messages: np.ndarray) -> dict[int, np.ndarray]:
        """The shifted costs of each node (choices,); `messages` are those of all ends of all edges (places,)."""
        costs = self.given + np.add.reduceat(messages.take(self.rows), self.groups)
        return dict(zip(self.nodes, np.split(costs, self.splits), strict=True))

    def least(self, messages: np.ndarray) -> np.ndarray:
        """The message of each row if it took all that its edge has to give (rows,)."""
        return np.minimum.reduceat(self.values - messages.take(self.others), self.starts)

    def shift(self, messages: np.ndarray, handed: np.ndarray) -> None:
        """Take over from all edges and hand on equal shares to those ahead, in place; `handed` is of the sweep's direction."""
        least = self.least(messages)
        cost = self.given + np.add.reduceat(least, self.groups)
        messages[self.rows] = least - cost.take(self.group_of) * handed
