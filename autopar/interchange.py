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

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.layouts.mesh import Axes, Layout

Classes = Sequence[np.ndarray]
"""For each node the class number of each choice, counted from 0 without gaps."""


def equal_axes(shape: Sequence[int], links: Sequence[object]) -> list[Axes]:
    """Groups of two or more axes that have the same size, above 1, and the same link."""
    groups: dict[tuple[int, object], list[int]] = {}
    for axis, (size, link) in enumerate(zip(shape, links, strict=True)):
        if size > 1:
            groups.setdefault((size, link), []).append(axis)
    return [tuple(members) for members in groups.values() if len(members) > 1]


def class_numbers(choices: Sequence[Sequence[Layout]], groups: Sequence[Axes]) -> np.ndarray:
    """Equal numbers for the choices, each the layouts of all operands, that an exchange of axes within `groups` makes alike."""
    renamings = list(_renamings(groups))
    numbers: dict[tuple[object, ...], int] = {}
    return np.array([numbers.setdefault(min(_renamed(c, r) for r in renamings), len(numbers)) for c in choices])


def _renamings(groups: Sequence[Axes]) -> Iterator[dict[int, int]]:
    for images in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield {
            axis: to for group, image in zip(groups, images, strict=True) for axis, to in zip(group, image, strict=True)
        }


def _renamed(layouts: Sequence[Layout], renaming: Mapping[int, int]) -> tuple[object, ...]:
    """The layouts under other axis names; the order of axes within a dimension does not count."""
    return tuple(
        (
            tuple(tuple(sorted(renaming.get(axis, axis) for axis in axes)) for axes in layout.dims),
            tuple(sorted((renaming.get(axis, axis), monoid) for axis, monoid in layout.partial)),
        )
        for layout in layouts
    )


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
