"""One equation of a device's program as the operations that a compiler makes of it.

In: an equation with the numbers of its operands and the layouts of its results, or a move. Out: `Operation`s in one block,
and the `Value`s that they make. Equal work is one operation. What can go wrong: an operation that the compiler expands into
several; those that matter are here (random bits, operands that are repeated or wanted in another order, collectives over
inner dimensions).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence

import jax

from autopar.avals import Aval, dtype_name, is_opaque, itemsize_of
from autopar.compat import Literal, Var, module_path
from autopar.intra_op.memory.compilers import XLA_CPU, Compiler
from autopar.intra_op.memory.device_operations import Block, Held, Kind, Operation, Value
from autopar.intra_op.memory.equation_facts import EquationFacts, facts_of, kind_of, result_name
from autopar.intra_op.memory.zeros import Zeros
from autopar.intra_op.xla_cpu import table as xla_cpu
from autopar.intra_op.xla_cpu.contraction_orders import Orders
from autopar.intra_op.xla_cpu.table import Making
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import LOCAL_KINDS, Move
from autopar.program.program import Atom, Equation, fan_out_p
from autopar.rules.table import entry_for


class Values:
    """The values of one device's program, and what is known of them in all of its blocks.

    `split_inputs`: inputs that are gathered when they are first read, if they are split, and casts of them. `permuted`: what a
    value is with its dimensions in another order. `turned`: values that have been written in an order. `products`: products of
    two matrices, which XLA computes the other way around if all that is done with them is to exchange rows and columns.
    """

    def __init__(self, mesh: LogicalMesh, compiler: Compiler = XLA_CPU) -> None:
        self.mesh, self.compiler = mesh, compiler
        self.values: list[Value] = []
        self.constants: set[int] = set()
        self.split_inputs: set[int] = set()
        self.turned: dict[tuple[int, tuple[int, ...]], int] = {}
        self.permuted: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.products: set[int] = set()
        self.zeros = Zeros()
        self._bytes: dict[tuple[tuple[int, ...], int, Layout], int] = {}

    def add(self, value: Value) -> int:
        """The number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    def add_shard(self, aval: Aval, layout: Layout, var: Var | None, name: str, scope: str = "") -> int:
        """The number of a new value that is a device's shard in a layout."""
        shape, dtype, itemsize = tuple(aval.shape), dtype_name(aval.dtype), itemsize_of(aval)
        size = self.local_bytes(shape, itemsize, layout)
        return self.add(Value(name=name, shape=shape, dtype=dtype, bytes=size, var=var, itemsize=itemsize, scope=scope))

    def local_bytes(self, shape: tuple[int, ...], itemsize: int, layout: Layout) -> int:
        """Bytes of a device's shard, found once for all values that are alike."""
        key = shape, itemsize, layout
        if key not in self._bytes:
            self._bytes[key] = layout.local_bytes(shape, itemsize, self.mesh)
        return self._bytes[key]

    def add_like(self, value: int, *, factor: int = 1) -> int:
        """The number of a new value like another one, or so many times as large."""
        known = self.values[value]
        return self.add(dataclasses.replace(known, bytes=known.bytes * factor))

    def add_var(self, var: Var, layout: Layout, maker: Equation) -> Held:
        """A new value for a variable that an equation makes."""
        name = result_name(maker, var.aval.shape)
        return Held(self.add_shard(var.aval, layout, var, name, module_path(maker)), layout)


