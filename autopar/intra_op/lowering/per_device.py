"""A program and its strategies as one per-device program with explicit collectives.

In: a `Program`, the strategy chosen for each equation, the layouts of inputs and outputs. Out: a function of local shards,
to be run under `jax.shard_map`: every equation works on local shards, and where a value is not in the layout an operand
needs, the moves of the cheapest path bring it there. A value that several operands need in the same layout is moved once.
What can go wrong: anything that still speaks of global shapes; the random-strategies test is the judge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.avals import Aval, is_opaque
from autopar.compat import Literal, Var, attributed_to
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.layout_domain import LayoutDomain
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.perform import after_value, perform_move
from autopar.program.loops import Filled, LoopEquation, Nested
from autopar.program.program import Equation
from autopar.program.walk import Scope
from autopar.rules.on_shard import LocalCall
from autopar.rules.table import run_on_shard

Arrays = tuple[jax.Array, ...]


def local_function(assignment: Assignment) -> Callable[..., list[jax.Array]]:
    """The per-device function: local shards of the inputs to local shards of the outputs."""

    def run(*shards: jax.Array) -> list[jax.Array]:
        lowering, program = Lowering(assignment), assignment.program
        placed = [Placed(x, layout) for x, layout in zip(shards, assignment.inputs, strict=True)]
        scope = Scope(lowering, dict(zip(program.invars, placed, strict=True)))
        scope.run(program.equations)
        return [
            lowering.move_to(scope.value(atom), layout, atom.aval)
            for atom, layout in zip(program.outvars, assignment.outputs, strict=True)
        ]

    return run


def map_over_mesh(assignment: Assignment, device_mesh: jax.sharding.Mesh) -> Callable[..., list[jax.Array]]:
    """The assignment's local function under shard_map: global arrays in, global arrays out.

    JAX 0.10 to 0.12 fail to compile some such functions whose arguments are all empty. These get a number beside them.
    """
    program, local = assignment.program, local_function(assignment)
    beside = [i for i, v in enumerate(program.outvars) if not is_opaque(v.aval)][:1]
    is_empty = bool(program.invars) and all(0 in v.aval.shape for v in program.invars) and bool(beside)

    def with_number(number: jax.Array, *shards: jax.Array) -> list[jax.Array]:
        return [lax.optimization_barrier((x, number))[0] if i in beside else x for i, x in enumerate(local(*shards))]

    in_specs = tuple(partition_spec(layout, assignment.mesh) for layout in assignment.inputs)
    mapped: Callable[..., list[jax.Array]] = jax.shard_map(
        with_number if is_empty else local,
        mesh=device_mesh,
        in_specs=(jax.sharding.PartitionSpec(), *in_specs) if is_empty else in_specs,
        out_specs=[partition_spec(layout, assignment.mesh) for layout in assignment.outputs],
        check_vma=False,
    )
    return (lambda *given: mapped(jnp.zeros(()), *given)) if is_empty else mapped


def partition_spec(layout: Layout, mesh: LogicalMesh) -> jax.sharding.PartitionSpec:
    """A layout without partial axes as JAX's PartitionSpec."""
    assert not layout.partial
    return jax.sharding.PartitionSpec(*(mesh.names(axes) or None for axes in layout.dims))


@dataclasses.dataclass(frozen=True)
class Placed:
    """A local array and the layout it is the shard of; the array of a literal is NumPy's."""

    array: jax.Array
    layout: Layout


