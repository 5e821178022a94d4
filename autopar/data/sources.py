"""Sources of batches, each with a position from which it can continue.

In: an iterable, or examples by number. Out: a `Source`. Its `draw` returns one batch after the other, and its position is JSON
from which it continues exactly. Every process knows the whole order and draws the same batches, but reads only its own rows. What
can go wrong: a generator cannot go back, or an example by number differs from the first. The ArgumentError says what to do.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.typing import ArrayLike

from autopar.errors import ArgumentError
from autopar.files.checked import Fields
from autopar.program.call import PyTree, leaf_paths_below

Position: TypeAlias = Fields
"""The position of a source, as JSON: the number of `batches` drawn, and the iterator's own `state` if it has one."""


@runtime_checkable
class Resumable(Protocol):
    """An iterator that can save and restore its state, as those of grain do."""

    def get_state(self) -> object:
        """Return the state."""

    def set_state(self, state: object) -> None:
        """Continue from a state."""


@runtime_checkable
class ExamplesByNumber(Protocol):
    """Examples that can be read in any order, each a tree of arrays: a list, an array, a data source or MapDataset of grain."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, number: int) -> PyTree:
        """Return the example with this number."""


class Drawn(Protocol):
    """A batch that was drawn: the shapes and types of its leaves, and access to its rows."""

    @property
    def like(self) -> PyTree:
        """The batch, or a tree of the same structure with a `jax.ShapeDtypeStruct` for each leaf."""

    def leaf(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Return the examples with the numbers `rows` of one leaf. The leaf has examples."""

    def whole(self) -> PyTree:
        """Return the whole batch on the host."""


class WholeBatch:
    """A batch that exists as a whole. Its leaves may have different numbers of examples, or none."""

    def __init__(self, batch: PyTree) -> None:
        self.like, self._leaves = batch, jax.tree.leaves(batch)

    def leaf(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Return the examples with the numbers `rows` of one leaf."""
        found: np.ndarray = np.asarray(self._leaves[number])[rows]
        return found

    def whole(self) -> PyTree:
        """Return a copy of the batch, because its maker may reuse the memory."""
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array | int | float | complex) else np.array(x), self.like)


class BatchByNumber:
    """A batch of examples that are read one by one, and only when they are needed."""

    def __init__(self, examples: ExamplesByNumber, numbers: np.ndarray, shapes: PyTree) -> None:
        """Take the numbers of the batch's examples, and the tree of shapes and types of one example's leaves."""
        self._examples, self._numbers, self._shapes = examples, numbers, shapes
        self._read = dict[bytes, list[np.ndarray]]()
        self.like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(numbers), *x.shape), x.dtype), shapes)

    def leaf(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Return the examples with the numbers `rows` of one leaf. Leaves with the same numbers share one read.

        Raises ArgumentError if an example has another structure, shape or type than example 0.
        """
        key = rows.tobytes()
        if key not in self._read:
            read = [
                _leaves_like(self._shapes, self._examples[int(example)], int(example))
                for example in self._numbers[rows]
            ]
            self._read[key] = [np.stack(leaves) for leaves in zip(*read, strict=True)]
        return self._read[key][number]

    def whole(self) -> PyTree:
        """Return the whole batch on the host."""
        every = np.arange(len(self._numbers))
        leaves, structure = jax.tree.flatten(self.like)
        return jax.tree.unflatten(structure, [self.leaf(number, every) for number in range(len(leaves))])


class Source(Protocol):
    """Batches in an order that is the same in every process."""

    def draw(self) -> Drawn:
        """Draw the next batch. Raises StopIteration after the last one."""

    def position(self) -> Position:
        """Return the position."""

    def seek(self, position: Position) -> None:
        """Continue from a position."""


class IteratedSource:
    """A source that iterates: over an iterable that can start again, the result of a function, or a generator."""

    def __init__(self, iterable: Iterable[PyTree] | Callable[[], Iterable[PyTree]]) -> None:
        self._iterable = iterable
        self._is_anew = callable(iterable) or not isinstance(iterable, Iterator)
        self._iterator = self._begin()
        self._drawn = 0

    def draw(self) -> Drawn:
        """Draw the next batch. Raises StopIteration after the last one."""
        batch = next(self._iterator)
        self._drawn += 1
        return WholeBatch(batch)

    def position(self) -> Position:
        """Return the position."""
        state = self._iterator.get_state() if isinstance(self._iterator, Resumable) else None
        return {"batches": self._drawn, "state": _as_json(state)}

    def seek(self, position: Position) -> None:
        """Continue from a position, by the iterator's own state, or by drawing as many batches as had been drawn."""
        wanted = int(position["batches"])
        if isinstance(self._iterator, Resumable) and position["state"] is not None:
            self._iterator.set_state(_from_json(position["state"]))
        else:
            self._skip_to(wanted)
        self._drawn = wanted

    def _skip_to(self, wanted: int) -> None:
        if wanted < self._drawn:
            if not self._is_anew:
                raise ArgumentError(
                    f"the data is a generator of which {self._drawn} batches are drawn, and it has to continue after batch "
                    f"{wanted}: a generator cannot go back. Give the function that makes it, sharded(make_batches, step), or a "
                    "list, a data set, or an iterator with get_state and set_state."
                )
            self._iterator, self._drawn = self._begin(), 0
        for number in range(self._drawn, wanted):
            try:
                next(self._iterator)
            except StopIteration:
                raise ArgumentError(
                    f"the data ends after {number} batches, and the run to continue had drawn {wanted}: give the data that "
                    "it was given"
                ) from None

    def _begin(self) -> Iterator[PyTree]:
        return iter(self._iterable() if callable(self._iterable) else self._iterable)


def peek(
    data: Iterable[PyTree] | Callable[[], Iterable[PyTree]],
) -> tuple[PyTree, Iterable[PyTree] | Callable[[], Iterable[PyTree]]]:
    """Return the first batch, and the data, which still begins with it. Raises ArgumentError if there is no batch."""
    iterator = iter(data() if callable(data) else data)
    state = iterator.get_state() if isinstance(iterator, Resumable) else None
    try:
        first = next(iterator)
    except StopIteration:
        raise ArgumentError("the data has no batch to plan the step for") from None
    if iterator is not data:
        return first, data
    if not isinstance(iterator, Resumable):
        return first, itertools.chain([first], iterator)
    iterator.set_state(state)
    return first, data


class NumberedSource:
    """Batches of examples by number, in order or shuffled anew for each epoch. An incomplete last batch is left out."""

    def __init__(
        self, examples: ExamplesByNumber, *, batch_size: int, shuffle_seed: int | None = None, epochs: int | None = 1
    ) -> None:
        """Take the examples and their order. `epochs`: the number of passes; None never ends."""
        self._examples, self._size, self._seed, self._epochs = examples, batch_size, shuffle_seed, epochs
        self._per_epoch = len(examples) // batch_size
        if not self._per_epoch:
            raise ArgumentError(f"batch_size={batch_size}: there are {len(examples)} examples, too few for a batch")
        first = examples[0]
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), first)
        self._drawn = 0
        self._order: tuple[int, np.ndarray] = (-1, np.arange(0))

    def draw(self) -> Drawn:
        """Draw the next batch without reading its examples. Raises StopIteration after the last one."""
        epoch, number = divmod(self._drawn, self._per_epoch)
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        self._drawn += 1
        numbers = self._order[1][number * self._size : (number + 1) * self._size]
        return BatchByNumber(self._examples, numbers, self._shapes)

    def position(self) -> Position:
        """Return the position."""
        return {"batches": self._drawn, "state": None}

    def seek(self, position: Position) -> None:
        """Continue from a position, without reading any example."""
        self._drawn = int(position["batches"])

    def _order_of(self, epoch: int) -> np.ndarray:
        count = len(self._examples)
        return np.arange(count) if self._seed is None else np.random.default_rng((self._seed, epoch)).permutation(count)


