"""The arguments of one call of a step: which are static, which the batch, and the path of each leaf.

In: a `CallSignature`, what the user said of the step's arguments, and the arguments of a call. Out: `BoundArguments`. What can go
wrong: the step lacks an argument that the user numbers, or a static value cannot be hashed; each error names the argument.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from autopar.compat import static_arguments
from autopar.errors import ArgumentError
from autopar.program.boundary.nnx_objects import NnxObjects, split_objects
from autopar.program.boundary.static_values import hide_static, refuse_unhashable

PyTree: TypeAlias = object
"""A tree of containers and leaves, as JAX flattens it."""


@dataclasses.dataclass(frozen=True)
class CallSignature:
    """How a step's arguments are read: which are batch, static, donated. Static ones are given by number or by name."""

    fun: Callable[..., PyTree]
    batch_argnums: tuple[int, ...] | Literal["auto"]
    static_argnums: tuple[int | str, ...]
    donate_argnums: tuple[int, ...] | Literal["auto"]

    @property
    def name(self) -> str:
        """The step's name for messages."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BoundArguments:
    """Arguments of one call: static values by position or name, and the tree of the others as (positional, keyword).

    In that tree leaves that are no arrays are static values of their own, and objects of nnx, which `objects` has, are states.
    """

    static: tuple[tuple[int | str, Hashable], ...]
    dynamic: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    objects: NnxObjects | None = None

    @property
    def constants(self) -> tuple[object, ...]:
        """What a call is compiled for beside shapes and the structure of its arguments.

        A static value is told apart by its type as well, as in `jax.jit`: `1`, `1.0` and `True` are equal in Python.
        """
        typed = tuple((key, type(value), value) for key, value in self.static)
        return typed, None if self.objects is None else self.objects.graph

    def flatten(self) -> tuple[list[Any], jax.tree_util.PyTreeDef]:
        """The leaves that are not static, in the order of the traced step's inputs, and their tree."""
        return jax.tree_util.tree_flatten((self.dynamic, dict(self.kwargs)))


def bind_arguments(signature: CallSignature, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> BoundArguments:
    """Sort a call's arguments; keywords that name positional parameters take their positions."""
    args, kwargs, names = _move_to_positions(signature.fun, tuple(args), dict(kwargs))
    _refuse_bad_numbers(signature, max(len(args), len(names)), {*names, *kwargs})
    all_names = (*names, *(f"arg{i}" for i in range(len(names), len(args))))
    wanted = {*signature.static_argnums, *static_arguments(signature.fun)}
    is_static = [i in wanted or all_names[i] in wanted for i in range(len(args))]
    by_name = sorted(name for name in kwargs if name in wanted)
    static: list[tuple[int | str, Any]] = [(i, args[i]) for i in range(len(args)) if is_static[i]]
    static += [(name, kwargs.pop(name)) for name in by_name]
    _refuse_unhashable(signature, static, all_names)
    numbers = tuple(i for i in range(len(args)) if not is_static[i])
    given = tuple(all_names[i] for i in numbers)
    dynamic, objects = split_objects([args[i] for i in numbers])
    bound = BoundArguments(
        static=tuple(static),
        dynamic=tuple(map(hide_static, dynamic)),
        kwargs={name: hide_static(value) for name, value in kwargs.items()},
        numbers=numbers,
        names=given,
        objects=objects,
    )
    for name, value, raw in zip(bound.names, bound.dynamic, dynamic, strict=True):
        if value is not raw:
            refuse_unhashable(name, value)
    for name, value in bound.kwargs.items():
        refuse_unhashable(name, value)
    return bound


def _refuse_bad_numbers(signature: CallSignature, count: int, names: Collection[str]) -> None:
    """Raise ArgumentError for numbers and names of arguments that the step lacks."""
    given = {
        "batch_argnums": signature.batch_argnums,
        "static_argnums": signature.static_argnums,
        "donate_argnums": signature.donate_argnums,
    }
    wrong = [
        f"{what}={numbers}"
        for what, numbers in given.items()
        if numbers != "auto" and any(isinstance(i, int) and not 0 <= i < count for i in numbers)
    ]
    unknown = [key for key in signature.static_argnums if isinstance(key, str) and key not in names]
    if unknown and not _takes_any_keyword(signature.fun):
        raise ArgumentError(
            f"static_argnames={unknown}: {signature.name} has no such argument; it has {', '.join(sorted(names)) or 'none'}"
        )
    if wrong:
        raise ArgumentError(
            f"{', '.join(wrong)}: {signature.name} has {count} positional arguments, numbered from 0"
            + (f" to {count - 1}" if count else "")
        )


def _takes_any_keyword(fun: Callable[..., PyTree]) -> bool:
    """Whether a function has keyword parameters that may be left out, or does not tell."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)


def _refuse_unhashable(
    signature: CallSignature, static: Sequence[tuple[int | str, object]], names: Sequence[str]
) -> None:
    wrong = []
    for key, value in static:
        try:
            hash(value)
        except TypeError:
            where = repr(key) if isinstance(key, str) else f"{key} ({names[key]!r})"
            wrong.append(f"argument {where} is a {type(value).__name__}")
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
