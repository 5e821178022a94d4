"""The operations that one device runs, as `footprint` takes them: equations, moves between layouts, copies in XLA's own order.

In: a strategy graph, and an `Assignment` or None. Out: a `DeviceProgram`. With an assignment, every value has its size on one
device and every move is an operation, as the lowering performs them. Without one, there are no moves and values have the size
of the whole: which buffers live together then is what all choices have in common, and `Value.key` says whose choice decides
a buffer's size. Equal work is one operation, as XLA makes it. What can go wrong: an operation that XLA's CPU compiler expands
into several; those that matter are here (random bits, operands that are repeated or wanted in another order, collectives
over inner dimensions, loops). What a primitive's result needs is in `intra_op/xla_cpu/`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from autopar.avals import dtype_name, is_opaque, itemsize_of
from autopar.compat import Literal, Var
from autopar.intra_op.choices.catalogue import Spaces
from autopar.intra_op.choices.graph import Source, StrategyGraph
from autopar.intra_op.lowering.assignment import Assignment, is_gathered
from autopar.intra_op.memory.device_operations import Block, Kind, Operation, Value
from autopar.intra_op.xla_cpu import table as xla_cpu
from autopar.intra_op.xla_cpu.contraction_orders import Orders
from autopar.intra_op.xla_cpu.table import Making
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import LOCAL_KINDS, Move
from autopar.program.fingerprint import operation_key
from autopar.program.loops import LoopEquation
from autopar.program.program import Atom, Equation, Program, fan_out_p
from autopar.rules.table import entry_for


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """`inputs[i]` is the value of program input i; `block.outputs[i]` of output i, -1 if it is a literal."""

    block: Block
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Held:
    """A value and, if an assignment is given, the layout it is in."""

    value: int
    layout: Layout


def device_program(graph: StrategyGraph, names: Sequence[str], assignment: Assignment | None) -> DeviceProgram:
    """See the module's text; `names` are those of the inputs."""
    return _Walk(graph.mesh, graph.spaces, graph.sources, assignment).program(graph, names)


def task_program(
    assignment: Assignment,
    equations: Sequence[Equation],
    *,
    reads: Mapping[Var, Layout],
    entries: Mapping[Var, Layout],
    writes: Sequence[tuple[Atom, Sequence[Layout]]],
) -> DeviceProgram:
    """Some of an assignment's equations as a program of their own.

    `entries`: to which layouts some of what is read is moved first. Results go through layouts to the one in which they leave.
    """
    walk = _Walk(assignment.mesh, assignment.spaces, {}, assignment)  # no choice is left whose sources would matter
    inputs = [_Held(walk._value(v.aval, layout, None, "read"), layout) for v, layout in reads.items()]
    region = _Region(walk, Program(tuple(reads), tuple(equations), ()), inputs)
    for v, layout in entries.items():
        region.held[v] = _Held(region.move(region.held[v], layout, v.aval), layout)
    region.run()
    outputs = []
    for atom, path in writes:
        if isinstance(atom, Literal):
            continue
        held = region.held[atom]
        for layout in path:
            held = _Held(region.move(held, layout, atom.aval), layout)
        outputs.append(held.value)
    block = Block(tuple(region.operations), tuple(outputs))
    return DeviceProgram(block, tuple(walk.values), tuple(h.value for h in inputs), tuple(outputs))