def _leaves_like(shapes: PyTree, example: PyTree, number: int) -> list[np.ndarray]:
    """Return the leaves of an example with the types of example 0. Raises ArgumentError if the two examples differ."""
    structure: object = jax.tree.structure(shapes)
    own: object = jax.tree.structure(example)
    if own != structure:
        raise ArgumentError(
            f"example {number} of the data has the structure {own}, and example 0 has {structure}. A batch stacks its "
            "examples: give all of them the same keys"
        )
    expected, leaves = jax.tree.leaves(shapes), jax.tree.leaves(example)
    arrays = [_array_like(like, leaf) for like, leaf in zip(expected, leaves, strict=True)]
    wrong = [
        f"{path} is {np.asarray(leaf).dtype}{list(np.shape(leaf))}, in example 0 {like.dtype}{list(like.shape)}"
        for path, like, leaf, array in zip(leaf_paths_below("example", shapes), expected, leaves, arrays, strict=True)
        if array is None
    ]
    if wrong:
        raise ArgumentError(
            f"example {number} of the data differs from example 0: {'; '.join(wrong[:4])}. A batch stacks its examples: give "
            "all of them the same shapes and types, by padding, cropping or converting them in the data"
        )
    return [array for array in arrays if array is not None]


def _array_like(like: jax.ShapeDtypeStruct, leaf: ArrayLike) -> np.ndarray | None:
    """Return a leaf as an array of a shape and a type; None if it has another shape, or if the type would change its values."""
    try:
        array = np.asarray(leaf)
    except ValueError:  # a nested list, which NumPy finds ragged
        return None
    if array.shape != like.shape:
        return None
    if array.dtype == like.dtype:
        return array
    is_whole = array.dtype.kind in "iu" and like.dtype.kind in "iu"
    if not is_whole and not np.can_cast(array.dtype, like.dtype, "same_kind"):
        return None
    with np.errstate(over="ignore"):
        converted = array.astype(like.dtype)
    is_number = isinstance(leaf, float | complex) and not isinstance(leaf, np.generic)
    return converted if is_number or np.array_equal(converted, array, equal_nan=array.dtype.kind in "fc") else None


def _as_json(state: object) -> object:
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def _from_json(state: object) -> object:
    if isinstance(state, Mapping) and [*state] == ["base64"]:
        return base64.b64decode(state["base64"])
    return state
