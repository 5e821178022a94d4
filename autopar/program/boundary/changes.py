"""What a step changes in place: its arguments' containers, and objects that it closes over. Nothing of it outlives the trace.

In: a step and the arguments that it was traced with. Out: an error that names what was changed and not returned. What can go
wrong: an object that is neither an argument nor reached from the step's closure within a few steps is not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar.errors import UnsupportedProgramError

_DEPTH = 4
"""How far objects are followed from the step: a helper that it calls, an object of the helper's, a list in it, its elements."""
_MOST = 10_000
"""How many objects are looked at."""
_LIBRARIES = frozenset(("autopar", "equinox", "flax", "haiku", "jax", "jaxlib", "numpy", "optax"))


@dataclasses.dataclass(frozen=True)
class LostChange:
    """An argument, by its place, one of whose leaves the step replaced and does not return."""

    place: int
    path: str


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Every leaf by its path below the tree."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def find_lost_changes(
    before: Sequence[Mapping[str, Any]], after: Sequence[Any], results: Any
) -> tuple[LostChange, ...]:
    """For each argument that was changed in place and not returned its first changed leaf.

    `before`: the leaves of the arguments by path, as they were traced; `after`: the arguments after the step.
    """
    returned = {id(leaf) for leaf in jax.tree.leaves(results)}
    found = []
    for place, (old, tree) in enumerate(zip(before, after, strict=True)):
        for path, leaf in leaves_by_path(tree).items():
            if id(leaf) not in returned and _is_update(old.get(path), leaf):
                found.append(LostChange(place, path))
                break
    return tuple(found)


def _is_update(old: Any, new: Any) -> bool:
    """Whether a leaf has a new value of its own shape and type; a leaf of another one is a value in between, such as a cast."""
    if new is old or not isinstance(new, jax.core.Tracer) or old is None:
        return False
    return bool(jax.typeof(new).update(weak_type=False) == jax.typeof(old).update(weak_type=False))


def refuse_lost_changes(name: str, names: Sequence[str], lost: Sequence[LostChange]) -> None:
    """Raise UnsupportedProgramError for arguments that the step changes and does not return."""
    if lost:
        listed = ", ".join(names[change.place] + (f"/{change.path}" if change.path else "") for change in lost)
        argument = names[lost[0].place]
        raise UnsupportedProgramError(
            f"{name} changes {listed} in place and does not return it. A compiled step works on copies of its arguments, so the "
            f"change would be lost: return the new {argument}, as in `return {argument}, loss`"
        )


def find_traced_values(fun: Callable[..., Any], others: Mapping[str, Any]) -> dict[int, str]:
    """Where objects that a step closes over, and `others` by name, hold values of a trace: paths by the values' identities."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    waiting = [(name, value, 0) for name, value in (*_closed_over(fun), *others.items())]
    while waiting and len(seen) < _MOST:
        path, value, depth = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, jax.core.Tracer):
            found[id(value)] = path
        elif depth < _DEPTH:
            waiting += [(path + key, inner, depth + 1) for key, inner in _inside(value)]
    return found


def refuse_traced_values(name: str, before: Mapping[int, str], after: Mapping[int, str]) -> None:
    """Raise UnsupportedProgramError for values of the trace that objects hold which the step closes over."""
    new = sorted(path for key, path in after.items() if key not in before)
    if new:
        raise UnsupportedProgramError(
            f"{name} stores values in {', '.join(new[:4])}, which it is not given and does not return. A compiled step runs this "
            "Python once, while it is traced, when the values are no arrays yet: take what changes as an argument and return it"
        )


def _closed_over(fun: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function closes over: variables around it, globals that it reads, its own object."""
    if isinstance(fun, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(fun.args))
        yield from fun.keywords.items()
        yield from _closed_over(fun.func)
    elif isinstance(fun, types.MethodType):
        yield "self", fun.__self__
        yield from _closed_over(fun.__func__)
    elif isinstance(fun, types.FunctionType):
        for cell_name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
            try:
                yield cell_name, cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
        yield from ((key, fun.__globals__[key]) for key in _names_in(fun.__code__) if key in fun.__globals__)
    elif callable(getattr(fun, "__wrapped__", None)):
        yield from _closed_over(fun.__wrapped__)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The global names that code reads, and the functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_of_a_library(value: Any) -> bool:
    """Whether a function, or the type of an object, is of a library that keeps values of traces for its own ends."""
    module = getattr(value, "__module__", None) if callable(value) else type(value).__module__
    return str(module).partition(".")[0] in _LIBRARIES


def _inside(value: Any) -> list[tuple[str, Any]]:
    """What a value holds, each with how it is reached."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{i}]", inner) for i, inner in enumerate(value)]
    if _is_of_a_library(value):
        return []
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return [(f".{name}", inner) for name, inner in _closed_over(value)]
    own = getattr(value, "__dict__", None)
    if isinstance(value, (type, types.ModuleType)) or not isinstance(own, dict):
        return []
    return [(f".{name}", inner) for name, inner in own.items()]
