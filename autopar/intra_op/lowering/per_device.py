"""A program and its strategies as one per-device program with explicit collectives.

In: a `Program`, the strategy chosen for each equation, the layouts of inputs and outputs. Out: a function of local shards,
to be run under `jax.shard_map`: every equation works on local shards, and where a value is not in the layout an operand
needs, the moves of the cheapest path bring it there. A value that several operands need in the same layout is moved once.
What can go wrong: anything that still speaks of global shapes; the random-strategies test is the judge.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.avals import is_opaque
from autopar.compat import Literal, Var
from autopar.intra_op.lowering.assignment import Assignment, is_gathered
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.perform import after_value, perform_move
from autopar.program.program import Atom, Equation, Program
from autopar.rules.on_shard import LocalCall
from autopar.rules.table import entry_for


def local_function(assignment: Assignment) -> Any:
    """The per-device function: local shards of the inputs to local shards of the outputs."""

    def run(*shards: jax.Array) -> list[jax.Array]:
        lowering = Lowering(assignment)
        inputs = [Placed(x, layout) for x, layout in zip(shards, assignment.inputs, strict=True)]
        outs = lowering.region(assignment.program, inputs)
        return [
            lowering.moved(out, layout, atom.aval)
            for out, layout, atom in zip(outs, assignment.outputs, assignment.program.outvars, strict=True)
        ]

    return run


def sharded(assignment: Assignment, device_mesh: jax.sharding.Mesh) -> Any:
    """The assignment's local function under shard_map: global arrays in, global arrays out."""
    return jax.shard_map(
        local_function(assignment),
        mesh=device_mesh,
        in_specs=tuple(partition_spec(layout, assignment.mesh) for layout in assignment.inputs),
        out_specs=[partition_spec(layout, assignment.mesh) for layout in assignment.outputs],
        check_vma=False,
    )


def partition_spec(layout: Layout, mesh: LogicalMesh) -> jax.sharding.PartitionSpec:
    """A layout without partial axes as JAX's PartitionSpec."""
    assert not layout.partial
    return jax.sharding.PartitionSpec(*(mesh.names(axes) or None for axes in layout.dims))


@dataclasses.dataclass(frozen=True)
class Placed:
    """A local array and the layout it is the shard of."""

    array: Any
    layout: Layout


