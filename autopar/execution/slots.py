"""The groups of arrays that tasks pass to each other, which are the slots of the runtime.

In: the tasks of a pipeline and its schedule. Out: `Links`: a `TaskSpec` and a callable for each task, the arrays that the driver
takes from outside, and those that it returns. A task has one slot for each task that it reads from, and one for each set of tasks
that read the same arrays of it. So a transfer is one call, and an instruction costs little. What can go wrong: a slot holds an
old version of its arrays. The sums of a loop are therefore one slot, read and written under one name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from autopar.compat import Var
from autopar.execution.contents import Content, Given, Lent, Made, Passed, Results, Rows, Source, Sums
from autopar.execution.pipeline_tasks import Item, PipelineTasks
from autopar.execution.special_values import run_checked
from autopar.execution.stage_tasks import StageTask
from autopar.execution.transfers import arrays_of, in_sharding
from autopar.program.task_name import TaskName
from autopar.schedules.instructions import Slot, SpecKind, TaskSpec, Value
from autopar.schedules.tasks import Schedule
from autopar.stages.tasks.ports import Source as PortSource
from autopar.stages.tasks.refs import AccumulatorRef, InputRef, OutputRef, Ref, RowRef, SendRef

Call = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes the arrays of each slot that a task reads; returns those of each slot that it writes, and the driver's witness."""
_Place = tuple[int, int]
"""An array among the slots of a task: the position of the slot, and the position within the slot."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays that travel together in this order. The runtime has one slot for them."""

    content: Content
    per_microbatch: bool
    items: tuple[Item, ...]

    @property
    def slot(self) -> Slot:
        """The slot of the runtime."""
        return Slot(str(self.content), self.per_microbatch)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Links:
    """The tasks in the form that the runtime takes.

    Attributes:
        specs: the slots that each task reads and writes.
        callables: the function of each task.
        given: the arrays that the driver takes from outside, by mesh and value.
        outputs: the arrays that the driver returns.
        groups: the arrays of every slot, by the name of the slot.
        targets: for slots that may travel, the shardings in which their readers want the arrays.
    """

    specs: tuple[TaskSpec, ...]
    callables: Mapping[str, Call]
    given: Mapping[tuple[int, Value], tuple[Item, ...]]
    outputs: Mapping[tuple[int, Value], tuple[Item, ...]]
    groups: Mapping[str, Group]
    targets: Mapping[str, Sequence[NamedSharding]]

    @property
    def inputs(self) -> dict[int, tuple[Value, ...]]:
        """The values that the driver takes from outside, by mesh."""
        found: dict[int, tuple[Value, ...]] = {}
        for mesh, value in self.given:
            found[mesh] = (*found.get(mesh, ()), value)
        return found


def link_tasks(tasks: PipelineTasks, schedule: Schedule) -> Links:
    """Give the tasks their slots. A stage without work for some kind of task in the schedule gets an empty task."""
    return _Linker(tasks, schedule).link()


