"""A planned pipeline as something that runs: one driver thread per mesh, state that stays on its stage.

In: the stages' programs, assignments and devices, a schedule. Out: a `CompiledPipeline`, called with the step's flat leaves.
Tasks exchange groups of arrays: what one task makes for another is one `Value`, so that a transfer is one call and an
instruction costs little. What can go wrong: an executable fails on one mesh; the runtime stops all and names it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.compat import Var
from autopar.compile import checked_leaves, device_mesh, gathered, refuse_consumed
from autopar.errors import ArgumentError
from autopar.pipeline_plan import PipelinePlan
from autopar.pipeline_planner import schedule_of
from autopar.runtime.driver import Driver
from autopar.runtime.emit import emit
from autopar.runtime.instructions import Slot, TaskSpec, Value
from autopar.runtime.launch_order import in_launch_order, part_of
from autopar.runtime.processes import absent_like, are_here, from_host, is_global
from autopar.runtime.resharding import BatchResharder, brought_here, reshard
from autopar.runtime.routes import Move
from autopar.runtime.schedules import Schedule
from autopar.runtime.watch import Watch
from autopar.split_array import SplitArray, SplitSharding, held_in, in_pieces, joined
from autopar.split_scans import SplitStep
from autopar.spmd import Assignment, partition_spec
from autopar.stage_program import PROLOGUE, StageProgram
from autopar.staging import Staged
from autopar.task_cuts import Ref
from autopar.tasks import StageTask, stage_tasks
from autopar.trace import CallSignature, TracedStep

MADE_ONCE = (PROLOGUE, "update")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStage:
    """A stage with its layouts and the mesh of devices that it runs on, `mesh` its number."""

    program: StageProgram
    assignment: Assignment
    device_mesh: jax.sharding.Mesh
    mesh: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """A task of some stage, by its unique name."""

    stage: int
    task: StageTask

    @property
    def kind(self) -> str:
        return self.task.name.split()[0]

    @property
    def in_loop(self) -> bool:
        return self.kind not in MADE_ONCE


@dataclasses.dataclass(frozen=True)
class _Group:
    """Arrays that travel together: a slot of the runtime, and the refs in it in order."""

    slot: Slot
    refs: tuple[tuple[int, Ref], ...]


def compile_pipeline(
    signature: CallSignature,
    traced: TracedStep,
    staged: Staged,
    plan: PipelinePlan,
    devices: Sequence[jax.Device],
) -> CompiledPipeline:
    """A planned pipeline on devices; ArgumentError if there are too few."""
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
        for stage, where in zip(staged.stages, plan.stages, strict=True)
    ]
    return CompiledPipeline(signature, plan, stages, schedule, split_step=staged.split)


class CompiledPipeline:
    """A step compiled into pipeline stages. Calling it runs one step; results stay on the stages that make them."""

    def __init__(
        self,
        signature: CallSignature,
        plan: PipelinePlan,
        stages: Sequence[PlannedStage],
        schedule: Schedule,
        *,
        split_step: SplitStep,
    ) -> None:
        self.signature, self.plan = signature, plan
        self.stages, self.schedule = tuple(stages), schedule
        self.traced, self._split = split_step.whole, split_step
        split = "weight_gradient" in schedule.kinds
        self.nodes = {
            task.name: _Node(s, task)
            for s, stage in enumerate(stages)
            for task in stage_tasks(
                stage.program, stage.assignment, stage.device_mesh, split_backward=split, kept=self._lent_on(stage.mesh)
            )
        }
        self._makers = {
            (node.stage, ref): name
            for name, node in self.nodes.items()
            for ref in node.task.writes
            if not (ref.kind == "accumulator" and node.kind == PROLOGUE)
        }
        self._makers |= {
            (node.stage, ref): name
            for name, node in self.nodes.items()
            for ref in node.task.writes
            if (node.stage, ref) not in self._makers
        }
        self._linked = _Linker(self).link()
        self._resharders: dict[str, BatchResharder] = {}
        specs = self._linked.specs
        self.instructions = emit(
            schedule,
            specs,
            inputs=self._linked.inputs,
            outputs=tuple(self._linked.outputs),
            consumable=[(mesh, value) for mesh, values in self._linked.inputs.items() for value in values],
        )
        self._processes = _Processes.of(self.stages)
        if self._processes.several:
            self.instructions = in_launch_order(self.instructions, self._processes.of_mesh)
        self._part = part_of(self.instructions, self._processes.of_mesh, jax.process_index())
        self._watch = Watch(self._processes.all) if self._processes.several else None
        self._driver = Driver(
            self.instructions,
            self._linked.callables,
            self._transfer,
            part=self._part,
            watch=None if self._watch is None else self._watch.look,
        )

    def _lent_on(self, mesh: int) -> frozenset[Var]:
        """Leaves that updates on a mesh are lent by any stage; what the loop is lent it has read before the updates."""
        found: set[Var] = set()
        for program in (stage.program for stage in self.stages if stage.mesh == mesh):
            updates = [piece for piece in program.cut.of_stage(program.stage) if piece.name.kind == "update"]
            late = program.cut.loop.leaves_of([v for piece in updates for v in piece.reads])
            found |= {port.var for port in program.inputs if port.source == "lent" and port.var in late}
        return frozenset(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on arguments of the traced structure, shapes and types; ArgumentError names those that differ."""
        return self.run(checked_leaves(self.signature, self.traced, args, kwargs))

    @functools.cached_property
    def in_shardings(self) -> dict[int, NamedSharding | SplitSharding]:
        """Where each leaf of the step lives between steps, by number; leaves of the batch have no such place."""
        return held_in(self._split.inputs, self._places)

    @functools.cached_property
    def _places(self) -> dict[int, NamedSharding]:
        """Where each leaf of the divided step lives between steps."""
        places: dict[int, NamedSharding] = {}
        numbers = {v: i for i, v in enumerate(self._split.step.program.invars)}
        for stage in self.stages:
            for i, port in enumerate(stage.program.inputs):
                if port.source == "leaf":
                    spec = partition_spec(stage.assignment.inputs[i], stage.assignment.mesh)
                    places.setdefault(numbers[port.var], NamedSharding(stage.device_mesh, spec))
        return places

    def run(self, leaves: Sequence[Any], *, record: bool = False) -> Any:
        """One step on the flat leaves of its arguments; results as a tree, each on the stage that made it."""
        if self._watch is not None:
            self._watch.refuse_if_lost()
        refuse_consumed(self.signature.name, self.traced, leaves)
        if self._watch is None:
            flat = self._results(self._driver.run(self._supplied(self._leaves(leaves)), record=record))
        else:
            flat = self._run_with_others(leaves, self._watch, record=record)
        return jax.tree.unflatten(self.traced.out_tree, joined(flat, self._split.outputs))

    def _run_with_others(self, leaves: Sequence[Any], watch: Watch, *, record: bool) -> list[Any]:
        """The same where other processes have stages; scalars come to each of them, and a failure is told to all."""
        try:
            supplied = self._supplied(self._leaves(self._brought(leaves)))
            flat = self._results(self._driver.run(supplied, record=record))
            step, devices = self._split.step, self._processes.devices
            scalars = [n for n, x in enumerate(flat) if x.shape == () and step.state_of_output[n] is None]
            for n, x in zip(scalars, brought_here([flat[n] for n in scalars], devices), strict=True):
                flat[n] = x
            watch.wait([flat[n] for n in scalars])
        except BaseException as error:
            watch.post(error)
            raise
        return flat

    def _results(self, found: Mapping[tuple[int, Value], Sequence[Any]]) -> list[Any]:
        """The outputs of the divided step; those of stages elsewhere without shards."""
        flat: list[Any] = [None] * len(self._split.step.outputs)
        for (mesh, value), refs in self._linked.outputs.items():
            arrays = found.get((mesh, value))
            if arrays is None:
                shapes = [self._shape_of(stage, ref, mesh) for stage, ref in refs]
                arrays = [absent_like(shape, shape.sharding) for shape in shapes]
            for (stage, ref), array in zip(refs, arrays, strict=True):
                number = self.stages[stage].program.outputs[ref.key].output
                if number is not None:
                    flat[number] = array
        return flat

    def _brought(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a call as every process can take them apart: arrays that lie elsewhere than they are wanted come here.

        What is done depends on shardings alone, which are the same in every process.
        """
        ready = [self._lies_well(n, leaf) for n, leaf in enumerate(leaves)]
        moving = [leaf for leaf, is_ready in zip(leaves, ready, strict=True) if not is_ready]
        moved = iter(gathered(moving, self._processes.devices))
        return [leaf if is_ready else next(moved) for leaf, is_ready in zip(leaves, ready, strict=True)]

    def _lies_well(self, number: int, leaf: Any) -> bool:
        """Whether a leaf is a host value, or all its parts are where every task wants them."""
        pieces = self._split.inputs[number]
        if isinstance(leaf, SplitArray):
            parts = leaf.pieces if (leaf.dim, leaf.bounds) == (pieces.dim, pieces.bounds) else ()
        else:
            parts = () if pieces.bounds else (leaf,)
            if not is_global(leaf):
                return True
        return bool(parts) and all(
            wanted is not None and part.sharding.is_equivalent_to(wanted, part.ndim)
            for k, part in enumerate(parts)
            for wanted in self._wanted[pieces.first + k]
        )

    @functools.cached_property
    def _wanted(self) -> dict[int, list[NamedSharding | None]]:
        """The shardings in which the runtime is handed each leaf of the divided step; None for slices of it."""
        numbers = {v: i for i, v in enumerate(self._split.step.program.invars)}
        wanted: dict[int, list[NamedSharding | None]] = {number: [] for number in numbers.values()}
        for (mesh, _), refs in self._linked.given.items():
            for stage, ref in refs:
                ports = self.stages[stage].program.inputs
                if ref.kind in ("input", "row") and ref.key < len(ports):
                    sharding = self._sharding_given(stage, ref, mesh) if ref.kind == "input" else None
                    wanted[numbers[ports[ref.key].var]].append(sharding)
        return wanted

    def _shape_of(self, stage: int, ref: Ref, mesh: int) -> Any:
        """Shape, type and sharding of what a task on a mesh makes, or of what the runtime is handed there."""
        if (stage, ref) in self._makers:
            return self.nodes[self._makers[stage, ref]].task.results[ref]
        aval = self.stages[stage].program.inputs[ref.key].var.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=self._sharding_given(stage, ref, mesh))

    def as_text(self) -> str:
        """The optimised HLO of every task, under its name."""
        return "\n\n".join(f"// {name}\n{node.task.as_text()}" for name, node in self.nodes.items())

    def timeline(self) -> Any:
        """The timeline of the last run with `record=True`."""
        return self._driver.timeline()

    def _leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the divided step: those of a call, stacks in pieces, and constants."""
        return [*in_pieces(leaves, self._split.inputs), *self._split.step.constants]

    def _supplied(self, leaves: Sequence[Any]) -> dict[tuple[int, Value], Any]:
        """The driver's inputs: every leaf where it is read, the batch in slices; all copies are one call."""
        step = self._split.step
        by_var = dict(zip(step.program.invars, leaves, strict=True))
        donated = {v for v, leaf in zip(step.program.invars, step.inputs, strict=True) if leaf.donated}
        arrays: list[Any] = []
        shardings: list[Any] = []
        copied: list[bool] = []
        shape: list[tuple[tuple[int, Value], int]] = []
        for (mesh, value), refs in self._linked.given.items():
            if mesh not in self._part.meshes:
                continue
            for stage, ref in refs:
                arrays.append(self._given(stage, ref, value.microbatch, by_var))
                ports = self.stages[stage].program.inputs
                copied.append(ref.kind == "input" and ref.key < len(ports) and ports[ref.key].var in donated)
                shardings.append(self._sharding_given(stage, ref, mesh))
            shape.append(((mesh, value), len(refs)))
        placed = iter(_placed(arrays, shardings, copied))
        return {key: [next(placed) for _ in range(count)] for key, count in shape}

    def _given(self, stage: int, ref: Ref, microbatch: int | None, by_var: Mapping[Var, Any]) -> Any:
        program = self.stages[stage].program
        if ref.kind == "number":
            return np.int32(microbatch or 0)
        if ref.key >= len(program.inputs):
            return program.step.constants[ref.key - len(program.inputs)]
        leaf = by_var[program.inputs[ref.key].var]
        if ref.kind == "row":
            count = self.schedule.num_microbatches
            rows = leaf.shape[0] // count
            return leaf[(microbatch or 0) * rows : ((microbatch or 0) + 1) * rows]
        return leaf

    def _sharding_given(self, stage: int, ref: Ref, mesh: int) -> NamedSharding:
        """Where the runtime is handed an array: where its reader wants it, or, if that is another mesh, where it lives."""
        planned = self.stages[stage]
        if planned.mesh == mesh:
            for name, node in self.nodes.items():
                if node.stage == stage and ref in node.task.in_shardings:
                    return self.nodes[name].task.in_shardings[ref]
        var = planned.program.inputs[ref.key].var
        numbers = {v: i for i, v in enumerate(self._split.step.program.invars)}
        return self._places[numbers[var]]

    def _transfer(self, arrays: Any, value: Value, source_mesh: int, target_mesh: int) -> Any:
        name = value.name
        arrays = arrays.arrays() if isinstance(arrays, _Parcel) else arrays
        if name not in self._resharders:
            self._resharders[name] = BatchResharder(self._moves(name, arrays, source_mesh))
        resharder = self._resharders[name]
        if arrays is None:
            arrays = [move.absent() for move in resharder.moves]
        return _Parcel(resharder, resharder.send(arrays))

    def _moves(self, name: str, arrays: Sequence[Any] | None, source_mesh: int) -> list[Move]:
        """What a transfer moves; where several processes take part, from what all of them know."""
        targets = self._linked.targets[name]
        if arrays is not None and not self._processes.several:
            return [Move.of(x, target) for x, target in zip(arrays, targets, strict=True)]
        shapes = [self._shape_of(stage, ref, source_mesh) for stage, ref in self._linked.carried[name]]
        return [Move(x.shape, x.dtype, x.sharding, target) for x, target in zip(shapes, targets, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Processes:
    """Which processes have devices of each mesh."""

    of_mesh: tuple[frozenset[int], ...]
    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, stages: Sequence[PlannedStage]) -> _Processes:
        devices: dict[int, Any] = {stage.mesh: stage.device_mesh.devices for stage in stages}
        found = tuple(frozenset(d.process_index for d in devices[mesh].flat) for mesh in sorted(devices))
        return cls(found, tuple(d for mesh in sorted(devices) for d in devices[mesh].flat))

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted(frozenset().union(*self.of_mesh)))

    @property
    def several(self) -> bool:
        return len(self.all) > 1


class _Parcel:
    """Arrays under way; the receiving mesh's thread finishes the transfer, once."""

    def __init__(self, resharder: BatchResharder, sent: Any) -> None:
        self._resharder, self._sent = resharder, sent
        self._arrays: list[Any] | None = None

    def arrays(self) -> list[Any]:
        """The arrays on the receiving mesh."""
        if self._arrays is None:
            self._arrays = self._resharder.receive(self._sent)
            self._sent = None
        return self._arrays


@dataclasses.dataclass(frozen=True, eq=False)
class _Links:
    specs: list[TaskSpec]
    callables: dict[str, Callable[[Sequence[Any]], Sequence[Any]]]
    inputs: dict[int, tuple[Value, ...]]
    given: dict[tuple[int, Value], tuple[tuple[int, Ref], ...]]
    outputs: dict[tuple[int, Value], tuple[tuple[int, Ref], ...]]
    targets: dict[str, list[NamedSharding]]
    carried: dict[str, tuple[tuple[int, Ref], ...]]


class _Linker:
    """Gives every task its slots: one per task that it reads from, and one for each that reads from it."""

    def __init__(self, pipeline: CompiledPipeline) -> None:
        self.pipeline = pipeline
        self.nodes = pipeline.nodes
        self.meshes = [stage.mesh for stage in pipeline.stages]
        self.reads: dict[str, list[_Group]] = {name: [] for name in self.nodes}
        self.writes: dict[str, list[_Group]] = {name: [] for name in self.nodes}
        self.given: dict[tuple[int, Value], tuple[tuple[int, Ref], ...]] = {}
        self.outputs: dict[tuple[int, Value], tuple[tuple[int, Ref], ...]] = {}
        self.targets: dict[str, list[NamedSharding]] = {}
        self.carried: dict[str, tuple[tuple[int, Ref], ...]] = {}

    def link(self) -> _Links:
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
        inputs: dict[int, list[Value]] = {}
        for mesh, value in self.given:
            inputs.setdefault(mesh, []).append(value)
        return _Links(
            specs,
            callables,
            {mesh: tuple(values) for mesh, values in inputs.items()},
            self.given,
            self.outputs,
            self.targets,
            self.carried,
        )

    def _ordered(self) -> list[tuple[str, _Node]]:
        """Updates last, by level; for the others the order does not matter."""

        def key(item: tuple[str, _Node]) -> tuple[int, int]:
            name, node = item
            level = int(name.rpartition(".")[2]) if node.kind == "update" else 0
            return (node.kind == "update", level)

        return sorted(self.nodes.items(), key=key)

    def _spec(self, name: str, node: _Node) -> TaskSpec:
        kind: Any = {PROLOGUE: "prologue", "update": "epilogue"}.get(node.kind, node.kind)
        inputs = tuple(group.slot for group in self.reads[name])
        outputs = tuple(group.slot for group in self.writes[name])
        donated = tuple(i for i, slot in enumerate(inputs) if slot in outputs)
        return TaskSpec(name, self.meshes[node.stage], kind, node.stage, inputs, outputs, donated)

    def _missing(self, specs: Sequence[TaskSpec]) -> list[TaskSpec]:
        """Tasks of the schedule for which a stage has nothing to do."""
        have = {(spec.kind, spec.stage) for spec in specs}
        return [
            TaskSpec(f"{kind} {stage}", self.meshes[stage], kind, stage, (), ())
            for kind in self.pipeline.schedule.kinds
            for stage in range(len(self.meshes))
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
            covered = {item for group in self.reads[name] for item in group.refs}
            for ref in node.task.reads:
                if (node.stage, ref) not in covered:
                    readers.setdefault((node.stage, ref, node.task.in_shardings[ref]), []).append(name)
        shared: dict[tuple[str, tuple[str, ...]], list[tuple[tuple[int, Ref], Ref, NamedSharding]]] = {}
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
            self.carried[slot.name] = group.refs
            if source in self.nodes:
                self.writes[source].append(group)
            else:
                self._supply(group, source, self.nodes[names[0]], [ref for _, ref, _ in found])

    def _is_repeated(self, source: str, ref: Ref) -> bool:
        return self.nodes[source].in_loop if source in self.nodes else ref.per_microbatch

    def _source(self, node: _Node, ref: Ref) -> tuple[str, tuple[int, Ref]]:
        """Who makes what a task reads: (a task's name, or where the caller's arrays are handed in; the ref there)."""
        program = self.pipeline.stages[node.stage].program
        here = (node.stage, ref)
        if here in self.pipeline._makers:
            return self.pipeline._makers[here], here
        if ref.kind not in ("input", "row") or ref.key >= len(program.inputs):
            return ("rows" if ref.per_microbatch else "given"), here
        port = program.inputs[ref.key]
        if port.source in ("received", "exchanged"):
            assert port.piece is not None
            there = (port.piece.stage, self._output_of(port.piece.stage, port.var, port.source))
            return self.pipeline._makers[there], there
        if port.source == "lent":
            return f"lent by {program.cut.homes[port.var]}", here
        return ("rows" if ref.per_microbatch else "given"), here

    def _output_of(self, stage: int, var: Var, source: str) -> Ref:
        """The ref under which a stage returns a value that another one reads."""
        ports = self.pipeline.stages[stage].program.outputs
        number = next(i for i, port in enumerate(ports) if port.var is var and port.source == source)
        return Ref("send", number, True) if source == "received" else Ref("output", number)

    def _supply(self, group: _Group, source: str, node: _Node, refs: Sequence[Ref]) -> None:
        home = int(source.removeprefix("lent by ")) if source.startswith("lent") else node.stage
        microbatches = range(self.pipeline.schedule.num_microbatches) if group.slot.per_microbatch else [None]
        for microbatch in microbatches:
            key = (self.meshes[home], Value(group.slot.name, microbatch))
            self.given[key] = tuple((node.stage, ref) for ref in refs)

    def _results(self, name: str) -> None:
        """What a task returns to the caller."""
        node = self.nodes[name]
        ports = self.pipeline.stages[node.stage].program.outputs
        refs = [ref for ref in node.task.writes if ref.kind == "output" and ports[ref.key].output is not None]
        if refs:
            group = _Group(Slot(f"results of {name}", per_microbatch=False), tuple((node.stage, ref) for ref in refs))
            self.writes[name].append(group)
            self.outputs[self.meshes[node.stage], Value(group.slot.name)] = group.refs

    def _callable(self, name: str, node: _Node) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The executable between groups: flatten what is read, split what is written."""
        places: list[Any] = []
        count = self.pipeline.schedule.num_microbatches
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
        splits = [[numbers[item] for item in group.refs] for group in self.writes[name]]
        shardings = [node.task.in_shardings[ref] for ref in node.task.reads]
        run = node.task.run

        def call(groups: Sequence[Any]) -> Sequence[Any]:
            arrays = [g.arrays() if isinstance(g, _Parcel) else g for g in groups]
            operands = [
                _there(arrays[place[0]][place[1]], sharding)
                if isinstance(place, tuple)
                else [_there(arrays[g][i], sharding) for g, i in place]
                for place, sharding in zip(places, shardings, strict=True)
            ]
            results = run(*operands)
            return [*([results[i] for i in split] for split in splits), results[-1]]

        return call

    def _place(self, name: str, node: _Node, ref: Ref) -> tuple[int, int]:
        wanted = {(node.stage, ref)}
        source, item = self._source(node, ref)
        wanted.add(item)
        for g, group in enumerate(self.reads[name]):
            if group.slot.name.startswith("sums of") or group.slot.name.startswith(f"{source} >"):
                for i, found in enumerate(group.refs):
                    if found in wanted:
                        return g, i
        raise AssertionError(f"{name} reads {ref}, which no slot holds")


def _there(array: Any, sharding: NamedSharding) -> Any:
    """The array in the sharding that an executable wants; between stages on one mesh they may differ."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.device_put(array, sharding) if are_here(sharding.device_set) else reshard(array, sharding)


def _placed(arrays: Sequence[Any], shardings: Sequence[NamedSharding], copied: Sequence[bool]) -> list[Any]:
    """Arrays where they are wanted, in one call for all that are not there yet.

    Those that the step donates are `copied` first: `device_put` may share the caller's buffer, and donation would take that.
    """
    result: list[Any] = list(arrays)
    moving = []
    for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        given = getattr(array, "sharding", None)
        if isinstance(given, NamedSharding) and given.is_equivalent_to(sharding, array.ndim):
            continue
        if are_here(sharding.device_set):
            moving.append(i)
        else:
            result[i] = from_host(array, sharding)
    sources = [arrays[i].copy() if copied[i] and isinstance(arrays[i], jax.Array) else arrays[i] for i in moving]
    moved = jax.device_put(sources, [shardings[i] for i in moving])
    for i, array in zip(moving, moved, strict=True):
        result[i] = array
    return result