class Scope:
    """Values of one program while it runs, each in every layout it has been moved to."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.values: dict[Var, Placed] = {}
        self.moved: dict[tuple[Var, Layout], Any] = {}
        self.used: dict[tuple[Var, Layout], int] = {}
        self.position = 0
        self.latest: Any = None

    def get(self, atom: Atom, layout: Layout) -> Any:
        """The value in a layout, moved there once; a gathered copy long unused is gathered again (`copy_span`)."""
        if isinstance(atom, Literal):
            whole = Placed(_literal(atom), Layout.replicated(len(atom.aval.shape)))
            return self.lowering.moved(whole, layout, atom.aval)
        key = (atom, layout)
        unused_for = self.position - self.used[key] if key in self.used else sys.maxsize
        is_stale = self.lowering.is_stale(self.values[atom], layout, atom.aval, unused_for)
        if key not in self.moved or is_stale:
            after = self.latest if is_stale else None
            self.moved[key] = self.lowering.moved(self.values[atom], layout, atom.aval, after=after)
        self.used[key] = self.position
        return self.moved[key]

    def placed(self, atom: Atom) -> Placed:
        """The value in the layout in which it was made."""
        if isinstance(atom, Literal):
            return Placed(_literal(atom), Layout.replicated(len(atom.aval.shape)))
        return self.values[atom]


def _literal(atom: Any) -> jax.Array:
    return jnp.asarray(atom.val, dtype=atom.aval.dtype)


class Lowering:
    """Runs a program's equations on local shards, moving values as the assignment says."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.mesh = assignment.mesh

    def region(self, program: Program, inputs: Sequence[Placed]) -> list[Placed]:
        """A whole program."""
        scope = Scope(self)
        scope.values.update(zip(program.invars, inputs, strict=True))
        self.run(program.equations, scope)
        return [scope.placed(atom) for atom in program.outvars]

    def run(self, equations: Sequence[Equation], scope: Scope) -> None:
        """Run equations in order; their operands are in the scope, and so are their results afterwards."""
        for scope.position, eqn in enumerate(equations):
            outs = self.operation(eqn, scope) if eqn.loop is None else _LOOPS[eqn.loop.kind](self, eqn, scope)
            scope.values.update(zip(eqn.outvars, outs, strict=True))
            if outs and outs[-1].array.size and jnp.issubdtype(outs[-1].array.dtype, jnp.floating):
                scope.latest = outs[-1].array

    def is_stale(self, value: Placed, target: Layout, aval: Any, unused_for: int) -> bool:
        """Whether a copy is dropped after so many equations without a use."""
        span = self.assignment.copy_span
        if span is None or unused_for <= span or value.layout == target or is_opaque(aval):
            return False
        return is_gathered(self.assignment.spaces.between(aval, value.layout, target).path(value.layout, target))

    def moved(self, value: Placed, target: Layout, aval: Any, *, after: Any = None) -> Any:
        """The local array after the cheapest moves from the value's layout to `target`, made again once `after` is there."""
        if value.layout == target or is_opaque(aval):
            return value.array
        space = self.assignment.spaces.between(aval, value.layout, target)
        array = value.array if after is None else after_value(after, value.array)
        for move in space.path(value.layout, target):
            array = perform_move(move, array, self.mesh)
        return array

    def operation(self, eqn: Equation, scope: Scope) -> list[Placed]:
        """One equation that is not a loop."""
        strategy, rule = self.assignment.strategies[eqn], self.assignment.rules[eqn]
        operands = tuple(scope.get(v, layout) for v, layout in zip(eqn.invars, strategy.inputs, strict=True))
        call = LocalCall(eqn, operands, rule, dict(strategy.factor_axes), self.mesh)
        results = entry_for(eqn).local(call)
        if eqn.after is not None and eqn.after in scope.values:
            results = [self.held_back(array, scope.values[eqn.after].array) for array in results]
        return [Placed(array, layout) for array, layout in zip(results, strategy.outputs, strict=True)]

    def held_back(self, array: Any, late: Any) -> Any:
        """The array, not before `late` is there."""
        return after_value(late, array) if late.size else array

    def needs(self, eqn: Equation) -> tuple[Layout, ...]:
        """The layouts in which an equation takes its operands."""
        loop = eqn.loop
        if loop is None:
            return self.assignment.strategies[eqn].inputs
        heads = [[self._head(region, place) for place in range(len(region.invars))] for region in eqn.regions]
        if loop.kind == "cond":
            return (Layout.replicated(0), *heads[0])
        if loop.kind == "while":
            return (*heads[0][: loop.condition_consts], *heads[1])
        first_stack = loop.consts + loop.carries
        return (*heads[0][:first_stack], *(head.prepend() for head in heads[0][first_stack:]))

    def gives(self, eqn: Equation) -> tuple[Layout, ...]:
        """The layouts of an equation's results."""
        loop = eqn.loop
        if loop is None:
            return self.assignment.strategies[eqn].outputs
        if loop.kind == "cond":
            return self.assignment.joins[eqn]
        body = eqn.regions[-1]
        carried = [self._head(body, place) for place in range(loop.consts, loop.consts + loop.carries)]
        stacked = [self._made(body, atom).prepend() for atom in body.outvars[loop.carries :]]
        return (*carried, *stacked)

    def _made(self, program: Program, atom: Atom) -> Layout:
        """The layout of a value that a nested program returns: its last equation for it is a fan_out."""
        if isinstance(atom, Literal):
            return Layout.replicated(len(atom.aval.shape))
        (eqn,) = (e for e in program.equations if atom in e.outvars)
        return self.gives(eqn)[eqn.outvars.index(atom)]

    def _head(self, region: Program, place: int) -> Layout:
        """The layout in which a nested program takes its input: that of the fan_out which is its only user."""
        return self.assignment.strategies[region.equations[place]].inputs[0]

    def _scan(self, eqn: Equation, scope: Scope) -> list[Placed]:
        loop, (region,) = eqn.loop, eqn.regions
        assert loop is not None
        heads = [self._head(region, place) for place in range(len(region.invars))]
        first_stack = loop.consts + loop.carries
        consts = [scope.get(v, h) for v, h in zip(eqn.invars, heads[: loop.consts], strict=False)]
        carried = heads[loop.consts : first_stack]
        start = [scope.get(v, h) for v, h in zip(eqn.invars[loop.consts :], carried, strict=False)]
        stacks = [scope.get(v, h.prepend()) for v, h in zip(eqn.invars[first_stack:], heads[first_stack:], strict=True)]
        stack_layouts: list[Layout] = []

        def body(carry: Any, slices: Any) -> Any:
            inputs = [Placed(x, h) for x, h in zip((*consts, *carry, *slices), heads, strict=True)]
            outs = self.region(region, inputs)
            new = [self.moved(o, h, a.aval) for o, h, a in zip(outs, carried, region.outvars, strict=False)]
            stack_layouts[:] = [o.layout for o in outs[loop.carries :]]
            return tuple(new), tuple(o.array for o in outs[loop.carries :])

        params = {key: eqn.params[key] for key in ("reverse", "unroll") if key in eqn.params}
        carry, ys = jax.lax.scan(body, tuple(start), tuple(stacks), length=eqn.params["length"], **params)
        results = [Placed(x, h) for x, h in zip(carry, carried, strict=True)]
        return results + [Placed(y, layout.prepend()) for y, layout in zip(ys, stack_layouts, strict=True)]

    def _while(self, eqn: Equation, scope: Scope) -> list[Placed]:
        loop, (condition, body) = eqn.loop, eqn.regions
        assert loop is not None
        check_heads = [self._head(condition, place) for place in range(len(condition.invars))]
        heads = [self._head(body, place) for place in range(len(body.invars))]
        n = loop.condition_consts
        check_consts = [scope.get(v, h) for v, h in zip(eqn.invars[:n], check_heads, strict=False)]
        consts = [scope.get(v, h) for v, h in zip(eqn.invars[n:], heads[: loop.consts], strict=False)]
        carried = heads[loop.consts :]
        start = [scope.get(v, h) for v, h in zip(eqn.invars[n + loop.consts :], carried, strict=True)]

        def check(carry: Any) -> Any:
            inputs = [Placed(x, h) for x, h in zip(check_consts, check_heads, strict=False)]
            for x, h, target, var in zip(carry, carried, check_heads[n:], condition.invars[n:], strict=True):
                inputs.append(Placed(self.moved(Placed(x, h), target, var.aval), target))
            (decision,) = self.region(condition, inputs)
            return self.moved(decision, Layout.replicated(0), condition.outvars[0].aval)

        def step(carry: Any) -> Any:
            inputs = [Placed(x, h) for x, h in zip((*consts, *carry), heads, strict=True)]
            outs = self.region(body, inputs)
            return tuple(self.moved(o, h, a.aval) for o, h, a in zip(outs, carried, body.outvars, strict=True))

        results = jax.lax.while_loop(check, step, tuple(start))
        return [Placed(x, h) for x, h in zip(results, carried, strict=True)]

    def _cond(self, eqn: Equation, scope: Scope) -> list[Placed]:
        joins = self.assignment.joins[eqn]
        number = scope.get(eqn.invars[0], Layout.replicated(0))
        branches = []
        for region in eqn.regions:
            heads = [self._head(region, place) for place in range(len(region.invars))]
            operands = [scope.get(v, h) for v, h in zip(eqn.invars[1:], heads, strict=True)]

            def branch(region: Program = region, heads: Any = heads, operands: Any = operands) -> Any:
                outs = self.region(region, [Placed(x, h) for x, h in zip(operands, heads, strict=True)])
                return tuple(self.moved(o, j, a.aval) for o, j, a in zip(outs, joins, region.outvars, strict=True))

            branches.append(branch)
        index = number.astype(jnp.int32)
        results = jax.lax.switch(index, branches)
        return [Placed(x, layout) for x, layout in zip(results, joins, strict=True)]


_LOOPS = {"scan": Lowering._scan, "while": Lowering._while, "cond": Lowering._cond}
