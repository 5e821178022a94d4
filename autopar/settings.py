"""The arguments of `parallelize` as one frozen value, and what they say of devices, meshes, the machine and its memory.

In: a `Settings`, whose fields `arguments.py` checked one by one. Out: what the planner is asked (`make_request`). Only these
functions look at devices, and only to count them and to learn their kind. What can go wrong: a mesh that needs more devices than
there are, or numbers of stages that contradict each other; each error names the arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from typing import Literal

import jax

from autopar.arguments import Leader, Statistics
from autopar.cost_model.hardware import Cluster, find_preset, preset
from autopar.errors import ArgumentError, warn
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.request import PlanRequest, logical_meshes
from autopar.layouts.constraints import Constraints, Rule
from autopar.layouts.mesh import AXIS_NAMES, LogicalMesh
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.schedules.schedules import Open, Recompute
from autopar.solver.budget import Budget


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """The arguments of `parallelize`, checked. `meshes` has one shape per stage if the user gave several.

    `budget`: the clock of the planning that is under way; see `start_clock`.
    """

    devices: tuple[jax.Device, ...] | int | None
    meshes: Literal["auto"] | tuple[LogicalMesh, ...]
    memory_limit_bytes: int | None
    constraints: Constraints
    cluster: Literal["auto"] | Cluster
    options: PlannerOptions
    plan: Plan | PipelinePlan | None
    follow: Leader | None
    num_microbatches: Open
    num_stages: Open
    schedule: str
    virtual_stages: Open
    recompute: Recompute = "auto"
    batch_statistics: Statistics = "batch"
    processes: int = 1
    planning_seconds: float | None = None
    uses_cache: bool = True
    max_programs: int | None = None
    budget: Budget = dataclasses.field(default_factory=Budget)


def start_clock(settings: Settings) -> Settings:
    """The same settings for a search that begins now."""
    limit = settings.planning_seconds
    return dataclasses.replace(settings, budget=Budget(seconds=math.inf if limit is None else limit).share_with_forks())


def list_devices(settings: Settings) -> list[jax.Device]:
    """The devices to run on."""
    match settings.devices:
        case int() as count:
            return jax.devices()[:count]
        case tuple() as given:
            return list(given)
        case None:
            return jax.devices() if settings.follow is None else settings.follow.jax_devices()


def count_devices(settings: Settings) -> int:
    """The number of devices; if that is what the user gave, none is looked at."""
    return settings.devices if isinstance(settings.devices, int) else len(list_devices(settings))


def choose_cluster(settings: Settings) -> Cluster:
    """What the machine can do: as the user says, like the step that is followed, or by the devices' kind."""
    if isinstance(settings.cluster, Cluster):
        return settings.cluster
    if settings.follow is not None:
        return settings.follow.cluster()
    if isinstance(settings.devices, int):
        return preset("cpu")
    device = list_devices(settings)[0]
    nearest = find_preset(device.platform, device.device_kind)
    if nearest.guess:
        warn(nearest.guess)
    return nearest.cluster


def is_cluster_assumed(settings: Settings) -> bool:
    """Whether a plan is made for the preset that stands for any machine: none is named, and there are no devices to look at."""
    has_one = settings.cluster != "auto" or settings.follow is not None or settings.plan is not None
    return isinstance(settings.devices, int) and not has_one


def plan_to_follow(settings: Settings) -> Plan | PipelinePlan | None:
    """The last plan of the step that this one follows. Raises PlanError if that has none."""
    return None if settings.follow is None else settings.follow.last_plan()


def count_meshes(settings: Settings) -> int:
    """On how many meshes the step is to run: as asked for, or one for each shape; one if neither is given."""
    shapes = 1 if settings.meshes == "auto" else len(settings.meshes)
    if settings.num_stages == "auto":
        return shapes
    if shapes not in (1, settings.num_stages):
        raise ArgumentError(
            f"mesh_shape has {shapes} shapes, num_stages is {settings.num_stages}; give one shape per stage, or one for all"
        )
    return settings.num_stages


def require_all_devices(settings: Settings) -> None:
    """Raise ArgumentError if devices are given and the meshes leave some of them out."""
    if settings.devices is None or settings.meshes == "auto":
        return
    meshes = settings.meshes if len(settings.meshes) > 1 else settings.meshes * count_meshes(settings)
    used, given = sum(mesh.size for mesh in meshes), count_devices(settings)
    if used < given:
        what = "the meshes of all stages have" if len(meshes) > 1 else f"mesh_shape={meshes[0].shape} has"
        raise ArgumentError(
            f"{what} {used} device{'s' * (used > 1)} and devices has {given}: make them agree, or leave devices out, which then "
            f"takes the first {used} that JAX has"
        )


