"""What a command is about: a train step with the shapes of its arguments, found by name, and the planning options.

MODEL is a name in the registry, at the sizes that flags give, or `module:function`, where `function()` returns
(train_step, state_shapes, batch_shapes): a step `(state, batch) -> (state, anything)` and two trees of arrays or
`jax.ShapeDtypeStruct`s. Shapes are all that is needed: nothing here touches a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from autopar.api import ParallelStep, parallelize
from autopar.commands.values import MeshShape, layout, mesh_size
from autopar.errors import ArgumentError
from autopar.models import MODELS, BuiltModel, ModelEntry, build
from autopar.options import Constraints, data_parallel, zero2, zero3

DEFAULT_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step and the shapes of its state and batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


def entry_of(model: str) -> ModelEntry:
    """The registry's entry; ArgumentError names the models there are."""
    if model not in MODELS:
        raise ArgumentError(
            f"no model {model!r}: the models are {', '.join(MODELS)}; for a step of your own give module:function"
        )
    return MODELS[model]


def built_model(model: str, sizes: Mapping[str, Any]) -> BuiltModel:
    """A model of the registry; ArgumentError says which sizes cannot work."""
    if ":" in model:
        raise ArgumentError(
            f"{model!r} is a step without data: train takes {', '.join(MODELS)}; `autopar plan` can plan your own step"
        )
    entry_of(model)
    try:
        return build(model, **sizes)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def shapes_of(built: BuiltModel) -> Subject:
    """The step of a model with the shapes of its state, evaluated without a device, and of its batch."""
    state = jax.eval_shape(lambda: built.create_state(jax.random.key(0)))
    return Subject(built.train_step, state, built.batch_shape())


def subject_of(model: str, sizes: Mapping[str, Any]) -> Subject:
    """The step that MODEL names."""
    return _imported(model) if ":" in model else shapes_of(built_model(model, sizes))


def _imported(target: str) -> Subject:
    """The step of a user's `module:function`; the current folder is searched first, as `python -m` does."""
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


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # built into the interpreter: nothing is known
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def device_count(devices: int | None, mesh: MeshShape | None) -> int:
    """How many devices are asked for; ArgumentError if --devices and --mesh disagree."""
    if mesh is None:
        return devices or DEFAULT_DEVICES
    if devices is not None and devices != mesh_size(mesh):
        raise ArgumentError(
            f"--mesh has {mesh_size(mesh)} devices and --devices is {devices}: make them agree, or give only one"
        )
    return mesh_size(mesh)


def parallel(
    step: Callable[..., Any], devices: int | Sequence[jax.Device], options: argparse.Namespace
) -> ParallelStep:
    """`parallelize` with the planning options of the command line."""
    made: ParallelStep = parallelize(
        step,
        devices=devices,
        mesh_shape="auto" if options.mesh is None else options.mesh,
        memory_limit_bytes=options.memory_limit,
        constraints=_constraints(options),
        cluster=options.cluster,
        allow_redundant_compute=options.allow_redundant_compute,
    )
    return made


def _constraints(options: argparse.Namespace) -> list[Constraints | Mapping[str, Any]]:
    """Presets first: where two constraints match a leaf the later one holds, and the user's are more particular."""
    presets = [data_parallel()] if options.data_parallel else []
    presets += [{2: zero2, 3: zero3}[options.zero]()] if options.zero else []
    return [*presets, *({glob: layout(spec)} for glob, spec in options.constraint)]