class BlockWriter:
    """Writes one block; `ends` are the values that it hands on, `places` of a loop's body what they are in the next trip."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.operations: list[Operation] = []
        self.ends: list[int] = []
        self.places: dict[int, int] = {}
        self.known: dict[Hashable, list[Held]] = {}
        self.factors: dict[int, Hashable] = {}

    def block(self) -> Block:
        """What has been written."""
        return Block(tuple(self.operations), tuple(self.ends), dict(self.places), self.values.compiler)

    def emit(
        self,
        kind: Kind,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        over: tuple[int, ...] = (),
        bodies: tuple[Block, ...] = (),
        group: Hashable = None,
        by_library: bool = False,
        adds: bool = False,
        multiplies: bool = False,
        has_workspace: bool = False,
        reshaped: frozenset[int] = frozenset(),
    ) -> None:
        """Write an operation; what is made of constants alone is a constant."""
        read = tuple([v for v in inputs if v >= 0])
        if self.values.constants.issuperset(read) and kind in (Kind.CHEAP, Kind.MOVED, Kind.ALIAS):
            self.values.constants.update(outputs)
        self.operations.append(
            Operation(
                kind=kind,
                inputs=read,
                outputs=tuple(outputs),
                over=over,
                bodies=bodies,
                group=group,
                by_library=by_library,
                adds=adds,
                multiplies=multiplies,
                has_workspace=has_workspace,
                reshaped=reshaped,
            )
        )

    def move(self, value: int, path: Sequence[Move], aval: Aval) -> int:
        """The value after moves."""
        made_from = self.values.values[value]
        for move in path:
            name = f"{'moved' if move.kind in LOCAL_KINDS else move.kind} {made_from.name}"
            new = self.values.add_shard(aval, move.target, made_from.var, name, made_from.scope)
            is_merged = move.kind in self.values.compiler.merges
            group = (move.kind, move.axes, move.monoid, dtype_name(aval.dtype)) if is_merged else None
            if move.kind in LOCAL_KINDS:
                self.emit(Kind.CHEAP, (value,), (new,))
            elif self._is_turned(move, aval):
                given, taken = self.values.add_like(value), self.values.add_like(new)
                self.emit(Kind.MOVED, (value,), (given,))
                self.emit(Kind.WHOLE, (given,), (taken,), group=group)
                self.emit(Kind.MOVED, (taken,), (new,))
            else:
                self.emit(Kind.WHOLE, (value,), (new,), group=group)
            value = new
        return value

    def _is_turned(self, move: Move, aval: Aval) -> bool:
        """Whether a collective cuts or joins a dimension that is not the outermost: XLA turns that outside for it, and back.

        An all-to-all cuts one dimension and joins another, so one of them is inside.
        """
        if move.kind == "all-to-all":
            return True
        dim = {"all-gather": move.from_dim, "reduce-scatter": move.to_dim}.get(move.kind, 0)
        return math.prod(move.source.local_shape(aval.shape, self.values.mesh)[:dim]) > 1

    def outputs(self, eqn: Equation, layouts: Sequence[Layout]) -> list[Held]:
        """New values for the results of a loop."""
        return [self.values.add_var(var, layout, eqn) for var, layout in zip(eqn.outvars, layouts, strict=True)]

    def _results(self, eqn: Equation, facts: EquationFacts, layouts: Sequence[Layout]) -> list[Held]:
        """New values for the results of an equation that is no loop."""
        values, scope = self.values, facts.scope
        return [
            Held(values.add_shard(var.aval, layout, var, name, scope), layout)
            for var, layout, name in zip(eqn.outvars, layouts, facts.names, strict=True)
        ]

    def operation(
        self,
        eqn: Equation,
        operands: Sequence[Held],
        layouts: Sequence[Layout],
        after: Held | None,
    ) -> Sequence[Held]:
        """An equation that is no loop; `layouts` are those of its results, `after` is what it waits for without reading it."""
        read, facts = [held.value for held in operands], facts_of(eqn)
        if facts.orders is not None:
            return self._contraction(eqn, facts, operands, layouts, facts.orders)
        same_as = self.values.zeros.find_same(eqn, read)
        if same_as is not None and operands[same_as].layout == layouts[0]:
            return [operands[same_as]]
        entry = entry_for(eqn)
        if entry.fused and not entry.free:
            apart = self._apart(eqn, facts, read)
            read = [self._spread(v, n, eqn, facts, layouts, apart) for v, n in zip(eqn.invars, read, strict=True)]
        same = None
        if facts.work is not None and not entry.barrier:  # what is recomputed behind a barrier stays apart
            same = facts.work, tuple(read[place] for place in facts.variables), tuple(layouts)
            if same in self.known:
                return self.known[same]
        results = self._results(eqn, facts, layouts)
        self.values.zeros.note(eqn, read, results[0].value)
        if same is not None:
            self.known[same] = results
        if facts.factor is not None:
            self.factors[results[0].value] = facts.factor
        if entry.scratch is not None:
            shapes = [
                held.layout.local_shape(v.aval.shape, self.values.mesh)
                for v, held in zip(eqn.invars, operands, strict=True)
            ]
            self._write_with_scratch(eqn, entry.scratch(eqn, shapes), read, results)
            return results
        self._write(eqn, facts, read, [held.value for held in results], after)
        return results

    def _write(
        self, eqn: Equation, facts: EquationFacts, operands: Sequence[int], outputs: Sequence[int], after: Held | None
    ) -> None:
        """The operations of an equation whose results are new."""
        entry, making = entry_for(eqn), facts.making
        if entry.random and not self.values.compiler.draws_bits_apart:
            self.emit(Kind.DEAR, operands, outputs)
        elif entry.random and len(outputs) == 1:  # two halves of a counter, combined
            bits = self.values.add_like(outputs[0], factor=2)
            self.emit(Kind.WHOLE, operands, (bits,))
            self.emit(Kind.CHEAP, (bits,), outputs)
        elif making is Making.IN_PLACE:
            over = (operands[0],) if operands[0] >= 0 else ()
            self.emit(Kind.WHOLE, operands, outputs, over=over, adds=facts.adds and bool(over))
        elif making is Making.SELECTED and operands[1] >= 0:
            self._scatter_selected(operands, outputs)
        elif entry.permutation is not None and operands[0] >= 0:
            self._permute(operands[0], entry.permutation(eqn), outputs[0])
        elif eqn.primitive is fan_out_p and operands[0] in self.values.split_inputs:
            self.values.values[outputs[0]] = dataclasses.replace(self.values.values[outputs[0]], copy_of=operands[0])
            self.emit(Kind.WHOLE, operands, outputs)
        elif after is not None:
            self.wait(operands[0], after.value, outputs[0])
        elif self._is_renaming(making, operands, outputs):
            self.emit(Kind.ALIAS, operands[:1], outputs)
            if operands[0] in self.values.permuted and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape:
                self.values.permuted[outputs[0]] = self.values.permuted[operands[0]]
            if operands[0] in self.factors:
                self.factors[outputs[0]] = self.factors[operands[0]]
        else:
            made = self.values.values[outputs[0]]
            kind = kind_of(facts, self.values.compiler, made.itemsize)
            if kind is Kind.DEAR and made.dtype == "bfloat16":  # computed and kept in float32
                wide = self.values.add_like(outputs[0], factor=2)
                self.emit(kind, operands, (wide,))
                kind, operands = Kind.CHEAP, (wide,)
            self.emit(kind, operands, outputs, by_library=facts.by_library, adds=facts.adds)

    def _write_with_scratch(self, eqn: Equation, size: int, operands: Sequence[int], results: Sequence[Held]) -> None:
        """An operation that needs so many bytes while it runs, as a loop needs its body's. Its first result divides them."""
        first = self.values.values[results[0].value]
        name = f"within {eqn.primitive.name} {first.shape}"
        scratch = self.values.add(dataclasses.replace(first, name=name, bytes=size))
        body = Block((Operation(kind=Kind.WHOLE, inputs=(), outputs=(scratch,)),), (scratch,))
        self.emit(Kind.WHOLE, operands, [held.value for held in results], bodies=(body,))

    def _scatter_selected(self, operands: Sequence[int], outputs: Sequence[int]) -> None:
        """A scatter of the first operand to places that are selected in windows of the second: XLA numbers all elements of that,
        which waits for nothing, and carries the numbers through the windows."""
        given, scattered = (self.values.values[v] for v in operands[1::-1])
        size = 4 * given.elements
        key = ("positions", given.shape, given.bytes)
        if key not in self.known:
            number = dataclasses.replace(given, name=f"positions {given.shape}", dtype="int32", bytes=size, itemsize=4)
            self.known[key] = [Held(self.values.add(number), Layout.replicated(0)) for _ in given.shape]
            for held in self.known[key]:
                self.emit(Kind.WHOLE, (), (held.value,))
        positions = [held.value for held in self.known[key]]
        chosen = dataclasses.replace(
            scattered, name=f"selected {scattered.shape}", bytes=4 * scattered.elements, itemsize=4
        )
        places = [self.values.add(chosen) for _ in given.shape]
        self.emit(Kind.WHOLE, (operands[1], *positions), places)
        self.emit(Kind.WHOLE, (operands[0], *places), outputs)

    def wait(self, value: int, late: int, out: int) -> None:
        """The value as soon as another is there, of which one element is read."""
        given = self.values.values[late]
        number = self.values.add(dataclasses.replace(given, shape=(), bytes=given.itemsize, var=None))
        self.emit(Kind.MOVED, (late,), (number,))
        self.emit(Kind.CHEAP, (value, number), (out,))

    def _permute(self, value: int, permutation: Sequence[int], out: int) -> None:
        """The value with its dimensions in another order; permutations that undo each other leave another name."""
        source, before = self.values.permuted.get(value, (value, tuple(range(len(permutation)))))
        order = tuple(before[d] for d in permutation)
        self.values.permuted[out] = source, order
        is_undone = order == tuple(range(len(order))) or value in self.values.products
        self.emit(Kind.ALIAS if is_undone else Kind.MOVED, (source,), (out,), by_library=True)

    def _apart(self, eqn: Equation, facts: EquationFacts, read: Sequence[int]) -> list[Hashable]:
        """What tells a value that is repeated for an equation from the same one, repeated for others.

        That is constants that move into it; and if XLA does not find that the two are the same, all that the equation reads.
        """
        factors = [self.factors[n] for n in read if n in self.factors] if facts.takes_factors else []
        return factors if xla_cpu.shares_repeated(eqn, self.values.mesh.size) else [*factors, *read]

    def _spread(
        self,
        atom: Atom,
        value: int,
        eqn: Equation,
        facts: EquationFacts,
        layouts: Sequence[Layout],
        apart: Sequence[Hashable],
    ) -> int:
        """An operand of pointwise work, repeated as often as the result needs it: an operation of its own, made once.

        `apart` tells it from others. A constant is repeated as well, if a library may read the result and others may share it.
        """
        (out, *_), (layout, *_) = eqn.outvars, layouts
        if is_opaque(out.aval) or (value >= 0 and atom.aval.shape == out.aval.shape):
            return value
        itemsize = itemsize_of(atom.aval)
        size = self.values.local_bytes(tuple(out.aval.shape), itemsize, layout)
        if value < 0 and (size < itemsize * xla_cpu.LIBRARY_ELEMENTS or not self._is_shared_constant(facts)):
            return value
        if value >= 0 and size == self.values.values[value].bytes:
            return value
        dtype = dtype_name(atom.aval.dtype)
        source = (str(atom.val), dtype) if isinstance(atom, Literal) else value
        key = (source, out.aval.shape, layout, *apart)
        if key not in self.known:
            name = str(source) if value < 0 else self.values.values[value].name
            scope = "" if value < 0 else self.values.values[value].scope
            spread = self.values.add_shard(
                jax.core.ShapedArray(out.aval.shape, atom.aval.dtype), layout, out, name, scope
            )
            self.known[key] = [Held(spread, layout)]
            self.emit(Kind.CHEAP, (value,), (spread,), by_library=True)
        return self.known[key][0].value

    def _is_shared_constant(self, facts: EquationFacts) -> bool:
        """Whether all readers of a constant that an equation reads are found to read the same."""
        return self.values.mesh.size == 1 and facts.factor is None

    def _contraction(
        self,
        eqn: Equation,
        facts: EquationFacts,
        operands: Sequence[Held],
        layouts: Sequence[Layout],
        orders: Orders,
    ) -> Sequence[Held]:
        """A product or convolution, which reads operands with their dimensions in the order that it wants."""
        read, reshaped = [], set[int]()
        for place, (held, v) in enumerate(zip(operands, eqn.invars, strict=True)):
            value, shape = held.value, held.layout.local_shape(v.aval.shape, self.values.mesh)
            if value in self.values.permuted and orders.reads_before(place, self.values.permuted[value][1], shape):
                read.append(self.values.permuted[value][0])
                continue
            order = orders.copy_order(place, shape) if self.values.compiler.turns_operands else None
            if order is None and orders.is_reshaped(place):
                reshaped.add(value)
            read.append(value if value < 0 or order is None else self._turn(value, order))
        results = self._results(eqn, facts, layouts)
        outputs = [held.value for held in results]
        if orders.makes_matrix:
            self.values.products.update(outputs)
        if orders.is_result_in_order or not self.values.compiler.turns_operands:
            self.emit(
                Kind.WHOLE,
                read,
                outputs,
                multiplies=orders.multiplies,
                has_workspace=self.values.compiler.adds_into_products,
                reshaped=frozenset(reshaped),
            )
            return results
        made = self.values.add_like(outputs[0])
        self.emit(Kind.WHOLE, read, (made,))
        self.emit(Kind.MOVED, (made,), outputs)
        return results

    def _turn(self, value: int, order: tuple[int, ...]) -> int:
        """The value with its dimensions in another order, which XLA writes once to a buffer of its own."""
        key = (value, order)
        if key not in self.values.turned:
            self.values.turned[key] = self.values.add_like(value)
            self.emit(Kind.MOVED, (value,), (self.values.turned[key],))
        return self.values.turned[key]

    def _is_renaming(self, making: Making, operands: Sequence[int], outputs: Sequence[int]) -> bool:
        if len(operands) == 0 or operands[0] < 0 or len(outputs) != 1:
            return False
        before, after = self.values.values[operands[0]], self.values.values[outputs[0]]
        is_same = (before.bytes, before.dtype) == (after.bytes, after.dtype)
        return making is Making.NAME or (making is Making.SAME and is_same)
