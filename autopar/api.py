"""`parallelize`: trace, plan, compile, run.

A train step in, a step that runs on all devices out, with the same results. This module is the whole compiler on one page:

    arguments -> TracedStep (trace.py) -> Plan and Assignment (planner.py) -> CompiledStep (compile.py) -> results

Each distinct set of argument shapes and static values is traced, planned and compiled once. What can go wrong is said by the
passes, in the user's own names.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from autopar.compile import CompiledStep
from autopar.cost_model.hardware import Cluster, find_cluster, load_cluster, preset, preset_for_device_kind
from autopar.errors import ArgumentError, OutOfMemoryError, PlanError
from autopar.graph import PlannerOptions
from autopar.mesh import LogicalMesh
from autopar.microbatch import in_microbatches, microbatch_counts
from autopar.options import Constraints, ConstraintsLike, Rule, as_constraints
from autopar.plan import Plan
from autopar.planner import PlanRequest, logical_meshes, plan_step, restore
from autopar.relayout import KINDS
from autopar.spmd import Assignment
from autopar.trace import BoundArguments, CallSignature, TracedStep, bind_arguments, require_state, trace

MeshShape = Literal["auto"] | Sequence[int] | Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Planned:
    traced: TracedStep
    plan: Plan
    assignment: Assignment


class ParallelStep:
    """A step that plans itself for its arguments and runs on all devices; made by `parallelize`."""

    def __init__(self, signature: CallSignature, settings: _Settings) -> None:
        self._signature, self._settings = signature, settings
        self._planned: dict[Any, _Planned] = {}
        self._compiled: dict[Any, CompiledStep] = {}
        self._last: _Planned | None = None
        functools.update_wrapper(self, signature.fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; results equal those of the undecorated function."""
        bound = bind_arguments(self._signature, args, kwargs)
        leaves = jax.tree_util.tree_leaves((bound.dynamic, dict(bound.kwargs)))
        return self._compile(bound).run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s; needs no devices if their number is given."""
        return self._plan(bind_arguments(self._signature, args, kwargs)).plan

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """The compiled step for these arguments, arrays or `jax.ShapeDtypeStruct`s."""
        return self._compile(bind_arguments(self._signature, args, kwargs))

    def init_state(self, create_fn: Callable[..., Any], *args: Any) -> Any:
        """`create_fn(*args)`, made already laid out as the last plan says; no device ever holds all of it.

        Raises ArgumentError if nothing has been planned yet, or if the result is not the step's state.
        """
        planned = self._last
        if planned is None:
            raise ArgumentError(
                f"init_state needs to know the plan: call {self._signature.name}.plan(state, batch) first, with arrays or "
                "shapes, e.g. state = jax.eval_shape(create_fn, *args)"
            )
        require_state(planned.traced, self._signature.name)
        shapes = jax.eval_shape(create_fn, *args)
        wanted = [(i, leaf) for i, leaf in enumerate(planned.traced.inputs) if leaf.role == "state"]
        made = [(tuple(x.shape), x.dtype) for x in jax.tree.leaves(shapes)]
        if made != [(leaf.shape, leaf.dtype) for _, leaf in wanted]:
            raise ArgumentError(
                f"create_fn makes {len(made)} leaves, the state of {self._signature.name} has {len(wanted)} of the planned "
                "shapes and types; pass the function that makes the state, with the same sizes as were planned"
            )
        compiled = self._compiled_for(planned)
        shardings = [compiled.in_shardings[i] for i, _ in wanted]
        return jax.jit(create_fn, out_shardings=jax.tree.unflatten(jax.tree.structure(shapes), shardings))(*args)

    def last_plan(self) -> Plan:
        """The plan that was made last; PlanError if there is none."""
        if self._last is None:
            raise PlanError(f"{self._signature.name} has not been planned yet; call it, or .plan(...)")
        return self._last.plan

    def jax_devices(self) -> list[jax.Device]:
        """The devices that the step runs on, or may be given some of."""
        return self._settings.jax_devices()

    def cluster(self) -> Cluster:
        """What the planner assumes of the machine."""
        return self._settings.chosen_cluster()

    def _plan(self, bound: BoundArguments) -> _Planned:
        key = _key(bound)
        if key not in self._planned:
            self._planned[key] = self._settings.planned(trace(self._signature, bound))
        self._last = self._planned[key]
        return self._last

    def _compile(self, bound: BoundArguments) -> CompiledStep:
        key = _key(bound)
        if key not in self._compiled:
            self._compiled[key] = self._compiled_for(self._plan(bound))
        return self._compiled[key]

    def _compiled_for(self, planned: _Planned) -> CompiledStep:
        devices = self._settings.jax_devices()
        return CompiledStep(self._signature, planned.traced, planned.assignment, planned.plan, devices)


@dataclasses.dataclass(frozen=True, eq=False)
class _Settings:
    """The arguments of `parallelize`, checked."""

    devices: tuple[jax.Device, ...] | int | None
    mesh: Literal["auto"] | LogicalMesh
    memory_limit_bytes: int | None
    constraints: Constraints
    cluster: Literal["auto"] | Cluster
    options: PlannerOptions
    plan: Plan | None
    follow: ParallelStep | None
    num_microbatches: Literal["auto"] | int

    def planned(self, traced: TracedStep) -> _Planned:
        """The plan for a step, in as many microbatches as were asked for, or, by default, as the memory needs."""
        request = self.request()
        if self.plan is not None:
            cut = in_microbatches(traced, self.plan.num_microbatches)
            return _Planned(cut, self.plan, restore(cut, self.plan, request))
        if self.num_microbatches != "auto":
            cut = in_microbatches(traced, self.num_microbatches)
            return _Planned(cut, *plan_step(cut, request))
        too_large: OutOfMemoryError | None = None
        for count in microbatch_counts(traced):
            cut = in_microbatches(traced, count)
            if cut.microbatches != count:
                break
            try:
                return _Planned(cut, *plan_step(cut, request))
            except OutOfMemoryError as error:
                too_large = too_large or error
        assert too_large is not None
        raise too_large

    def jax_devices(self) -> list[jax.Device]:
        """The devices to run on."""
        if self.devices is None and self.follow is not None:
            return self.follow.jax_devices()
        if isinstance(self.devices, int):
            return jax.devices()[: self.devices]
        return list(self.devices) if self.devices is not None else jax.devices()

    def request(self) -> PlanRequest:
        """What the planner is asked; touches devices only to count them and to learn their kind."""
        cluster = self.chosen_cluster()
        limit = self.memory_limit_bytes
        if limit is None and np.isfinite(cluster.usable_memory_bytes):
            limit = int(cluster.usable_memory_bytes)
        return PlanRequest(self._meshes(), cluster, limit, self._constraints(), self.options)

    def _meshes(self) -> tuple[LogicalMesh, ...]:
        if self.follow is not None:
            plan = self.follow.last_plan()
            return (LogicalMesh(plan.mesh_shape, plan.axis_names),)
        if isinstance(self.mesh, LogicalMesh):
            self._check_size(self.mesh)
            return (self.mesh,)
        return logical_meshes(self._count())

    def _count(self) -> int:
        return self.devices if isinstance(self.devices, int) else len(self.jax_devices())

    def _check_size(self, mesh: LogicalMesh) -> None:
        if self.devices is not None and mesh.size > self._count():
            raise ArgumentError(
                f"mesh_shape={mesh.shape} needs {mesh.size} devices, there are {self._count()}; use a smaller mesh_shape, or "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} to try it on virtual CPU devices"
            )

    def chosen_cluster(self) -> Cluster:
        """What the machine can do, looked up by its devices' kind if the user did not say."""
        if isinstance(self.cluster, Cluster):
            return self.cluster
        if self.follow is not None:
            return self.follow.cluster()
        if isinstance(self.devices, int):
            return preset("cpu")
        device = self.jax_devices()[0]
        return preset_for_device_kind(device.platform, device.device_kind)

    def _constraints(self) -> Constraints:
        if self.follow is None:
            return self.constraints
        plan = self.follow.last_plan()
        layouts = tuple(Rule(v.path, v.partition_spec, must_match=False) for v in plan.inputs if v.role == "state")
        return Constraints((*layouts, *self.constraints.rules))


