"""The arguments of one call of a step: which are static, which the batch, and the path of each leaf.

In: a `CallSignature`, what the user said of the step's arguments, and the arguments of a call. Out: `BoundArguments`. What can go
wrong: the step lacks an argument that the user numbers, or a static value cannot be hashed; each error names the argument.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from autopar.errors import ArgumentError

PyTree: TypeAlias = object
"""A tree of containers and leaves, as JAX flattens it."""


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """How a step's arguments are read: which are batch, static, donated."""

    fun: Callable[..., PyTree]
    batch_argnums: tuple[int, ...] | Literal["auto"]
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...] | Literal["auto"]

    @property
    def name(self) -> str:
        """The step's name for messages."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BoundArguments:
    """Arguments of one call: static values by position, and the tree of the others as (positional, keyword)."""

    static: tuple[tuple[int, Hashable], ...]
    dynamic: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    numbers: tuple[int, ...]
    names: tuple[str, ...]

    def flatten(self) -> tuple[list[Any], jax.tree_util.PyTreeDef]:
        """The leaves that are not static, in the order of the traced step's inputs, and their tree."""
        return jax.tree_util.tree_flatten((self.dynamic, dict(self.kwargs)))


def bind_arguments(signature: CallSignature, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> BoundArguments:
    """Sort a call's arguments; keywords that name positional parameters take their positions."""
    args, kwargs, names = _move_to_positions(signature.fun, tuple(args), dict(kwargs))
    _refuse_bad_numbers(signature, max(len(args), len(names)))
    all_names = (*names, *(f"arg{i}" for i in range(len(names), len(args))))
    static = tuple((i, args[i]) for i in signature.static_argnums if i < len(args))
    _refuse_unhashable(signature, static, all_names)
    numbers = tuple(i for i in range(len(args)) if i not in signature.static_argnums)
    return BoundArguments(
        static=static,
        dynamic=tuple(args[i] for i in numbers),
        kwargs=kwargs,
        numbers=numbers,
        names=tuple(all_names[i] for i in numbers),
    )


def _refuse_bad_numbers(signature: CallSignature, count: int) -> None:
    """Raise ArgumentError for numbers of arguments that the step lacks."""
    given = {
        "batch_argnums": signature.batch_argnums,
        "static_argnums": signature.static_argnums,
        "donate_argnums": signature.donate_argnums,
    }
    wrong = [
        f"{what}={numbers}"
        for what, numbers in given.items()
        if numbers != "auto" and any(i < 0 or i >= count for i in numbers)
    ]
    if wrong:
        raise ArgumentError(
            f"{', '.join(wrong)}: {signature.name} has {count} positional arguments, numbered from 0"
            + (f" to {count - 1}" if count else "")
        )


def _refuse_unhashable(signature: CallSignature, static: Sequence[tuple[int, object]], names: Sequence[str]) -> None:
    wrong = []
    for number, value in static:
        try:
            hash(value)
        except TypeError:
            wrong.append(f"argument {number} ({names[number]!r}) is a {type(value).__name__}")
    if wrong:
        raise ArgumentError(
            f"static_argnums={signature.static_argnums}: {'; '.join(wrong)}, which cannot be hashed. A static value is part of "
            f"what {signature.name} is compiled for, so it must be hashable: pass a tuple instead of a list, and leave arrays "
            "out of static_argnums."
        )


def _move_to_positions(
    fun: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], tuple[str, ...]]:
    """Arguments with keywords that name positional parameters in their places, and the names of these parameters."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return args, kwargs, ()
    positional = [
        p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    while len(args) < len(positional) and positional[len(args)] in kwargs:
        args = (*args, kwargs.pop(positional[len(args)]))
    return args, kwargs, tuple(positional)


def fix_static(fun: Callable[..., PyTree], bound: BoundArguments) -> Callable[..., PyTree]:
    """The function of the arguments that are not static, with the static ones filled in."""

    def call(*dynamic: PyTree, **kwargs: PyTree) -> PyTree:
        args: dict[int, PyTree] = dict(bound.static) | dict(zip(bound.numbers, dynamic, strict=True))
        return fun(*(args[i] for i in sorted(args)), **kwargs)

    return call


def dtype_of(leaf: object) -> Any:
    """The dtype of a leaf in a traced program, which has no 64-bit types unless they are enabled."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def leaf_paths_below(head: str, tree: PyTree) -> list[str]:
    """`head/key/key` of every leaf of a tree, in order."""
    tails = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    return [f"{head}/{tail}" if tail else head for tail in tails]


def leaf_paths(bound: BoundArguments) -> list[str]:
    """`argument/key/key` of every leaf of the arguments, in order."""
    named = (*zip(bound.names, bound.dynamic, strict=True), *sorted(bound.kwargs.items()))
    return [path for name, value in named for path in leaf_paths_below(name, value)]


def output_paths(results: PyTree) -> list[str]:
    """`output/key/key` of every leaf of the results, in order."""
    return leaf_paths_below("output", results)
