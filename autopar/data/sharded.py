"""`sharded`: batches that lie where a step wants them before the step asks for them.

In: a source of batches, the same in every process, and a step that has been planned. Out: an iterator over batches whose leaves
are on their devices. Each process holds the rows that its devices compute with; in a pipeline these are devices of the stages
that read the leaf. What can go wrong: the step has no plan for the shapes of a batch. The batch is then handed over unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from autopar.arguments import check_limit
from autopar.data.feed import Feed
from autopar.data.sources import Drawn, ExamplesByNumber, IteratedSource, NumberedSource, Position, Source
from autopar.errors import ArgumentError
from autopar.execution.batch_places import PlacedBatch, place
from autopar.execution.published import Places
from autopar.program.call import PyTree, dtype_of

_Kind = tuple[jax.tree_util.PyTreeDef, tuple[tuple[tuple[int, ...], str], ...]]
"""Structure, shapes and types of a batch."""


class PlannedStep(Protocol):
    """The part of a planned `autopar.ParallelStep` that batches need."""

    def places(self) -> Places:
        """Return the places of the step's arrays under its last plan."""


class _Ready(NamedTuple):
    """A batch for the step, and the position of the source after it."""

    batch: PyTree
    position: Position


class ShardedBatches(Iterator[PyTree]):
    """An iterator over batches on their devices, made by `sharded`. A checkpoint keeps its `position` for `seek`."""

    def __init__(self, source: Source, step: PlannedStep, *, prefetch: int) -> None:
        self._source, self._step, self._prefetch = source, step, prefetch
        self._places: dict[_Kind, list[PlacedBatch]] = {}
        self._position = dict(source.position())
        self._feed: Feed[_Ready] | None = None
        self._known: object = None

    def __iter__(self) -> ShardedBatches:
        return self

    def __next__(self) -> PyTree:
        self._learn()
        if self._feed is None:
            if dict(self._source.position()) != self._position:
                self._source.seek(self._position)
            make = functools.partial(
                _make, self._source, self._places
            )  # so that the thread does not keep this object alive
            self._feed = Feed(make, ahead=self._prefetch)
        ready = self._feed.take()
        self._position = dict(ready.position)
        return ready.batch

    def position(self) -> Position:
        """Return the position of the source after the last batch that was handed over.

        Returns:
            JSON: the number of `batches` so far, and the source's own `state`. Batches made ahead do not count.
        """
        return dict(self._position)

    def seek(self, position: Position) -> None:
        """Continue after the batch of a position.

        Args:
            position: a result of `position`, of this process or of another run.

        Raises:
            ArgumentError: the source cannot go there. It is a generator that is past the position, or has fewer batches.
        """
        self.close()
        self._source.seek(position)
        self._position = dict(position)

    def close(self) -> None:
        """End the thread that makes batches ahead. The next batch taken starts it again, without loss."""
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    def _learn(self) -> None:
        """Look up where the last plan wants its batch. The thread must not ask itself, because a step may be under way."""
        places = self._step.places()
        if places.plan is self._known:
            return
        self._known, tree = places.plan, places.batch
        leaves, structure = jax.tree.flatten(tree)
        self._places.setdefault((structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)), leaves)


def _make(source: Source, places: Mapping[_Kind, list[PlacedBatch]]) -> _Ready:
    """Draw a batch and lay it out. Runs in the thread."""
    drawn = source.draw()
    return _Ready(_lay_out(drawn, places), source.position())


def _lay_out(drawn: Drawn, known: Mapping[_Kind, list[PlacedBatch]]) -> PyTree:
    """Lay a batch out on its devices; on the host if no plan for its shapes is known."""
    leaves, structure = jax.tree.flatten(drawn.like)
    places = known.get((structure, tuple(map(_kind_of, leaves))))
    if places is None:
        return drawn.whole()
    made = [
        leaf if _is_key(leaf) else place(like, functools.partial(drawn.leaf, number), whole=leaf)
        for number, (like, leaf) in enumerate(zip(places, leaves, strict=True))
    ]
    return jax.tree.unflatten(structure, made)


def _kind_of(leaf: ArrayLike) -> tuple[tuple[int, ...], str]:
    return tuple(np.shape(leaf)), str(dtype_of(leaf))


def _is_key(leaf: ArrayLike) -> bool:
    return jnp.issubdtype(dtype_of(leaf), jax.dtypes.prng_key)


def sharded(
    source: Iterable[PyTree] | Callable[[], Iterable[PyTree]] | ExamplesByNumber,
    step: PlannedStep,
    *,
    prefetch: int = 2,
    batch_size: int | None = None,
    shuffle_seed: int | None = None,
    epochs: int | None = 1,
) -> ShardedBatches:
    """Lay batches out for a step in a thread, a few ahead of it.

    Every process calls this with the same source, and passes the step the same sequence of batches. Of each batch a process keeps
    the rows that its devices compute with under the step's plan, on one mesh or in a pipeline.

    Args:
        source: batches in the order in which the step gets them. Each is a tree of host arrays with the examples along their
            leading dimension. A list, a data set or a function that makes an iterable can start again. An iterator with
            `get_state` and `set_state`, such as those of grain, continues from its state. A generator can only go forward. With
            `batch_size` the source is instead a sequence of single examples, of which each process reads only its own.
        step: the step, planned for such batches.
        prefetch: the number of batches to lay out before the step asks for them.
        batch_size: the number of examples in a batch.
        shuffle_seed: with `batch_size`, the seed of the order, which differs in each epoch; None keeps the order.
        epochs: with `batch_size`, the number of passes over all examples; None never ends.

    Returns:
        An iterator over batches. Its `position()` returns JSON, and `seek(position)` continues exactly there. `autopar.save`,
        `autopar.restore` and `autopar.Run` take it as `data`.

    Raises:
        ArgumentError: an argument cannot be used, or the step has not been planned.
    """
    ahead = check_limit("prefetch", prefetch)
    if ahead is None:
        raise ArgumentError("prefetch=None: give the number of batches that are laid out ahead, 1 or more")
    step.places()
    if batch_size is None:
        if shuffle_seed is not None or epochs != 1:
            raise ArgumentError("shuffle_seed and epochs are for examples by number: give batch_size as well")
        if not callable(source) and not isinstance(source, Iterable):
            raise ArgumentError(f"the source is a {type(source).__name__}, which is not iterable; or give batch_size")
        return ShardedBatches(IteratedSource(source), step, prefetch=ahead)
    if not isinstance(source, ExamplesByNumber):
        raise ArgumentError(
            f"batch_size={batch_size} asks for examples by number, and a {type(source).__name__} has no len() and no [number]"
        )
    size = check_limit("batch_size", batch_size)
    assert size is not None
    numbered = NumberedSource(source, batch_size=size, shuffle_seed=shuffle_seed, epochs=check_limit("epochs", epochs))
    return ShardedBatches(numbered, step, prefetch=ahead)
