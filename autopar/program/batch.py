"""Which arguments of a step are its batch, if the user does not say; and what is said if they may be misread.

In: bound arguments, which of them the step returns, and which it trains. Out: the places of the batch. A step returns its state
and not its batch, so

    1. the batch is among the arguments that the step does not return, wherever they stand, and that have rows;
    2. the first argument, which holds the weights of a step that only evaluates, is none of these, unless the step trains
       others and nothing else is left, or it has as many rows as the batch;
    3. if the step returns all others, the batch is one that it does not train, as in `evaluate(weights, x)` whose result has
       the shape of `x`.

Of several, the one called `batch` is it, or the second argument, or the last one whose arrays have equally many rows; others with
as many rows belong to it. What can go wrong: an argument that is left out may be the batch as well, or one that is taken may be
state. A warning names both, unless the one left out is small.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError, warn
from autopar.program.boundary.static_values import is_static_value
from autopar.program.call import BoundArguments, CallSignature, PyTree, dtype_of, leaf_paths_below

SMALL = 1 / 16
"""Leaves of a batch with another leading size than the largest, and less than this part of its bytes, are shared by all examples.

Sizes are all there is to tell a key, a scale or class weights from examples. A larger part would take the labels of wide rows for
shared, a smaller one the weights of many classes for examples.
"""


def numbers_of_examples(rows_and_bytes: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The leading sizes of arrays that count examples. That of a key, a scale or class weights does not; see `SMALL`."""
    bytes_of = collections.Counter[int]()
    for rows, size in rows_and_bytes:
        bytes_of[rows] += size
    most = max(bytes_of.values(), default=0)
    return frozenset(rows for rows, own in bytes_of.items() if own >= SMALL * most)


@dataclasses.dataclass(frozen=True, eq=False)
class _Argument:
    """An argument that has rows: its place among those that are not static, its number among the step's."""

    place: int
    number: int
    name: str
    value: PyTree

    @property
    def arrays(self) -> list[tuple[int, int]]:
        """Rows and bytes of each array that is no random key."""
        leaves = [(np.shape(x), dtype_of(x)) for x in jax.tree.leaves(self.value)]
        return [
            (shape[0], math.prod(shape) * dtype.itemsize) for shape, dtype in leaves if not _has_no_rows(shape, dtype)
        ]

    @property
    def counts(self) -> frozenset[int]:
        """Numbers of examples that it may have."""
        return numbers_of_examples(self.arrays)

    @property
    def is_uniform(self) -> bool:
        """Whether its arrays have equally many rows."""
        return len(self.counts) == 1

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(size for _, size in self.arrays)

    def __str__(self) -> str:
        return f"{self.name!r} (rows: {', '.join(map(str, sorted(self.counts)))})"


def _has_no_rows(shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array is a scalar or a random key, of JAX's type or of the older one of two numbers."""
    return not shape or not isinstance(dtype, np.dtype) or (tuple(shape) == (2,) and dtype == np.uint32)


def batch_arguments(
    signature: CallSignature, bound: BoundArguments, returned: Set[int], trained: Set[int]
) -> frozenset[int]:
    """The places of the batch among the arguments that are not static; see the module's text.

    Raises:
        ArgumentError: the user names an argument that is state beyond doubt.
    """
    arguments = [
        argument
        for place, (number, name, value) in enumerate(zip(bound.numbers, bound.names, bound.dynamic, strict=True))
        if (argument := _Argument(place, number, name, value)).arrays
    ]
    if signature.batch_argnums == "auto":
        first = next((place for place, value in enumerate(bound.dynamic) if not is_static_value(value)), 0)
        return frozenset(argument.place for argument in _choose(signature, arguments, returned, trained, first))
    given = frozenset(place for place, number in enumerate(bound.numbers) if number in signature.batch_argnums)
    _check(signature, arguments, returned, trained, given)
    return given


def _choose(
    signature: CallSignature,
    arguments: Sequence[_Argument],
    returned: Set[int],
    trained: Set[int],
    first_place: int,
) -> list[_Argument]:
    """The arguments that are the batch, by rules 1 to 3; a warning tells of others that may be."""
    rest = [a for a in arguments if a.place != first_place]
    first = [a for a in arguments if a.place == first_place and a.place not in returned and trained]
    left = [a for a in rest if a.place not in returned]
    alike = [a for a in rest if a.place in returned and a.place not in trained and a.is_uniform]
    pool = left or first or alike
    if not pool:
        return []
    second = [a for a in pool if a.place == rest[0].place] if rest else []
    named = [a for a in pool if a.name == "batch"]
    uniform = [a for a in pool if a.is_uniform]
    chosen = (named or [a for a in second if a.is_uniform] or uniform[-1:] or second or pool[-1:])[0]
    doubtful = [a for a in alike if left and jax.tree_util.all_leaves([a.value]) and a.counts == chosen.counts]
    batch = [a for a in (*first, *pool) if a is chosen or (chosen.is_uniform and a.counts == chosen.counts)]
    others = [a for a in pool if a not in batch and a.size >= SMALL * chosen.size]
    if left and not chosen.is_uniform:
        # It may be weights that the step does not return, beside one token of each example, whose next one it returns.
        others += [a for a in alike if jax.tree_util.all_leaves([a.value]) and a not in doubtful]
    batch = list(dict.fromkeys([*batch, *doubtful]))
    if doubtful or (others and not named):
        _warn(signature, batch, [*others, *doubtful])
    return batch


def _warn(signature: CallSignature, batch: Sequence[_Argument], doubtful: Sequence[_Argument]) -> None:
    numbers = tuple(sorted(a.number for a in batch))
    listed = [str(a) + (" not" if a not in batch else " too, although the step returns its like") for a in doubtful]
    warn(
        f"{signature.name} has several arguments that may be its batch: {', '.join(str(a) for a in batch)} is taken for it, "
        f"{' and '.join(listed)}. Say which are: batch_argnums={numbers} if that is right"
    )


def _check(
    signature: CallSignature,
    arguments: Sequence[_Argument],
    returned: Set[int],
    trained: Set[int],
    given: Set[int],
) -> None:
    """Raise ArgumentError for state that the user calls the batch; warn where it may be either."""
    wrong = [a for a in arguments if a.place in given & returned and not a.is_uniform]
    maybe = [a for a in arguments if a.place in given & returned & trained and a.is_uniform]
    others = [a for a in arguments if a.place not in returned | given | {0}]
    numbers = tuple(a.number for a in others)
    instead = f"leave batch_argnums out, or give batch_argnums={numbers}" if others else "leave batch_argnums out"
    if wrong:
        rows = [
            f"{path} has {np.shape(x)[0]}"
            for a in wrong
            for path, x in zip(leaf_paths_below(a.name, a.value), jax.tree.leaves(a.value), strict=True)
            if not _has_no_rows(np.shape(x), dtype_of(x))
        ]
        raise ArgumentError(
            f"batch_argnums={signature.batch_argnums} takes {', '.join(repr(a.name) for a in wrong)} for the batch, but "
            f"{signature.name} returns its like, as a step returns its state, and its arrays have different numbers of rows "
            f"({', '.join(rows[:4])}), where those of a batch have one for each example: {instead}"
        )
    if maybe and others:
        warn(
            f"batch_argnums={signature.batch_argnums} takes {', '.join(map(str, maybe))} for the batch, although "
            f"{signature.name} returns its like, as a step returns its state, and not {', '.join(map(str, others))}. If it is "
            f"state, {instead}; if both are the batch, name both."
        )
