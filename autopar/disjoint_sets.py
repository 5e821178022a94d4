"""Sets of elements that are joined one by one: union-find.

In: elements, and which of them belong together. Out: the sets that follow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DisjointSets(Generic[T]):
    """An element that is named for the first time is a set of its own."""

    def __init__(self, elements: Iterable[T] = ()) -> None:
        self._parents = {element: element for element in elements}

    def find(self, element: T) -> T:
        """The element that stands for the set."""
        parents = self._parents
        parents.setdefault(element, element)
        while parents[element] is not element:
            parents[element] = parents[parents[element]]
            element = parents[element]
        return element

    def join(self, elements: Sequence[T]) -> None:
        """Make one set of those that the elements are in."""
        for element in elements[1:]:
            self._parents[self.find(element)] = self.find(elements[0])

    def groups(self) -> list[list[T]]:
        """The sets, each in the order in which its elements came, by their first elements."""
        found: dict[T, list[T]] = {}
        for element in self._parents:
            found.setdefault(self.find(element), []).append(element)
        return list(found.values())
