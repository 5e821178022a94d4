"""Compile a planned pipeline: one driver thread per mesh, and state that stays on its stage.

In: the stages' programs, assignments and devices, and a schedule. Out: a `CompiledPipeline`, called with the step's arguments.
`execution/pipeline_tasks.py` makes the tasks, `execution/slots.py` the groups of arrays that they pass to each other. If several
processes have the devices, each runs its part of the same instructions. What can go wrong: an executable fails on one mesh. The
runtime then stops all meshes and names it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.compat import coordination, undisturbed
from autopar.errors import ArgumentError
from autopar.events import StepRun, reach, running
from autopar.execution.batch_places import RowsPlace
from autopar.execution.calls import (
    Given,
    check_leaves,
    copy_repeated,
    describe_run,
    refuse_consumed,
    telling_what_is_left,
)
from autopar.execution.devices import device_mesh
from autopar.execution.inputs import StepInputs
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline_tasks import Item, PlannedStage, make_pipeline_tasks
from autopar.execution.processes import PipelineProcesses, bring_leaves
from autopar.execution.slots import Links, link_tasks
from autopar.execution.stage_tasks import StageTask
from autopar.execution.transfers import Transfers
from autopar.execution.turns import RUNNING
from autopar.inter_op.candidates.pipeline_seconds import schedule_of
from autopar.inter_op.describe_pipeline import PlannedPipeline, RestoredPipeline
from autopar.intra_op.request import PlannedStep
from autopar.pipeline_plan import PipelinePlan
from autopar.plan_cache.recall import Recalled
from autopar.program.call import CallSignature, PyTree
from autopar.program.crossing import deliver
from autopar.program.task_name import TaskName
from autopar.runtime.driver import Driver
from autopar.runtime.meetings import group_of, refusing_together
from autopar.runtime.processes import absent_like
from autopar.runtime.resharding.reshard import bring_here
from autopar.runtime.thread_settings import program_settings_here, under
from autopar.runtime.watch import Watch
from autopar.schedules.emit import emit
from autopar.schedules.instructions import Value
from autopar.schedules.launch_order import order_launches, part_of
from autopar.schedules.tasks import Schedule
from autopar.schedules.timeline import Timeline
from autopar.split_array import SplitSharding, cut_leaves, join_leaves, leaf_shardings
from autopar.stages.split_scans import SplitStep
from autopar.stages.tasks.refs import OutputRef


def compile_planned(
    signature: CallSignature,
    planned: PlannedStep
    | PlannedPipeline
    | RestoredPipeline
    | Recalled[PlannedStep | PlannedPipeline | RestoredPipeline],
    devices: Sequence[jax.Device],
) -> CompiledStep | CompiledPipeline:
    """Compile a step, on one mesh or in stages as its plan says. Raises ArgumentError if there are too few devices."""
    match planned:
        case Recalled():
            return compile_planned(signature, planned.whole, devices)
        case PlannedStep():
            return CompiledStep(signature, planned, devices)
        case _:
            return compile_pipeline(signature, planned, devices)


def compile_pipeline(
    signature: CallSignature, planned: PlannedPipeline | RestoredPipeline, devices: Sequence[jax.Device]
) -> CompiledPipeline:
    """Compile a planned pipeline. Raises ArgumentError if there are too few devices."""
    plan = planned.plan
    schedule = schedule_of(plan)
    needed = max(s.first_device + math.prod(s.plan.mesh_shape) for s in plan.stages)
    if needed > len(devices):
        raise ArgumentError(
            f"the {plan.num_stages} stages need {needed} devices, there are {len(devices)}. Use smaller meshes or fewer stages; "
            f"or, to try a plan on a CPU, start Python with XLA_FLAGS=--xla_force_host_platform_device_count={needed}."
        )
    stages = [
        PlannedStage(
            stage.program,
            stage.assignment,
            device_mesh(stage.assignment.mesh, devices[where.first_device :]),
            where.mesh,
        )
        for stage, where in zip(planned.stages, plan.stages, strict=True)
    ]
    return CompiledPipeline(signature, plan, stages, schedule, split_step=planned.split, devices=devices)


def _watch_on(processes: PipelineProcesses) -> Watch | None:
    """Make the watch over failures of the other processes; None if there are no others."""
    if not processes.are_several:
        return None
    service = coordination()
    assert service is not None, "several processes without jax.distributed"
    return Watch(processes.all, service)


def _shapes_in(links: Links, inputs: StepInputs, slot: str, mesh: int) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and shardings of the arrays of a slot on a mesh."""
    return [inputs.shape_of(item, mesh) for item in links.groups[slot].items]


