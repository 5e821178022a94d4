"""The operations that one device runs, as `footprint` takes them: equations, moves between layouts, copies in XLA's own order.

In: a strategy graph, and an `Assignment` or None. Out: a `DeviceProgram`. With an assignment, every value has its size on one
device and every move is an operation, as the lowering performs them. Without one, there are no moves and values have the size
of the whole: which buffers live together then is what all choices have in common, and `Value.var` says whose layout decides
a buffer's size. Equal work is one operation, as XLA makes it. What can go wrong: an operation that XLA's CPU compiler expands
into several; those that matter are here (random bits, operands that are repeated or wanted in another order, collectives
over inner dimensions, loops). What a primitive's result needs is in `intra_op/xla_cpu/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from autopar.avals import Aval
from autopar.compat import Literal, Var
from autopar.intra_op.choices.graph import StrategyGraph
from autopar.intra_op.lowering.assignment import Assignment, Layouts, WholeLayouts
from autopar.intra_op.lowering.layout_domain import LayoutDomain
from autopar.intra_op.memory.block_writer import BlockWriter, Values
from autopar.intra_op.memory.compilers import XLA_CPU, Compiler
from autopar.intra_op.memory.device_operations import FOLDED, Block, Held, Kind, Operation, Value
from autopar.intra_op.memory.folding import Folding
from autopar.intra_op.memory.turned_results import copy_turned
from autopar.intra_op.xla_cpu.table import Making, making_of
from autopar.layouts.mesh import Layout
from autopar.program.loops import Entry, Exit, Filled, Goes, LoopEquation
from autopar.program.program import Atom, Equation
from autopar.program.walk import Scope, StaticDomain

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """`inputs[i]` is the value of program input i; `block.outputs[i]` of output i, -1 if it is a literal."""

    block: Block
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def device_program(
    graph: StrategyGraph, names: Sequence[str], assignment: Assignment | None, compiler: Compiler = XLA_CPU
) -> DeviceProgram:
    """See the module's text; `names` are those of the inputs."""
    program, values = graph.program, Values(graph.mesh, compiler)
    layouts: Layouts = assignment if assignment is not None else WholeLayouts(program, graph.mesh, graph.spaces)
    inputs = [
        Held(values.add_shard(v.aval, layout, v, name), layout)
        for v, layout, name in zip(program.invars, layouts.inputs, names, strict=True)
    ]
    if assignment is None:
        values.split_inputs.update(held.value for held in inputs)
    buffers = _Buffers(layouts, values)
    scope = Scope(buffers, dict(zip(program.invars, inputs, strict=True)))
    scope.run(program.equations)
    outputs = [
        buffers.need(atom, layout, scope).value for atom, layout in zip(program.outvars, layouts.outputs, strict=True)
    ]
    return buffers.program(scope, inputs, outputs)


def task_program(
    assignment: Assignment,
    equations: Sequence[Equation],
    *,
    reads: Mapping[K, tuple[Sequence[Var], Layout]],
    joined: Collection[K] = (),
    entries: Mapping[Var, Layout],
    writes: Sequence[tuple[Atom, Sequence[Layout]]],
    compiler: Compiler = XLA_CPU,
) -> DeviceProgram:
    """Some of an assignment's equations as a program of their own.

    `reads`: what the program is given, in order, each under one or several names. `joined`: those that come as a list of slices,
    which the program joins first. `entries`: to which layouts some of what is read is moved first. Results go through layouts to
    the one in which they leave.
    """
    values = Values(assignment.mesh, compiler)
    buffers, inputs = _Buffers(assignment, values), []
    scope = Scope(buffers, {})
    for read, (names, layout) in reads.items():
        held = Held(values.add_shard(names[0].aval, layout, None, "read"), layout)
        inputs.append(held)
        scope.values.update(dict.fromkeys(names, buffers.join(held, scope) if read in joined else held))
    for v, layout in entries.items():
        scope.values[v] = buffers.bring(scope.values[v], layout, v.aval, scope)
    scope.run(equations)
    outputs = []
    for atom, path in writes:
        held = scope.value(atom)
        for layout in path:
            held = buffers.bring(held, layout, atom.aval, scope)
        outputs += [] if isinstance(atom, Literal) else [held.value]
    return buffers.program(scope, inputs, outputs)


def _is_cast(eqn: Equation) -> bool:
    """Whether an equation makes the same values in another type."""
    return making_of(eqn) is Making.SAME and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape


class _Buffers(LayoutDomain[Held], StaticDomain[Held]):
    """A value is a buffer; the operations of every program that the walk goes through are a block."""

    def __init__(self, layouts: Layouts, values: Values) -> None:
        super().__init__(layouts)
        self.values = values
        self._writers: dict[Scope[Held], BlockWriter] = {}
        self._operands: dict[LoopEquation, list[int]] = {}
        self._starts: dict[LoopEquation, list[int]] = {}
        self._given: dict[int, int] = {}

    def program(self, scope: Scope[Held], inputs: Sequence[Held], outputs: Sequence[int]) -> DeviceProgram:
        """Everything that has been written."""
        operations, outputs = copy_turned(self._writer(scope).operations, self.values, outputs)
        ends = tuple(v for v in outputs if v >= 0)
        block = Block(tuple(operations), ends, compiler=self.values.compiler)
        return DeviceProgram(block, tuple(self.values.values), tuple(h.value for h in inputs), tuple(outputs))

    def join(self, held: Held, scope: Scope[Held]) -> Held:
        """A stack of the slices that `held` stands for."""
        stack = self.values.add_like(held.value)
        self._writer(scope).emit(Kind.WHOLE, (held.value,), (stack,))
        return Held(stack, held.layout)

    def _writer(self, scope: Scope[Held]) -> BlockWriter:
        found = self._writers.get(scope)
        if found is None:
            found = self._writers[scope] = BlockWriter(self.values)
        return found

    def layout_of(self, value: Held) -> Layout:
        return value.layout

    def literal(self, atom: Literal, scope: Scope[Held]) -> Held:
        return Held(-1, Layout.replicated(len(atom.aval.shape)))

    def bring(self, value: Held, form: Layout, aval: Aval, scope: Scope[Held], *, late: Held | None = None) -> Held:
        path, writer = self.path(value, form, aval), self._writer(scope)
        if value.value < 0 or not path:
            return Held(value.value, form)
        number = value.value
        if late is not None:
            number = self.values.add_like(value.value)
            writer.wait(value.value, late.value, number)
        return Held(writer.move(number, path, aval), form)

    def operation(self, eqn: Equation, scope: Scope[Held]) -> Sequence[Held]:
        wanted = zip(eqn.invars, self.layouts.operand_layouts(eqn), strict=True)
        operands = [self.need(atom, layout, scope) for atom, layout in wanted]
        after = None if eqn.after is None else scope.values.get(eqn.after)
        results = self._writer(scope).operation(eqn, operands, self.layouts.result_layouts(eqn), after)
        if _is_cast(eqn) and self._is_split_input(operands[0].value):
            self.values.split_inputs.add(results[0].value)
        return results

    def _is_split_input(self, value: int) -> bool:
        """Whether a value is an input that may be gathered, or what operations read in place of one."""
        values = self.values
        return value in values.split_inputs or (value >= 0 and values.values[value].copy_of is not None)

    def begin(self, eqn: LoopEquation, scope: Scope[Held]) -> None:
        self._operands[eqn], self._starts[eqn] = [], []
        if eqn.branch_number is not None:
            self._operands[eqn].append(self.need(eqn.branch_number, Layout.replicated(0), scope).value)

    def enter(self, entry: Entry, scope: Scope[Held], inner: Scope[Held]) -> Held:
        """A buffer of the program around; of a row, what is cut out of it when it is read; or a constant, made inside."""
        outer, loop = self.need(entry.atom, self.layouts.operand_layout(entry), scope).value, entry.loop
        is_repeated = loop.branch_number is None
        if entry.filled is Filled.CONSTANT and is_repeated:
            outer = self._for_loop(outer, entry, scope)
        is_sunk = entry.filled is Filled.CONSTANT and is_repeated and outer in self.values.constants
        self._operands[loop].append(-1 if is_sunk else outer)
        if entry.filled is Filled.CARRY:
            self._starts[loop].append(outer)
        held = self.values.add_var(entry.var, self.layouts.entry_layout(entry), loop)
        if not is_repeated:
            self._given[held.value] = outer
        if is_sunk or entry.filled is Filled.ROW:
            read = () if is_sunk or outer < 0 else (outer,)
            self._writer(inner).operations.append(Operation(kind=Kind.CHEAP, inputs=read, outputs=(held.value,)))
        return held

    def _for_loop(self, outer: int, entry: Entry, scope: Scope[Held]) -> int:
        """What a loop reads all the time, as a value of its own if it is an input or its cast, which may be gathered for it."""
        values = self.values
        if outer < 0:
            return outer
        like = values.values[outer]
        root = outer if outer in values.split_inputs else like.copy_of
        if root is None:
            return outer
        copy = values.add(dataclasses.replace(like, var=entry.head.outvars[0], copy_of=root))
        self._writer(scope).emit(Kind.WHOLE, (outer,), (copy,))
        return copy

    def pass_on(self, entry: Entry, value: Held, inner: Scope[Held]) -> Held:
        assert entry.passed is not None
        held = self.values.add_var(entry.var, self.layouts.exit_layout(entry.passed), entry.loop)
        return self.bring(held, self.layouts.entry_layout(entry), entry.var.aval, inner)

    def leave(self, exit_: Exit, inner: Scope[Held]) -> Held:
        writer = self._writer(inner)
        held = self.bring(inner.value(exit_.atom), self.layouts.exit_layout(exit_), exit_.atom.aval, inner)
        if held.value >= 0 and exit_.goes is Goes.ROW:  # written into its stack at once
            writer.emit(Kind.REDUCE, (held.value,), ())
        elif held.value >= 0:
            writer.ends.append(held.value)
            if exit_.carry is not None:
                writer.places[held.value] = inner.value(exit_.carry.var).value
        return held

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, Held], scope: Scope[Held]) -> Sequence[Held]:
        writer, starts = self._writer(scope), self._starts.pop(eqn)
        results = writer.outputs(eqn, self.layouts.result_layouts(eqn))
        stacks = [
            self.values.add_like(held.value)
            for held, exits in zip(results, eqn.results, strict=True)
            if exits[0].goes is Goes.ROW
        ]
        for v in stacks:
            writer.emit(Kind.WHOLE, (), (v,))
        bodies = tuple(self._writers.pop(inner).block() for inner in list(self._writers) if inner.around is eqn)
        over, is_choice = (*starts, *stacks), eqn.branch_number is not None
        if is_choice:
            over = tuple(self._shared_with([[ends[exit_].value for exit_ in exits] for exits in eqn.results], bodies))
        operation = Operation(
            kind=Kind.WHOLE,
            inputs=tuple(v for v in (*self._operands.pop(eqn), *stacks) if v >= 0),
            outputs=tuple(held.value for held in results),
            over=over,
            bodies=bodies,
            chooses=is_choice,
        )
        writer.operations.append(operation)
        return results

    def _shared_with(self, ends: Sequence[Sequence[int]], bodies: Sequence[Block]) -> list[int]:
        """For each result of branches the operand in whose memory XLA puts it without a copy; -1 if there is none.

        A branch hands that operand on, or writes over it where nothing else reads it. XLA of JAX before 0.12 copies nevertheless,
        except where the first of two branches hands it on.
        """
        foldings = [Folding(body, self.values.values) for body in bodies]
        made = [[folding.original(v) for folding, v in zip(foldings, one, strict=True)] for one in ends]
        if not self.values.compiler.copies_branches:
            return [self._find_shared(one, self._taken(one[0], foldings[0]), foldings) for one in made]
        if len(bodies) != 2:
            return [-1] * len(ends)
        return [self._find_shared(one, [self._given.get(one[0], -1)], foldings) for one in made]

    def _find_shared(self, made: Sequence[int], operands: Sequence[int], foldings: Sequence[Folding]) -> int:
        def is_free(operand: int, made: int, folding: Folding) -> bool:
            """Whether nothing in a branch reads the operand, but what writes over it."""
            if self._given.get(made) == operand:
                return True
            readers = [op for op in folding.running if operand in map(self._given.get, folding.reads[op])]
            return all(op is folding.maker.get(made) and operand in self._taken(made, folding) for op in readers)

        usable = (one for one in operands if one >= 0 and all(map(is_free, [one] * len(made), made, foldings)))
        return next(usable, -1)

    def _taken(self, made: int, folding: Folding) -> list[int]:
        """The operands that a branch hands on as a result, or over which it may write that."""
        if made in self._given:
            return [self._given[made]]
        maker = folding.maker.get(made)
        in_place = () if maker is None or maker.kind not in FOLDED else folding.read_in_place(maker)
        return [self._given[v] for v in in_place if v in self._given]
