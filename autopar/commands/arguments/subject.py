"""What a command is about: a train step with the shapes of its arguments, found by name.

MODEL is a name in the registry, at the sizes that flags give, or `module:function`, where `function()` returns
(train_step, state_shapes, batch_shapes): a step `(state, batch) -> (state, anything)` and two trees of arrays or
`jax.ShapeDtypeStruct`s. Shapes are all that is needed: nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import jax

from autopar.commands.arguments.values import model_entry
from autopar.errors import ArgumentError
from autopar.models import MODELS, BuiltModel, build

PyTree: TypeAlias = object
"""A tree of arrays or of shapes."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step and the shapes of its state and batch."""

    step: Callable[..., object]
    state: PyTree
    batch: PyTree


def build_model(model: str, sizes: Mapping[str, int | float | str]) -> BuiltModel:
    """Build a model of the registry; ArgumentError says which sizes cannot work."""
    if ":" in model:
        raise ArgumentError(
            f"{model!r} is a step without data: train takes {', '.join(MODELS)}; `autopar plan` can plan your own step"
        )
    model_entry(model)
    try:
        return build(model, **sizes)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def find_shapes(built: BuiltModel) -> Subject:
    """The step of a model with the shapes of its state, evaluated without a device, and of its batch."""
    state = jax.eval_shape(lambda: built.create_state(jax.random.key(0)))
    return Subject(built.train_step, state, built.batch_shape())


def find_subject(model: str, sizes: Mapping[str, int | float | str]) -> Subject:
    """Find the step that MODEL names."""
    return _import_step(model) if ":" in model else find_shapes(build_model(model, sizes))


def _import_step(target: str) -> Subject:
    """Call a user's `module:function`; the current folder is searched first, as `python -m` does."""
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
        raise ArgumentError(
            f"{target}() returned {type(returned).__name__}; it must return (train_step, state_shapes, batch_shapes), "
            "the shapes as trees of arrays or jax.ShapeDtypeStruct"
        )
    return Subject(*returned)


def _required_parameters(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # It is built into the interpreter: nothing is known.
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
