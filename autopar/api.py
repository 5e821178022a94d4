"""`parallelize`: trace, plan, compile, run.

A train step in, a step that runs on all devices out, with the same results. This module is the whole compiler on one page:

    arguments -> TracedStep (trace.py) -> Plan and Assignment (planner.py) -> CompiledStep (compile.py) -> results

Each distinct set of argument shapes and static values is traced, planned and compiled once. What can go wrong is said by the
passes, in the user's own names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.compile import CompiledStep
from autopar.cost_model.hardware import Cluster, preset, preset_for_device_kind
from autopar.errors import ArgumentError, PlanError
from autopar.graph import PlannerOptions
from autopar.mesh import LogicalMesh
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

    def _plan(self, bound: BoundArguments) -> _Planned:
        key = _key(bound)
        if key not in self._planned:
            traced = trace(self._signature, bound)
            if self._settings.plan is not None:
                assignment = restore(traced, self._settings.plan, self._settings.request())
                self._planned[key] = _Planned(traced, self._settings.plan, assignment)
            else:
                plan, assignment = plan_step(traced, self._settings.request())
                self._planned[key] = _Planned(traced, plan, assignment)
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

    devices: Sequence[jax.Device] | int | None
    mesh_shape: MeshShape
    memory_limit_bytes: int | None
    constraints: Constraints
    cluster: Literal["auto"] | str | Cluster
    options: PlannerOptions
    plan: Plan | None
    follow: ParallelStep | None

    def jax_devices(self) -> list[jax.Device]:
        """The devices to run on."""
        if isinstance(self.devices, int):
            return jax.devices()[: self.devices]
        return list(self.devices) if self.devices is not None else jax.devices()

    def request(self) -> PlanRequest:
        """What the planner is asked; touches devices only to count them and to learn their kind."""
        cluster = self._cluster()
        limit = self.memory_limit_bytes
        if limit is None and np.isfinite(cluster.device.memory_bytes):
            limit = int(cluster.device.memory_bytes)
        return PlanRequest(self._meshes(), cluster, limit, self._constraints(), self.options)

    def _meshes(self) -> tuple[LogicalMesh, ...]:
        if self.follow is not None:
            plan = self.follow.last_plan()
            return (LogicalMesh(plan.mesh_shape, plan.axis_names),)
        if self.mesh_shape != "auto":
            mesh = LogicalMesh.of(self.mesh_shape)  # type: ignore[arg-type]
            self._check_size(mesh)
            return (mesh,)
        return logical_meshes(self._count())

    def _count(self) -> int:
        return self.devices if isinstance(self.devices, int) else len(self.jax_devices())

    def _check_size(self, mesh: LogicalMesh) -> None:
        if self.devices is not None and mesh.size > self._count():
            raise ArgumentError(
                f"mesh_shape={mesh.shape} needs {mesh.size} devices, there are {self._count()}; use a smaller mesh_shape, or "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} to try it on virtual CPU devices"
            )

    def _cluster(self) -> Cluster:
        if isinstance(self.cluster, Cluster):
            return self.cluster
        if self.cluster != "auto":
            return preset(self.cluster)
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
        (np.shape(x), str(x.dtype), bool(getattr(x, "weak_type", False))) if hasattr(x, "dtype") else type(x) for x in leaves
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
    cluster: Literal["auto"] | str | Cluster = "auto",
    allow_redundant_compute: bool = False,
    collectives: Sequence[str] | None = None,
    plan: Plan | None = None,
    follow: ParallelStep | None = None,
) -> Any:
    """Run a step on all devices under a plan that autopar finds; usable as a decorator with and without arguments.

    devices: JAX devices (all if None), or their number, to plan without any. mesh_shape: sizes of the logical mesh, as a tuple
    (axes x, y, z) or a mapping of names to sizes; "auto" compares all one- and two-dimensional shapes. batch_argnums: arguments
    whose leading dimension is the batch. donate_argnums: "auto" donates what the step returns in the same structure.
    memory_limit_bytes: per device; the cluster's memory if None. constraints: leaf-path globs to PartitionSpec, `Replicated`,
    `Split`, and presets such as `data_parallel()`. cluster: what the machine can do. allow_redundant_compute: let devices
    repeat contractions. collectives: the kinds the plan may use (all if None). plan: use this plan instead of searching.
    follow: reuse the mesh and the layouts that another step's last plan gave to leaves of the same path.

    Raises ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError, from the first call or `.plan`.
    """
    kinds = frozenset(KINDS if collectives is None else collectives)
    if not kinds <= set(KINDS):
        raise ArgumentError(f"collectives={sorted(kinds - set(KINDS))}: no such kind; there are {', '.join(KINDS)}")
    if devices is not None and (devices < 1 if isinstance(devices, int) else not list(devices)):
        raise ArgumentError(f"devices={devices!r}: at least one device is needed")
    settings = _Settings(
        devices,
        mesh_shape,
        memory_limit_bytes,
        as_constraints(constraints),
        cluster,
        PlannerOptions(allow_redundant_compute, kinds),
        plan,
        follow,
    )

    def decorate(step: Callable[..., Any]) -> ParallelStep:
        donate: Any = donate_argnums if donate_argnums == "auto" else _tuple(donate_argnums)  # type: ignore[arg-type]
        return ParallelStep(CallSignature(step, _tuple(batch_argnums), _tuple(static_argnums), donate), settings)

    return decorate if fun is None else decorate(fun)


def _tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)
