"""Mesh axes that nothing tells apart, and choices that an exchange of such axes makes alike.

Along axes of equal size and equal links a strategy costs the same whichever of them shards what. In: the sizes and links of a
mesh's axes, and the layouts of choices. Out: groups of equal axes, and a class number for each choice (`solver/classes.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.layouts.mesh import Axes, Layout


def find_equal_axes(shape: Sequence[int], links: Sequence[object]) -> list[Axes]:
    """Groups of two or more axes that have the same size, above 1, and the same link."""
    groups: dict[tuple[int, object], list[int]] = {}
    for axis, (size, link) in enumerate(zip(shape, links, strict=True)):
        if size > 1:
            groups.setdefault((size, link), []).append(axis)
    return [tuple(members) for members in groups.values() if len(members) > 1]


class ClassNumbers:
    """Numbers the classes of choices that an exchange of axes within `groups` makes alike.

    A layout has a number under each renaming, which is found once for all choices: many have the same layouts.
    """

    def __init__(self, groups: Sequence[Axes]) -> None:
        self._renamings = list(_list_renamings(groups))
        self._rows: dict[Layout, list[int]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, choices: Sequence[Sequence[Layout]]) -> np.ndarray:
        """Equal numbers, ints (choices,), for choices, each the layouts of all operands, that are alike."""
        numbers: dict[tuple[int, ...], int] = {}
        return np.array([numbers.setdefault(self._name(layouts), len(numbers)) for layouts in choices])

    def _name(self, layouts: Sequence[Layout]) -> tuple[int, ...]:
        """The least name of some layouts, renamed together."""
        rows = [self._rows.get(layout) or self._add(layout) for layout in layouts]
        return min(zip(*rows, strict=True), default=())

    def _add(self, layout: Layout) -> list[int]:
        """A layout's number under each renaming; equal for equal renamed layouts."""
        row = [self._numbers.setdefault(_rename(layout, r), len(self._numbers)) for r in self._renamings]
        self._rows[layout] = row
        return row


def _list_renamings(groups: Sequence[Axes]) -> Iterator[dict[int, int]]:
    for images in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield {
            axis: to for group, image in zip(groups, images, strict=True) for axis, to in zip(group, image, strict=True)
        }


def _rename(layout: Layout, renaming: Mapping[int, int]) -> tuple[object, ...]:
    """The layout under other axis names; the order of axes within a dimension does not count."""
    return (
        tuple(tuple(sorted(renaming.get(axis, axis) for axis in axes)) for axes in layout.dims),
        tuple(sorted((renaming.get(axis, axis), monoid) for axis, monoid in layout.partial)),
    )