def _lines_of(tasks: Mapping[TaskName, StageTask], task: str) -> str:
    """Return the lines of the user's program that a task comes from."""
    return next((one.lines() for name, one in tasks.items() if str(name) == task), "")


class CompiledPipeline:
    """A step compiled into pipeline stages. A call runs one step. Results stay on the stages that make them."""

    def __init__(
        self,
        signature: CallSignature,
        plan: PipelinePlan,
        stages: Sequence[PlannedStage],
        schedule: Schedule,
        *,
        split_step: SplitStep,
        devices: Sequence[jax.Device],
    ) -> None:
        self.signature, self.plan = signature, plan
        self.stages, self.schedule = tuple(stages), schedule
        self._settings, self._is_new = program_settings_here(), True
        self.traced, self._split = split_step.whole, split_step
        self._donated = tuple(i for i, leaf in enumerate(split_step.step.inputs) if leaf.donated)
        self.pipeline_tasks = make_pipeline_tasks(stages, split_backward="weight_gradient" in schedule.kinds)
        self.tasks = self.pipeline_tasks.by_name
        self.links = link_tasks(self.pipeline_tasks, schedule)
        self._numbers = {key: self._output_numbers(items) for key, items in self.links.outputs.items()}
        self._inputs = StepInputs(
            split_step.step, self.pipeline_tasks, self.links.given, num_microbatches=schedule.num_microbatches
        )
        self.instructions = emit(
            schedule,
            self.links.specs,
            inputs=self.links.inputs,
            outputs=tuple(self.links.outputs),
            consumable=tuple(self.links.given),
        )
        self._processes = PipelineProcesses.of(self.stages)
        if self._processes.are_several:
            self.instructions = order_launches(self.instructions, self._processes.of_mesh)
        self._part = part_of(self.instructions, self._processes.of_mesh, jax.process_index())
        self._watch = _watch_on(self._processes)
        self._group = group_of(lambda: devices)
        self._words = "" if self._group is None else describe_run(signature.name, self.traced)
        # Neither holds the pipeline, so that one that is dropped goes at once, with its executables.
        shapes = functools.partial(_shapes_in, self.links, self._inputs)
        self._driver = Driver(
            self.instructions,
            self.links.callables,
            Transfers(self.links.targets, shapes, several_processes=self._processes.are_several),
            part=self._part,
            watch=None if self._watch is None else self._watch.look,
            lines=functools.partial(_lines_of, self.tasks),
        )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Run one step on arguments of the traced structure, shapes and types; ArgumentError names those that differ."""
        bound, leaves = check_leaves(self.signature, self.traced, args, kwargs)
        return deliver(bound, self.run(leaves))

    @functools.cached_property
    def in_shardings(self) -> dict[int, NamedSharding | SplitSharding]:
        """The sharding of each leaf of the step between steps, by number; leaves of the batch have none."""
        return leaf_shardings(self._split.inputs, self._inputs.places)

    @functools.cached_property
    def batch_places(self) -> dict[int, list[RowsPlace]]:
        """Return the places of each leaf of the batch, by number: one for each microbatch in each stage that reads the leaf."""
        found, held = self._inputs.rows_places(), self._split.inputs
        return {
            number: found.get(held[number].first, [])
            for number, leaf in enumerate(self.traced.inputs)
            if leaf.role == "batch" and not held[number].bounds
        }

    def run(self, leaves: Sequence[Given], *, record: bool = False) -> Any:
        """One step on the flat leaves of its arguments; results as a tree, each on the stage that made it."""
        if self._watch is not None:
            self._watch.refuse_if_lost()
        with RUNNING.take(self.signature.name), undisturbed(), under(self._settings):  # the first call lowers the tasks
            with refusing_together(self._group):
                refuse_consumed(self.signature.name, self.traced.input_paths(), leaves)
            if self._group is not None:
                self._group.meet(self._words)
            leaves, run = list(leaves), self._make_run()
            with telling_what_is_left(self.signature.name, self.traced.input_paths(), leaves):
                if self._watch is None:
                    with running(run, leaves):
                        flat = self._results(self._drive(run, leaves, record=record))
                else:
                    flat = self._run_with_others(run, leaves, self._watch, record=record)
            self._is_new = False
            reach("launched", run, flat)
        return jax.tree.unflatten(self.traced.out_tree, join_leaves(flat, self._split.outputs))

    def _make_run(self) -> StepRun:
        """Make the record of a call that is about to begin."""
        return StepRun(
            name=self.signature.name,
            plan=self.plan,
            standing=self._standing,
            compiled=self,
            is_first=self._is_new,
        )

    def _run_with_others(self, run: StepRun, leaves: list[Given], watch: Watch, *, record: bool) -> list[Any]:
        """Run a step of which other processes have stages. Every process gets the scalars, and hears of a failure."""
        try:
            with running(run, leaves):
                devices = self._processes.devices
                leaves = bring_leaves(leaves, self._split.inputs, self._inputs, devices=devices)
                flat = self._results(self._drive(run, leaves, record=record))
                step = self._split.step
                scalars = [n for n, x in enumerate(flat) if x.shape == () and step.state_of_output[n] is None]
                for n, x in zip(scalars, bring_here([flat[n] for n in scalars], devices), strict=True):
                    flat[n] = x
                watch.wait([flat[n] for n in scalars])
        except BaseException as error:
            watch.post(error)
            raise
        return flat

    def _drive(
        self, run: StepRun, leaves: Sequence[Given], *, record: bool
    ) -> dict[tuple[int, Value], list[jax.Array]]:
        """Drive the instructions on the leaves. Records a timeline if the caller or an observer of the run asks for one."""
        record = record or run.wants_timeline
        found = self._driver.run(self._supply(leaves), record=record)
        run.timeline = self._driver.timeline() if record else None
        return found

    def _supply(self, leaves: Sequence[Any]) -> dict[tuple[int, Value], list[Any]]:
        """Return the driver's inputs for the leaves of a call: stacks in pieces, and constants."""
        parts = [*cut_leaves(leaves, self._split.inputs), *self._split.step.constants]
        return self._inputs.supply(copy_repeated(parts, self._donated), self._part.meshes)

    def _results(self, found: Mapping[tuple[int, Value], Sequence[Any]]) -> list[Any]:
        """Return the outputs of the divided step. Outputs of stages on other processes have no shards here."""
        flat: list[Any] = [None] * len(self._split.step.outputs)
        for (mesh, value), items in self.links.outputs.items():
            arrays = found.get((mesh, value))
            if arrays is None:
                shapes = [self._inputs.shape_of(item, mesh) for item in items]
                arrays = [absent_like(shape, shape.sharding) for shape in shapes]
            for number, array in zip(self._numbers[mesh, value], arrays, strict=True):
                flat[number] = array
        return flat

    def _output_numbers(self, items: Sequence[Item]) -> tuple[int, ...]:
        """Return the number of each array among the outputs of the divided step."""
        numbers = []
        for stage, ref in items:
            number = self.stages[stage].program.outputs[ref.port].output if isinstance(ref, OutputRef) else None
            assert number is not None, f"{ref} of stage {stage} is no output of the step"
            numbers.append(number)
        return tuple(numbers)

    def _standing(self) -> list[str]:
        """Describe where each mesh of this process is in the step."""
        several = self._processes.are_several
        return self._driver.standing(
            lambda mesh: f" of process {min(self._processes.of_mesh[mesh])}" if several else ""
        )

    def executables(self, tasks: Collection[str] | None = None) -> dict[TaskName, jax.stages.Compiled]:
        """Return XLA's executable of every task, or of some `tasks`, compiled under JAX's settings at the time of tracing."""
        with undisturbed(), under(self._settings):
            return {name: task.executable for name, task in self.tasks.items() if tasks is None or str(name) in tasks}

    def lower(self, name: TaskName) -> jax.stages.Lowered:
        """Lower a task for XLA."""
        with undisturbed(), under(self._settings):
            return self.tasks[name].lower()

    def as_text(self) -> str:
        """Return the optimised HLO of every task, each under the name of the task."""
        return "\n\n".join(f"// {name}\n{executable.as_text()}" for name, executable in self.executables().items())

    def timeline(self) -> Timeline:
        """Return the timeline of the last run with `record=True`."""
        return self._driver.timeline()
