"""A planned stage cut into tasks: which operation runs in which, what each reads and writes, and how that lies in between.

In: a `StageProgram` and the `Assignment` that planning chose for it. Out: `TaskCut`s: the prologue, forward and backward of a
microbatch, updates, each with its equations and, for every array that passes between them, a `Ref` that says what it is and a
layout, which is that of the one plan; so what the planner priced between forward and backward is what happens between the
tasks. What can go wrong: an operation without a piece of its own (a fan_out that the program needed); it runs where its result
is first read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import jax

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.intra_op.lowering.assignment import Assignment
from autopar.layouts.mesh import Layout
from autopar.program.program import Atom, Equation, fan_out_p
from autopar.stages.tasks.owners import LoopedProgram, task_owners, update_level, variables
from autopar.stages.tasks.stage_program import PROLOGUE, StageProgram

RefKind = Literal["input", "row", "value", "accumulator", "slice", "send", "output", "number"]


@dataclasses.dataclass(frozen=True)
class Ref:
    """One array between tasks of a stage.

    input: a leaf, lent leaf or exchanged value, by input port. row: a microbatch of such a stack, by input port. value: made by a
    task of the stage. accumulator: a carry of the loop. slice: a microbatch of a result that is joined after the loop. send: a
    microbatch of what another stage receives, by output port. output: made once for the step or another stage, by output port.
    number: which microbatch it is.
    """

    kind: RefKind
    key: Any = None
    per_microbatch: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A ref with the layout in which it lies between tasks, and its shape."""

    ref: Ref
    layout: Layout
    aval: Any


