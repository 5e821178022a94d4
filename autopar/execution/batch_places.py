"""Where the batch of a compiled step lives, and a batch that is there before the step is called.

In: a compiled step. Out: the tree of its batch with a `PlacedBatch` for each array, which tells which examples go where; and
`place`, which makes `BatchLeaf`s: each process holds the examples that its devices compute with, and no others. The step takes
them without another copy. What can go wrong: such a leaf is given to a step with another plan, and this process lacks some of its
examples; ArgumentError says so.
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
"""The first example and the one behind the last; None for a leaf that is taken as it is."""


@dataclasses.dataclass(frozen=True)
class RowsPlace:
    """Some examples of a leaf, as one array that the step computes with.

    Attributes:
        rows: which examples.
        shape: of the array; with microbatches on one mesh these are its first dimension, and their examples the second.
        sharding: where it is.
    """

    rows: Rows
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def leading(self) -> tuple[int, ...]:
        """The sizes of the dimensions of the array that the examples are laid out along."""
        assert self.rows is not None
        count, sizes = self.rows[1] - self.rows[0], self.shape[:1]
        return sizes if sizes == (count,) else self.shape[:2]

    def rows_of(self, index: Sequence[slice] | None) -> np.ndarray:
        """The numbers of the examples that a part of the array holds, in the order in which it holds them."""
        if self.rows is None or index is None:
            return np.arange(0)
        leading = self.leading
        found: np.ndarray = np.arange(*self.rows).reshape(leading)[tuple(index[: len(leading)])].ravel()
        return found


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """Shape, type and places of an array of the batch; several stages may each have their own copy of it."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    places: tuple[RowsPlace, ...]

    def rows_here(self) -> np.ndarray:
        """The numbers of the examples that devices of this process compute with, ascending."""
        found = [
            place.rows_of(index)
            for place in self.places
            for index in place.sharding.addressable_devices_indices_map(place.shape).values()
        ]
        return np.unique(np.concatenate(found)) if found else np.arange(0)


class BatchLeaf:
    """A leaf of a batch whose examples are on their devices, under the plan of one step. It has the shape of the whole leaf."""

    def __init__(self, like: PlacedBatch, arrays: Mapping[tuple[Rows, NamedSharding], jax.Array]) -> None:
        self.shape, self.dtype, self.ndim = like.shape, like.dtype, len(like.shape)
        self._like, self._arrays = like, arrays

    def find(self, rows: Rows, sharding: NamedSharding) -> jax.Array | None:
        """The array of these examples in this place, if the leaf was laid out so."""
        return self._arrays.get((rows, sharding))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """All examples on the host. Raises ArgumentError if some are in other processes alone."""
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
    """The batch of a step, with a `PlacedBatch` for each of its arrays; a tuple of trees if several arguments are batch.

    Args:
        traced: the step.
        places: those of each leaf, by number.
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
    """Where a step on one mesh takes each leaf of its batch."""
    return {
        number: [RowsPlace(_rows(leaf), leaf.shape, sharding)]
        for number, (leaf, sharding) in enumerate(zip(traced.inputs, shardings, strict=True))
        if leaf.role == "batch"
    }


def _rows(leaf: Leaf) -> Rows:
    return (0, leaf.given_shape[0]) if leaf.given_shape else None


def place(like: PlacedBatch, read: Callable[[np.ndarray], np.ndarray], whole: ArrayLike | None = None) -> BatchLeaf:
    """Lay out one leaf of a batch, of which this process reads the examples that its devices need.

    Args:
        like: shape, type and places.
        read: the examples with these numbers, as one array; it is asked once.
        whole: the leaf itself, where it has no examples.

    Returns:
        The leaf, as the step takes it.
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
    """The entries of one place, from the examples with the numbers `rows`, or from a leaf without examples."""

    where: RowsPlace
    dtype: np.dtype
    rows: np.ndarray
    numbers: np.ndarray

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Those of one device, in memory of their own: a device of a CPU may keep it."""
        index = index or ()
        if self.where.rows is None:
            return np.array(self.numbers[index], self.dtype)
        chosen = np.searchsorted(self.rows, self.where.rows_of(index))
        leading = self.where.leading
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, leading, strict=False)]
        found = self.numbers[chosen].reshape(*sizes, *self.numbers.shape[1:])
        return np.array(found[(slice(None),) * len(leading) + tuple(index[len(leading) :])], self.dtype)
