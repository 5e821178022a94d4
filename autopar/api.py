"""`parallelize`: trace, plan, compile, run.

A train step in, a step that runs on all devices out, with the same results. This module is the whole compiler on one page:

    arguments -> TracedStep (program/trace.py)
              -> Plan and Assignment of one mesh (intra_op/planner.py), or PipelinePlan and stages (inter_op/plan_pipeline.py)
              -> CompiledStep (execution/one_mesh.py) or CompiledPipeline (execution/pipeline.py) -> results

Each distinct set of argument shapes, static values and settings of JAX (`jax.enable_x64` and others) is traced, planned and
compiled once. What can go wrong is said by the passes, in the user's own names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.arguments import (
    MeshShape,
    checked_cluster,
    checked_count,
    checked_devices,
    checked_kinds,
    checked_leader,
    checked_memory_limit,
    checked_meshes,
    checked_plan,
    checked_processes,
    checked_recompute,
    checked_schedule,
    numbers,
)
from autopar.compat import undisturbed
from autopar.cost_model.hardware import Cluster
from autopar.decide import Planned, Settings
from autopar.errors import ArgumentError, PlanError
from autopar.execution.calls import refuse_tracers
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.execution.state import create_sharded, gathered
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.constraints import ConstraintsLike, as_constraints
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.call import BoundArguments, CallSignature, bind_arguments
from autopar.program.step import require_state
from autopar.program.trace import trace
from autopar.rules.table import warn_of_missing_rules
from autopar.runtime.thread_settings import program_settings_here
from autopar.schedules.schedules import Open


class ParallelStep:
    """A step that plans itself for its arguments and runs on all devices; made by `parallelize`."""

    def __init__(self, signature: CallSignature, settings: Settings) -> None:
        self._signature, self._settings = signature, settings
        self._planned: dict[Any, Planned] = {}
        self._compiled: dict[Any, CompiledStep | CompiledPipeline] = {}
        self._last: Planned | None = None
        functools.update_wrapper(self, signature.fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; results equal those of the undecorated function."""
        bound = bind_arguments(self._signature, args, kwargs)
        leaves = jax.tree_util.tree_leaves((bound.dynamic, dict(bound.kwargs)))
        refuse_tracers(self._signature.name, leaves)
        with undisturbed():
            return self._compile(bound).run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s; needs no devices if their number is given."""
        with undisturbed():
            return self._plan(bind_arguments(self._signature, args, kwargs)).plan

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep | CompiledPipeline:
        """The compiled step for these arguments, arrays or `jax.ShapeDtypeStruct`s."""
        with undisturbed():
            return self._compile(bind_arguments(self._signature, args, kwargs))

    @undisturbed()
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
        return create_sharded(create_fn, args, shardings)

    def gather(self, tree: Any) -> Any:
        """Arrays that live on stages or are split over devices, as ordinary arrays on one device.

        Where several processes have the devices, all of them call it, and each gets every array, on a device of its own.
        """
        with undisturbed():
            return gathered(tree, self.jax_devices())

    def last_plan(self) -> Plan | PipelinePlan:
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

    def _plan(self, bound: BoundArguments) -> Planned:
        key = _key(bound)
        if key not in self._planned:
            traced = trace(self._signature, bound)
            warn_of_missing_rules([eqn for eqn in traced.program.walk() if eqn.loop is None])
            self._planned[key] = self._settings.planned_by_all(traced, self._signature.name)
        self._last = self._planned[key]
        return self._last

    def _compile(self, bound: BoundArguments) -> CompiledStep | CompiledPipeline:
        key = _key(bound)
        if key not in self._compiled:
            self._compiled[key] = self._compiled_for(self._plan(bound))
        return self._compiled[key]

    def _compiled_for(self, planned: Planned) -> CompiledStep | CompiledPipeline:
        return planned.compiled(self._signature, self._settings.jax_devices())


def _key(bound: BoundArguments) -> Any:
    leaves, tree = jax.tree_util.tree_flatten((bound.dynamic, dict(bound.kwargs)))
    return tree, tuple(map(_kind, leaves)), bound.static, tuple(program_settings_here().values())


def _kind(leaf: Any) -> Any:
    """What a leaf is traced as: a number or an array of the host as the `jax.Array` that takes its place after the first step."""
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.typeof(leaf)
    if not hasattr(leaf, "dtype"):
        return type(leaf)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf, np.ndarray) else leaf.dtype
    return np.shape(leaf), str(dtype), bool(getattr(leaf, "weak_type", False))


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
    plan: Plan | PipelinePlan | None = None,
    follow: ParallelStep | None = None,
    num_microbatches: Open = "auto",
    num_stages: Open = "auto",
    schedule: str = "auto",
    virtual_stages: Open = "auto",
    recompute: str = "auto",
    planning_processes: int = 1,
) -> Any:
    """Run a step on all devices under a plan that autopar finds; usable as a decorator with and without arguments.

    devices: JAX devices (all if None), or their number, to plan without any. mesh_shape: sizes of the logical mesh, as a tuple
    (axes x, y, z) or a mapping of names to sizes; "auto" compares all shapes of up to three axes. batch_argnums: arguments
    whose leading dimension is the batch. donate_argnums: "auto" donates what the step returns in the same structure.
    memory_limit_bytes: per device; the cluster's memory if None. constraints: leaf-path globs to PartitionSpec, `Replicated`,
    `Split`, and presets such as `data_parallel()`. cluster: what the machine can do: a preset's name, a
    `Cluster`, or a cluster file such as `python -m autopar calibrate` writes. allow_redundant_compute: let devices
    repeat contractions. collectives: the kinds the plan may use (all if None). plan: use this plan instead of searching.
    follow: reuse the mesh, or the stages, and the layouts that another step's last plan gave to leaves of the same path, so that
    its state goes in as it is; microbatches and schedule are the follower's own.
    num_microbatches: into how many parts the batch is cut, one after the other, with the same results; "auto" takes the
    fastest number: in stages of several around four per stage, on one mesh of those that the memory asks for.
    num_stages: on how many meshes the step runs as a pipeline; "auto" searches where that may be faster than one mesh or is the
    way to fit the memory; with a mesh_shape it is one, or one per shape of a list.
    schedule: "gpipe", "1f1b", "interleaved", "zb-h1" or "inference"; virtual_stages: stages per mesh, for "interleaved"; "auto"
    compares 1f1b, zb-h1 and interleaved with 2 and 4 virtual stages. `plan.compared` holds what was compared.
    recompute: "layer" does forward work again in the backward pass, with the same results: of a stage, so that a microbatch in
    flight keeps only what the stage received; on one mesh, of each layer in turn. "auto" does so where nothing else fits; on
    one mesh it is compared with microbatches by predicted time.
    planning_processes: so many processes plan layers and stages, to the same plan; those beside this one are forks of it, which
    touch no device. Leave it at 1 where forking is forbidden, or while other threads of the program compute with JAX.

    Raises ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError, from the first call or `.plan`.
    """
    settings = Settings(
        checked_devices(devices),
        checked_meshes(mesh_shape),
        checked_memory_limit(memory_limit_bytes),
        as_constraints(constraints),
        checked_cluster(cluster),
        PlannerOptions(allow_redundant_compute, checked_kinds(collectives)),
        checked_plan(plan),
        checked_leader(follow),
        checked_count("num_microbatches", num_microbatches),
        checked_count("num_stages", num_stages),
        checked_schedule(schedule),
        checked_count("virtual_stages", virtual_stages),
        checked_recompute(recompute),
        checked_processes(planning_processes),
    )
    batch, static = numbers("batch_argnums", batch_argnums), numbers("static_argnums", static_argnums)
    donate: Any = (
        donate_argnums
        if isinstance(donate_argnums, str) and donate_argnums == "auto"
        else numbers("donate_argnums", donate_argnums)
    )

    def decorate(step: Callable[..., Any]) -> ParallelStep:
        if not callable(step):
            raise ArgumentError(f"parallelize takes a function, not a {type(step).__name__} ({step!r})")
        return ParallelStep(CallSignature(step, batch, static, donate), settings)

    return decorate if fun is None else decorate(fun)