def _key(bound: BoundArguments) -> Any:
    leaves, tree = jax.tree_util.tree_flatten((bound.dynamic, dict(bound.kwargs)))
    shapes = tuple(
        (np.shape(x), str(x.dtype), bool(getattr(x, "weak_type", False))) if hasattr(x, "dtype") else type(x)
        for x in leaves
    )
    return tree, shapes, bound.static


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    devices: Sequence[jax.Device] | int | None = None,
    mesh_shape: MeshShape = "auto",
    batch_argnums: int | Sequence[int] = (1,),
    donate_argnums: Literal["auto"] | int | Sequence[int] = "auto",
    static_argnums: int | Sequence[int] = (),
    memory_limit_bytes: int | None = None,
    constraints: ConstraintsLike = None,
    cluster: Literal["auto"] | str | os.PathLike[str] | Cluster = "auto",
    allow_redundant_compute: bool = False,
    collectives: Sequence[str] | None = None,
    plan: Plan | None = None,
    follow: ParallelStep | None = None,
    num_microbatches: Literal["auto"] | int = "auto",
) -> Any:
    """Run a step on all devices under a plan that autopar finds; usable as a decorator with and without arguments.

    devices: JAX devices (all if None), or their number, to plan without any. mesh_shape: sizes of the logical mesh, as a tuple
    (axes x, y, z) or a mapping of names to sizes; "auto" compares all shapes of up to three axes. batch_argnums: arguments
    whose leading dimension is the batch. donate_argnums: "auto" donates what the step returns in the same structure.
    memory_limit_bytes: per device; the cluster's memory if None. constraints: leaf-path globs to PartitionSpec, `Replicated`,
    `Split`, and presets such as `data_parallel()`. cluster: what the machine can do: a preset's name, a
    `Cluster`, or a cluster file such as `python -m autopar calibrate` writes. allow_redundant_compute: let devices
    repeat contractions. collectives: the kinds the plan may use (all if None). plan: use this plan instead of searching.
    follow: reuse the mesh and the layouts that another step's last plan gave to leaves of the same path.
    num_microbatches: into how many parts the batch is cut, one after the other, with the same results; "auto" takes the
    least number that fits the memory.

    Raises ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError, from the first call or `.plan`.
    """
    if memory_limit_bytes is not None and memory_limit_bytes <= 0:
        raise ArgumentError(
            f"memory_limit_bytes={memory_limit_bytes}: a positive number of bytes per device is expected"
        )
    settings = _Settings(
        _checked_devices(devices),
        mesh_shape if mesh_shape == "auto" else LogicalMesh.of(mesh_shape),
        memory_limit_bytes,
        as_constraints(constraints),
        _checked_cluster(cluster),
        PlannerOptions(allow_redundant_compute, _checked_kinds(collectives)),
        plan,
        follow,
        _checked_microbatches(num_microbatches),
    )
    batch, static = _numbers("batch_argnums", batch_argnums), _numbers("static_argnums", static_argnums)
    donate = _numbers("donate_argnums", donate_argnums) if donate_argnums != "auto" else donate_argnums

    def decorate(step: Callable[..., Any]) -> ParallelStep:
        if not callable(step):
            raise ArgumentError(f"parallelize takes a function, not a {type(step).__name__} ({step!r})")
        return ParallelStep(CallSignature(step, batch, static, donate), settings)

    return decorate if fun is None else decorate(fun)


