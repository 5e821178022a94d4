"""Which groups of arrays tasks hand to each other: the slots by which the runtime knows them.

In: the tasks of a pipeline and the schedule's kinds of work. Out: `Links`: a `TaskSpec` and a callable for each task, what the
driver is handed from outside and what it returns. The idea: a task has one slot per task that it reads from, and one for each set
of tasks that read the same of it; so a transfer is one call and an instruction costs little. What can go wrong: a slot that is
not the latest version of what it holds; a loop's sums are therefore one slot, read and written under one name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from autopar.compat import Var
from autopar.execution.pipeline_tasks import Item, Node, PipelineTasks
from autopar.execution.transfers import opened, there
from autopar.schedules.instructions import Slot, TaskSpec, Value
from autopar.schedules.tasks import Schedule
from autopar.stages.tasks.cuts import Ref
from autopar.stages.tasks.stage_program import PROLOGUE


@dataclasses.dataclass(frozen=True)
class _Group:
    """Arrays that travel together: a slot of the runtime, and the arrays in it in order."""

    slot: Slot
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Links:
    """The tasks as the runtime knows them.

    `given`: what the driver is handed, by mesh and value; `outputs`: what it returns. By slots that may travel: `targets`, the
    shardings in which their readers want the arrays, and `carried`, the arrays.
    """

    specs: tuple[TaskSpec, ...]
    callables: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]]
    given: Mapping[tuple[int, Value], tuple[Item, ...]]
    outputs: Mapping[tuple[int, Value], tuple[Item, ...]]
    targets: Mapping[str, Sequence[NamedSharding]]
    carried: Mapping[str, tuple[Item, ...]]

    @property
    def inputs(self) -> dict[int, tuple[Value, ...]]:
        """The values that the driver is handed, by mesh."""
        found: dict[int, tuple[Value, ...]] = {}
        for mesh, value in self.given:
            found[mesh] = (*found.get(mesh, ()), value)
        return found


def linked(tasks: PipelineTasks, schedule: Schedule) -> Links:
    """The tasks with their slots; a stage that has nothing to do in some kind of the schedule's work gets an empty task."""
    return _Linker(tasks, schedule).link()


