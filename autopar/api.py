"""`parallelize`: trace, plan, compile, run.

A train step in, a step that runs on all devices out, with the same results. This module is the whole compiler on one page:

    arguments -> Settings (settings.py), checked one by one (arguments.py)
    call      -> TracedStep (program/trace.py)
              -> PlannedStep of one mesh, or PlannedPipeline of stages (decide.py chooses which)
              -> CompiledStep (execution/one_mesh.py) or CompiledPipeline (execution/pipeline.py) -> results

Each distinct set of argument shapes, static values and settings of JAX (`jax.enable_x64` and others) is traced, planned and
compiled once. What can go wrong is said by the passes, in the user's own names.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from autopar.arguments import (
    MeshShape,
    check_cluster,
    check_count,
    check_devices,
    check_kinds,
    check_leader,
    check_limit,
    check_memory_limit,
    check_meshes,
    check_names,
    check_open_positions,
    check_plan,
    check_positions,
    check_processes,
    check_recompute,
    check_schedule,
    check_seconds,
    check_statistics,
    check_switch,
)
from autopar.compat import undisturbed
from autopar.cost_model.hardware import Cluster
from autopar.decide import Planned, decide_for_fewer_examples, decide_together, meet_to_plan
from autopar.errors import ArgumentError, ConstraintError, PlanError
from autopar.execution.calls import CallKey, key_of, refuse_consumed, refuse_without_values
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline, compile_planned
from autopar.execution.published import Places
from autopar.execution.recent import Recent, warn_of_many
from autopar.execution.state import create_sharded, gather_to_one
from autopar.execution.turns import RUNNING, Turn
from autopar.explain.inspected import Inspected
from autopar.gc_pause import pause_full_collections
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.constraints import ConstraintsLike, as_constraints
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.plan_cache.key import digest_of_wishes
from autopar.program.call import BoundArguments, CallSignature, PyTree, bind_arguments, leaf_paths_below
from autopar.program.crossing import deliver
from autopar.program.step import TracedStep, require_state, require_state_like
from autopar.program.trace import trace
from autopar.progress import COMPILING, STEPPING, Progress, enter, report, tell
from autopar.rules.table import are_registered, find_unlisted
from autopar.rules.unlisted.notices import warn_of_operations
from autopar.runtime.meetings import group_of, refusing_together
from autopar.runtime.thread_settings import under
from autopar.schedules.schedules import Open
from autopar.settings import Settings, axis_names, choose_cluster, list_devices, require_all_devices, start_clock
from autopar.solver.budget import Budget


@dataclasses.dataclass(eq=False)
class _Program:
    """The step planned for one kind of call, and compiled once it is needed, under JAX's `settings` and users' `rules`."""

    planned: Planned
    settings: dict[str, object]
    rules: dict[str, object]
    compiled: CompiledStep | CompiledPipeline | None = None

    def holds(self) -> bool:
        """Whether nobody has registered another rule since."""
        return are_registered(self.rules)


@dataclasses.dataclass(eq=False)
class _Memory:
    """What a step keeps from call to call: programs by call, the one that was planned or used last, the clock of a search."""

    programs: Recent[CallKey, _Program]
    last: _Program | None = None
    clock: Budget | None = None
    making: Turn = dataclasses.field(default_factory=Turn)


class ParallelStep(Inspected):
    """A step that plans itself for its arguments and runs on all devices; made by `parallelize`.

    It is called like the function that it was made of, which stays available as `__wrapped__`.
    """

    def __init__(self, signature: CallSignature, settings: Settings) -> None:
        self.signature, self._settings = signature, settings
        self._memory = _Memory(Recent(settings.max_programs))
        functools.update_wrapper(self, signature.fun, updated=())

    def __get__(self, owner: object, kind: type | None = None) -> ParallelStep:
        """The step as a method of an object, which is its first argument: a tree of arrays, or else static."""
        if owner is None:
            return self
        bound = copy.copy(self)
        bound._first = (owner,)
        return bound

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Run one step; the results equal those of the undecorated function.

        The first call with arguments of these shapes traces, plans and compiles. The state is consumed unless `donate_argnums`
        says otherwise: pass on the state that the step returns.
        """
        call = self._bind(args, kwargs)
        leaves, _ = call.flatten()
        refuse_without_values(self.signature.name, leaves)
        with undisturbed():
            return deliver(call, self._compile(self._plan(call)).run(leaves))

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan | PipelinePlan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s; it needs no devices if their number was given."""
        with undisturbed():
            return self._plan(self._bind(args, kwargs), is_use=False).planned.plan

    def compile(self, *args: PyTree, **kwargs: PyTree) -> CompiledStep | CompiledPipeline:
        """The compiled step for these arguments, arrays or shapes, or for the last; that of a method takes the object first."""
        with undisturbed():
            program = self._plan(self._bind(args, kwargs)) if args or kwargs or self._first else self._last()
            return self._compile(program)

    @undisturbed()
    def init_state(self, create_fn: Callable[..., PyTree], *args: PyTree) -> Any:
        """Create the state already laid out as the last plan says; no device ever holds all of it.

        Args:
            create_fn: the function that makes the state; it is compiled once per mesh.
            *args: its arguments.

        Returns:
            What `create_fn(*args)` returns, as sharded arrays.

        Raises:
            ArgumentError: nothing has been planned yet, or the result is not the step's state.
        """
        last = self._last()
        traced = last.planned.traced
        require_state(traced, self.signature.name)
        require_state_like(traced, jax.eval_shape(create_fn, *args), self.signature.name)
        shardings = self._compile(last).in_shardings
        of_state = [shardings[i] for i, leaf in enumerate(traced.inputs) if leaf.role == "state"]
        with RUNNING.take(self.signature.name):
            self._meet("makes the state", args)
            return create_sharded(create_fn, args, of_state)

    @undisturbed()
    def places(self) -> Places:
        """Where the last plan keeps the state and computes with the batch, leaf by leaf; ArgumentError if there is no plan."""
        last = self._last()
        wishes = functools.partial(digest_of_wishes, self._settings)
        return Places(self.signature.name, last.planned.plan, self._compile(last), wishes)

    def gather(self, tree: Any) -> Any:
        """Copy `tree`, whose arrays are split over devices or stages, to ordinary arrays on one device.

        Where several processes have the devices, all of them call it, and each gets every array, on a device of its own.
        """
        with RUNNING.take(self.signature.name), undisturbed():
            self._meet(f"gathers {len(jax.tree.leaves(tree))} arrays", tree)
            return gather_to_one(tree, self.jax_devices())

    def last_plan(self) -> Plan | PipelinePlan:
        """The plan that was made or used last; PlanError if there is none."""
        if self._memory.last is None:
            raise PlanError(f"{self.signature.name} has not been planned yet; call it, or .plan(...)")
        return self._memory.last.planned.plan

    def stop_planning(self) -> bool:
        """End the search that is under way with the best plan so far, for signal handlers and other threads; whether one was."""
        clock = self._memory.clock
        if clock is not None:
            clock.stop()
        return clock is not None

    def jax_devices(self) -> list[jax.Device]:
        """The devices that the step may run on."""
        return list_devices(self._settings)

    def cluster(self) -> Cluster:
        """The cluster whose figures the planner uses."""
        return choose_cluster(self._settings)

    def _last(self) -> _Program:
        """What was planned or used last. Raises ArgumentError if there is nothing."""
        if self._memory.last is None:
            name = self.signature.name
            raise ArgumentError(
                f"{name} has not been planned yet: pass its arguments, or call {name}.plan(state, batch) first, with arrays or "
                "shapes, e.g. state = jax.eval_shape(create_fn, *args)"
            )
        return self._memory.last

    def _meet(self, words: str, given: PyTree) -> None:
        """Wait until all processes that have devices of the step are about to do the same with what they are given."""
        group, name = group_of(self.jax_devices), self.signature.name
        with refusing_together(group):
            refuse_consumed(name, leaf_paths_below("given", given), jax.tree.leaves(given))
        if group is not None:
            group.meet(f"{words} of {name}")

    def _bind(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> BoundArguments:
        """A call's arguments, after the object that the step is a method of."""
        return bind_arguments(self.signature, (*self._first, *args), kwargs)

    def _plan(self, call: BoundArguments, *, is_use: bool = True) -> _Program:
        """Trace and plan the step for such a call, once; `is_use`: it is about to run, nobody just looks at the plan."""
        key = key_of(call)
        program = self._memory.programs.find(key, is_use=is_use, holds=_Program.holds)
        if program is None:
            with self._memory.making.take(self.signature.name):
                program = self._memory.programs.find(key, holds=_Program.holds) or self._make(key, call)
        self._memory.last = program
        return program

    def _make(self, key: CallKey, call: BoundArguments) -> _Program:
        """Trace and plan the step, and keep it."""
        with pause_full_collections():
            enter("tracing")
            with refusing_together(group_of(self.jax_devices)):
                require_all_devices(self._settings)
                traced = trace(self.signature, call, axis_names(self._settings))
            warn_of_operations([eqn for eqn in traced.program.walk() if not eqn.regions])
            program = _Program(self._decide(traced), dict(key.settings), find_unlisted(traced.program.walk()))
        programs = self._memory.programs
        programs.keep(key, program)
        if programs.dropped == 1:
            warn_of_many(self.signature.name, programs.limit)
        return program

    def _decide(self, traced: TracedStep) -> Planned:
        """The plan for a traced step, sought while its clock runs."""
        shared = meet_to_plan(self._settings, traced, self.signature.name)
        settings = start_clock(self._settings)
        self._memory.clock = settings.budget
        report(Progress(phase="planning", seconds_left=settings.budget.seconds_left), is_news=True)
        try:
            return decide_together(settings, traced, shared)
        except (ArgumentError, ConstraintError) as error:
            earlier = [kept.planned for kept in self._memory.programs.values()]
            return decide_for_fewer_examples(settings, traced, self.signature.name, earlier=earlier, error=error)
        finally:
            self._memory.clock = None

    def _compile(self, program: _Program) -> CompiledStep | CompiledPipeline:
        """The step compiled by a plan, once, under the settings of JAX under which it was planned."""
        if program.compiled is None:
            with self._memory.making.take(self.signature.name):
                if program.compiled is None:
                    enter(COMPILING)
                    with under(program.settings):
                        program.compiled = compile_planned(self.signature, program.planned, self.jax_devices())
                    tell(Progress(phase=STEPPING))
        return program.compiled


