"""What each argument of a step is: state if the step returns its structure, shapes and types; else batch or other.

In: bound arguments and the shapes of the results. Out: the state arguments, the donated ones, the role of every leaf, and for
each output the state leaf whose place it takes. What can go wrong: the step does not return a donated argument; the error says
how the nearest output differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from autopar.errors import ArgumentError
from autopar.program.batch import numbers_of_examples
from autopar.program.call import BoundArguments, CallSignature, PyTree, dtype_of, leaf_paths_below
from autopar.program.crossing import changed_arguments, parts_of
from autopar.program.program import Program
from autopar.program.step import Leaf, Role
from autopar.program.uses import Use


def shapes_of(tree: PyTree) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each leaf."""
    return [(tuple(np.shape(x)), str(dtype_of(x))) for x in jax.tree.leaves(tree)]


def _is_lone_scalar(value: PyTree) -> bool:
    """Whether an argument is one number, which is never state.

    A learning rate that goes in and a loss that comes out have the same structure, shape and type. If the rate were state, the
    loss would take its place.
    """
    return [shape for shape, _ in shapes_of(value)] == [()]


def _are_alike(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and dtypes."""
    return (jax.tree.structure(one), shapes_of(one)) == (jax.tree.structure(other), shapes_of(other))


def returned_arguments(bound: BoundArguments, out_shape: PyTree) -> dict[int, PyTree]:
    """Arguments (by place among the dynamic ones) that the step returns, each with the part of the result that it matches."""
    taken: set[int] = set()
    found = changed_arguments(bound, out_shape)
    for place, value in enumerate(bound.dynamic):
        if place in found or not jax.tree.leaves(value) or _is_lone_scalar(value):
            continue
        for part in parts_of(out_shape):
            if id(part) not in taken and _are_alike(part, value):
                found[place] = part
                taken.add(id(part))
                break
    return found


def donated_arguments(
    signature: CallSignature,
    bound: BoundArguments,
    state: Mapping[int, PyTree],
    batch: Collection[int],
    out_shape: PyTree,
) -> frozenset[int]:
    """Arguments, by place among the dynamic ones, whose memory the step may reuse.

    Raises ArgumentError if the user asks for one that the step does not return.
    """
    wanted = signature.donate_argnums
    if wanted == "auto":
        return frozenset(place for place in state if place not in batch)
    for place, (number, name, value) in enumerate(zip(bound.numbers, bound.names, bound.dynamic, strict=True)):
        if number in wanted and place not in state and jax.tree.leaves(value):
            raise ArgumentError(
                f"{signature.name} donates argument {number} ({name!r}) but does not return it: no output has its structure, "
                f"shapes and types. {_describe_nearest(name, value, out_shape)}Return the new {name}, or leave it out of "
                "donate_argnums."
            )
    return frozenset(place for place, number in enumerate(bound.numbers) if number in wanted)


def _describe_nearest(name: str, value: PyTree, out_shape: PyTree) -> str:
    """How the part of the result that shares most leaves with the argument differs from it; "" if none shares any."""
    before = _leaf_types(name, value)
    candidates = [after for part in parts_of(out_shape) if (after := _leaf_types(name, part)).keys() & before.keys()]
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


def _leaf_types(name: str, tree: PyTree) -> dict[str, str]:
    """Type of each leaf, as JAX writes it, by path."""
    types = [f"{dtype}{list(shape)}" for shape, dtype in shapes_of(tree)]
    return dict(zip(leaf_paths_below(name, tree), types, strict=True))


def arguments_of_leaves(bound: BoundArguments) -> list[int]:
    """For each leaf of the positional arguments, in order, the place of its argument."""
    return [place for place, value in enumerate(bound.dynamic) for _ in jax.tree.leaves(value)]


@dataclasses.dataclass(frozen=True)
class Roles:
    """The places of the arguments that are state, batch and donated, and the use of leaves of the state, by their numbers."""

    state: Collection[int]
    batch: Collection[int]
    donated: Collection[int]
    uses: Mapping[int, Use]


def input_leaves(bound: BoundArguments, paths: Sequence[str], program: Program, roles: Roles) -> tuple[Leaf, ...]:
    """A leaf for every array that the step takes, in order."""
    places = arguments_of_leaves(bound)
    leaves = []
    for number, (path, var) in enumerate(zip(paths, program.invars, strict=False)):
        place = places[number] if number < len(places) else -1
        role: Role = "batch" if place in roles.batch else "state" if place in roles.state else "other"
        leaves.append(
            Leaf(
                path=path,
                role=role,
                shape=tuple(var.aval.shape),
                dtype=var.aval.dtype,
                donated=place in roles.donated,
                use=roles.uses.get(number) if role == "state" else None,
            )
        )
    counts = numbers_of_examples(
        (leaf.shape[0], math.prod(leaf.shape) * leaf.dtype.itemsize)
        for leaf in leaves
        if leaf.role == "batch" and leaf.shape
    )
    return tuple(
        dataclasses.replace(leaf, shared=leaf.role == "batch" and bool(leaf.shape) and leaf.shape[0] not in counts)
        for leaf in leaves
    )


def outputs_of_state(
    bound: BoundArguments, state: Mapping[int, PyTree], out_leaves: Sequence[object]
) -> tuple[int | None, ...]:
    """For each output leaf the number of the input leaf whose place it takes, None if it is not state."""
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
