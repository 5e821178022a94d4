"""The operations that one device runs, as `footprint` takes them: equations, moves between layouts, copies in XLA's own order.

In: a strategy graph, and an `Assignment` or None. Out: a `DeviceProgram`. With an assignment, every value has its size on one
device and every move is an operation, as the lowering performs them. Without one, there are no moves and values have the size
of the whole: which buffers live together then is what all choices have in common, and `Value.key` says whose choice decides
a buffer's size. What can go wrong: an operation that XLA's CPU compiler expands into several; those that matter are here
(random bits, contractions and convolutions that want other dimension orders, loops).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autopar.catalogue import is_opaque, itemsize_of
from autopar.compat import Literal, Var
from autopar.footprint import Block, Kind, Operation, Value
from autopar.graph import Source, StrategyGraph
from autopar.mesh import Layout
from autopar.program import Atom, Equation, Program, fan_out_p
from autopar.relayout import LOCAL_KINDS
from autopar.rules import entry_for
from autopar.spmd import Assignment, is_gathered

RENAMING = frozenset(
    {
        "copy", "copy_p", "fan_out", "optimization_barrier", "random_unwrap", "random_wrap", "reshape",
        "sharding_constraint", "squeeze", "stop_gradient",
    }
)  # fmt: skip
COSTLY = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "gather", "lgamma", "log", "log1p", "logistic", "pow", "rem", "rsqrt",
        "sin", "sinh", "sqrt", "tan", "tanh",
    }
)  # fmt: skip
FOLDED = frozenset(["concatenate", "dynamic_slice", "pad", "rev", "slice", "split", "stack", "transpose", "unstack"])
LIBRARY_SUM_BYTES = 4 * 4096
"""Sums over this much or more are left to a library, which multiplies by itself and reads whole buffers."""
REDUCTIONS = "reduce_"
WRITES_INTO_FIRST = ("scatter", "dynamic_update_slice")


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
    return _Walk(graph, assignment).program(names)


class _Walk:
    def __init__(self, graph: StrategyGraph, assignment: Assignment | None) -> None:
        self.graph, self.assignment, self.mesh = graph, assignment, graph.mesh
        self.values: list[Value] = []
        self.constants: set[int] = set()
        self.inputs: set[int] = set()
        self.factors: dict[int, tuple[int, ...]] = {}

    def program(self, names: Sequence[str]) -> DeviceProgram:
        program = self.graph.program
        held = []
        for number, node in enumerate(self.graph.nodes):
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
        self.values.append(Value(name, tuple(aval.shape), str(aval.dtype), size, key))
        return len(self.values) - 1


class _Region:
    """One program on its way to operations; as `spmd.Scope`, it remembers what has been moved where."""

    def __init__(self, walk: _Walk, program: Program, inputs: Sequence[_Held]) -> None:
        self.walk, self.graph, self.assignment, self.source = walk, walk.graph, walk.assignment, program
        self.operations: list[Operation] = []
        self.held: dict[Var, _Held] = dict(zip(program.invars, inputs, strict=True))
        self.moved: dict[tuple[Var, Layout], int] = {}
        self.used: dict[tuple[Var, Layout], int] = {}
        self.position = 0
        self.latest = -1

    def run(self) -> None:
        for position, eqn in enumerate(self.source.equations):
            self.position = position
            if eqn.loop is None:
                self._operation(eqn)
            else:
                _LOOPS[eqn.loop.kind](self, eqn)
            if eqn.outvars and str(eqn.outvars[-1].aval.dtype).startswith(("float", "bfloat")):
                self.latest = self.held[eqn.outvars[-1]].value

    def emit(self, kind: Kind, inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> None:
        read = tuple(v for v in inputs if v >= 0)
        if kind in (Kind.CHEAP, Kind.ALIAS) and all(v in self.walk.constants for v in read):
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
            self.emit(Kind.CHEAP, (held.value, self.latest), (waiting,))
            self.moved[key] = self.move(_Held(waiting, held.layout), target, atom.aval)
        elif key not in self.moved:
            self.moved[key] = self.move(held, target, atom.aval)
        self.used[key] = self.position
        return self.moved[key]

    def move(self, held: _Held, target: Layout | None, aval: Any) -> int:
        if target is None or held.layout == target or is_opaque(aval):
            return held.value
        value, made_from = held.value, self.walk.values[held.value]
        for move in self.graph.spaces.between(aval, held.layout, target).path(held.layout, target):
            name = f"{'moved' if move.kind in LOCAL_KINDS else move.kind} {made_from.name}"
            new = self.walk._value(aval, move.target, made_from.key, name)
            group = (move.axes, move.monoid, str(aval.dtype)) if move.kind == "all-reduce" else None
            self.emit(Kind.CHEAP if move.kind in LOCAL_KINDS else Kind.WHOLE, (value,), (new,), group=group)
            value = new
        return value

    def _is_stale(self, given: Layout, target: Layout, aval: Any, unused_for: int) -> bool:
        span = None if self.assignment is None else self.assignment.copy_span
        if span is None or unused_for <= span:
            return False
        return is_gathered(self.graph.spaces.between(aval, given, target).path(given, target))

    def _outputs(self, eqn: Equation, layouts: Sequence[Layout | None]) -> list[int]:
        """New values for the results of an equation."""
        numbers = []
        for var, layout in zip(eqn.outvars, layouts, strict=True):
            lies = self.walk._layout(layout, var.aval)
            source = self.graph.sources.get(var)
            number = self.walk._value(var.aval, lies, _key(source), f"{eqn.primitive.name} {tuple(var.aval.shape)}")
            self.held[var] = _Held(number, lies)
            numbers.append(number)
        return numbers

    def _operation(self, eqn: Equation) -> None:
        strategy = None if self.assignment is None else self.assignment.strategies[eqn]
        wanted: Sequence[Layout | None] = [None] * len(eqn.invars) if strategy is None else strategy.inputs
        operands = [self.need(v, layout) for v, layout in zip(eqn.invars, wanted, strict=True)]
        results: Sequence[Layout | None] = [None] * len(eqn.outvars) if strategy is None else strategy.outputs
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            orders, (order,) = _ORDERS[name](eqn)
            operands = [self._reordered(v, by) for v, by in zip(operands, orders, strict=True)]
            outputs = self._outputs(eqn, results)
            if not order:
                made = self._like(outputs[0])
                self.emit(Kind.WHOLE, operands, (made,))
                self.emit(Kind.CHEAP, (made,), outputs)
                return
            self.emit(Kind.WHOLE, operands, outputs)
            return
        outputs = self._outputs(eqn, results)
        if name in ("square", "mul") and all(self._is_like(v, outputs[0]) for v in operands):
            self.walk.factors[outputs[0]] = tuple(operands)
        if name == "random_bits":  # two halves of a counter, combined
            bits = self._like(outputs[0], factor=2)
            self.emit(Kind.WHOLE, operands, (bits,))
            self.emit(Kind.CHEAP, (bits,), outputs)
        elif name.startswith(WRITES_INTO_FIRST):
            self.emit(Kind.WHOLE, operands, outputs, over=(operands[0],) if operands[0] >= 0 else ())
        elif (
            self.assignment is None and eqn.primitive is fan_out_p and operands[0] in self.walk.inputs
        ):  # gathered, if it is split
            self.walk.values[outputs[0]] = dataclasses.replace(self.walk.values[outputs[0]], is_copy=True)
            self.emit(Kind.WHOLE, operands, outputs)
        elif self._is_renaming(eqn, operands, outputs):
            self.emit(Kind.ALIAS, operands[:1], outputs)
        elif name == "reduce_sum" and self._is_left_to_a_library(operands[0]):
            self.emit(Kind.WHOLE, self.walk.factors.get(operands[0], operands[:1]), outputs)
        else:
            self.emit(_kind_of(eqn), operands, outputs)

    def _is_left_to_a_library(self, operand: int) -> bool:
        return operand >= 0 and self.walk.values[operand].bytes >= LIBRARY_SUM_BYTES

    def _is_like(self, value: int, other: int) -> bool:
        return value >= 0 and self.walk.values[value].bytes == self.walk.values[other].bytes

    def _is_renaming(self, eqn: Equation, operands: Sequence[int], outputs: Sequence[int]) -> bool:
        if len(operands) == 0 or operands[0] < 0 or len(outputs) != 1:
            return False
        if eqn.primitive.name in RENAMING:
            return True
        (before,), (after,) = operands[:1], outputs
        same = self.walk.values[before].bytes == self.walk.values[after].bytes
        if eqn.primitive.name == "convert_element_type":
            return self.walk.values[before].dtype == self.walk.values[after].dtype
        return eqn.primitive.name == "broadcast_in_dim" and same

    def _like(self, value: int, *, factor: int = 1) -> int:
        known = self.walk.values[value]
        self.walk.values.append(dataclasses.replace(known, bytes=known.bytes * factor))
        return len(self.walk.values) - 1

    def _reordered(self, value: int, is_in_order: bool) -> int:
        """The value with its dimensions in another order, which XLA writes to a buffer of its own."""
        if is_in_order or value < 0:
            return value
        new = self._like(value)
        self.emit(Kind.CHEAP, (value,), (new,))
        return new

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

    def _scan(self, eqn: Equation) -> None:
        loop, (region,) = eqn.loop, eqn.regions
        assert loop is not None
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
            inner = self.walk._value(var.aval, lies, _key(self.graph.sources.get(var)), name)
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

    def _while(self, eqn: Equation) -> None:
        loop, (_, region) = eqn.loop, eqn.regions
        assert loop is not None
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

    def _cond(self, eqn: Equation) -> None:
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
            held.append(_Held(self.walk._value(var.aval, lies, _key(self.graph.sources.get(var)), name), lies))
        return held


_LOOPS: dict[str, Callable[[_Region, Equation], None]] = {
    "scan": _Region._scan,
    "while": _Region._while,
    "cond": _Region._cond,
}


def _key(source: Source | None) -> tuple[int, int, bool] | None:
    return None if source is None else (source.node, source.output, source.stacked)


def _kind_of(eqn: Equation) -> Kind:
    name, entry = eqn.primitive.name, entry_for(eqn)
    if name in COSTLY and not (name == "div" and isinstance(eqn.invars[1], Literal)):
        return Kind.COSTLY
    if entry.fused or entry.free or name in FOLDED or name == "integer_pow":
        return Kind.CHEAP
    return Kind.REDUCE if name.startswith(REDUCTIONS) and "window" not in name else Kind.WHOLE


def _order_of_contraction(eqn: Equation) -> tuple[list[bool], list[bool]]:
    """Whether operands and result have their dimensions in an order that a matrix product can read in place."""
    (contract, batch) = eqn.params["dimension_numbers"]
    found = []
    for v, contracted, batched in zip(eqn.invars, contract, batch, strict=True):
        rank = len(v.aval.shape)
        free = [d for d in range(rank) if d not in contracted and d not in batched]
        orders = ([*batched, *free, *contracted], [*batched, *contracted, *free])
        found.append(any(order == list(range(rank)) for order in orders))
    return found, [True]


def _order_of_convolution(eqn: Equation) -> tuple[list[bool], list[bool]]:
    """XLA's CPU convolutions take examples first and channels last, kernels with their features last."""
    numbers = eqn.params["dimension_numbers"]
    rank = len(numbers.lhs_spec)
    image = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    return [tuple(numbers.lhs_spec) == image, tuple(numbers.rhs_spec) == kernel], [tuple(numbers.out_spec) == image]


_ORDERS = {"dot_general": _order_of_contraction, "conv_general_dilated": _order_of_convolution}
