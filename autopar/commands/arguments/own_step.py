"""A step of the user's own, named as `module:function`.

`function()` returns `(train_step, state, batches)`, where `train_step(state, batch)` returns the next state and what it
reports: its loss, or a mapping with a scalar `"loss"`. What there is of state and batches says what can be done:

- state: shapes (`jax.ShapeDtypeStruct`), which can be planned; arrays, or a function that makes them, which can also be trained;
- batches: one batch, as shapes or as arrays that every step gets; or something to iterate over, or a function that returns it.

What can go wrong: an iterator is used up; the function is called again where a run needs its batches twice.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias, cast

import jax

from autopar.errors import ArgumentError

PyTree: TypeAlias = object
"""A tree of arrays or of shapes."""
_RETURNS = (
    "(train_step, state_shapes, batch_shapes), the shapes as trees of arrays or jax.ShapeDtypeStruct; for training arrays or a "
    "function that makes them, and arrays or batches to iterate over"
)


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """What `module:function` returned."""

    target: str
    step: Callable[..., object]
    state: PyTree
    given: object

    def state_shapes(self) -> PyTree:
        """The shapes of the state."""
        return jax.eval_shape(self.state) if _is_function(self.state) else self.state  # type: ignore[arg-type]

    def batch_shapes(self) -> PyTree:
        """The shapes of a batch: of the first one, if there are several. Raises ArgumentError if there is none."""
        batches = self._begin()
        if _is_tree(batches):
            return batches
        try:
            return next(iter(cast(Iterable[PyTree], batches)))
        except StopIteration:
            raise ArgumentError(f"{self.target}() returned batches of which there are none") from None
        except TypeError:
            raise ArgumentError(
                f"{self.target}() returned {type(batches).__name__} for its batches; it must be a tree of arrays or shapes, or "
                "something to iterate over"
            ) from None

    def first_state(self) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
        """A function that makes the first state, and its arguments. Raises ArgumentError if there are shapes alone."""
        if _is_function(self.state):
            return cast(Callable[..., PyTree], self.state), ()
        if _has_shapes(self.state):
            raise ArgumentError(
                f"{self.target}() returned shapes for its state, which can be planned and not trained: return arrays, or a "
                "function without arguments that makes them"
            )
        return lambda given: given, (self.state,)

    def batches(self) -> Callable[[], Iterable[PyTree]]:
        """A function that begins the batches. Raises ArgumentError if there are shapes alone."""
        if _is_tree(self.given):
            if _has_shapes(self.given):
                raise ArgumentError(
                    f"{self.target}() returned shapes for its batch, which can be planned and not trained: return arrays, which "
                    "every step then gets, something to iterate over, or a function that returns it"
                )
            return lambda: itertools.repeat(self.given)
        return lambda: cast(Iterable[PyTree], self._begin())

    def _begin(self) -> object:
        """The batches from their beginning; of an iterator, those of another call."""
        given = self.given if not hasattr(self.given, "__next__") else import_step(self.target).given
        return given() if _is_function(given) else given  # type: ignore[operator]


def import_step(target: str) -> OwnStep:
    """Call a user's `module:function`; the current folder is searched first, as `python -m` does.

    Raises ArgumentError if it is not there, or returns something else.
    """
    module_name, _, function_name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"cannot find {target!r}: {error}; give an importable module:function") from None
    if not callable(function) or _required_parameters(function):
        raise ArgumentError(f"{target!r} must be a function without required arguments; it is {function!r}")
    returned = function()
    if not isinstance(returned, tuple) or len(returned) != 3 or not callable(returned[0]):
        raise ArgumentError(f"{target}() returned {type(returned).__name__}; it must return {_RETURNS}")
    _check_step(target, returned[0])
    return OwnStep(target, *returned)


def _check_step(target: str, step: Callable[..., object]) -> None:
    """Raises ArgumentError if the step cannot be called with a state and a batch alone."""
    needed = _required_parameters(step)
    if len(needed) > 2:
        raise ArgumentError(
            f"the step of {target}() takes {', '.join(needed)}, but the command line calls it with a state and a batch: make one "
            "tree of what it updates, such as (params, opt_state), and return the new one first"
        )


def _required_parameters(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # It is built into the interpreter: nothing is known.
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _is_function(value: object) -> bool:
    """Whether it is a function and no module of flax or equinox, which can be called as well."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def _is_tree(value: object) -> bool:
    """Whether it is a tree of arrays, shapes or numbers."""
    leaves = jax.tree.leaves(value, is_leaf=lambda part: hasattr(part, "__next__"))
    return all(hasattr(leaf, "shape") or isinstance(leaf, int | float | complex) for leaf in leaves)


def _has_shapes(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
