"""Lay the batch of a compiled step out on its devices before the step is called.

In: a compiled step. Out: the tree of its batch with a `PlacedBatch` for each array, which says which examples go to which
devices; and `place`, which makes a `BatchLeaf` of an array. Each process holds only the examples that its devices compute with,
and the step takes a `BatchLeaf` without another copy. What can go wrong: a leaf is passed to a step with another plan, and this
process lacks some of the examples. An ArgumentError says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from autopar.errors import ArgumentError
from autopar.program.boundary.static_values import reveal_static
from autopar.program.call import PyTree
from autopar.program.step import Leaf, TracedStep
from autopar.runtime.processes import absent, is_here

Rows = tuple[int, int] | None
"""The numbers of the first example and of the one after the last; None for a leaf without examples."""


@dataclasses.dataclass(frozen=True)
class RowsPlace:
    """A range of examples of a leaf, held in one array that the step computes with.

    Attributes:
        rows: the range of examples; None if the leaf has none.
        shape: the shape of the array: (examples, ...), or (microbatches, examples, ...) with microbatches on one mesh.
        sharding: the sharding of the array.
    """

    rows: Rows
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def leading(self) -> tuple[int, ...]:
        """The sizes of the leading dimensions that count examples: one dimension, or two with microbatches."""
        assert self.rows is not None
        count, sizes = self.rows[1] - self.rows[0], self.shape[:1]
        return sizes if sizes == (count,) else self.shape[:2]

    def rows_of(self, index: Sequence[slice] | None) -> np.ndarray:
        """Return the numbers of the examples in the part of the array at `index`, in the order of the part."""
        if self.rows is None or index is None:
            return np.arange(0)
        leading = self.leading
        found: np.ndarray = np.arange(*self.rows).reshape(leading)[tuple(index[: len(leading)])].ravel()
        return found


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """Shape, type and places of an array of the batch. Several stages may each have a copy of it."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    places: tuple[RowsPlace, ...]

    def rows_here(self) -> np.ndarray:
        """Return the numbers of the examples that devices of this process compute with, in ascending order."""
        found = [
            place.rows_of(index)
            for place in self.places
            for index in place.sharding.addressable_devices_indices_map(place.shape).values()
        ]
        return np.unique(np.concatenate(found)) if found else np.arange(0)


class BatchLeaf:
    """A leaf of a batch, laid out on devices for the plan of one step. `shape` is that of the whole leaf."""

    def __init__(self, like: PlacedBatch, arrays: Mapping[tuple[Rows, NamedSharding], jax.Array]) -> None:
        self.shape, self.dtype, self.ndim = like.shape, like.dtype, len(like.shape)
        self._like, self._arrays = like, arrays

    def find(self, rows: Rows, sharding: NamedSharding) -> jax.Array | None:
        """Return the array that holds these examples under this sharding, or None if the leaf was laid out otherwise."""
        return self._arrays.get((rows, sharding))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Return all examples as an array on the host. Raises ArgumentError if only other processes hold some of them."""
        whole = np.empty(self.shape, self.dtype)
        missing = np.ones(self.shape[:1], bool)
        for place in self._like.places:
            for shard in self._arrays[place.rows, place.sharding].addressable_shards:
                if place.rows is None:
                    whole[shard.index], missing[...] = np.asarray(shard.data), False
                    continue
                rows, rest = place.rows_of(shard.index), shard.index[len(place.leading) :]
                whole[(np.ix_(rows)[0], *rest)] = np.asarray(shard.data).reshape(
                    len(rows), *shard.data.shape[len(place.leading) :]
                )
                missing[rows] = False
        if missing.any():
            raise ArgumentError(
                f"{self._like.path} was laid out for the plan of one step, and this process has {int((~missing).sum())} of its "
                f"{self.shape[0]} examples. Give it to that step, or lay the batch out for this one with autopar.data.sharded."
            )
        return whole if dtype is None else whole.astype(dtype)

    def __repr__(self) -> str:
        return f"BatchLeaf({self.dtype}{list(self.shape)} for {self._like.path})"


def batch_tree(traced: TracedStep, places: Mapping[int, Sequence[RowsPlace]]) -> PyTree:
    """Return the batch of a step as a tree with a `PlacedBatch` for each array.

    Args:
        traced: the step.
        places: the places of each leaf of the batch, by the number of the leaf.

    Returns:
        The tree; a tuple of trees if several arguments are batch.
    """
    positional, keywords = jax.tree.unflatten(traced.in_tree, range(traced.in_tree.num_leaves))

    def is_batch(numbers: PyTree) -> bool:
        return any(traced.inputs[i].role == "batch" for i in jax.tree.leaves(numbers))

    def placed(number: int) -> PlacedBatch:
        leaf = traced.inputs[number]
        return PlacedBatch(leaf.path, leaf.given_shape, leaf.dtype, tuple(places.get(number, ())))

    arguments = [reveal_static(one) for one in (*positional, *keywords.values()) if is_batch(one)]
    trees = [jax.tree.map(placed, one) for one in arguments]
    return trees[0] if len(trees) == 1 else tuple(trees)


def places_on_one_mesh(traced: TracedStep, shardings: Sequence[NamedSharding]) -> dict[int, list[RowsPlace]]:
    """Return the places of each leaf of the batch of a step on one mesh, by the number of the leaf."""
    return {
        number: [RowsPlace(_rows(leaf), leaf.shape, sharding)]
        for number, (leaf, sharding) in enumerate(zip(traced.inputs, shardings, strict=True))
        if leaf.role == "batch"
    }


def _rows(leaf: Leaf) -> Rows:
    return (0, leaf.given_shape[0]) if leaf.given_shape else None


def place(like: PlacedBatch, read: Callable[[np.ndarray], np.ndarray], whole: ArrayLike | None = None) -> BatchLeaf:
    """Lay out one leaf of a batch. This process reads only the examples that its devices need.

    Args:
        like: shape, type and places of the leaf.
        read: takes the numbers of examples and returns these as one array (examples, ...). It is called once at most.
        whole: the leaf itself, if it has no examples.

    Returns:
        The leaf on its devices, which the step takes as it is.
    """
    rows = like.rows_here()
    numbers = read(rows) if rows.size else np.empty((0, *like.shape[1:]), like.dtype)
    arrays = {}
    for where in like.places:
        entries = _Entries(where, like.dtype, rows, np.asarray(whole) if where.rows is None else numbers)
        arrays[where.rows, where.sharding] = (
            jax.make_array_from_callback(where.shape, where.sharding, entries.read)
            if is_here(where.sharding)
            else absent(where.shape, like.dtype, where.sharding)
        )
    return BatchLeaf(like, arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class _Entries:
    """The source of one place: the examples with the numbers `rows`, or a leaf without examples."""

    where: RowsPlace
    dtype: np.dtype
    rows: np.ndarray
    numbers: np.ndarray

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Return the entries of one device. They are a copy, because a CPU device may keep the memory that it is given."""
        index = index or ()
        if self.where.rows is None:
            return np.array(self.numbers[index], self.dtype)
        chosen = np.searchsorted(self.rows, self.where.rows_of(index))
        leading = self.where.leading
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, leading, strict=False)]
        found = self.numbers[chosen].reshape(*sizes, *self.numbers.shape[1:])
        return np.array(found[(slice(None),) * len(leading) + tuple(index[len(leading) :])], self.dtype)