class Lowering(LayoutDomain[Placed]):
    """Runs a program's equations on local shards, moving values as the assignment says."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.assignment, self.mesh = assignment, assignment.mesh

    def layout_of(self, value: Placed) -> Layout:
        """Which shards of the value the devices hold."""
        return value.layout

    def literal(self, atom: Literal, scope: Scope[Placed]) -> Placed:
        """The whole literal, on every device; as NumPy's, which JAX takes for a constant and need not trace."""
        array = cast(jax.Array, np.asarray(atom.val, dtype=atom.aval.dtype))
        return Placed(array, Layout.replicated(len(atom.aval.shape)))

    def bring(
        self, value: Placed, form: Layout, aval: Aval, scope: Scope[Placed], *, late: Placed | None = None
    ) -> Placed:
        """The local array in another layout, made again once `late` is there."""
        return Placed(self.move_to(value, form, aval, after=None if late is None else late.array), form)

    def move_to(self, value: Placed, layout: Layout, aval: Aval, *, after: jax.Array | None = None) -> jax.Array:
        """The local array after the cheapest moves from the value's layout to `layout`, made once `after` is there."""
        path, array = self.path(value, layout, aval), value.array
        array = after_value(after, array) if path and after is not None else array
        for move in path:
            array = perform_move(move, array, self.mesh)
        return array

    def operation(self, eqn: Equation, scope: Scope[Placed]) -> list[Placed]:
        """One equation that is not a loop; what it becomes, its moves too, carries its line and scopes."""
        with attributed_to(eqn):
            return self._operation(eqn, scope)

    def _operation(self, eqn: Equation, scope: Scope[Placed]) -> list[Placed]:
        strategy, rule = self.assignment.strategies[eqn], self.assignment.rules[eqn]
        operands = tuple(self.need(v, la, scope).array for v, la in zip(eqn.invars, strategy.inputs, strict=True))
        late = scope.values.get(awaited) if (awaited := self.late(eqn)) is not None else None
        if late is not None:  # or what is cheap would be computed early, and its result be kept
            operands = tuple(
                array if isinstance(v, Literal) else self.hold_back(array, late.array)
                for v, array in zip(eqn.invars, operands, strict=True)
            )
        call = LocalCall(eqn=eqn, operands=operands, rule=rule, factor_axes=dict(strategy.factor_axes), mesh=self.mesh)
        results = run_on_shard(call)
        if late is not None and all(isinstance(v, Literal) for v in eqn.invars):
            results = [self.hold_back(array, late.array) for array in results]
        return list(map(self.place, eqn.outvars, results, strategy.outputs))

    def place(self, var: Var, array: jax.Array, layout: Layout) -> Placed:
        """A value of the program as the walk keeps it."""
        return Placed(array, layout)

    def late(self, eqn: Equation) -> Var | None:
        """What an equation waits for without reading it."""
        return eqn.after

    def hold_back(self, array: jax.Array, late: jax.Array) -> jax.Array:
        """The array, not before `late` is there."""
        return after_value(late, array) if late.size else array

    def loop(self, eqn: LoopEquation, scope: Scope[Placed]) -> list[Placed]:
        """Control flow as JAX's own, on local shards."""
        with attributed_to(eqn):
            results = _LOOPS[eqn.loop.kind](self, eqn, scope)
        return list(map(self.place, eqn.outvars, results, self.assignment.result_layouts(eqn)))

    def _scan(self, eqn: LoopEquation, scope: Scope[Placed]) -> Arrays:
        (body,), loop = eqn.nested, eqn.loop
        run = self._function(body, eqn, scope)

        def step(carries: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
            return body.carries_and_rows(run(*carries, *rows))

        start, stacks = self._operands(body, Filled.CARRY, scope), self._operands(body, Filled.ROW, scope)
        carries, rows = jax.lax.scan(
            step, start, stacks, length=loop.trips, reverse=loop.is_reversed, unroll=loop.unroll
        )
        return (*carries, *rows)

    def _while(self, eqn: LoopEquation, scope: Scope[Placed]) -> Arrays:
        body, condition = (self._function(nested, eqn, scope) for nested in eqn.nested)
        start = self._operands(eqn.nested[0], Filled.CARRY, scope)
        carries: Arrays = jax.lax.while_loop(lambda c: condition(*c)[0], lambda c: body(*c), start)
        return carries

    def _cond(self, eqn: LoopEquation, scope: Scope[Placed]) -> Arrays:
        assert eqn.branch_number is not None
        number = self.need(eqn.branch_number, Layout.replicated(0), scope).array
        branches = [self._function(nested, eqn, scope) for nested in eqn.nested]
        results: Arrays = jax.lax.switch(number.astype(jnp.int32), branches)
        return results

    def _operands(self, nested: Nested, filled: Filled, scope: Scope[Placed]) -> Arrays:
        """The operands that fill inputs in this way, in the layouts in which the nested program takes them."""
        entries = nested.entries_filled(filled)
        return tuple(self.need(e.atom, self.assignment.operand_layout(e), scope).array for e in entries)

    def _function(self, nested: Nested, eqn: LoopEquation, scope: Scope[Placed]) -> Callable[..., Arrays]:
        """A nested program as a function of its carries and rows; its constants are operands, moved once outside of it.

        Carries come as the body takes them, and results leave in the layouts that their exits ask for.
        """
        entry_layout, exit_layout = self.assignment.entry_layout, self.assignment.exit_layout
        fixed = nested.entries_filled(Filled.CONSTANT)
        constants = {e.var: self.need(e.atom, entry_layout(e), scope) for e in fixed}
        varying = nested.entries_filled(Filled.CARRY, Filled.ROW, Filled.PASSED)

        def run(*arrays: jax.Array) -> Arrays:
            inner = scope.inside(eqn)
            inner.values.update(constants)
            for e, array in zip(varying, arrays, strict=True):
                given = entry_layout(e) if e.passed is None else exit_layout(e.passed)
                inner.values[e.var] = self.bring(self.place(e.var, array, given), entry_layout(e), e.var.aval, inner)
            inner.run(nested.program.equations)
            return tuple(self.move_to(inner.value(e.atom), exit_layout(e), e.atom.aval) for e in nested.exits)

        return run


_LOOPS = {"scan": Lowering._scan, "while": Lowering._while, "cond": Lowering._cond}
