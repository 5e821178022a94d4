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
    """A step that plans itself for its arguments and runs on all devices; made by `parallelize`.

    It is called like the function that it was made of, which stays available as `__wrapped__`.
    """

    def __init__(self, signature: CallSignature, settings: Settings) -> None:
        self._signature, self._settings = signature, settings
        self._planned: dict[Any, Planned] = {}
        self._compiled: dict[Any, CompiledStep | CompiledPipeline] = {}
        self._last: Planned | None = None
        functools.update_wrapper(self, signature.fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; the results equal those of the undecorated function.

        The first call with arguments of these shapes traces, plans and compiles. The state is consumed unless `donate_argnums`
        says otherwise: pass on the state that the step returns.
        """
        bound = bind_arguments(self._signature, args, kwargs)
        leaves = jax.tree_util.tree_leaves((bound.dynamic, dict(bound.kwargs)))
        refuse_tracers(self._signature.name, leaves)
        with undisturbed():
            return self._compile(bound).run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s; it needs no devices if their number was given."""
        with undisturbed():
            return self._plan(bind_arguments(self._signature, args, kwargs)).plan

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep | CompiledPipeline:
        """The compiled step for these arguments, arrays or `jax.ShapeDtypeStruct`s."""
        with undisturbed():
            return self._compile(bind_arguments(self._signature, args, kwargs))

    @undisturbed()
    def init_state(self, create_fn: Callable[..., Any], *args: Any) -> Any:
        """Create the state already laid out as the last plan says; no device ever holds all of it.

        Args:
            create_fn: the function that makes the state; it is compiled once per mesh.
            *args: its arguments.

        Returns:
            What `create_fn(*args)` returns, as sharded arrays.

        Raises:
            ArgumentError: nothing has been planned yet, or the result is not the step's state.
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
        """Copy a tree of arrays that are split over devices or stages to ordinary arrays on one device.

        Where several processes have the devices, all of them call it, and each gets every array, on a device of its own.
        """
        with undisturbed():
            return gathered(tree, self.jax_devices())

    def last_plan(self) -> Plan | PipelinePlan:
        """The plan that was made or used last; PlanError if there is none."""
        if self._last is None:
            raise PlanError(f"{self._signature.name} has not been planned yet; call it, or .plan(...)")
        return self._last.plan

    def jax_devices(self) -> list[jax.Device]:
        """The devices that the step may run on."""
        return self._settings.jax_devices()

    def cluster(self) -> Cluster:
        """The cluster whose figures the planner uses."""
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
    """Run a step on all devices under a plan that autopar finds; a decorator with and without arguments.

    Nothing is planned until the first call, or the first `.plan(...)`. An argument that is left out is searched or has the
    default given here.

    Args:
        fun: the step, a function of arrays and trees of arrays. A train step takes the state first and the batch second and
            returns the new state; see `batch_argnums` and `donate_argnums` for other orders.
        devices: the JAX devices to run on, all of them if None; or a number of devices, to plan without having any. A number
            plans for the `cpu` cluster unless `cluster` says otherwise.
        mesh_shape: sizes of the logical mesh, as a tuple (axes are then `x`, `y`, `z`, ...) or a mapping of axis names to sizes;
            a list of shapes, one per pipeline stage; `"auto"` compares all shapes of up to three axes.
        batch_argnums: positions of the arguments whose arrays have the examples along their leading dimension.
        donate_argnums: positions of the arguments whose memory the results may take; `"auto"` donates each argument that the step
            returns with the same structure, shapes and types.
        static_argnums: positions of the arguments that are compile-time constants; they must be hashable.
        memory_limit_bytes: a hard limit, in bytes per device; None takes the memory of the cluster's devices.
        constraints: layouts that the plan must keep: a mapping of leaf-path globs to a `PartitionSpec`, `Replicated` or `Split`;
            a preset such as `data_parallel()`; or a list of these, of which the last that matches a leaf holds.
        cluster: what the machine can do: the name of a preset, the path of a cluster file, or a `Cluster`; `"auto"` looks up
            the kind of the devices.
        allow_redundant_compute: let devices repeat contractions where that saves communication.
        collectives: the kinds of collectives that the plan may use, of `all-reduce`, `reduce-scatter`, `all-gather`,
            `all-to-all` and `collective-permute`; None allows all.
        plan: use this plan instead of searching.
        follow: another parallelized step whose mesh or stages, and whose layouts of leaves with the same path, are taken over, so
            that its state can be passed in as it is. Microbatches and schedule are the follower's own.
        num_microbatches: into how many parts the batch is cut, computed one after the other with the same results. `"auto"`
            compares several: in stages around four per stage, on one mesh those that the memory asks for.
        num_stages: on how many meshes the step runs as a pipeline. `"auto"` searches stages where they may be faster than one
            mesh or are the way to fit the memory; with `mesh_shape` it is one, or one per shape of a list.
        schedule: the order of work in a pipeline: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zb-h1"` or `"inference"`; `"auto"`
            compares 1F1B, ZB-H1 and interleaved.
        virtual_stages: stages per mesh, for the interleaved schedule; `"auto"` compares 2 and 4.
        recompute: `"layer"` repeats forward work in the backward pass, with the same results, so that less is kept in memory: of
            a whole stage in a pipeline, of one layer after the other on one mesh. `"none"` does not; `"auto"` does where
            nothing else fits, and on one mesh where it beats microbatches.
        planning_processes: how many processes plan layers and stages, to the same plan. Those beside this one are forks of it,
            which touch no device; leave it at 1 where forking is forbidden or while other threads compute with JAX.

    Returns:
        A `ParallelStep`, called like `fun` and with the same results; without `fun`, a decorator that makes one.

    Raises:
        ArgumentError: an argument cannot be used as given, alone or together with the others or with the step.
        ConstraintError: a constraint matches no leaf, or no plan can keep it.
        OutOfMemoryError: no plan fits the memory limit.
        UnsupportedProgramError: the step cannot be run in parallel.
        PlanError: `plan` is for another step or other devices.

    The first error of an argument's own is raised at once, the others from the first call or `.plan(...)`.
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
