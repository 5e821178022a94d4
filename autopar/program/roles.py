"""What each argument of a step is: state if the step returns its structure, shapes and types; else batch or other.

In: bound arguments and the shapes of the results. Out: the state arguments, the donated ones, the role of every leaf, and for
each output the state leaf whose place it takes. What can go wrong: a donated argument that the step does not return; the error
names what keeps the nearest output from being it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError
from autopar.program.call import BoundArguments, CallSignature, join_path
from autopar.program.program import Program
from autopar.program.step import Leaf, Role

SMALL = 1 / 16
"""Leaves of a batch with fewer bytes than this part of the largest, and another leading size, are shared by all examples."""


def shapes_of(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each leaf."""
    return [(tuple(np.shape(x)), str(dtype_of(x))) for x in jax.tree.leaves(tree)]


def dtype_of(leaf: Any) -> Any:
    """The type that a leaf has in a traced program, where there are no 64-bit types unless they are enabled."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def _parts(out_shape: Any) -> list[Any]:
    """The whole result, and its elements if it is a tuple or list."""
    return [out_shape, *(out_shape if isinstance(out_shape, (tuple, list)) else ())]


def returned_arguments(bound: BoundArguments, out_shape: Any) -> dict[int, Any]:
    """Arguments (by place among the dynamic ones) that the step returns, with the part of the result that they match."""
    taken: set[int] = set()
    found: dict[int, Any] = {}
    structure: Callable[[Any], Any] = jax.tree.structure
    for place, value in enumerate(bound.dynamic):
        if not jax.tree.leaves(value):
            continue
        for part in _parts(out_shape):
            same = structure(part) == structure(value) and shapes_of(part) == shapes_of(value)
            if same and id(part) not in taken and not (len(shapes_of(value)) == 1 and shapes_of(value)[0][0] == ()):
                found[place] = part
                taken.add(id(part))
                break
    return found


def donated_arguments(
    signature: CallSignature, bound: BoundArguments, state: Mapping[int, Any], out_shape: Any
) -> frozenset[int]:
    """Arguments, by place among the dynamic ones, whose memory the step may reuse.

    Raises ArgumentError for one that the step does not return.
    """
    wanted = signature.donate_argnums
    batch = {place for place, number in enumerate(bound.numbers) if number in signature.batch_argnums}
    if wanted == "auto":
        return frozenset(place for place in state if place not in batch)
    for place, number in enumerate(bound.numbers):
        if number in wanted and place not in state and jax.tree.leaves(bound.dynamic[place]):
            raise ArgumentError(
                f"{signature.name} donates argument {number} ({bound.names[place]!r}) but does not return it: no output has "
                f"its structure, shapes and types. {_nearest(bound.names[place], bound.dynamic[place], out_shape)}Return the "
                f"new {bound.names[place]}, or leave it out of donate_argnums."
            )
    return frozenset(place for place, number in enumerate(bound.numbers) if number in wanted)


def _nearest(name: str, value: Any, out_shape: Any) -> str:
    """What keeps the part of the result that shares most leaves with the argument from being it; "" if none shares any."""
    before = _leaf_types(name, value)
    candidates = [after for part in _parts(out_shape) if (after := _leaf_types(name, part)).keys() & before.keys()]
    if not candidates:
        return ""
    after = max(
        candidates, key=lambda leaves: len(leaves.items() & before.items()) - len(leaves.keys() ^ before.keys())
    )
    changes = [
        f"{path} goes in as {before.get(path, 'nothing')} and comes out as {after.get(path, 'nothing')}"
        for path in [*before, *(path for path in after if path not in before)]
        if before.get(path) != after.get(path)
    ]
    listed = "; ".join(changes[:3]) + ("; ..." if len(changes) > 3 else "")
    return f"The nearest output differs: {listed or 'its containers are of other types'}. "


def _leaf_types(name: str, tree: Any) -> dict[str, str]:
    """Type of each leaf, as JAX writes it, by path."""
    paths = [join_path(name, path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path: f"{dtype}{list(shape)}" for path, (shape, dtype) in zip(paths, shapes_of(tree), strict=True)}


def input_leaves(
    signature: CallSignature,
    bound: BoundArguments,
    paths: Sequence[str],
    program: Program,
    state: Mapping[int, Any],
    donated: frozenset[int],
) -> tuple[Leaf, ...]:
    """A leaf for every array that the step takes, in order."""
    roles: list[tuple[Role, bool]] = []
    for place, (number, value) in enumerate(zip(bound.numbers, bound.dynamic, strict=True)):
        role: Role = "batch" if number in signature.batch_argnums else "state" if place in state else "other"
        roles += [(role, place in donated)] * len(jax.tree.leaves(value))
    roles += [("other", False)] * (len(paths) - len(roles))
    leaves = [
        Leaf(path, role, tuple(var.aval.shape), var.aval.dtype, donate)
        for path, (role, donate), var in zip(paths, roles, program.invars, strict=False)
    ]
    counts = _numbers_of_examples([leaf for leaf in leaves if leaf.role == "batch" and leaf.shape])
    return tuple(
        dataclasses.replace(leaf, shared=leaf.role == "batch" and bool(leaf.shape) and leaf.shape[0] not in counts)
        for leaf in leaves
    )


def _numbers_of_examples(leaves: Sequence[Leaf]) -> set[int]:
    """The leading sizes of a batch that count examples; those of a key, a scale or the weights of classes need little memory."""
    bytes_of = collections.Counter[int]()
    for leaf in leaves:
        bytes_of[leaf.shape[0]] += math.prod(leaf.shape) * leaf.dtype.itemsize
    most = max(bytes_of.values(), default=0)
    return {size for size, own in bytes_of.items() if own >= SMALL * most}


def outputs_of_state(
    bound: BoundArguments, state: Mapping[int, Any], out_leaves: Sequence[Any]
) -> tuple[int | None, ...]:
    """For each output leaf the number of the input leaf whose place it takes."""
    starts, total = [], 0
    for value in bound.dynamic:
        starts.append(total)
        total += len(jax.tree.leaves(value))
    by_identity = {id(leaf): i for i, leaf in enumerate(out_leaves)}
    places: list[int | None] = [None] * len(out_leaves)
    for place, part in state.items():
        for offset, leaf in enumerate(jax.tree.leaves(part)):
            places[by_identity[id(leaf)]] = starts[place] + offset
    return tuple(places)
