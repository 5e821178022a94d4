"""Objects of flax.nnx at the boundary of a trace, as in `flax.nnx.jit`: split into arrays before, merged inside, updated after.

In: the arguments of a call. Out: the same with an `nnx.State` in place of each argument that holds modules, optimizers or
variables, and `NnxObjects`, which has the rest: one graph definition for all of them, so that variables that they share stay
shared. Inside the trace `merge` rebuilds the objects, and `changed` splits them again after the step. Results that are such
objects become `NnxResult`s. What can go wrong: a step that adds variables to a module, or changes an attribute of it; the error
says so. Nothing here is used if flax.nnx is not imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from autopar.errors import UnsupportedProgramError


@dataclasses.dataclass(frozen=True)
class NnxResult:
    """A result that holds objects of nnx: its arrays, and the graph definition to rebuild it from them."""

    graph: object
    state: object


jax.tree_util.register_pytree_with_keys(
    NnxResult,
    lambda x: (((jax.tree_util.GetAttrKey("state"), x.state),), x.graph),
    lambda graph, children: NnxResult(graph, *children),
)


def is_nnx_result(node: object) -> bool:
    """Whether a node of the results stands for objects of nnx."""
    return isinstance(node, NnxResult)


@dataclasses.dataclass(frozen=True, eq=False)
class NnxObjects:
    """The objects of one call.

    Attributes:
        places: which arguments hold objects.
        originals: these arguments, as the caller has them.
        graph: their graph definition; calls with different ones run different programs.
    """

    places: tuple[int, ...]
    originals: tuple[object, ...]
    graph: object

    def merge(self, values: Sequence[object]) -> list[object]:
        """The arguments with objects made of their states."""
        nnx = sys.modules["flax.nnx"]
        state = nnx.State({k: values[place] for k, place in enumerate(self.places) if _has_leaves(values[place])})
        result = list(values)
        for place, made in zip(self.places, nnx.merge(self.graph, state), strict=True):
            result[place] = made
        return result

    def changed(
        self, name: str, names: Sequence[str], before: Sequence[Sequence[object]], after: Sequence[object]
    ) -> dict[int, object]:
        """New states of the arguments in which the step has put other arrays, by their places.

        Args:
            name: the step's name.
            names: of the arguments.
            before: the arrays of the arguments with states, as they were traced.
            after: the same arguments with objects, after the step.
        """
        graph, states = _split([after[place] for place in self.places])
        if graph != self.graph:
            listed = " or ".join(repr(names[place]) for place in self.places)
            raise UnsupportedProgramError(
                f"{name} adds to {listed}, or takes from it or changes an attribute: only the values of its variables may change "
                "in a step. Make variables, and call train() or eval(), before the step; or split the object yourself: "
                "`graph, state = nnx.split(model)` before, `model = nnx.merge(graph, state)` in the step, `return "
                "nnx.state(model), loss` at its end, and `nnx.update(model, state)` after it."
            )
        return {
            place: state
            for place, state in zip(self.places, states, strict=True)
            if any(x is not y for x, y in zip(before[place], jax.tree.leaves(state), strict=True))
        }

    def update(self, states: Mapping[int, object]) -> None:
        """Put new states, by place, into the caller's objects."""
        nnx = sys.modules["flax.nnx"]
        numbers = {place: k for k, place in enumerate(self.places)}
        new = nnx.State({numbers[place]: state for place, state in states.items() if _has_leaves(state)})
        nnx.update(self.originals, new)


def split_objects(values: Sequence[object]) -> tuple[tuple[object, ...], NnxObjects | None]:
    """The arguments with states in place of objects, and the objects; None if there are none."""
    places = tuple(place for place, value in enumerate(values) if holds_objects(value))
    if not places:
        return tuple(values), None
    originals = tuple(values[place] for place in places)
    graph, states = _split(originals)
    result = list(values)
    for place, state in zip(places, states, strict=True):
        result[place] = state
    return tuple(result), NnxObjects(places, originals, graph)


def _split(objects: Sequence[object]) -> tuple[object, list[object]]:
    """The graph definition of several objects together, and the state of each; shared variables are in the first one's."""
    nnx = sys.modules["flax.nnx"]
    graph, state = nnx.split(tuple(objects))
    return graph, [state[k] if k in state else nnx.State({}) for k in range(len(objects))]


def holds_objects(tree: object) -> bool:
    """Whether a tree has a module, an optimizer or another object of nnx, or a variable outside a state."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = (nnx.Pytree, nnx.Variable)

    def is_leaf(node: object) -> bool:
        return isinstance(node, (*kinds, nnx.State))

    waiting, arrays = (
        [tree],
        set[type](),
    )  # containers of Python by hand: a call of `is_leaf` for every array takes milliseconds
    while waiting:
        node = waiting.pop()
        if type(node) in arrays:
            continue
        if isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, (list, tuple)):
            waiting.extend(node)
        elif isinstance(node, (jax.Array, np.ndarray)):
            arrays.add(type(node))
        elif any(isinstance(inner, kinds) for inner in jax.tree.leaves(node, is_leaf=is_leaf)):
            return True
    return False


def split_result(part: object) -> object:
    """A result with its objects split."""
    if not holds_objects(part):
        return part
    return NnxResult(*sys.modules["flax.nnx"].split(part))


def merge_result(part: object) -> object:
    """A result with its objects made again."""
    return sys.modules["flax.nnx"].merge(part.graph, part.state) if isinstance(part, NnxResult) else part


def _has_leaves(tree: object) -> bool:
    return bool(jax.tree.leaves(tree))