@dataclasses.dataclass(frozen=True)
class Write:
    """A result of a task: the value, and the layouts through which it goes to the one in which it leaves."""

    ref: Ref
    atom: Atom
    path: tuple[Layout, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TaskCut:
    """One task. `slots` are the values that it reads, `entries` those that it moves to another layout first.

    Of a value that is per microbatch a task of the loop, `in_loop`, reads the array of its own microbatch, any other all of
    them, as a list. `donated` are the numbers of the reads whose memory a result may take.
    """

    name: str
    in_loop: bool
    equations: tuple[Equation, ...]
    slots: Mapping[Var, Slot]
    entries: Mapping[Var, Layout]
    writes: tuple[Write, ...]
    donated: tuple[int, ...]

    @property
    def reads(self) -> tuple[Ref, ...]:
        """What it reads, each once, in order."""
        return tuple(dict.fromkeys(slot.ref for slot in self.slots.values()))

    def comes_as_list(self, ref: Ref) -> bool:
        """Whether a read stands for the arrays of all microbatches."""
        return ref.per_microbatch and not self.in_loop


def cut_into_tasks(
    stage: StageProgram, assignment: Assignment, *, split_backward: bool, kept: Set[Var]
) -> tuple[TaskCut, ...]:
    """The tasks of one stage in the order in which they first run; for the options see `tasks.stage_tasks`."""
    return _Cutter(stage, assignment, split_backward=split_backward, kept=kept).cut()


class _Cutter:
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
        self.program, self.loop, self.region, self.counts = shape.program, shape.loop, shape.region, shape.counts
        self._entries = {
            e.outvars[0]: assignment.strategies[e].outputs[0] for e in self.region.equations[: len(self.region.invars)]
        }
        self.task_of = task_owners(shape, split_backward=split_backward)
        self.home: dict[Var, Slot] = {}
        self._find_homes()
        self._passed_on = self._find_passed_on()

    # Where values are between tasks.

    def _find_homes(self) -> None:
        """The slot of every value that is there before a task makes it: inputs, and the entries of the loop."""
        layouts = self.assignment.inputs
        for i, (var, layout) in enumerate(zip(self.program.invars, layouts, strict=True)):
            port = self.stage.inputs[i] if i < len(self.stage.inputs) else None
            if port is not None and port.source in ("rows", "received"):
                one = Layout(layout.dims[1:])
                self.home[var] = Slot(Ref("row", i, True), one, _without_leading(var.aval))
            else:
                self.home[var] = Slot(Ref("input", i), layout, var.aval)
        for eqn in self.program.equations:
            if eqn is not self.loop:
                for v, layout in zip(eqn.outvars, self.assignment.result_layouts(eqn), strict=True):
                    self.home.setdefault(v, Slot(Ref("value", v), layout, v.aval))
        self._find_homes_inside()

    def _find_homes_inside(self) -> None:
        loop, count = self.counts, len(self.region.invars)
        heads = [self.assignment.strategies[e] for e in self.region.equations[:count]]
        for i, (atom, eqn, head) in enumerate(zip(self.loop.invars, self.region.equations[:count], heads, strict=True)):
            inner, layout = eqn.outvars[0], head.inputs[0]
            if i < loop.consts:
                self.home[inner] = self._constant(atom, layout)
            elif i < loop.consts + loop.carries:
                self.home[inner] = Slot(Ref("accumulator", i - loop.consts), layout, inner.aval)
            elif i == loop.consts + loop.carries:
                self.home[inner] = Slot(Ref("number", None, True), Layout.replicated(0), inner.aval)
            else:
                self.home[inner] = self.home[self.shape.before_fan_out(atom)]
        for eqn in self.region.equations[count:]:
            for v, layout in zip(eqn.outvars, self.assignment.result_layouts(eqn), strict=True):
                self.home[v] = Slot(Ref("value", v, True), layout, v.aval)
        for i, v in enumerate(self.loop.outvars):
            atom = self.region.outvars[i]
            if i < loop.carries:
                self.home[v] = Slot(Ref("accumulator", i), heads[loop.consts + i].inputs[0], v.aval)
            else:
                layout = self.assignment.strategies[self.shape.maker[atom]].outputs[0]
                self.home[v] = Slot(Ref("slice", i, True), layout, atom.aval)

    def _constant(self, atom: Atom, layout: Layout) -> Slot:
        """A value that the loop reads in every microbatch: as it is, or moved once by the prologue."""
        if not isinstance(atom, JaxLiteral):
            slot = self._resolved(atom)
            if slot.layout == layout:
                return slot
        key = ("moved", atom if not isinstance(atom, JaxLiteral) else id(atom), layout)
        return Slot(Ref("value", key), layout, atom.aval)

    def _resolved(self, var: Var) -> Slot:
        """The slot of a value; a fan_out that moves nothing is what it copies."""
        maker = self.shape.maker.get(var)
        if maker is not None and maker.primitive is fan_out_p and not maker.task:
            inner = self._resolved(maker.invars[0]) if not isinstance(maker.invars[0], JaxLiteral) else None
            if inner is not None and inner.layout == self.assignment.strategies[maker].outputs[0]:
                return inner
        return self.home[var]

    # The tasks.

    def cut(self) -> tuple[TaskCut, ...]:
        inside = [self.task_of[e] for e in self.region.equations if e in self.task_of] + list(self._passed_on.values())
        outside = [self.task_of[e] for e in self.program.equations if e in self.task_of]
        updates = dict.fromkeys(t for t in outside if t.startswith("update "))
        updates |= dict.fromkeys(str(p.piece) for p in self.stage.outputs if str(p.piece).startswith("update "))
        order = {"forward": 0, "backward": 1, "input_gradient": 1, "weight_gradient": 2}
        moving = sorted(dict.fromkeys(inside), key=lambda t: order[t.split()[0]])
        tasks = [self._inside(name) for name in moving]
        tasks += [self._outside(name) for name in sorted(updates, key=update_level)]
        read = {ref for task in tasks for ref in task.reads}
        prologue = self._prologue(read)
        return (prologue, *tasks) if prologue is not None else tuple(tasks)

    def _inside(self, name: str) -> TaskCut:
        """A task of one microbatch."""
        equations = [e for e in self.region.equations if self.task_of.get(e) == name]
        made = {v for e in equations for v in e.outvars}
        others = [e for e in self.region.equations if e in self.task_of and self.task_of[e] != name]
        read_elsewhere = {v for e in others for v in variables(e)}
        reads = _operands_from_outside(equations, made)
        writes: list[Write] = []
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if v in read_elsewhere:
                writes.append(Write(self.home[v].ref, v, (self.home[v].layout,)))
        sends = {self.loop.outvars.index(self.shape.before_fan_out(v)): i for i, v in self.shape.sends().items()}
        for i, atom in enumerate(self.region.outvars):
            source = self.shape.before_copy(atom)
            passed_on = self._passed_on.get(i) == name
            if isinstance(source, JaxLiteral) or not (source in made or passed_on):
                continue
            reads += [source] if passed_on and source not in reads else []
            through = self.assignment.strategies[self.shape.maker[atom]].inputs[0]
            if i < self.counts.carries:
                slot = self.home[self.loop.outvars[i]]
                writes.append(Write(slot.ref, source, (through, slot.layout)))
            else:
                if i in sends:
                    final = Layout(self.assignment.outputs[sends[i]].dims[1:])
                    writes.append(Write(Ref("send", sends[i], True), source, (through, final)))
                if self._is_joined(i):
                    writes.append(Write(Ref("slice", i, True), source, (through,)))
        return self._task(name, equations, reads, writes)

    def _find_passed_on(self) -> dict[int, str]:
        """Results of the loop that no task makes, such as what a stage receives for another one; the task that hands them on."""
        backward = "input_gradient" if self.split_backward else "backward"
        pieces = {
            self.loop.outvars.index(self.shape.before_fan_out(v)): self.stage.outputs[i].piece
            for i, v in self.shape.sends().items()
        }
        found: dict[int, str] = {}
        for place in range(self.counts.carries, len(self.region.outvars)):
            source = self.shape.before_copy(self.region.outvars[place])
            if not isinstance(source, JaxLiteral) and self.shape.maker.get(source) not in self.task_of:
                piece = pieces.get(place)
                kind = backward if piece is not None and piece.kind == "backward" else "forward"
                found[place] = f"{kind} {self.stage.stage}"
        return found

    def _is_joined(self, number: int) -> bool:
        """Whether an update reads the stack of a value; other stages read it through fan_outs alone."""
        users = self.shape.users.get(self.loop.outvars[number], [])
        return any(e.primitive is not fan_out_p or e.task or self.shape.users.get(e.outvars[0]) for e in users)

    def _outside(self, name: str) -> TaskCut:
        """An update."""
        equations = [e for e in self.program.equations if self.task_of.get(e) == name]
        made = {v for e in equations for v in e.outvars}
        writes: list[Write] = []
        others = [e for e in self.program.equations if e in self.task_of and self.task_of[e] not in (name, PROLOGUE)]
        read_elsewhere = {v for e in others for v in variables(e)}
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if v in read_elsewhere:
                writes.append(Write(self.home[v].ref, v, (self.home[v].layout,)))
        returned = []
        for i, (port, atom) in enumerate(zip(self.stage.outputs, self.program.outvars, strict=True)):
            if port.source != "received" and str(port.piece) == name:
                writes.append(Write(Ref("output", i), atom, (self.assignment.outputs[i],)))
                returned += [] if isinstance(atom, JaxLiteral) or atom in made else [atom]
        reads = _operands_from_outside(equations, made)
        reads = list(dict.fromkeys([*reads, *returned]))
        return self._task(name, equations, reads, writes)

    def _prologue(self, read: set[Ref]) -> TaskCut | None:
        """Everything that others read and that no task writes or is given."""
        equations = [e for e in self.program.equations if self.task_of.get(e) == PROLOGUE]
        made = {v for e in equations for v in e.outvars}
        writes: list[Write] = []
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if self.home[v].ref in read:
                writes.append(Write(self.home[v].ref, v, (self.home[v].layout,)))
        for i, atom in enumerate(self.loop.invars[: self.counts.consts + self.counts.carries]):
            slot = self.home[self.region.equations[i].outvars[0]]
            is_moved = isinstance(slot.ref.key, tuple) and slot.ref.key[0] == "moved"
            if (is_moved or i >= self.counts.consts) and slot.ref in read:
                writes.append(Write(slot.ref, atom, (slot.layout,)))
        writes = list({write.ref: write for write in writes}.values())
        if not writes:
            return None
        needed = {w.atom for w in writes if not isinstance(w.atom, JaxLiteral)}
        chosen = []
        for eqn in reversed(equations):
            if any(v in needed for v in eqn.outvars):
                chosen.append(eqn)
                needed.update(v for v in variables(eqn))
        reads = [v for v in self.program.invars if v in needed and v not in made]
        return self._task(f"{PROLOGUE} {self.stage.stage}", chosen[::-1], reads, writes)

    def _task(
        self, name: str, equations: Sequence[Equation], operands: Sequence[Var], writes: Sequence[Write]
    ) -> TaskCut:
        in_loop = name.split()[0] in ("forward", "backward", "input_gradient", "weight_gradient")
        slots = {}
        for v in operands:
            slot = self.home.get(v) if in_loop else self._resolved(v)
            if slot is not None:
                slots[v] = slot
        entries = {v: self._entries[v] for v in slots if in_loop and v in self._entries}
        task = TaskCut(name, in_loop, tuple(equations), slots, entries, tuple(writes), ())
        return dataclasses.replace(task, donated=tuple(self._donated(task)))

    def _donated(self, task: TaskCut) -> Iterator[int]:
        """Accumulators that are written again; leaves whose place an output takes, if no later update reads them."""
        written = [write.ref for write in task.writes]
        step = self.stage.step
        replaced = {step.state_of_output[ref.key] for ref in written if ref.kind == "output"} - {None}
        for i, ref in enumerate(task.reads):
            if task.in_loop:
                if ref.kind == "accumulator" and ref in written:
                    yield i
            elif (
                ref.kind == "input"
                and ref.key in replaced
                and step.inputs[ref.key].donated
                and self.stage.inputs[ref.key].var not in self.kept
                and not self._read_by_later_updates(ref, task.name)
            ):
                yield i

    def _read_by_later_updates(self, ref: Ref, name: str) -> bool:
        """Whether an update after this one reads an input, or returns it unchanged."""
        return ref in self._returned or self._last_update_of.get(ref, -1) > update_level(name)

    @functools.cached_property
    def _returned(self) -> set[Ref]:
        """What the stage returns as it is."""
        return {self._resolved(v).ref for v in self.program.outvars if not isinstance(v, JaxLiteral)}

    @functools.cached_property
    def _last_update_of(self) -> dict[Ref, int]:
        """The level of the last update that reads a value, of those after the first."""
        found: dict[Ref, int] = {}
        for eqn in self.program.equations:
            level = update_level(self.task_of.get(eqn, PROLOGUE))
            for v in variables(eqn) if level > 0 else ():
                ref = self._resolved(v).ref
                found[ref] = max(found.get(ref, level), level)
        return found


def _without_leading(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)


def _operands_from_outside(equations: Sequence[Equation], made: set[Var]) -> list[Var]:
    used = (v for e in equations for v in variables(e))
    return list(dict.fromkeys(v for v in used if v not in made))
