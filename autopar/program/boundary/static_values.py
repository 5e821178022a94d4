"""Leaves that are no arrays, such as functions and strings: part of the tree's structure while the step is traced and run.

In: a tree. Out: the same tree in which each such leaf is a `StaticValue`, a node without leaves, and back.
Trees with other static values have other structures, so that a step is traced once for each. Numbers of Python are arrays, as
`jax.jit` has it; below a module of equinox they are static, as `equinox.filter_jit` has it. What can go wrong: a value that
cannot be hashed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class StaticValue:
    """A leaf that is no array, as a node without leaves."""

    value: Any


# Trees are compared with the types of their static values, because `1`, `1.0` and `True` are equal in Python.
jax.tree_util.register_pytree_node(
    StaticValue, lambda x: ((), (type(x.value), x.value)), lambda typed, _: StaticValue(typed[1])
)


def is_array_like(leaf: object) -> bool:
    """Whether a leaf can be traced: an array, its shape and type, or a number."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or _is_number(leaf)


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)


def hide_static(tree: Any, *, is_static: Callable[[object], bool] = lambda leaf: True) -> Any:
    """The tree with static leaves as nodes; of those that are no arrays the ones of which `is_static` says so."""
    module = getattr(sys.modules.get("equinox"), "Module", ())
    kinds = {type(leaf): leaf for leaf in jax.tree.leaves(tree)}
    if all(is_array_like(leaf) and not (module and _is_number(leaf)) for leaf in kinds.values()):
        return tree

    def is_module(node: object) -> bool:
        return isinstance(node, module)

    def hide(leaf: Any) -> Any:
        return leaf if is_array_like(leaf) or not is_static(leaf) else StaticValue(leaf)

    def hide_in_module(leaf: Any) -> Any:
        return StaticValue(leaf) if _is_number(leaf) else hide(leaf)

    def hide_in(node: Any) -> Any:
        return jax.tree.map(hide_in_module, node) if module and is_module(node) else hide(node)

    return jax.tree.map(hide_in, tree, is_leaf=is_module if module else None)


def reveal_static(tree: Any) -> Any:
    """The tree with static leaves in their places."""
    return jax.tree.map(lambda x: x.value if is_static_value(x) else x, tree, is_leaf=is_static_value)


def is_static_value(node: object) -> bool:
    """Whether a node is a static leaf."""
    return isinstance(node, StaticValue)


def static_values(tree: Any) -> list[tuple[str, Any]]:
    """Path and value of every static leaf."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_static_value)[0]
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), x.value) for path, x in found if is_static_value(x)
    ]


def refuse_static_leaves(name: str, batch: Mapping[str, Any]) -> None:
    """Raise ArgumentError for static leaves of the batch, each of whose values would be compiled for."""
    wrong = [
        f"{argument}/{path} is a {type(value).__name__} ({str(value)[:40]!r})"
        for argument, tree in batch.items()
        for path, value in static_values(tree)
    ]
    if wrong:
        raise ArgumentError(
            f"the batch of {name} has leaves that are no arrays: {'; '.join(wrong[:4])}. The step would be compiled for each of "
            "their values: take them out of the batch, or pass them as an argument of their own, which is then static"
        )


def refuse_unhashable(name: str, tree: Any) -> None:
    """Raise ArgumentError for static leaves of the argument of this name that cannot be hashed."""
    for path, value in static_values(tree):
        try:
            hash(value)
        except TypeError:
            where = f"{name}/{path}" if path else f"the argument {name!r}"
            raise ArgumentError(
                f"{where} is a {type(value).__name__}, neither an array nor hashable. Leaves that are no arrays are part "
                "of what a step is compiled for, so they must be hashable: give the class __hash__ and __eq__, or register it as "
                "a tree of arrays (jax.tree_util.register_dataclass)."
            ) from None