def _checked_devices(devices: Any) -> tuple[jax.Device, ...] | int | None:
    if devices is None:
        return None
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ArgumentError(f"devices={devices}: at least one device is needed")
        return devices
    listed = tuple(devices) if isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str) else ()
    if not listed and isinstance(devices, list | tuple):
        raise ArgumentError(f"devices={devices!r}: at least one device is needed")
    if not listed or not all(isinstance(device, jax.Device) for device in listed):
        raise ArgumentError(
            f"devices={devices!r}: a list of JAX devices such as jax.devices(), or their number, is expected"
        )
    return listed


def _checked_cluster(cluster: Any) -> Literal["auto"] | Cluster:
    if cluster == "auto" or isinstance(cluster, Cluster):
        return cluster  # type: ignore[no-any-return]
    if not isinstance(cluster, str | os.PathLike):
        raise ArgumentError(
            f"cluster={cluster!r}: 'auto', the name of a preset or a Cluster is expected, or the path of a file"
        )
    try:
        return find_cluster(cluster) if isinstance(cluster, str) else load_cluster(Path(cluster))
    except ValueError as error:
        raise ArgumentError(f"cluster={cluster!r}: {error}") from None


def _checked_microbatches(count: Any) -> Literal["auto"] | int:
    if count != "auto" and (type(count) is not int or count < 1):
        raise ArgumentError(f"num_microbatches={count!r}: 'auto' or a positive whole number is expected")
    return count  # type: ignore[no-any-return]


def _checked_kinds(collectives: Sequence[str] | None) -> frozenset[str]:
    given = KINDS if collectives is None else (collectives,) if isinstance(collectives, str) else collectives
    unknown = sorted(set(given) - set(KINDS))
    if unknown:
        raise ArgumentError(f"collectives={unknown}: no such kind; there are {', '.join(KINDS)}")
    return frozenset(given)


def _numbers(what: str, given: Any) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int | str) else tuple(given)
    if not all(isinstance(number, int) for number in numbers):
        raise ArgumentError(f"{what}={given!r}: a number, or a list of numbers, of positional arguments is expected")
    return numbers
