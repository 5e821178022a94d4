"""`sharded`: batches that lie where a step wants them before the step asks for them.

In: a source of batches, the same in every process, and a step that has been planned. Out: an iterator over batches whose leaves
are on their devices, of each process the rows that its devices compute with; in a pipeline these are devices of the stages that
read the leaf. What can go wrong: a batch has shapes that the step has not been planned for; it is handed over as it is.
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
    """What is asked of a step: an `autopar.ParallelStep` that has been planned."""

    def places(self) -> Places:
        """Where its arrays go."""


class _Ready(NamedTuple):
    """A batch for the step, and how far the source was behind it."""

    batch: PyTree
    position: Position


class ShardedBatches(Iterator[PyTree]):
    """An iterator over batches on their devices; made by `sharded`. `position` and `seek` are what a checkpoint keeps of it."""

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
            make = functools.partial(_make, self._source, self._places)  # the thread does not keep this object alive
            self._feed = Feed(make, ahead=self._prefetch)
        ready = self._feed.take()
        self._position = dict(ready.position)
        return ready.batch

    def position(self) -> Position:
        """How far the source was behind the last batch that was handed over: `batches`, and the source's own `state`.

        Batches that are made ahead do not count.
        """
        return dict(self._position)

    def seek(self, position: Position) -> None:
        """Go on behind the batch of a position.

        Args:
            position: what `position` returned, in this process or in another run.

        Raises:
            ArgumentError: the source cannot go there: it is a generator that is further, or has fewer batches.
        """
        self.close()
        self._source.seek(position)
        self._position = dict(position)

    def close(self) -> None:
        """End the thread that makes batches ahead; if more are taken, those that were not handed over are drawn again."""
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    def _learn(self) -> None:
        """Look up where the last plan wants its batch; the thread may not ask, because a step may be under way."""
        places = self._step.places()
        if places.plan is self._known:
            return
        self._known, tree = places.plan, places.batch
        leaves, structure = jax.tree.flatten(tree)
        self._places.setdefault((structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)), leaves)


def _make(source: Source, places: Mapping[_Kind, list[PlacedBatch]]) -> _Ready:
    """In the thread: draw a batch, and lay it out."""
    drawn = source.draw()
    return _Ready(_lay_out(drawn, places), source.position())


def _lay_out(drawn: Drawn, known: Mapping[_Kind, list[PlacedBatch]]) -> PyTree:
    """The batch on its devices, or on the host if no plan for its shapes is known."""
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
    """Lay batches out for a step, a few ahead of it, in a thread.

    Every process calls it with the same source, and every process hands the step the same sequence of batches. Of each batch a
    process keeps the rows that its devices compute with, as the step's plan says, also in a pipeline.

    Args:
        source: batches, each a tree of arrays of the host with the examples along their leading dimension, in the order in which
            the step is to get them. A list, a data set or a function that makes an iterable can be begun anew; an iterator with
            `get_state` and `set_state`, such as those of grain, goes on from its state; a generator can only go forward. With
            `batch_size` it is `len(source)` single examples by number instead, of which each process reads its own alone.
        step: the step, planned before for such batches.
        prefetch: how many batches are laid out before the step asks for them.
        batch_size: how many examples make a batch.
        shuffle_seed: with `batch_size`, the seed of an order that is another one in each epoch; None keeps the order.
        epochs: with `batch_size`, how often all examples are gone through; None has no end.

    Returns:
        An iterator over batches. Its `position()` is JSON, and `seek(position)` goes on exactly there; `autopar.save`,
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
