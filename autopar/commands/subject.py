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
from autopar.commands.values import MeshShape, layout, mesh_size, model_entry
from autopar.errors import ArgumentError
from autopar.layouts.constraints import Constraints, data_parallel, zero2, zero3
from autopar.models import MODELS, BuiltModel, build

DEFAULT_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step and the shapes of its state and batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


def built_model(model: str, sizes: Mapping[str, Any]) -> BuiltModel:
    """A model of the registry; ArgumentError says which sizes cannot work."""
    if ":" in model:
        raise ArgumentError(
            f"{model!r} is a step without data: train takes {', '.join(MODELS)}; `autopar plan` can plan your own step"
        )
    model_entry(model)
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


def device_count(options: argparse.Namespace) -> int:
    """How many devices are asked for; ArgumentError if --devices, --mesh and --stages disagree."""
    in_meshes = _devices_of_meshes(options.mesh, options.stages)
    if in_meshes is None:
        return options.devices or DEFAULT_DEVICES
    if options.devices is not None and options.devices != in_meshes:
        meshes = "--mesh has" if len(options.mesh) == 1 and not options.stages else "the meshes of all stages have"
        raise ArgumentError(
            f"{meshes} {in_meshes} devices and --devices is {options.devices}: make them agree, or give only one"
        )
    return in_meshes


def _devices_of_meshes(meshes: Sequence[MeshShape] | None, stages: int | None) -> int | None:
    """Devices of all stages together; one mesh is that of every stage. None without --mesh."""
    if meshes is None:
        return None
    if stages is not None and len(meshes) not in (1, stages):
        raise ArgumentError(
            f"--mesh gives {len(meshes)} shapes and --stages is {stages}: give one shape per stage, or one for all of them"
        )
    sizes = [mesh_size(mesh) for mesh in meshes]
    return sizes[0] * (stages or 1) if len(meshes) == 1 else sum(sizes)


FOR_PIPELINES = (
    "--schedule and --virtual-stages are for pipelines, and this plan has one mesh: ask for two or more --stages"
)


def parallel(
    step: Callable[..., Any], devices: int | Sequence[jax.Device], options: argparse.Namespace
) -> ParallelStep:
    """`parallelize` with the planning options of the command line; ArgumentError for a pipeline's options on one mesh."""
    meshes = options.stages or (len(options.mesh) if options.mesh is not None else None)
    if (options.schedule != "auto" and meshes == 1) or ((options.virtual_stages or 1) > 1 and meshes in (None, 1)):
        raise ArgumentError(FOR_PIPELINES)
    made: ParallelStep = parallelize(
        step,
        devices=devices,
        mesh_shape=_mesh_shape(options.mesh),
        memory_limit_bytes=options.memory_limit,
        constraints=_constraints(options),
        cluster=options.cluster,
        allow_redundant_compute=options.allow_redundant_compute,
        num_stages=options.stages or "auto",
        num_microbatches=options.microbatches or "auto",
        schedule=options.schedule,
        virtual_stages=options.virtual_stages or "auto",
        planning_processes=options.planning_processes,
    )
    return made


def _mesh_shape(meshes: Sequence[MeshShape] | None) -> Any:
    """What `parallelize` takes: one shape, a list of them, or "auto"."""
    if meshes is None:
        return "auto"
    return meshes[0] if len(meshes) == 1 else list(meshes)


def _constraints(options: argparse.Namespace) -> list[Constraints | Mapping[str, Any]]:
    """Presets first: where two constraints match a leaf the later one holds, and the user's are more particular."""
    presets = [data_parallel()] if options.data_parallel else []
    presets += [{2: zero2, 3: zero3}[options.zero]()] if options.zero else []
    return [*presets, *({glob: layout(spec)} for glob, spec in options.constraint)]