def parallelize(
    fun: Callable[..., PyTree] | None = None,
    *,
    devices: Sequence[jax.Device] | int | None = None,
    mesh_shape: MeshShape = "auto",
    batch_argnums: Literal["auto"] | int | Sequence[int] = "auto",
    donate_argnums: Literal["auto"] | int | Sequence[int] = "auto",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
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
    batch_statistics: str = "batch",
    planning_processes: int = 1,
    planning_seconds: float | None = 60.0,
    plan_cache: bool = True,
    max_programs: int | None = 64,
) -> Any:
    """Run a step on all devices under a plan that autopar finds; a decorator with and without arguments.

    Nothing is planned until the first call, or the first `.plan(...)`. An argument that is left out is searched or has the
    default given here.

    Args:
        fun: the step, a function of arrays and trees of arrays. A train step takes state and a batch and returns the new state,
            in one argument or several, in any order: what it returns is state.
        devices: the JAX devices to run on, all of them if None; or a number of devices, to plan without having any. A number
            plans for the `cpu` cluster unless `cluster` says otherwise.
        mesh_shape: sizes of the logical mesh, as a tuple (axes are then `x`, `y`, `z`, ...) or a mapping of axis names to sizes;
            a list, one per pipeline stage; `"auto"` compares all of up to three axes. It takes all `devices` that are given.
        batch_argnums: positions of the arguments whose arrays have the examples along their leading dimension. `"auto"` takes
            those after the first that the step does not return; a warning tells where that may be wrong.
        donate_argnums: positions of the arguments whose memory the results may take; `"auto"` donates each argument that the step
            returns with the same structure, shapes and types.
        static_argnums: positions of the arguments that are compile-time constants; they must be hashable. Leaves that are no
            arrays, such as functions and strings, are constants in any case, and so is what `jax.jit` of `fun` takes as static.
        static_argnames: the same by the arguments' names; these may be keyword-only.
        memory_limit_bytes: a hard limit, in bytes per device; None takes what the cluster's devices have, and JAX may take.
        constraints: layouts that the plan must keep: a mapping of leaf-path globs to a `PartitionSpec`, `Replicated` or `Split`;
            a preset such as `data_parallel()`; or a list of these, of which the last that matches a leaf holds.
        cluster: what the machine can do: the name of a preset, the path of a cluster file, or a `Cluster`; `"auto"` looks up
            the kind of the devices, and is the preset `"cpu"` where `devices` is a number.
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
        schedule: the order of work in a pipeline: `"gpipe"`, `"1f1b"`, `"eager-1f1b"`, `"interleaved"`, `"zb-h1"` or
            `"inference"`; `"auto"` compares 1F1B, eager 1F1B, ZB-H1 and interleaved.
        virtual_stages: stages per mesh, for schedules interleaved, gpipe and inference; `"auto"` compares 2 and 4.
        recompute: `"layer"` repeats the forward work of each layer in the backward pass, one layer after the other, with the same
            results, so that less is kept in memory. `"named"` keeps the values that `jax.ad_checkpoint.checkpoint_name` names.
            `"none"` repeats nothing. `"auto"` repeats as much as has to be for the rest to fit, where nothing else does, and on
            one mesh where that beats microbatches.
        batch_statistics: of what batch normalisation takes mean and variance: `"batch"`, exactly as without autopar, or each
            `"microbatch"` for itself, without which a step that has it runs in one. What the state remembers is averaged.
        planning_processes: how many processes plan, to the same plan or one as good within 1 %. Those beside this one are forks
            of it, which touch no device; leave it at 1 where forking is forbidden or while other threads compute with JAX.
        planning_seconds: how long the search may take, tracing not counted. When they are over, the best plan so far is used, and
            it says what was not compared. None sets no limit.
        plan_cache: whether the plan is looked for on disk, where an earlier run may have left it, and kept there for later ones.
        max_programs: for how many sets of shapes, types and static values the step keeps its plan and its program. The set that
            was not used for longest goes first, with a warning the first time. None keeps all.

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
        devices=check_devices(devices),
        meshes=check_meshes(mesh_shape),
        memory_limit_bytes=check_memory_limit(memory_limit_bytes),
        constraints=as_constraints(constraints),
        cluster=check_cluster(cluster),
        options=PlannerOptions(
            check_switch("allow_redundant_compute", allow_redundant_compute), check_kinds(collectives)
        ),
        plan=check_plan(plan),
        follow=check_leader(follow),
        num_microbatches=check_count("num_microbatches", num_microbatches),
        num_stages=check_count("num_stages", num_stages),
        schedule=check_schedule(schedule),
        virtual_stages=check_count("virtual_stages", virtual_stages),
        recompute=check_recompute(recompute),
        batch_statistics=check_statistics(batch_statistics),
        processes=check_processes(planning_processes),
        planning_seconds=check_seconds(planning_seconds),
        uses_cache=check_switch("plan_cache", plan_cache),
        max_programs=check_limit("max_programs", max_programs),
    )
    batch = check_open_positions("batch_argnums", batch_argnums)
    static = check_positions("static_argnums", static_argnums)
    static_names = check_names("static_argnames", static_argnames)
    donate = check_open_positions("donate_argnums", donate_argnums)

    def decorate(step: Callable[..., PyTree]) -> ParallelStep:
        if not callable(step):
            raise ArgumentError(f"parallelize takes a function, not a {type(step).__name__} ({step!r})")
        return ParallelStep(CallSignature(step, batch, (*static, *static_names), donate), settings)

    return decorate if fun is None else decorate(fun)
