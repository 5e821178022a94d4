"""Parts of a choice problem that look alike choose alike: a smaller problem whose solution is one of the whole.

In: a pairwise choice problem (`presolve.py`), in which a deep model repeats its layers. Out: a `Tied` problem with one node for
each class of nodes that look alike. Two nodes look alike if they have equal costs, and equal edges to neighbours that look
alike, up to `RADIUS` edges away (colour refinement, Weisfeiler and Leman 1968, stopped early): nodes of all layers but those
near the ends. Ties only leave choices out, so a solution of the tied problem is a solution, of equal value; how far it is from
the optimum only a bound of the whole problem says. What can go wrong: a problem in which alike parts had better differ, such as
layers that would take turns in using a scarce memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.intra_op import Choice

RADIUS = 6
"""How far nodes must look alike: more keeps more of the ends apart."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tied:
    """One node per class: `classes[v]` is the class of node v of the whole problem."""

    classes: np.ndarray
    costs: tuple[np.ndarray, ...]
    edges: Mapping[tuple[int, int], np.ndarray]

    def extend(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The choice of every node of the whole problem."""
        return tuple(numbers[c] for c in self.classes.tolist())

    def representatives(self, of: Sequence[Any]) -> list[Any]:
        """Of what nodes have, that of the first of each class."""
        _, first = np.unique(self.classes, return_index=True)
        return [of[v] for v in first.tolist()]

    def restrict(self, choice: Choice) -> Choice:
        """A choice that respects the ties, in the classes."""
        return dataclasses.replace(choice, numbers=tuple(self.representatives(choice.numbers)))

    def sums(self, of: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """What nodes have of something, added up by class."""
        total: dict[int, np.ndarray] = {}
        for v, array in of.items():
            c = int(self.classes[v])
            total[c] = total[c] + array if c in total else array
        return total


def tied(costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], *, radius: int = RADIUS) -> Tied:
    """The problem with alike nodes tied together."""
    classes = alike(costs, edges, radius=radius)
    count = int(classes.max(initial=-1)) + 1
    sums: list[np.ndarray | None] = [None] * count
    for c, cost in zip(classes.tolist(), costs, strict=True):
        held = sums[c]
        sums[c] = np.asarray(cost, dtype=float) if held is None else held + cost
    repeated: dict[tuple[int, int, int, bool], int] = {}
    matrices: dict[int, np.ndarray] = {}
    for (u, v), matrix in edges.items():
        a, b = int(classes[u]), int(classes[v])
        key = (min(a, b), max(a, b), id(matrix), a > b)
        repeated[key] = repeated.get(key, 0) + 1
        matrices[id(matrix)] = matrix
    between: dict[tuple[int, int], np.ndarray] = {}
    for (a, b, number, flipped), times in repeated.items():
        matrix = matrices[number].T if flipped else matrices[number]
        whole = times * matrix if times > 1 else matrix
        if a == b:
            held = sums[a]
            assert held is not None
            sums[a] = held + np.diagonal(whole)
        else:
            between[a, b] = between[a, b] + whole if (a, b) in between else whole
    return Tied(classes, tuple(cost for cost in sums if cost is not None), between)


def alike(
    costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], *, radius: int = RADIUS
) -> np.ndarray:
    """The class of each node, numbered in order of first appearance."""
    count = len(costs)
    pairs = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    matrix = _numbered([id(m) for m in edges.values()])
    one_way = np.concatenate([pairs[:, 0], pairs[:, 1]])
    other = np.concatenate([pairs[:, 1], pairs[:, 0]])
    label = np.concatenate([2 * matrix, 2 * matrix + 1])
    colour = _numbered([cost.tobytes() for cost in costs])
    order = np.argsort(one_way, kind="stable")
    one_way, other, label = one_way[order], other[order], label[order]
    for _ in range(radius):
        seen = _numbered(list(zip(label.tolist(), colour[other].tolist(), strict=True)))
        arranged = np.lexsort((seen, one_way))
        around = np.split(seen[arranged], np.searchsorted(one_way, np.arange(1, count)))
        refined = _numbered([(c, a.tobytes()) for c, a in zip(colour.tolist(), around, strict=True)])
        if refined.max(initial=-1) == colour.max(initial=-1):
            break
        colour = refined
    return colour


def _numbered(keys: Sequence[object]) -> np.ndarray:
    """Equal keys get equal numbers, in order of first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
