"""A step as a function of arrays alone, and its results as the caller expects them.

In: bound arguments. Out: a `Crossing`, which calls the step inside a trace with objects and static leaves in their places, and
returns arrays: the results, and the new states of objects that the step changed. `deliver` turns what the compiled step returns
into the results, and puts new states into the caller's objects. What can go wrong: the step changes something in place that is
neither; the error names it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.errors import ArgumentError
from autopar.program.boundary.changes import (
    LostChange,
    find_lost_changes,
    find_traced_values,
    leaves_by_path,
    refuse_traced_values,
)
from autopar.program.boundary.nnx_objects import is_nnx_result, merge_result, split_result
from autopar.program.boundary.static_values import hide_static, is_static_value, reveal_static, static_values
from autopar.program.call import BoundArguments, CallSignature, PyTree, leaf_paths_below


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Results with static leaves or objects among them, and new states of arguments by their names."""

    result: Any
    changed: dict[str, Any]


def _flatten(results: Results) -> tuple[tuple[Any, ...], None]:
    return (results.result, results.changed), None


jax.tree_util.register_pytree_node(Results, _flatten, lambda _, children: Results(*children))


class Crossing:
    """The step of one call as a function of arrays. `lost`: arguments that it changed in place without returning them."""

    def __init__(self, signature: CallSignature, bound: BoundArguments) -> None:
        self.signature, self.bound = signature, bound
        self.lost: tuple[LostChange, ...] = ()

    def __call__(self, *dynamic: PyTree, **kwargs: PyTree) -> PyTree:
        """The results as arrays, from the arguments that are not static."""
        bound = self.bound
        arrays = list(map(jax.tree.leaves, dynamic))  # nnx changes variables of the very states that it merges
        values = list(map(reveal_static, dynamic)) if bound.objects is None else bound.objects.merge(dynamic)
        places = () if bound.objects is None else bound.objects.places
        before = [{} if place in places else leaves_by_path(value) for place, value in enumerate(values)]
        out = self._call(values, reveal_static(kwargs))
        changed = (
            {} if bound.objects is None else bound.objects.changed(self.signature.name, bound.names, arrays, values)
        )
        own = [() if place in places else value for place, value in enumerate(values)]
        self.lost = find_lost_changes(before, own, out)
        return self._enclose(out, {bound.names[place]: state for place, state in changed.items()})

    def _call(self, values: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        """Call the step; refuse values of the trace that stay in objects which it closes over."""
        fun, bound = self.signature.fun, self.bound
        args: dict[int | str, PyTree] = dict(bound.static) | dict(zip(bound.numbers, values, strict=True))
        named = {key: args.pop(key) for key in list(args) if isinstance(key, str)}
        others = {f"argument {key}" if isinstance(key, int) else key: value for key, value in bound.static}
        for name, tree in (*zip(bound.names, bound.dynamic, strict=True), *bound.kwargs.items()):
            others |= {f"{name}/{path}".rstrip("/"): value for path, value in static_values(tree)}
        known = find_traced_values(fun, others)
        out = fun(*(args[i] for i in sorted(i for i in args if isinstance(i, int))), **kwargs, **named)
        refuse_traced_values(self.signature.name, known, find_traced_values(fun, others))
        return out

    def _enclose(self, out: Any, changed: dict[str, Any]) -> Any:
        """Results as they cross the boundary: objects and static leaves as nodes."""
        several = type(out) in (tuple, list)
        made = type(out)(map(split_result, out)) if several else split_result(out)
        given = {
            id(value) for _, value in (*static_values((self.bound.dynamic, self.bound.kwargs)), *self.bound.static)
        }
        made = hide_static(made, is_static=lambda x: id(x) in given or isinstance(x, (str, bytes, enum.Enum)))
        return Results(made, changed) if changed or any(map(_is_special, _leaves(made))) else out


def _is_special(node: object) -> bool:
    return is_static_value(node) or is_nnx_result(node)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_special)


def deliver(bound: BoundArguments, results: Any) -> Any:
    """The results as the step's caller expects them; new states go into the caller's objects."""
    if not isinstance(results, Results):
        return results
    if bound.objects is not None:
        bound.objects.update({bound.names.index(name): state for name, state in results.changed.items()})
    return jax.tree.map(
        lambda x: merge_result(x) if is_nnx_result(x) else x.value if is_static_value(x) else x,
        results.result,
        is_leaf=_is_special,
    )


def parts_of(results: Any) -> list[PyTree]:
    """The whole result, and its elements if it is a tuple or list; of objects their states."""
    whole = results.result if isinstance(results, Results) else results
    parts = [whole, *(whole if isinstance(whole, (tuple, list)) else ())]
    return [part.state if is_nnx_result(part) else part for part in parts]


def changed_arguments(bound: BoundArguments, results: Any) -> dict[int, PyTree]:
    """The arguments whose objects the step changed, by place, each with its new state."""
    changed = results.changed if isinstance(results, Results) else {}
    return {bound.names.index(name): state for name, state in changed.items()}


def output_paths(results: PyTree) -> list[str]:
    """`output/key/key` of every leaf of the results, in order."""
    if not isinstance(results, Results):
        return leaf_paths_below("output", results)
    new = [
        path for name, state in sorted(results.changed.items()) for path in leaf_paths_below(f"output/{name}", state)
    ]
    return [*leaf_paths_below("output", results.result), *new]


def refuse_numbers_as_arrays(name: str, bound: BoundArguments, error: TypeError) -> None:
    """Raise ArgumentError from an error of the step's if an argument is a list of numbers where an array is meant."""
    for argument, value in zip(bound.names, bound.dynamic, strict=True):
        path = next(iter(_lists_of_numbers(argument, value)), None)
        if path is not None:
            raise ArgumentError(
                f"{path} is a list of Python numbers, each of which is an array of its own, and {name} fails with it: {error}"
                f". Pass an array, such as numpy.asarray({argument})"
            ) from error


def _lists_of_numbers(path: str, tree: Any) -> list[str]:
    """Where a tree has lists all of whose elements are numbers."""
    if isinstance(tree, list) and tree and all(isinstance(x, (bool, int, float, complex)) for x in tree):
        return [path]
    if isinstance(tree, (list, tuple)):
        return [found for i, x in enumerate(tree) for found in _lists_of_numbers(f"{path}/{i}", x)]
    if isinstance(tree, dict):
        return [found for key, x in tree.items() for found in _lists_of_numbers(f"{path}/{key}", x)]
    return []