class _Walk:
    def __init__(
        self, mesh: LogicalMesh, spaces: Spaces, sources: Mapping[Var, Source], assignment: Assignment | None
    ) -> None:
        self.mesh, self.spaces, self.sources, self.assignment = mesh, spaces, sources, assignment
        self.values: list[Value] = []
        self.constants: set[int] = set()
        self.inputs: set[int] = set()
        self.turned: dict[tuple[int, tuple[int, ...]], int] = {}
        self.permuted: dict[int, tuple[int, tuple[int, ...]]] = {}

    def program(self, graph: StrategyGraph, names: Sequence[str]) -> DeviceProgram:
        program = graph.program
        held = []
        for number, node in enumerate(graph.nodes):
            if node.input_number is not None:
                var = program.invars[node.input_number]
                layout = self._layout(
                    None if self.assignment is None else self.assignment.inputs[node.input_number], var.aval
                )
                key = (number, 0, False)
                held.append(
                    (node.input_number, _Held(self._value(var.aval, layout, key, names[node.input_number]), layout))
                )
        inputs = [h for _, h in sorted(held, key=lambda pair: pair[0])]
        self.inputs.update(h.value for h in inputs)
        region = _Region(self, program, inputs)
        region.run()
        outputs = []
        for place, atom in enumerate(program.outvars):
            target = None if self.assignment is None else self.assignment.outputs[place]
            outputs.append(-1 if isinstance(atom, Literal) else region.need(atom, target))
        block = Block(tuple(region.operations), tuple(v for v in outputs if v >= 0))
        return DeviceProgram(block, tuple(self.values), tuple(h.value for h in inputs), tuple(outputs))

    def _layout(self, layout: Layout | None, aval: Any) -> Layout:
        return Layout.replicated(len(aval.shape)) if layout is None else layout

    def _value(self, aval: Any, layout: Layout, key: tuple[int, int, bool] | None, name: str, factor: int = 1) -> int:
        size = factor * layout.local_bytes(aval.shape, itemsize_of(aval), self.mesh)
        shape, dtype = tuple(aval.shape), dtype_name(aval.dtype)
        self.values.append(Value(name, shape, dtype, size, key=key, itemsize=itemsize_of(aval)))
        return len(self.values) - 1