class _Linker:
    """Gives every task its slots: one for each task that it reads from, and one for each set of tasks that reads from it."""

    def __init__(self, tasks: PipelineTasks, schedule: Schedule) -> None:
        self.tasks, self.schedule = tasks, schedule
        self.reads: dict[TaskName, list[Group]] = {name: [] for name in tasks.by_name}
        self.writes: dict[TaskName, list[Group]] = {name: [] for name in tasks.by_name}
        self.given: dict[tuple[int, Value], tuple[Item, ...]] = {}
        self.outputs: dict[tuple[int, Value], tuple[Item, ...]] = {}
        self.targets: dict[str, list[NamedSharding]] = {}

    def link(self) -> Links:
        for task in self.tasks.by_name.values():
            self._link_sums(task)
        self._link_operands()
        for task in self.tasks.by_name.values():
            self._link_results(task)
        names = sorted(self.tasks.by_name, key=lambda name: (name.kind == "update", name.level))
        specs = [self._spec(name) for name in names]
        callables = {str(name): self._callable(self.tasks.by_name[name]) for name in names}
        missing = self._missing(specs)
        return Links(
            specs=(*specs, *missing),
            callables={**callables, **{spec.name: _do_nothing for spec in missing}},
            given=self.given,
            outputs=self.outputs,
            groups={str(g.content): g for groups in (*self.reads.values(), *self.writes.values()) for g in groups},
            targets=self.targets,
        )

    def _spec(self, name: TaskName) -> TaskSpec:
        kind: SpecKind = "epilogue" if name.kind == "update" else name.kind
        inputs = tuple(group.slot for group in self.reads[name])
        outputs = tuple(group.slot for group in self.writes[name])
        donated = tuple(i for i, slot in enumerate(inputs) if slot in outputs)
        return TaskSpec(
            name=str(name),
            mesh=self.tasks.mesh_of(name.stage),
            kind=kind,
            stage=name.stage,
            inputs=inputs,
            outputs=outputs,
            donated=donated,
        )

    def _missing(self, specs: Iterable[TaskSpec]) -> list[TaskSpec]:
        """Make empty tasks for the parts of the schedule in which a stage has nothing to do."""
        have = {(spec.kind, spec.stage) for spec in specs}
        return [
            TaskSpec(
                name=str(TaskName(kind, stage)),
                mesh=self.tasks.mesh_of(stage),
                kind=kind,
                stage=stage,
                inputs=(),
                outputs=(),
            )
            for kind in self.schedule.kinds
            for stage in range(len(self.tasks.stages))
            if (kind, stage) not in have
        ]

    def _link_sums(self, task: StageTask) -> None:
        """Put the accumulators of a task of the loop in one slot, which the prologue fills and updates read."""
        name = task.name
        own = [ref for ref in task.writes if isinstance(ref, AccumulatorRef)] if name.in_loop else []
        if not own:
            return
        group = Group(Sums(name), per_microbatch=False, items=tuple((name.stage, ref) for ref in own))
        self.reads[name].append(group)
        self.writes[name].append(group)
        self.writes[TaskName("prologue", name.stage)].append(group)
        for other, reader in self.tasks.by_name.items():
            if other.stage == name.stage and other != name and any(ref in reader.reads for ref in own):
                self.reads[other].append(group)

    def _link_operands(self) -> None:
        """Put arrays of one source that the same tasks of a stage read in one slot, so that they move once for all of them."""
        readers: dict[tuple[int, Ref, NamedSharding], list[TaskName]] = {}
        for name, task in self.tasks.by_name.items():
            covered = {item for group in self.reads[name] for item in group.items}
            for ref in task.reads:
                if (name.stage, ref) not in covered:
                    readers.setdefault((name.stage, ref, task.in_shardings[ref]), []).append(name)
        shared: dict[Passed, list[tuple[Item, NamedSharding]]] = {}
        for (stage, ref, sharding), several in readers.items():
            source, item = self._source(stage, ref)
            shared.setdefault(Passed(source, tuple(several)), []).append((item, sharding))
        for content, found in shared.items():
            self._pass(content, [item for item, _ in found], [sharding for _, sharding in found])

    def _pass(self, content: Passed, items: Sequence[Item], shardings: Sequence[NamedSharding]) -> None:
        """Make a slot and give it to its source and its readers."""
        source = content.source
        repeated = source.task.in_loop if isinstance(source, Made) else items[0][1].per_microbatch
        group = Group(content, repeated, tuple(items))
        for name in content.readers:
            self.reads[name].append(group)
        self.targets[group.slot.name] = list(shardings)
        if isinstance(source, Made):
            self.writes[source.task].append(group)
            return
        home = source.stage if isinstance(source, Lent) else content.readers[0].stage
        for microbatch in range(self.schedule.num_microbatches) if repeated else [None]:
            self.given[self.tasks.mesh_of(home), Value(group.slot.name, microbatch)] = group.items

    def _source(self, stage: int, ref: Ref) -> tuple[Source, Item]:
        """Return the source of an array that a task of a stage reads, and the array's ref at the source."""
        program = self.tasks.stages[stage].program
        here = (stage, ref)
        if here in self.tasks.makers:
            return Made(self.tasks.makers[here]), here
        outside: Source = Rows() if ref.per_microbatch else Given()
        if not isinstance(ref, InputRef | RowRef) or ref.port >= len(program.inputs):
            return outside, here
        port = program.inputs[ref.port]
        if port.maker is not None:
            there = (port.maker.stage, self._output_of(port.maker.stage, port.var, port.source))
            return Made(self.tasks.makers[there]), there
        return (Lent(program.cut.homes[port.var]) if port.source == "lent" else outside), here

    def _output_of(self, stage: int, var: Var, source: PortSource) -> Ref:
        """Return the ref under which a stage writes a value that another stage reads."""
        ports = self.tasks.stages[stage].program.outputs
        number = next(i for i, port in enumerate(ports) if port.var is var and port.source == source)
        return SendRef(number) if source == "received" else OutputRef(number)

    def _link_results(self, task: StageTask) -> None:
        """Put the arrays that a task returns to the caller in one slot."""
        stage = task.name.stage
        ports = self.tasks.stages[stage].program.outputs
        returned = [ref for ref in task.writes if isinstance(ref, OutputRef) and ports[ref.port].output is not None]
        if returned:
            items = tuple((stage, ref) for ref in returned)
            group = Group(Results(task.name), per_microbatch=False, items=items)
            self.writes[task.name].append(group)
            self.outputs[self.tasks.mesh_of(stage), Value(group.slot.name)] = group.items

    def _callable(self, task: StageTask) -> Call:
        """Return the executable as a function of groups: it flattens the groups that it reads and splits what it writes."""
        name, count = task.name, self.schedule.num_microbatches
        come_as_lists = [group.per_microbatch and not name.in_loop for group in self.reads[name]]
        starts, position = [], 0
        for is_list in come_as_lists:
            starts.append(position)
            position += count if is_list else 1
        places: list[_Place | list[_Place]] = []
        for ref in task.reads:
            g, i = self._place(name, ref)
            places.append([(starts[g] + k, i) for k in range(count)] if come_as_lists[g] else (starts[g], i))
        numbers = {(name.stage, ref): i for i, ref in enumerate(task.writes)}
        splits = [[numbers[item] for item in group.items] for group in self.writes[name]]
        shardings = [task.in_shardings[ref] for ref in task.reads]
        run = task.run

        def call(groups: Sequence[Any]) -> Sequence[Any]:
            arrays = [arrays_of(group) for group in groups]
            operands = [
                in_sharding(arrays[place[0]][place[1]], sharding)
                if isinstance(place, tuple)
                else [in_sharding(arrays[g][i], sharding) for g, i in place]
                for place, sharding in zip(places, shardings, strict=True)
            ]
            results = run_checked(str(name), run, operands)
            return [*([results[i] for i in split] for split in splits), results[-1]]

        return call

    def _place(self, name: TaskName, ref: Ref) -> _Place:
        """Return the position, among the task's slots, of an array that it reads."""
        source, item = self._source(name.stage, ref)
        for g, group in enumerate(self.reads[name]):
            if isinstance(group.content, Sums) or (
                isinstance(group.content, Passed) and group.content.source == source
            ):
                for i, found in enumerate(group.items):
                    if found in ((name.stage, ref), item):
                        return g, i
        raise AssertionError(f"{name} reads {ref}, which no slot holds")


def _do_nothing(groups: Sequence[Any]) -> Sequence[Any]:
    return ()
