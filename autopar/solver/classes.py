"""Choices that differ only in which of several equal mesh axes does what, merged into classes.

Along axes of equal size and equal links, a strategy costs the same whichever of them shards what; only neighbours that must
agree tell the axes apart. Merged, the choices of a mesh of three or more axes are about as few as those of a mesh of two:

    cost of a class         the least of its members
    edge of two classes     the least over pairs of members

In: strategies, or a problem and classes. Out: class numbers of choices; the merged problem, whose optimum is a lower bound of
the real one, with memory or without. What can go wrong: the bound is loose where neighbours disagree on which axis is which;
then less is ruled out, never too much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Classes = Sequence[np.ndarray]
"""For each node the class number of each choice, counted from 0 without gaps."""


def least_of_classes(values: np.ndarray, classes: np.ndarray, axis: int = 0) -> np.ndarray:
    """The least value of each class along `axis`."""
    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    least: np.ndarray = np.minimum.reduceat(np.take(values, order, axis=axis), starts, axis=axis)
    return least


def merged_edges(edges: Mapping[tuple[int, int], np.ndarray], classes: Classes) -> dict[tuple[int, int], np.ndarray]:
    """The edges between classes; edges that share a matrix and classes share the result."""
    shared: dict[tuple[int, int, int], np.ndarray] = {}
    merged = {}
    for (u, v), matrix in edges.items():
        key = (id(matrix), id(classes[u]), id(classes[v]))
        if key not in shared:
            shared[key] = least_of_classes(least_of_classes(matrix, classes[u]), classes[v], axis=1)
        merged[u, v] = shared[key]
    return merged
