"""A planned stage taken apart into executables: prologue, forward, backward, updates.

In: a `StageProgram`, the `Assignment` that planning chose for it, a device mesh. Out: `StageTask`s: compiled functions with, for
every array that they read and write, a `Ref` that says what it is and how it lies on the mesh. The pieces meet in the layouts of
the one plan, so what the planner priced between forward and backward is what happens between their executables. A value that is
partial over mesh axes leaves an executable as it is, unreduced: as an array with one more leading dimension per partial axis, of
which every device holds its own term. What can go wrong: an operation without a piece of its own (a fan_out that the program
needed); it runs where its result is first read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.mesh import Layout
from autopar.program import Atom, Equation, Loop, Program, fan_out_p
from autopar.spmd import Assignment, Lowering, Placed, Scope
from autopar.stage_program import PROLOGUE, StageProgram

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
class StageTask:
    """One executable; `run` takes the arrays of `reads`, in order, and returns those of `writes` and the driver's witness.

    A read that is not per microbatch though its ref is, stands for the list of all microbatches' arrays. `run` is a jitted
    function, `shapes` are those of its arguments.
    """

    name: str
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    donated: tuple[int, ...]
    run: Any
    shapes: tuple[Any, ...]
    in_shardings: Mapping[Ref, NamedSharding]

    def as_text(self) -> str:
        """The optimised HLO."""
        return str(self.run.lower(*self.shapes).compile().as_text())


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """A ref with the layout in which it lies between tasks, and its shape."""

    ref: Ref
    layout: Layout
    aval: Any


def stage_tasks(
    stage: StageProgram,
    assignment: Assignment,
    device_mesh: jax.sharding.Mesh,
    *,
    split_backward: bool = False,
    kept: Set[Var] = frozenset(),
) -> tuple[StageTask, ...]:
    """The executables of one stage in the order in which they first run.

    `split_backward`: input gradients and weight gradients are two tasks. `kept`: leaves that another stage on the same devices
    reads, so that they are not donated.
    """
    return _Splitter(stage, assignment, device_mesh, split_backward=split_backward, kept=kept).split()


class _Splitter:
    def __init__(
        self,
        stage: StageProgram,
        assignment: Assignment,
        device_mesh: jax.sharding.Mesh,
        *,
        split_backward: bool,
        kept: Set[Var],
    ) -> None:
        self.kept = kept
        self.stage, self.assignment, self.device_mesh = stage, assignment, device_mesh
        self.program = assignment.program
        self.lowering = Lowering(assignment)
        self.loop = next(e for e in self.program.equations if e.loop is not None and not e.task)
        assert self.loop.loop is not None
        self.counts: Loop = self.loop.loop
        self.region: Program = self.loop.regions[0]
        self._maker = {v: e for program in (self.program, self.region) for e in program.equations for v in e.outvars}
        self._users: dict[Var, list[Equation]] = {}
        for eqn in self.program.equations:
            for v in _variables(eqn):
                self._users.setdefault(v, []).append(eqn)
        self._entries = {
            e.outvars[0]: assignment.strategies[e].outputs[0] for e in self.region.equations[: len(self.region.invars)]
        }
        self.task_of: dict[Equation, str] = {}
        self.home: dict[Var, _Slot] = {}
        self._tag_outside()
        self._tag_inside(split_backward)
        self._find_homes()
        self.split_backward = split_backward
        self._passed_on = self._find_passed_on()

    # Which task an equation belongs to.

    def _tag_outside(self) -> None:
        late: set[Var] = set(self.loop.outvars)
        untagged: list[Equation] = []
        for eqn in self.program.equations:
            if eqn is self.loop:
                continue
            if eqn.task:
                self.task_of[eqn] = eqn.task
                if eqn.task != PROLOGUE:
                    late.update(eqn.outvars)
            elif any(v in late for v in _variables(eqn)):
                untagged.append(eqn)
                late.update(eqn.outvars)
            else:
                self.task_of[eqn] = PROLOGUE
        for eqn in reversed(untagged):
            owners = [self.task_of[e] for v in eqn.outvars for e in self._users.get(v, ()) if e in self.task_of]
            returned = [
                str(port.piece)
                for port, atom in zip(self.stage.outputs, self.program.outvars, strict=True)
                if atom in eqn.outvars and port.source != "received"
            ]
            self.task_of[eqn] = (owners + returned + [PROLOGUE])[0]

    def _tag_inside(self, split_backward: bool) -> None:
        for eqn in self.region.equations[len(self.region.invars) :]:
            if eqn.task:
                self.task_of[eqn] = eqn.task
        if split_backward:
            self._split_backward()

    def _split_backward(self) -> None:
        """Backward into what the stage before waits for, the input gradients, and the rest, the weight gradients."""
        needed = {self._before_copy(atom) for atom in self._sent_atoms()}
        for eqn in reversed(self.region.equations):
            task = self.task_of.get(eqn, "")
            if task.startswith("backward "):
                first = any(v in needed for v in eqn.outvars)
                if first:
                    needed.update(v for v in _variables(eqn))
                kind = "input_gradient" if first else "weight_gradient"
                self.task_of[eqn] = f"{kind} {task.removeprefix('backward ')}"

    def _sent_atoms(self) -> list[Atom]:
        """What the region returns for other stages."""
        return [
            self.region.outvars[self.loop.outvars.index(self._before_fan_out(atom))] for atom in self._sends().values()
        ]

    def _sends(self) -> dict[int, Var]:
        return {
            i: atom
            for i, (port, atom) in enumerate(zip(self.stage.outputs, self.program.outvars, strict=True))
            if port.source == "received"
        }

    def _before_fan_out(self, atom: Atom) -> Atom:
        """The value that a chain of fan_outs outside the loop copies."""
        while not isinstance(atom, JaxLiteral) and atom in self._maker and self._maker[atom].primitive is fan_out_p:
            atom = self._maker[atom].invars[0]
        return atom

    def _before_copy(self, atom: Atom) -> Atom:
        """The value that the region's last fan_out for an output copies."""
        return atom if isinstance(atom, JaxLiteral) else self._maker[atom].invars[0]

    # Where values are between tasks.

    def _find_homes(self) -> None:
        """The slot of every value that is there before a task makes it: inputs, and the entries of the loop."""
        layouts = self.assignment.inputs
        for i, (var, layout) in enumerate(zip(self.program.invars, layouts, strict=True)):
            port = self.stage.inputs[i] if i < len(self.stage.inputs) else None
            if port is not None and port.source in ("rows", "received"):
                one = Layout(layout.dims[1:])
                self.home[var] = _Slot(Ref("row", i, True), one, _without_leading(var.aval))
            else:
                self.home[var] = _Slot(Ref("input", i), layout, var.aval)
        for eqn in self.program.equations:
            if eqn is not self.loop:
                for v, layout in zip(eqn.outvars, self.lowering.gives(eqn), strict=True):
                    self.home.setdefault(v, _Slot(Ref("value", v), layout, v.aval))
        self._find_homes_inside()

    def _find_homes_inside(self) -> None:
        loop, count = self.counts, len(self.region.invars)
        heads = [self.assignment.strategies[e] for e in self.region.equations[:count]]
        for i, (atom, eqn, head) in enumerate(zip(self.loop.invars, self.region.equations[:count], heads, strict=True)):
            inner, layout = eqn.outvars[0], head.inputs[0]
            if i < loop.consts:
                self.home[inner] = self._constant(atom, layout)
            elif i < loop.consts + loop.carries:
                self.home[inner] = _Slot(Ref("accumulator", i - loop.consts), layout, inner.aval)
            elif i == loop.consts + loop.carries:
                self.home[inner] = _Slot(Ref("number", None, True), Layout.replicated(0), inner.aval)
            else:
                self.home[inner] = self.home[self._before_fan_out(atom)]
        for eqn in self.region.equations[count:]:
            for v, layout in zip(eqn.outvars, self.lowering.gives(eqn), strict=True):
                self.home[v] = _Slot(Ref("value", v, True), layout, v.aval)
        for i, v in enumerate(self.loop.outvars):
            atom = self.region.outvars[i]
            if i < loop.carries:
                self.home[v] = _Slot(Ref("accumulator", i), heads[loop.consts + i].inputs[0], v.aval)
            else:
                layout = self.assignment.strategies[self._maker[atom]].outputs[0]
                self.home[v] = _Slot(Ref("slice", i, True), layout, atom.aval)

    def _constant(self, atom: Atom, layout: Layout) -> _Slot:
        """A value that the loop reads in every microbatch: as it is, or moved once by the prologue."""
        if not isinstance(atom, JaxLiteral):
            slot = self._resolved(atom)
            if slot.layout == layout:
                return slot
        key = ("moved", atom if not isinstance(atom, JaxLiteral) else id(atom), layout)
        return _Slot(Ref("value", key), layout, atom.aval)

    def _resolved(self, var: Var) -> _Slot:
        """The slot of a value; a fan_out that moves nothing is what it copies."""
        maker = self._maker.get(var)
        if maker is not None and maker.primitive is fan_out_p and not maker.task:
            inner = self._resolved(maker.invars[0]) if not isinstance(maker.invars[0], JaxLiteral) else None
            if inner is not None and inner.layout == self.assignment.strategies[maker].outputs[0]:
                return inner
        return self.home[var]

    # The tasks.

    def split(self) -> tuple[StageTask, ...]:
        inside = [self.task_of[e] for e in self.region.equations if e in self.task_of] + list(self._passed_on.values())
        outside = [self.task_of[e] for e in self.program.equations if e in self.task_of]
        updates = dict.fromkeys(t for t in outside if t.startswith("update "))
        updates |= dict.fromkeys(str(p.piece) for p in self.stage.outputs if str(p.piece).startswith("update "))
        order = {"forward": 0, "backward": 1, "input_gradient": 1, "weight_gradient": 2}
        moving = sorted(dict.fromkeys(inside), key=lambda t: order[t.split()[0]])
        tasks = [self._inside(name) for name in moving]
        tasks += [self._outside(name) for name in sorted(updates, key=_level)]
        read = {ref for task in tasks for ref in task.reads}
        written = {ref for task in tasks for ref in task.writes}
        prologue = self._prologue(read, written)
        return (prologue, *tasks) if prologue is not None else tuple(tasks)

    def _inside(self, name: str) -> StageTask:
        """A task of one microbatch."""
        equations = [e for e in self.region.equations if self.task_of.get(e) == name]
        made = {v for e in equations for v in e.outvars}
        others = [e for e in self.region.equations if e in self.task_of and self.task_of[e] != name]
        read_elsewhere = {v for e in others for v in _variables(e)}
        reads = _operands_from_outside(equations, made)
        writes: list[tuple[Ref, Atom, tuple[Layout, ...]]] = []
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if v in read_elsewhere:
                writes.append((self.home[v].ref, v, (self.home[v].layout,)))
        sends = {self.loop.outvars.index(self._before_fan_out(v)): i for i, v in self._sends().items()}
        for i, atom in enumerate(self.region.outvars):
            source = self._before_copy(atom)
            passed_on = self._passed_on.get(i) == name
            if isinstance(source, JaxLiteral) or not (source in made or passed_on):
                continue
            reads += [source] if passed_on and source not in reads else []
            through = self.assignment.strategies[self._maker[atom]].inputs[0]
            if i < self.counts.carries:
                slot = self.home[self.loop.outvars[i]]
                writes.append((slot.ref, source, (through, slot.layout)))
            else:
                if i in sends:
                    final = Layout(self.assignment.outputs[sends[i]].dims[1:])
                    writes.append((Ref("send", sends[i], True), source, (through, final)))
                if self._is_joined(i):
                    writes.append((Ref("slice", i, True), source, (through,)))
        return self._task(name, equations, reads, writes)

    def _find_passed_on(self) -> dict[int, str]:
        """Results of the loop that no task makes, such as what a stage receives for another one; the task that hands them on."""
        backward = "input_gradient" if self.split_backward else "backward"
        pieces = {
            self.loop.outvars.index(self._before_fan_out(v)): self.stage.outputs[i].piece
            for i, v in self._sends().items()
        }
        found: dict[int, str] = {}
        for place in range(self.counts.carries, len(self.region.outvars)):
            source = self._before_copy(self.region.outvars[place])
            if not isinstance(source, JaxLiteral) and self._maker.get(source) not in self.task_of:
                piece = pieces.get(place)
                kind = backward if piece is not None and piece.kind == "backward" else "forward"
                found[place] = f"{kind} {self.stage.stage}"
        return found

    def _is_joined(self, number: int) -> bool:
        """Whether an update reads the stack of a value; other stages read it through fan_outs alone."""
        users = self._users.get(self.loop.outvars[number], [])
        return any(e.primitive is not fan_out_p or e.task or self._users.get(e.outvars[0]) for e in users)

    def _outside(self, name: str) -> StageTask:
        """An update."""
        equations = [e for e in self.program.equations if self.task_of.get(e) == name]
        made = {v for e in equations for v in e.outvars}
        writes: list[tuple[Ref, Atom, tuple[Layout, ...]]] = []
        others = [e for e in self.program.equations if e in self.task_of and self.task_of[e] not in (name, PROLOGUE)]
        read_elsewhere = {v for e in others for v in _variables(e)}
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if v in read_elsewhere:
                writes.append((self.home[v].ref, v, (self.home[v].layout,)))
        returned = []
        for i, (port, atom) in enumerate(zip(self.stage.outputs, self.program.outvars, strict=True)):
            if port.source != "received" and str(port.piece) == name:
                writes.append((Ref("output", i), atom, (self.assignment.outputs[i],)))
                returned += [] if isinstance(atom, JaxLiteral) or atom in made else [atom]
        reads = _operands_from_outside(equations, made)
        reads = list(dict.fromkeys([*reads, *returned]))
        return self._task(name, equations, reads, writes)

    def _prologue(self, read: set[Ref], written: set[Ref]) -> StageTask | None:
        """Everything that others read and that no task writes or is given."""
        equations = [e for e in self.program.equations if self.task_of.get(e) == PROLOGUE]
        made = {v for e in equations for v in e.outvars}
        writes: list[tuple[Ref, Atom, tuple[Layout, ...]]] = []
        for v in dict.fromkeys(v for e in equations for v in e.outvars):
            if self.home[v].ref in read:
                writes.append((self.home[v].ref, v, (self.home[v].layout,)))
        for i, atom in enumerate(self.loop.invars[: self.counts.consts + self.counts.carries]):
            slot = self.home[self.region.equations[i].outvars[0]]
            is_moved = isinstance(slot.ref.key, tuple) and slot.ref.key[0] == "moved"
            if (is_moved or i >= self.counts.consts) and slot.ref in read:
                writes.append((slot.ref, atom, (slot.layout,)))
        writes = list({ref: (ref, atom, path) for ref, atom, path in writes}.values())
        if not writes:
            return None
        needed = {atom for _, atom, _ in writes if not isinstance(atom, JaxLiteral)}
        chosen = []
        for eqn in reversed(equations):
            if any(v in needed for v in eqn.outvars):
                chosen.append(eqn)
                needed.update(v for v in _variables(eqn))
        reads = [v for v in self.program.invars if v in needed and v not in made]
        return self._task(f"{PROLOGUE} {self.stage.stage}", chosen[::-1], reads, writes)

    def _task(
        self,
        name: str,
        equations: Sequence[Equation],
        operands: Sequence[Var],
        writes: Sequence[tuple[Ref, Atom, tuple[Layout, ...]]],
    ) -> StageTask:
        """The executable; `writes` gives each result's value and the layouts through which it goes."""
        inside = name.split()[0] in ("forward", "backward", "input_gradient", "weight_gradient")
        operands = [v for v in operands if self._source(v, inside=inside) is not None]
        slots = {v: self._source(v, inside=inside) for v in operands}
        by_ref: dict[Ref, _Slot] = {}
        for slot in slots.values():
            assert slot is not None
            by_ref.setdefault(slot.ref, slot)
        reads = tuple(by_ref)
        stacked = [ref for ref in reads if ref.per_microbatch and not inside]

        def local(*arrays: Any) -> tuple[Any, ...]:
            given = dict(zip(reads, arrays, strict=True))
            scope = Scope(self.lowering)
            for v in operands:
                slot = slots[v]
                assert slot is not None
                if slot.ref in stacked:
                    array = jnp.stack([_contract(x, slot.layout) for x in given[slot.ref]])
                    scope.values[v] = Placed(array, slot.layout.prepend())
                else:
                    scope.values[v] = Placed(_contract(given[slot.ref], slot.layout), slot.layout)
                entry = self._entry_layout(v) if inside else None
                if entry is not None:
                    scope.values[v] = Placed(self.lowering.moved(scope.values[v], entry, v.aval), entry)
            self.lowering.run(equations, scope)
            found = []
            for _, atom, path in writes:
                placed = scope.placed(atom)
                for layout in path:
                    placed = Placed(self.lowering.moved(placed, layout, atom.aval), layout)
                found.append(_expand(placed))
            return (*found, jnp.zeros((1,), jnp.bool_))

        in_specs = [self._spec(by_ref[ref].layout) for ref in reads]
        m = self.stage.cut.loop.plan.microbatches
        specs = tuple([spec] * m if ref in stacked else spec for ref, spec in zip(reads, in_specs, strict=True))
        out_specs = (*(self._spec(path[-1]) for _, _, path in writes), PartitionSpec())
        sharded = jax.shard_map(local, mesh=self.device_mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        shardings = {ref: NamedSharding(self.device_mesh, spec) for ref, spec in zip(reads, in_specs, strict=True)}
        donated = self._donated(name, reads, [ref for ref, _, _ in writes], inside=inside)
        jitted = jax.jit(
            _named(name, sharded),
            in_shardings=tuple([shardings[ref]] * m if ref in stacked else shardings[ref] for ref in reads),
            out_shardings=tuple(NamedSharding(self.device_mesh, spec) for spec in out_specs),
            donate_argnums=donated,
        )
        one = [self._shape(by_ref[ref], shardings[ref]) for ref in reads]
        shapes = tuple([shape] * m if ref in stacked else shape for ref, shape in zip(reads, one, strict=True))
        return StageTask(name, reads, tuple(ref for ref, _, _ in writes), donated, jitted, shapes, shardings)

    def _shape(self, slot: _Slot, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        terms = (self.assignment.mesh.shape[axis] for axis in slot.layout.partial_axes)
        return jax.ShapeDtypeStruct((*terms, *slot.aval.shape), slot.aval.dtype, sharding=sharding)

    def _source(self, var: Var, *, inside: bool) -> _Slot | None:
        slot = self.home.get(var) if inside else self._resolved(var)
        return slot

    def _entry_layout(self, var: Var) -> Layout | None:
        """The layout in which the loop's body takes an entry, if the value comes in another one."""
        return self._entries.get(var)

    def _spec(self, layout: Layout) -> PartitionSpec:
        mesh = self.assignment.mesh
        dims = [mesh.names(axes) or None for axes in layout.dims]
        return PartitionSpec(*(mesh.axis_names[axis] for axis in layout.partial_axes), *dims)

    def _donated(self, name: str, reads: Sequence[Ref], writes: Sequence[Ref], *, inside: bool) -> tuple[int, ...]:
        """Accumulators that are written again; leaves whose place an output of this task takes, if no later update reads them."""
        if inside:
            return tuple(i for i, ref in enumerate(reads) if ref.kind == "accumulator" and ref in writes)
        step = self.stage.step
        replaced = {step.state_of_output[ref.key] for ref in writes if ref.kind == "output"} - {None}
        return tuple(
            i
            for i, ref in enumerate(reads)
            if ref.kind == "input"
            and ref.key in replaced
            and step.inputs[ref.key].donated
            and self.stage.inputs[ref.key].var not in self.kept
            and not self._read_by_later_updates(ref, name)
        )

    def _read_by_later_updates(self, ref: Ref, name: str) -> bool:
        """Whether an update after this one reads an input, or returns it unchanged."""
        for eqn in self.program.equations:
            if _level(self.task_of.get(eqn, PROLOGUE)) > _level(name):
                operands = _variables(eqn)
                if any(self._resolved(v).ref == ref for v in operands):
                    return True
        returned = [v for v in self.program.outvars if not isinstance(v, JaxLiteral)]
        return any(self._resolved(v).ref == ref for v in returned)


def _level(task: str) -> int:
    """Which of the updates of a stage a task is; -1 for others."""
    return int(task.rpartition(".")[2]) if task.startswith("update ") else -1


def _variables(eqn: Equation) -> list[Var]:
    return [v for v in eqn.invars if not isinstance(v, JaxLiteral)]


def _named(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: Any) -> Any:
        return fun(*arrays)

    call.__name__ = name.replace(" ", "_").replace(".", "_")
    return call


def _without_leading(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)


def _operands_from_outside(equations: Sequence[Equation], made: set[Var]) -> list[Var]:
    used = (v for e in equations for v in _variables(e))
    return list(dict.fromkeys(v for v in used if v not in made))


def _expand(placed: Placed) -> Any:
    array = placed.array
    for _ in placed.layout.partial:
        array = jnp.expand_dims(array, 0)
    return array


def _contract(array: Any, layout: Layout) -> Any:
    for _ in layout.partial:
        array = array[0]
    return array
