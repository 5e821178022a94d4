"""A planned stage cut into tasks: which operation runs in which, what each reads and writes, and how that lies in between.

In: a `StageProgram` and the `Assignment` that planning chose for it. Out: `TaskCut`s: the prologue, forward and backward of a
microbatch, updates. Each has its equations and, for every array that passes between tasks, a `Ref` that says what it is, and
its layout. All layouts are those of the one plan, so what the planner priced between forward and backward is what happens
between the tasks. What can go wrong: an operation without a task of its own (a fan_out that the program needed); it runs where
its result is first read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import jax

from autopar.avals import Aval
from autopar.compat import Literal, Var
from autopar.intra_op.lowering.assignment import Assignment
from autopar.layouts.mesh import Layout
from autopar.program.loops import Filled
from autopar.program.program import Atom, Equation, fan_out_p, operands_of, variables_of
from autopar.program.task_name import TaskName
from autopar.stages.tasks.owners import LoopedProgram, task_owners
from autopar.stages.tasks.refs import (
    AccumulatorRef,
    InputRef,
    MovedRef,
    NumberRef,
    OutputRef,
    Ref,
    RowRef,
    SendRef,
    SliceRef,
    ValueRef,
)
from autopar.stages.tasks.stage_program import StageProgram


@dataclasses.dataclass(frozen=True)
class PlacedRef:
    """A ref with the layout in which it lies between tasks, and its shape and type."""

    ref: Ref
    layout: Layout
    aval: Aval


@dataclasses.dataclass(frozen=True)
class Write:
    """A result of a task: the value, and the layouts through which it goes to the one in which it leaves."""

    ref: Ref
    atom: Atom
    path: tuple[Layout, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskCut:
    """One task. `operands` are the values that it reads, `entries` those that it moves to another layout first.

    Of a value that is per microbatch a task of the loop reads the array of its own microbatch, any other task the arrays of all,
    as a list. `donated` are the numbers of the reads whose memory a result may take.
    """

    name: TaskName
    equations: tuple[Equation, ...]
    operands: Mapping[Var, PlacedRef]
    entries: Mapping[Var, Layout]
    writes: tuple[Write, ...]
    donated: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[Ref, ...]:
        """What it reads, each once, in order."""
        return tuple(dict.fromkeys(placed.ref for placed in self.operands.values()))

    def equals(self, other: TaskCut) -> bool:
        """Whether it reads, does and writes the same, in the same layouts."""
        return vars(self) == vars(other)

    def comes_as_list(self, ref: Ref) -> bool:
        """Whether a read stands for the arrays of all microbatches."""
        return ref.per_microbatch and not self.name.in_loop


def cut_into_tasks(
    stage: StageProgram, assignment: Assignment, *, split_backward: bool, kept: Set[Var]
) -> tuple[TaskCut, ...]:
    """The tasks of one stage in the order in which they first run.

    Args:
        stage: the stage's program.
        assignment: the layouts that planning chose for it.
        split_backward: whether input gradients and weight gradients are two tasks.
        kept: leaves that another stage on the same devices reads, so that they are not donated.
    """
    return _TaskCutter(stage, assignment, split_backward=split_backward, kept=kept).cut()


class _TaskCutter:
    def __init__(
        self,
        stage: StageProgram,
        assignment: Assignment,
        *,
        split_backward: bool,
        kept: Set[Var],
    ) -> None:
        self.stage, self.assignment, self.kept = stage, assignment, kept
        self.split_backward = split_backward
        self.shape = shape = LoopedProgram.of(stage, assignment.program)
        self.program, self.loop, self.region, self.body = shape.program, shape.loop, shape.region, shape.body
        self._entries = {e.head.outvars[0]: assignment.strategies[e.head].outputs[0] for e in self.body.entries}
        self.task_of = task_owners(shape, split_backward=split_backward)
        self.home: dict[Atom, PlacedRef] = {}
        self._find_homes()
        self._passed_on = self._find_passed_on()

    # Where values are between tasks.

    def _find_homes(self) -> None:
        """The ref of every value that is there before a task makes it: inputs, and the entries of the loop."""
        layouts = self.assignment.inputs
        for i, (var, layout) in enumerate(zip(self.program.invars, layouts, strict=True)):
            port = self.stage.inputs[i] if i < len(self.stage.inputs) else None
            if port is not None and port.source in ("rows", "received"):
                one = Layout(layout.dims[1:])
                self.home[var] = PlacedRef(RowRef(i), one, _without_leading(var.aval))
            else:
                self.home[var] = PlacedRef(InputRef(i), layout, var.aval)
        for eqn in self.program.equations:
            if eqn is not self.loop:
                for v, layout in zip(eqn.outvars, self.assignment.result_layouts(eqn), strict=True):
                    self.home.setdefault(v, PlacedRef(ValueRef(v), layout, v.aval))
        self._find_homes_inside()

    def _find_homes_inside(self) -> None:
        number, *_ = self.body.entries_filled(Filled.ROW)
        for entry in self.body.entries:
            inner = entry.head.outvars[0]
            if entry.filled is Filled.CONSTANT:
                self.home[inner] = self._constant(entry.atom, self.assignment.entry_layout(entry))
            elif entry is number:
                self.home[inner] = PlacedRef(NumberRef(), Layout.replicated(0), inner.aval)
            elif entry.filled is Filled.ROW:
                self.home[inner] = self.home[self.shape.before_fan_out(entry.atom)]
        for eqn in self.region.equations[len(self.body.entries) :]:
            for v, layout in zip(eqn.outvars, self.assignment.result_layouts(eqn), strict=True):
                self.home[v] = PlacedRef(ValueRef(v, per_microbatch=True), layout, v.aval)
        for v, exit_ in zip(self.loop.outvars, self.body.exits, strict=True):
            ref = SliceRef(exit_.place) if exit_.carry is None else AccumulatorRef(exit_.place)
            self.home[v] = PlacedRef(ref, self.assignment.exit_layout(exit_), exit_.atom.aval)
            if exit_.carry is not None:
                self.home[exit_.carry.head.outvars[0]] = self.home[v]

    def _constant(self, atom: Atom, layout: Layout) -> PlacedRef:
        """A value that the loop reads in every microbatch: as it is, or moved once by the prologue."""
        if isinstance(atom, Literal):
            first = next(i for i, other in enumerate(self.loop.invars) if other is atom)
            return PlacedRef(MovedRef(first, layout), layout, atom.aval)
        placed = self._resolve(atom)
        return placed if placed.layout == layout else PlacedRef(MovedRef(atom, layout), layout, atom.aval)

    def _resolve(self, var: Var) -> PlacedRef:
        """The ref of a value; a fan_out that moves nothing is what it copies."""
        maker = self.shape.maker.get(var)
        if maker is not None and maker.primitive is fan_out_p and maker.task is None:
            inner = self._resolve(maker.invars[0]) if not isinstance(maker.invars[0], Literal) else None
            if inner is not None and inner.layout == self.assignment.strategies[maker].outputs[0]:
                return inner
        return self.home[var]

    # The tasks.

    def cut(self) -> tuple[TaskCut, ...]:
        inside = [self.task_of[e] for e in self.region.equations if e in self.task_of] + list(self._passed_on.values())
        outside = [self.task_of[e] for e in self.program.equations if e in self.task_of]
        returned = [port.maker for port in self.stage.outputs if port.maker is not None]
        updates = {name for name in (*outside, *returned) if name.kind == "update"}
        tasks = [self._inside(name) for name in sorted(set(inside))]
        tasks += [self._outside(name) for name in sorted(updates)]
        read = {ref for task in tasks for ref in task.reads}
        prologue = self._prologue(read)
        return (prologue, *tasks) if prologue is not None else tuple(tasks)

    def _inside(self, name: TaskName) -> TaskCut:
        """A task of one microbatch."""
        equations = [e for e in self.region.equations if self.task_of.get(e) == name]
        made = {v for e in equations for v in e.outvars}
        others = [e for e in self.region.equations if e in self.task_of and self.task_of[e] != name]
        read_elsewhere = {v for e in others for v in operands_of(e)}
        reads = _operands_from_outside(equations, made)
        writes: list[Write] = []
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if v in read_elsewhere:
                writes.append(Write(self.home[v].ref, v, (self.home[v].layout,)))
        sends = {self.loop.outvars.index(self.shape.before_fan_out(v)): i for i, v in self.shape.sends().items()}
        for exit_ in self.body.exits:
            i, source = exit_.place, self.shape.before_copy(exit_.atom)
            passed_on = self._passed_on.get(i) == name
            if isinstance(source, Literal) or not (source in made or passed_on):
                continue
            reads += [source] if passed_on and source not in reads else []
            through = self.assignment.strategies[self.shape.maker[exit_.atom]].inputs[0]
            if exit_.carry is not None:
                sums = self.home[self.loop.outvars[i]]
                writes.append(Write(sums.ref, source, (through, sums.layout)))
            else:
                if i in sends:
                    final = Layout(self.assignment.outputs[sends[i]].dims[1:])
                    writes.append(Write(SendRef(sends[i]), source, (through, final)))
                if self._is_joined(i):
                    writes.append(Write(SliceRef(i), source, (through,)))
        return self._task(name, equations, reads, writes)

    def _find_passed_on(self) -> dict[int, TaskName]:
        """Results of the loop that no task makes, such as what a stage receives for another one; the task that hands them on."""
        backward = TaskName("input_gradient" if self.split_backward else "backward", self.stage.stage)
        forward = TaskName("forward", self.stage.stage)
        makers = {
            self.loop.outvars.index(self.shape.before_fan_out(v)): self.stage.outputs[i].maker
            for i, v in self.shape.sends().items()
        }
        found: dict[int, TaskName] = {}
        for exit_ in self.body.exits:
            place, source = exit_.place, self.shape.before_copy(exit_.atom)
            if (
                exit_.carry is None
                and not isinstance(source, Literal)
                and self.shape.maker.get(source) not in self.task_of
            ):
                maker = makers.get(place)
                found[place] = backward if maker is not None and maker.kind == "backward" else forward
        return found

    def _is_joined(self, number: int) -> bool:
        """Whether an update reads the stack of a value; other stages read it through fan_outs alone."""
        users = self.shape.users.get(self.loop.outvars[number], [])
        return any(
            e.primitive is not fan_out_p or e.task is not None or self.shape.users.get(e.outvars[0]) for e in users
        )

    def _outside(self, name: TaskName) -> TaskCut:
        """An update."""
        equations = [e for e in self.program.equations if self.task_of.get(e) == name]
        made = {v for e in equations for v in e.outvars}
        writes: list[Write] = []
        read_elsewhere = {
            v
            for e in self.program.equations
            if e in self.task_of and self.task_of[e] != name and self.task_of[e].kind != "prologue"
            for v in operands_of(e)
        }
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if v in read_elsewhere:
                writes.append(Write(self.home[v].ref, v, (self.home[v].layout,)))
        returned = []
        for i, (port, atom) in enumerate(zip(self.stage.outputs, self.program.outvars, strict=True)):
            if port.source != "received" and port.maker == name:
                writes.append(Write(OutputRef(i), atom, (self.assignment.outputs[i],)))
                returned += [] if isinstance(atom, Literal) or atom in made else [atom]
        reads = dict.fromkeys([*_operands_from_outside(equations, made), *returned])
        return self._task(name, equations, self._in_order_of_results(reads, writes), writes)

    def _in_order_of_results(self, reads: Iterable[Var], writes: Sequence[Write]) -> list[Var]:
        """What an update reads, the leaves that its results replace last and in the order of these.

        JAX gives a result the memory of the first donated argument of its shape. If that is another one's, XLA copies both.
        """
        results = [write.ref.port for write in writes if isinstance(write.ref, OutputRef)]
        place = {self.stage.step.state_of_output[port]: at for at, port in enumerate(results)}

        def place_of(v: Var) -> int:
            ref = self._resolve(v).ref if v in self.home else None
            return place.get(ref.port, -1) if isinstance(ref, InputRef) else -1

        return sorted(reads, key=place_of)

    def _prologue(self, read: Set[Ref]) -> TaskCut | None:
        """Everything that others read and that no task writes or is given."""
        equations = [e for e in self.program.equations if e in self.task_of and self.task_of[e].kind == "prologue"]
        made = {v for e in equations for v in e.outvars}
        writes: list[Write] = []
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if self.home[v].ref in read:
                writes.append(Write(self.home[v].ref, v, (self.home[v].layout,)))
        for entry in self.body.entries_filled(Filled.CONSTANT, Filled.CARRY):
            placed = self.home[entry.head.outvars[0]]
            is_moved = isinstance(placed.ref, MovedRef)
            if (is_moved or entry.filled is Filled.CARRY) and placed.ref in read:
                writes.append(Write(placed.ref, entry.atom, (placed.layout,)))
        writes = list({write.ref: write for write in writes}.values())
        if not writes:
            return None
        needed = set(variables_of([write.atom for write in writes]))
        chosen = []
        for eqn in reversed(equations):
            if any(v in needed for v in eqn.outvars):
                chosen.append(eqn)
                needed.update(operands_of(eqn))
        reads = [v for v in self.program.invars if v in needed and v not in made]
        return self._task(TaskName("prologue", self.stage.stage), chosen[::-1], reads, writes)

    def _task(
        self, name: TaskName, equations: Sequence[Equation], operands: Sequence[Var], writes: Sequence[Write]
    ) -> TaskCut:
        refs = {}
        for v in operands:
            placed = self.home.get(v) if name.in_loop else self._resolve(v)
            if placed is not None:
                refs[v] = placed
        entries = {v: self._entries[v] for v in refs if name.in_loop and v in self._entries}
        task = TaskCut(name=name, equations=tuple(equations), operands=refs, entries=entries, writes=tuple(writes))
        return dataclasses.replace(task, donated=tuple(self._donated(task)))

    def _donated(self, task: TaskCut) -> Iterator[int]:
        """Accumulators that are written again; leaves whose place an output takes, if no later update reads them."""
        written = [write.ref for write in task.writes]
        step = self.stage.step
        replaced = {step.state_of_output[ref.port] for ref in written if isinstance(ref, OutputRef)} - {None}
        for i, ref in enumerate(task.reads):
            if task.name.in_loop:
                if isinstance(ref, AccumulatorRef) and ref in written:
                    yield i
            elif (
                isinstance(ref, InputRef)
                and ref.port in replaced
                and step.inputs[ref.port].donated
                and self.stage.inputs[ref.port].var not in self.kept
                and not self._read_by_later_updates(ref, task.name)
            ):
                yield i

    def _read_by_later_updates(self, ref: Ref, name: TaskName) -> bool:
        """Whether an update after this one reads an input, or returns it unchanged."""
        return ref in self._returned or self._last_update_of.get(ref, 0) > name.level

    @functools.cached_property
    def _returned(self) -> set[Ref]:
        """What the stage returns as it is."""
        return {self._resolve(v).ref for v in variables_of(self.program.outvars)}

    @functools.cached_property
    def _last_update_of(self) -> dict[Ref, int]:
        """The level of the last update that reads a value, of those after the first."""
        found: dict[Ref, int] = {}
        for eqn in self.program.equations:
            level = self.task_of[eqn].level if eqn in self.task_of else 0
            for v in operands_of(eqn) if level > 0 else ():
                ref = self._resolve(v).ref
                found[ref] = max(found.get(ref, level), level)
        return found


def _without_leading(aval: Aval) -> Aval:
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)


def _operands_from_outside(equations: Sequence[Equation], made: set[Var]) -> list[Var]:
    used = (v for e in equations for v in operands_of(e))
    return list(dict.fromkeys(v for v in used if v not in made))