class _Linker:
    """Gives every task its slots: one per task that it reads from, and one for each that reads from it."""

    def __init__(self, tasks: PipelineTasks, schedule: Schedule) -> None:
        self.tasks, self.nodes, self.schedule = tasks, tasks.nodes, schedule
        self.reads: dict[str, list[_Group]] = {name: [] for name in self.nodes}
        self.writes: dict[str, list[_Group]] = {name: [] for name in self.nodes}
        self.given: dict[tuple[int, Value], tuple[Item, ...]] = {}
        self.outputs: dict[tuple[int, Value], tuple[Item, ...]] = {}
        self.targets: dict[str, list[NamedSharding]] = {}
        self.carried: dict[str, tuple[Item, ...]] = {}

    def link(self) -> Links:
        for name in self.nodes:
            self._accumulators(name)
        self._operands()
        for name in self.nodes:
            self._results(name)
        specs, callables = [], {}
        for name, node in self._ordered():
            specs.append(self._spec(name, node))
            callables[name] = self._callable(name, node)
        for spec in self._missing(specs):
            specs.append(spec)
            callables[spec.name] = lambda arrays: ()
        return Links(tuple(specs), callables, self.given, self.outputs, self.targets, self.carried)

    def _ordered(self) -> list[tuple[str, Node]]:
        """Updates last, by level; for the others the order does not matter."""

        def key(item: tuple[str, Node]) -> tuple[int, int]:
            name, node = item
            level = int(name.rpartition(".")[2]) if node.kind == "update" else 0
            return (node.kind == "update", level)

        return sorted(self.nodes.items(), key=key)

    def _spec(self, name: str, node: Node) -> TaskSpec:
        kind: Any = {PROLOGUE: "prologue", "update": "epilogue"}.get(node.kind, node.kind)
        inputs = tuple(group.slot for group in self.reads[name])
        outputs = tuple(group.slot for group in self.writes[name])
        donated = tuple(i for i, slot in enumerate(inputs) if slot in outputs)
        return TaskSpec(
            name=name,
            mesh=self.tasks.mesh_of(node.stage),
            kind=kind,
            stage=node.stage,
            inputs=inputs,
            outputs=outputs,
            donated=donated,
        )

    def _missing(self, specs: Sequence[TaskSpec]) -> list[TaskSpec]:
        """Tasks of the schedule for which a stage has nothing to do."""
        have = {(spec.kind, spec.stage) for spec in specs}
        return [
            TaskSpec(
                name=f"{kind} {stage}",
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

    def _accumulators(self, name: str) -> None:
        """A task of the loop keeps its accumulators in one slot, which the prologue fills and updates read."""
        node = self.nodes[name]
        own = [ref for ref in node.task.writes if ref.kind == "accumulator"] if node.in_loop else []
        if not own:
            return
        group = _Group(Slot(f"sums of {name}", per_microbatch=False), tuple((node.stage, ref) for ref in own))
        self.reads[name].append(group)
        self.writes[name].append(group)
        start = f"{PROLOGUE} {node.stage}"
        self.writes[start].append(group)
        for other, reader in self.nodes.items():
            if reader.stage == node.stage and other != name and any(ref in reader.task.reads for ref in own):
                self.reads[other].append(group)

    def _operands(self) -> None:
        """What the same tasks of a stage read of the same source is one slot, so that it is moved once for all of them."""
        readers: dict[tuple[int, Ref, NamedSharding], list[str]] = {}
        for name, node in self.nodes.items():
            covered = {item for group in self.reads[name] for item in group.items}
            for ref in node.task.reads:
                if (node.stage, ref) not in covered:
                    readers.setdefault((node.stage, ref, node.task.in_shardings[ref]), []).append(name)
        shared: dict[tuple[str, tuple[str, ...]], list[tuple[Item, Ref, NamedSharding]]] = {}
        for (_, ref, sharding), several in readers.items():
            source, item = self._source(self.nodes[several[0]], ref)
            shared.setdefault((source, tuple(several)), []).append((item, ref, sharding))
        for (source, names), found in shared.items():
            repeated = self._is_repeated(source, found[0][0][1])
            slot = Slot(f"{source} > {', '.join(names)}", per_microbatch=repeated)
            group = _Group(slot, tuple(item for item, _, _ in found))
            for name in names:
                self.reads[name].append(group)
            self.targets[slot.name] = [sharding for _, _, sharding in found]
            self.carried[slot.name] = group.items
            if source in self.nodes:
                self.writes[source].append(group)
            else:
                self._supply(group, source, self.nodes[names[0]], [ref for _, ref, _ in found])

    def _is_repeated(self, source: str, ref: Ref) -> bool:
        return self.nodes[source].in_loop if source in self.nodes else ref.per_microbatch

    def _source(self, node: Node, ref: Ref) -> tuple[str, Item]:
        """Who makes what a task reads: (a task's name, or where the caller's arrays are handed in; the ref there)."""
        program = self.tasks.stages[node.stage].program
        here = (node.stage, ref)
        if here in self.tasks.makers:
            return self.tasks.makers[here], here
        if ref.kind not in ("input", "row") or ref.key >= len(program.inputs):
            return ("rows" if ref.per_microbatch else "given"), here
        port = program.inputs[ref.key]
        if port.source in ("received", "exchanged"):
            assert port.piece is not None
            there = (port.piece.stage, self._output_of(port.piece.stage, port.var, port.source))
            return self.tasks.makers[there], there
        if port.source == "lent":
            return f"lent by {program.cut.homes[port.var]}", here
        return ("rows" if ref.per_microbatch else "given"), here

    def _output_of(self, stage: int, var: Var, source: str) -> Ref:
        """The ref under which a stage returns a value that another one reads."""
        ports = self.tasks.stages[stage].program.outputs
        number = next(i for i, port in enumerate(ports) if port.var is var and port.source == source)
        return Ref("send", number, True) if source == "received" else Ref("output", number)

    def _supply(self, group: _Group, source: str, node: Node, refs: Sequence[Ref]) -> None:
        home = int(source.removeprefix("lent by ")) if source.startswith("lent") else node.stage
        microbatches = range(self.schedule.num_microbatches) if group.slot.per_microbatch else [None]
        for microbatch in microbatches:
            key = (self.tasks.mesh_of(home), Value(group.slot.name, microbatch))
            self.given[key] = tuple((node.stage, ref) for ref in refs)

    def _results(self, name: str) -> None:
        """What a task returns to the caller."""
        node = self.nodes[name]
        ports = self.tasks.stages[node.stage].program.outputs
        refs = [ref for ref in node.task.writes if ref.kind == "output" and ports[ref.key].output is not None]
        if refs:
            group = _Group(Slot(f"results of {name}", per_microbatch=False), tuple((node.stage, ref) for ref in refs))
            self.writes[name].append(group)
            self.outputs[self.tasks.mesh_of(node.stage), Value(group.slot.name)] = group.items

    def _callable(self, name: str, node: Node) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The executable between groups: flatten what is read, split what is written."""
        places: list[Any] = []
        count = self.schedule.num_microbatches
        starts, position = [], 0
        for group in self.reads[name]:
            starts.append(position)
            position += count if group.slot.per_microbatch and not node.in_loop else 1
        for ref in node.task.reads:
            g, i = self._place(name, node, ref)
            group = self.reads[name][g]
            if group.slot.per_microbatch and not node.in_loop:
                places.append([(starts[g] + k, i) for k in range(count)])
            else:
                places.append((starts[g], i))
        numbers = {(node.stage, ref): i for i, ref in enumerate(node.task.writes)}
        splits = [[numbers[item] for item in group.items] for group in self.writes[name]]
        shardings = [node.task.in_shardings[ref] for ref in node.task.reads]
        run = node.task.run

        def call(groups: Sequence[Any]) -> Sequence[Any]:
            arrays = [opened(group) for group in groups]
            operands = [
                there(arrays[place[0]][place[1]], sharding)
                if isinstance(place, tuple)
                else [there(arrays[g][i], sharding) for g, i in place]
                for place, sharding in zip(places, shardings, strict=True)
            ]
            results = run(*operands)
            return [*([results[i] for i in split] for split in splits), results[-1]]

        return call

    def _place(self, name: str, node: Node, ref: Ref) -> tuple[int, int]:
        wanted = {(node.stage, ref)}
        source, item = self._source(node, ref)
        wanted.add(item)
        for g, group in enumerate(self.reads[name]):
            if group.slot.name.startswith("sums of") or group.slot.name.startswith(f"{source} >"):
                for i, found in enumerate(group.items):
                    if found in wanted:
                        return g, i
        raise AssertionError(f"{name} reads {ref}, which no slot holds")