class _Region:
    """One program on its way to operations; as `spmd.Scope`, it remembers what has been moved where."""

    def __init__(self, walk: _Walk, program: Program, inputs: Sequence[_Held]) -> None:
        self.walk, self.assignment, self.source = walk, walk.assignment, program
        self.operations: list[Operation] = []
        self.held: dict[Var, _Held] = dict(zip(program.invars, inputs, strict=True))
        self.moved: dict[tuple[Var, Layout], int] = {}
        self.used: dict[tuple[Var, Layout], int] = {}
        self.known: dict[Hashable, list[_Held]] = {}
        self.position = 0
        self.latest = -1

    def run(self) -> None:
        for position, eqn in enumerate(self.source.equations):
            self.position = position
            if not isinstance(eqn, LoopEquation):
                self._operation(eqn)
            else:
                _LOOPS[eqn.loop.kind](self, eqn)
            if eqn.outvars and dtype_name(eqn.outvars[-1].aval.dtype).startswith(("float", "bfloat")):
                self.latest = self.held[eqn.outvars[-1]].value

    def emit(self, kind: Kind, inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> None:
        read = tuple(v for v in inputs if v >= 0)
        if kind in (Kind.CHEAP, Kind.MOVED, Kind.ALIAS) and all(v in self.walk.constants for v in read):
            self.walk.constants.update(outputs)
        self.operations.append(Operation(kind, read, tuple(outputs), **more))

    def need(self, atom: Atom, target: Layout | None) -> int:
        """The number of a value in a layout, moved there if it is elsewhere; -1 for a literal."""
        if isinstance(atom, Literal):
            return -1
        held = self.held[atom]
        if target is None or held.layout == target or is_opaque(atom.aval):
            return held.value
        key = (atom, target)
        unused_for = self.position - self.used[key] if key in self.used else sys.maxsize
        if self._is_stale(held.layout, target, atom.aval, unused_for):
            waiting = self._like(held.value)
            self._wait(held.value, self.latest, waiting)
            self.moved[key] = self.move(_Held(waiting, held.layout), target, atom.aval)
        elif key not in self.moved:
            self.moved[key] = self.move(held, target, atom.aval)
        self.used[key] = self.position
        return self.moved[key]

    def move(self, held: _Held, target: Layout | None, aval: Any) -> int:
        if target is None or held.layout == target or is_opaque(aval):
            return held.value
        value, made_from = held.value, self.walk.values[held.value]
        for move in self.walk.spaces.between(aval, held.layout, target).path(held.layout, target):
            name = f"{'moved' if move.kind in LOCAL_KINDS else move.kind} {made_from.name}"
            new = self.walk._value(aval, move.target, made_from.key, name)
            group = (move.axes, move.monoid, dtype_name(aval.dtype)) if move.kind == "all-reduce" else None
            if move.kind in LOCAL_KINDS:
                self.emit(Kind.CHEAP, (value,), (new,))
            elif self._is_turned(move, aval):
                given, taken = self._like(value), self._like(new)
                self.emit(Kind.MOVED, (value,), (given,))
                self.emit(Kind.WHOLE, (given,), (taken,))
                self.emit(Kind.MOVED, (taken,), (new,))
            else:
                self.emit(Kind.WHOLE, (value,), (new,), group=group)
            value = new
        return value

    def _is_turned(self, move: Move, aval: Any) -> bool:
        """Whether a collective cuts or joins a dimension that is not the outermost: XLA turns that outside for it, and back.

        An all-to-all cuts one dimension and joins another, so one of them is inside.
        """
        if move.kind == "all-to-all":
            return True
        dim = {"all-gather": move.from_dim, "reduce-scatter": move.to_dim}.get(move.kind, 0)
        return math.prod(move.source.local_shape(aval.shape, self.walk.mesh)[:dim]) > 1

    def _is_stale(self, given: Layout, target: Layout, aval: Any, unused_for: int) -> bool:
        span = None if self.assignment is None else self.assignment.copy_span
        if span is None or unused_for <= span:
            return False
        return is_gathered(self.walk.spaces.between(aval, given, target).path(given, target))

    def _outputs(self, eqn: Equation, layouts: Sequence[Layout | None]) -> list[int]:
        """New values for the results of an equation."""
        numbers = []
        for var, layout in zip(eqn.outvars, layouts, strict=True):
            lies = self.walk._layout(layout, var.aval)
            source = self.walk.sources.get(var)
            number = self.walk._value(var.aval, lies, _key(source), f"{eqn.primitive.name} {tuple(var.aval.shape)}")
            self.held[var] = _Held(number, lies)
            numbers.append(number)
        return numbers

    def _operation(self, eqn: Equation) -> None:
        strategy = None if self.assignment is None else self.assignment.strategies[eqn]
        wanted: Sequence[Layout | None] = [None] * len(eqn.invars) if strategy is None else strategy.inputs
        operands = [self.need(v, layout) for v, layout in zip(eqn.invars, wanted, strict=True)]
        results: Sequence[Layout | None] = [None] * len(eqn.outvars) if strategy is None else strategy.outputs
        entry, making, orders = entry_for(eqn), xla_cpu.making_of(eqn), xla_cpu.orders_of(eqn)
        if orders is not None:
            self._contraction(eqn, operands, wanted, results, orders)
            return
        if entry.fused and not entry.free:
            operands = [self._spread(v, n, eqn, results) for v, n in zip(eqn.invars, operands, strict=True)]
        same = _same_work(eqn, operands, results) if eqn.after is None else None
        if same is not None and same in self.known:
            self.held.update(zip(eqn.outvars, self.known[same], strict=True))
            return
        outputs = self._outputs(eqn, results)
        if same is not None:
            self.known[same] = [self.held[v] for v in eqn.outvars]
        is_gathered_input = self.assignment is None and eqn.primitive is fan_out_p and operands[0] in self.walk.inputs
        if entry.random and len(outputs) == 1:  # two halves of a counter, combined
            bits = self._like(outputs[0], factor=2)
            self.emit(Kind.WHOLE, operands, (bits,))
            self.emit(Kind.CHEAP, (bits,), outputs)
        elif making is Making.IN_PLACE:
            over = (operands[0],) if operands[0] >= 0 else ()
            self.emit(Kind.WHOLE, operands, outputs, over=over, adds=xla_cpu.can_move_sums(eqn) and bool(over))
        elif entry.permutation is not None and operands[0] >= 0:
            self._permute(operands[0], entry.permutation(eqn), outputs[0])
        elif is_gathered_input:  # if it is split
            self.walk.values[outputs[0]] = dataclasses.replace(self.walk.values[outputs[0]], is_copy=True)
            self.emit(Kind.WHOLE, operands, outputs)
        elif eqn.after is not None and eqn.after in self.held:
            self._wait(operands[0], self.held[eqn.after].value, outputs[0])
        elif self._is_renaming(making, operands, outputs):
            self.emit(Kind.ALIAS, operands[:1], outputs)
            if operands[0] in self.walk.permuted and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape:
                self.walk.permuted[outputs[0]] = self.walk.permuted[operands[0]]
        else:
            by_library, adds = xla_cpu.can_join_library(eqn), xla_cpu.can_move_sums(eqn)
            self.emit(_KINDS[making], operands, outputs, by_library=by_library, adds=adds)

    def _wait(self, value: int, late: int, out: int) -> None:
        """The value as soon as another is there, of which one element is read."""
        given = self.walk.values[max(late, 0)]
        self.walk.values.append(dataclasses.replace(given, shape=(), bytes=given.itemsize, key=None))
        number = len(self.walk.values) - 1
        self.emit(Kind.MOVED, (late,), (number,))
        self.emit(Kind.CHEAP, (value, number), (out,))

    def _permute(self, value: int, permutation: Sequence[int], out: int) -> None:
        """The value with its dimensions in another order; permutations that undo each other leave another name."""
        source, before = self.walk.permuted.get(value, (value, tuple(range(len(permutation)))))
        order = tuple(before[d] for d in permutation)
        self.walk.permuted[out] = source, order
        is_undone = order == tuple(range(len(order)))
        self.emit(Kind.ALIAS if is_undone else Kind.MOVED, (source,), (out,), by_library=True)

    def _spread(self, atom: Atom, value: int, eqn: Equation, results: Sequence[Layout | None]) -> int:
        """An operand of pointwise work, repeated as often as the result needs it: an operation of its own, made once."""
        (out, *_), (layout, *_) = eqn.outvars, results
        if value < 0 or atom.aval.shape == out.aval.shape or is_opaque(out.aval):
            return value
        key = (value, out.aval.shape, layout)
        if key not in self.known:
            lies = self.walk._layout(layout, out.aval)
            given = self.walk.values[value]
            size = lies.local_bytes(out.aval.shape, given.itemsize, self.walk.mesh)
            if size == given.bytes:
                return value
            spread = dataclasses.replace(
                given, shape=tuple(out.aval.shape), bytes=size, key=_key(self.walk.sources.get(out))
            )
            self.walk.values.append(spread)
            self.known[key] = [_Held(len(self.walk.values) - 1, lies)]
            self.emit(Kind.CHEAP, (value,), (self.known[key][0].value,), by_library=True)
        return self.known[key][0].value

    def _contraction(
        self,
        eqn: Equation,
        operands: Sequence[int],
        wanted: Sequence[Layout | None],
        results: Sequence[Layout | None],
        orders: Orders,
    ) -> None:
        """A product or convolution, which reads operands with their dimensions in the order that it wants."""
        read = []
        for place, (value, layout, v) in enumerate(zip(operands, wanted, eqn.invars, strict=True)):
            shape = self.walk._layout(layout, v.aval).local_shape(v.aval.shape, self.walk.mesh)
            if value in self.walk.permuted and orders.reads_before(place, self.walk.permuted[value][1], shape):
                read.append(self.walk.permuted[value][0])
                continue
            order = orders.copied(place, shape)
            read.append(value if value < 0 or order is None else self._turned(value, order))
        outputs = self._outputs(eqn, results)
        if orders.is_result_in_order:
            self.emit(Kind.WHOLE, read, outputs)
            return
        made = self._like(outputs[0])
        self.emit(Kind.WHOLE, read, (made,))
        self.emit(Kind.MOVED, (made,), outputs)

    def _turned(self, value: int, order: tuple[int, ...]) -> int:
        """The value with its dimensions in another order, which XLA writes once to a buffer of its own."""
        key = (value, order)
        if key not in self.walk.turned:
            self.walk.turned[key] = self._like(value)
            self.emit(Kind.MOVED, (value,), (self.walk.turned[key],))
        return self.walk.turned[key]

    def _is_renaming(self, making: Making, operands: Sequence[int], outputs: Sequence[int]) -> bool:
        if len(operands) == 0 or operands[0] < 0 or len(outputs) != 1:
            return False
        before, after = self.walk.values[operands[0]], self.walk.values[outputs[0]]
        is_same = (before.bytes, before.dtype) == (after.bytes, after.dtype)
        return making is Making.NAME or (making is Making.SAME and is_same)

    def _like(self, value: int, *, factor: int = 1) -> int:
        known = self.walk.values[value]
        self.walk.values.append(dataclasses.replace(known, bytes=known.bytes * factor))
        return len(self.walk.values) - 1

    # Loops.

    def _heads(self, region: Program) -> list[Layout | None]:
        """The layouts in which a nested program takes its inputs."""
        if self.assignment is None:
            return [None] * len(region.invars)
        return [self.assignment.strategies[region.equations[i]].inputs[0] for i in range(len(region.invars))]

    def _body(self, region: Program, inputs: Sequence[_Held]) -> _Region:
        body = _Region(self.walk, region, inputs)
        body.run()
        return body

    def _scan(self, eqn: LoopEquation) -> None:
        loop, (region,) = eqn.loop, eqn.regions
        heads = self._heads(region)
        first_stack = loop.consts + loop.carries
        operands, inputs = [], []
        slices: list[Operation] = []
        for place, (atom, head, var) in enumerate(zip(eqn.invars, heads, region.invars, strict=True)):
            stacked = place >= first_stack
            outer = self.need(atom, head.prepend() if head is not None and stacked else head)
            is_sunk = place < loop.consts and outer in self.walk.constants
            operands.append(-1 if is_sunk else outer)
            lies = self.walk._layout(head, var.aval)
            name = f"{eqn.primitive.name} {tuple(var.aval.shape)}"
            inner = self.walk._value(var.aval, lies, _key(self.walk.sources.get(var)), name)
            if stacked:  # a slice of the stack, cut out when it is read
                slices.append(Operation(Kind.CHEAP, (outer,) if outer >= 0 else (), (inner,)))
            elif is_sunk:  # XLA makes constants inside the loop
                slices.append(Operation(Kind.CHEAP, (), (inner,)))
            inputs.append(_Held(inner, lies))
        body = self._body(region, inputs)
        outs = [body.held[a] if not isinstance(a, Literal) else None for a in region.outvars]
        carried = heads[loop.consts : first_stack]
        ends = []
        for out, head, atom in zip(outs, carried, region.outvars, strict=False):
            if out is not None:
                ends.append(body.move(out, head, atom.aval))
        for out in outs[loop.carries :]:
            if out is not None:  # written into its stack at once
                body.emit(Kind.REDUCE, (out.value,), ())
        stacks = [None if out is None else out.layout.prepend() for out in outs[loop.carries :]]
        results = self._outputs(eqn, [*carried, *(s if self.assignment else None for s in stacks)])
        starts = [self._like(v) for v in results[loop.carries :]]
        for v in starts:
            self.emit(Kind.WHOLE, (), (v,))
        block = Block((*slices, *body.operations), tuple(ends))
        over = (*(operands[loop.consts : first_stack]), *starts)
        self.emit(Kind.WHOLE, (*operands, *starts), results, over=over, bodies=(block,))

    def _while(self, eqn: LoopEquation) -> None:
        loop, (_, region) = eqn.loop, eqn.regions
        heads = self._heads(region)
        start = loop.condition_consts
        operands = [self.need(v, head) for v, head in zip(eqn.invars[start:], heads, strict=True)]
        conditions = [self.need(v, None) for v in eqn.invars[:start]]
        body = self._body(region, self._entries(eqn, region, heads))
        carried = heads[loop.consts :]
        ends = [
            body.move(body.held[a], head, a.aval)
            for a, head in zip(region.outvars, carried, strict=True)
            if not isinstance(a, Literal)
        ]
        results = self._outputs(eqn, carried)
        over = tuple(operands[loop.consts :])
        block = Block(tuple(body.operations), tuple(ends))
        self.emit(Kind.WHOLE, (*conditions, *operands), results, over=over, bodies=(block,))

    def _cond(self, eqn: LoopEquation) -> None:
        joins = [None] * len(eqn.outvars) if self.assignment is None else self.assignment.joins[eqn]
        blocks, operands = [], [self.need(eqn.invars[0], None)]
        for region in eqn.regions:
            heads = self._heads(region)
            operands += [self.need(v, head) for v, head in zip(eqn.invars[1:], heads, strict=True)]
            body = self._body(region, self._entries(eqn, region, heads))
            ends = [
                body.move(body.held[a], join, a.aval)
                for a, join in zip(region.outvars, joins, strict=True)
                if not isinstance(a, Literal)
            ]
            blocks.append(Block(tuple(body.operations), tuple(ends)))
        self.emit(Kind.WHOLE, operands, self._outputs(eqn, joins), bodies=tuple(blocks))

    def _entries(self, eqn: Equation, region: Program, heads: Sequence[Layout | None]) -> list[_Held]:
        """A nested program's inputs, which lie in buffers of the program around it."""
        held = []
        for var, head in zip(region.invars, heads, strict=True):
            lies = self.walk._layout(head, var.aval)
            name = f"{eqn.primitive.name} {tuple(var.aval.shape)}"
            held.append(_Held(self.walk._value(var.aval, lies, _key(self.walk.sources.get(var)), name), lies))
        return held


_LOOPS: dict[str, Callable[[_Region, LoopEquation], None]] = {
    "scan": _Region._scan,
    "while": _Region._while,
    "cond": _Region._cond,
}


def _key(source: Source | None) -> tuple[int, int, bool] | None:
    return None if source is None else (source.node, source.output, source.stacked)


_KINDS = {
    Making.WHOLE: Kind.WHOLE,
    Making.NAME: Kind.CHEAP,
    Making.SAME: Kind.CHEAP,
    Making.CHEAP: Kind.CHEAP,
    Making.MOVED: Kind.MOVED,
    Making.COSTLY: Kind.COSTLY,
    Making.REDUCTION: Kind.REDUCE,
    Making.LIBRARY: Kind.LIBRARY,
}


def _same_work(eqn: Equation, operands: Sequence[int], results: Sequence[Layout | None]) -> Hashable:
    """Equal for equations that do the same to the same values, of which XLA keeps one; None where it does not look.

    It leaves barriers apart, so that what is recomputed behind one stays apart too.
    """
    if entry_for(eqn).barrier or xla_cpu.making_of(eqn) in (Making.WHOLE, Making.IN_PLACE):
        return None
    read = tuple(
        (str(v.aval), str(v.val)) if isinstance(v, Literal) else n for v, n in zip(eqn.invars, operands, strict=True)
    )
    return operation_key(eqn), read, tuple(results)