def axis_names(settings: Settings) -> tuple[str, ...]:
    """The names that axes of the plan's meshes may have."""
    followed = plan_to_follow(settings)
    plans: tuple[Plan, ...] = () if followed is None else (followed,) if isinstance(followed, Plan) else ()
    if isinstance(followed, PipelinePlan):
        plans = tuple(stage.plan for stage in followed.stages)
    given = () if settings.meshes == "auto" else settings.meshes
    names = (*(mesh.axis_names for mesh in given), *(plan.axis_names for plan in plans))
    return tuple(dict.fromkeys(itertools.chain.from_iterable(names))) or AXIS_NAMES


def choose_one_mesh(settings: Settings) -> tuple[LogicalMesh, ...]:
    """The logical meshes that one mesh may have: that of the step to follow, the given one, or all shapes of the devices."""
    followed = plan_to_follow(settings)
    if isinstance(followed, Plan):
        return (LogicalMesh(followed.mesh_shape, followed.axis_names),)
    if settings.meshes == "auto":
        return logical_meshes(count_devices(settings))
    mesh = settings.meshes[0]
    if settings.devices is not None and mesh.size > count_devices(settings):
        raise ArgumentError(
            f"mesh_shape={mesh.shape} needs {mesh.size} devices, there are {count_devices(settings)}; use a smaller mesh_shape, "
            f"or XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} to try it on virtual CPU devices"
        )
    return settings.meshes


def most_devices(settings: Settings) -> float:
    """How many devices the cluster joins."""
    tiers = choose_cluster(settings).tiers
    return (tiers[-1].devices if tiers else None) or math.inf


def make_request(settings: Settings, meshes: tuple[LogicalMesh, ...] = ()) -> PlanRequest:
    """What the planner is asked; `meshes` are left out for a pipeline, whose stages have their own."""
    cluster = choose_cluster(settings)
    return PlanRequest(
        meshes=meshes,
        cluster=cluster,
        memory_limit_bytes=_choose_limit(settings, cluster),
        constraints=_gather_constraints(settings),
        options=_options(settings),
        processes=settings.processes,
        budget=settings.budget,
    )


def _choose_limit(settings: Settings, cluster: Cluster) -> int | None:
    """The limit that is given, or the memory of the cluster's devices, of which JAX may take a part alone; None: no limit."""
    if settings.memory_limit_bytes is not None:
        return settings.memory_limit_bytes
    at_hand = [] if isinstance(settings.devices, int) else list_devices(settings)
    limit = min([cluster.usable_memory_bytes, *filter(None, map(allocatable_bytes, at_hand))])
    return int(limit) if math.isfinite(limit) else None


def allocatable_bytes(device: jax.Device) -> int | None:
    """How much of a device's memory JAX may take: three quarters of a GPU's, unless XLA_PYTHON_CLIENT_MEM_FRACTION says else.

    None where JAX sets itself no limit, as on CPUs, or the device is another process's, or there only to compile for.
    """
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return None
    limit: int | None = stats.get("bytes_limit")
    return limit


def _options(settings: Settings) -> PlannerOptions:
    """The options, without the kinds of collectives that a constraint leaves out."""
    return dataclasses.replace(settings.options, kinds=settings.options.kinds - {*settings.constraints.without})


def _gather_constraints(settings: Settings) -> Constraints:
    """The user's constraints, after the layouts that the state of the step to follow has on one mesh."""
    followed = plan_to_follow(settings)
    if not isinstance(followed, Plan):
        return settings.constraints
    layouts = tuple(
        Rule(glob=v.path, layout=v.partition_spec, must_match=False) for v in followed.inputs if v.role == "state"
    )
    return dataclasses.replace(settings.constraints, rules=(*layouts, *settings.constraints.rules))


def describe_question(settings: Settings, traced: TracedStep, name: str) -> str:
    """What is to be planned, in words that are the same on every process if the step and the options are.

    The cluster is left out: each process may have measured its own machine, and the first one's plan is for all.
    """
    batch = ", ".join(f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in traced.inputs if leaf.role == "batch")
    meshes = settings.meshes if settings.meshes == "auto" else [mesh.shape for mesh in settings.meshes]
    given = "" if settings.plan is None else f", plan={_digest(settings.plan.to_json())}"
    rules = "" if not settings.constraints.rules else f", constraints={_digest(repr(settings.constraints.rules))}"
    options = _options(settings)
    kinds = "" if options.kinds == PlannerOptions().kinds else f", collectives={sorted(options.kinds)}"
    redundant = ", allow_redundant_compute=True" if options.allow_redundant_compute else ""
    return (
        f"{name} (program {traced.fingerprint}; {batch}; {count_devices(settings)} devices, mesh_shape={meshes}, "
        f"memory_limit_bytes={settings.memory_limit_bytes}, num_microbatches={settings.num_microbatches}, "
        f"num_stages={settings.num_stages}, schedule={settings.schedule!r}, virtual_stages={settings.virtual_stages}, "
        f"recompute={settings.recompute!r}, batch_statistics={settings.batch_statistics!r}{rules}{kinds}{redundant}{given})"
    )


def _digest(text: str) -> str:
    """A few characters that tell two texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
