"""The planning options of the command line, as arguments of `parallelize`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import jax

from autopar.api import ParallelStep, parallelize
from autopar.commands.arguments.devices import DEFAULT_DEVICES
from autopar.commands.arguments.values import MeshShape, layout, mesh_size
from autopar.cost_model.hardware import find_cluster
from autopar.errors import ArgumentError
from autopar.layouts.constraints import Constraints, data_parallel, zero1, zero2, zero3

if TYPE_CHECKING:
    from autopar.commands.arguments.values import Layout

FOR_PIPELINES = (
    "--schedule and --virtual-stages are for pipelines, and this plan has one mesh: ask for two or more --stages"
)


def make_parallel(
    step: Callable[..., object], devices: int | Sequence[jax.Device], options: argparse.Namespace
) -> ParallelStep:
    """Call `parallelize` with the planning options; ArgumentError for a pipeline's options on one mesh."""
    meshes = options.stages or (len(options.mesh) if options.mesh is not None else None)
    if (options.schedule != "auto" and meshes == 1) or ((options.virtual_stages or 1) > 1 and meshes in (None, 1)):
        raise ArgumentError(FOR_PIPELINES)
    made: ParallelStep = parallelize(
        step,
        devices=devices,
        mesh_shape=_mesh_shape(options.mesh),
        memory_limit_bytes=options.memory_limit,
        constraints=_constraints(options),
        cluster="cpu" if options.cluster == "auto" and isinstance(devices, int) else options.cluster,
        allow_redundant_compute=options.allow_redundant_compute,
        collectives=options.collectives,
        num_stages=options.stages or _open_stages(options),
        num_microbatches=options.microbatches or "auto",
        batch_statistics=options.batch_statistics,
        schedule=options.schedule,
        virtual_stages=options.virtual_stages or "auto",
        recompute=options.recompute,
        planning_processes=options.planning_processes,
        planning_seconds=options.planning_seconds,
        plan_cache=options.plan_cache,
    )
    return made


def _open_stages(options: argparse.Namespace) -> Literal[1, "auto"]:
    """How many stages there may be where nobody says it: one, if the step is to be data parallel over all devices."""
    is_of_stages = options.schedule != "auto" or len(options.mesh or ()) > 1
    return 1 if (options.data_parallel or options.zero) and not is_of_stages else "auto"


def _mesh_shape(meshes: Sequence[MeshShape] | None) -> MeshShape | list[MeshShape] | Literal["auto"]:
    """The shapes as `parallelize` takes them: one, a list of them, or "auto"."""
    if meshes is None:
        return "auto"
    return meshes[0] if len(meshes) == 1 else list(meshes)


def _constraints(options: argparse.Namespace) -> list[Constraints | Mapping[str, Layout]]:
    """Presets first: where two constraints match a leaf the later one holds, and the user's own are more specific."""
    presets = [data_parallel()] if options.data_parallel else []
    presets += [{1: zero1, 2: zero2, 3: zero3}[options.zero]()] if options.zero else []
    return [*presets, *({glob: layout(spec)} for glob, spec in options.constraint)]


def count_devices(options: argparse.Namespace) -> int:
    """Count the devices that are asked for; ArgumentError if --devices, --mesh and --stages disagree."""
    asked = options.devices
    if options.nodes is not None:
        asked = count_devices_of_nodes(options.nodes, options.cluster)
        if options.devices not in (None, asked):
            raise ArgumentError(
                f"--nodes {options.nodes} of {options.cluster} have {asked} devices and --devices is {options.devices}: make "
                "them agree, or give only one"
            )
    in_meshes = _count_devices_of_meshes(options.mesh, options.stages)
    if in_meshes is None:
        return asked or DEFAULT_DEVICES
    if asked is not None and asked != in_meshes:
        meshes = "--mesh has" if len(options.mesh) == 1 and not options.stages else "the meshes of all stages have"
        flag = f"--devices is {asked}" if options.nodes is None else f"--nodes {options.nodes} have {asked}"
        raise ArgumentError(f"{meshes} {in_meshes} devices and {flag}: make them agree, or give only one")
    return in_meshes


def count_devices_of_nodes(nodes: int, cluster: str) -> int:
    """Count the devices of so many machines of a cluster. Raises ArgumentError if it does not say how many one has."""
    if cluster == "auto":
        raise ArgumentError("--nodes needs --cluster, which says how many devices a machine has; or give --devices")
    per_node = find_cluster(cluster).devices_per_node
    if per_node is None:
        raise ArgumentError(
            f"cluster {cluster} joins any number of devices and has no machines to count: give --devices"
        )
    return nodes * per_node


def _count_devices_of_meshes(meshes: Sequence[MeshShape] | None, stages: int | None) -> int | None:
    """Count the devices of all stages together; one mesh is that of every stage. None without --mesh."""
    if meshes is None:
        return None
    if stages is not None and len(meshes) not in (1, stages):
        raise ArgumentError(
            f"--mesh gives {len(meshes)} shapes and --stages is {stages}: give one shape per stage, or one for all of them"
        )
    sizes = [mesh_size(mesh) for mesh in meshes]
    return sizes[0] * (stages or 1) if len(meshes) == 1 else sum(sizes)
