"""Evaluate the operations of a program on values that are in pieces.

In: an equation, the stacks that are divided and between which layers, the values so far. Out: its results, in pieces where its
factor rule allows it: each piece is computed as a shard would be, though pieces may differ in size. A factor that a rule reduces
is combined from the pieces' results by its monoid. A scan over a divided stack becomes one scan per piece. Anything else takes
its operands whole, joined once, and gives whole results, which are cut once for those who want pieces. What can go wrong: nothing
that the factor rules do not say; a rule that is wrong for shards is wrong for pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import Literal, Var, attributed_to
from autopar.layouts.mesh import LogicalMesh
from autopar.layouts.monoids import COMBINE
from autopar.program.evaluate import bind_equation, bind_scan
from autopar.program.loops import Filled, Goes, LoopEquation
from autopar.program.program import Atom, Equation, Program, fan_out_p
from autopar.program.tags import tag_operations
from autopar.rules.factor_rule import FactorRule, Operand
from autopar.rules.on_shard import LocalCall
from autopar.rules.table import rule_for, run_on_shard
from autopar.split_array import LeafPieces, cut_array
from autopar.stages.scan_stacks import Stack, factor_dims

Results = TypeVar("Results")
Given = jax.Array | np.ndarray
"""The value of an operand; of a literal an array that is not traced."""


@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
    """A stack and the layers between which its pieces are."""

    stack: Stack
    bounds: tuple[int, ...]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The layers of each piece, from and to."""
        return tuple(itertools.pairwise(self.bounds))

    def of_size(self, size: int) -> tuple[int, ...]:
        """The bounds along a dimension of this size, of which the layers are the major factor."""
        return tuple(bound * size // self.stack.length for bound in self.bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PieceCall(LocalCall):
    """An operation on a piece: one factor is cut to `count` of its values from `start`, as if sharded unevenly."""

    factor: str = ""
    start: int = 0
    count: int = 0

    def ways(self, factor: str) -> int:
        """More than one for the factor that is cut."""
        return 2 if factor == self.factor else 1

    def local_size(self, dim: Sequence[str]) -> int:
        """Size of a dimension in this piece."""
        size = 1
        for factor in dim:
            size *= self.count if factor == self.factor else self.rule.size_of(factor)
        return size

    def offset(self, dim: Sequence[str]) -> int:
        """Position in the whole of the first element of this piece."""
        position = 0
        for factor in dim:
            position = position * self.rule.size_of(factor) + (self.start if factor == self.factor else 0)
        return position


class Values:
    """The values of a program while it is evaluated: whole, in pieces along a dimension, or both."""

    def __init__(self, program: Program, divided: Sequence[Divided]) -> None:
        self.divided = tuple(divided)
        self._makers = {v: eqn for eqn in program.equations for v in eqn.outvars}
        self._whole: dict[Var, jax.Array] = {}
        self._parts: dict[tuple[Var, int, tuple[int, ...]], list[Given]] = {}
        self._made_in_parts: dict[Var, tuple[int, tuple[int, ...]]] = {}

    def set_whole(self, v: Var, array: jax.Array) -> None:
        """A value that is made whole."""
        self._whole[v] = array

    def set_parts(self, v: Var, dim: int, parts: Sequence[jax.Array]) -> None:
        """A value that is made in pieces."""
        bounds = tuple(itertools.accumulate((part.shape[dim] for part in parts), initial=0))
        self._made_in_parts[v] = (dim, bounds)
        self._parts[v, dim, bounds] = list(parts)

    def whole(self, atom: Atom) -> jax.Array:
        """The value; pieces are joined once, where the value is made."""
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        if atom not in self._whole:
            dim, bounds = self._made_in_parts[atom]
            with self._where_made(atom):
                self._whole[atom] = jax.lax.concatenate(self._parts[atom, dim, bounds], dim)
        return self._whole[atom]

    def operand(self, atom: Atom) -> Given:
        """The whole value as operations take it: of a literal its number, a constant of whatever is traced with it."""
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else self.whole(atom)

    def parts_between(self, atom: Atom, dim: int, bounds: tuple[int, ...]) -> list[Given]:
        """The value in pieces between these bounds; a whole one is cut once, where it is made."""
        if isinstance(atom, Literal):
            return cut_array(self.whole(atom), LeafPieces(0, dim, bounds))
        key = (atom, dim, bounds)
        if key not in self._parts:
            array = self.whole(atom)
            with self._where_made(atom):
                self._parts[key] = cut_array(array, LeafPieces(0, dim, bounds))
        return self._parts[key]

    def _where_made(self, v: Var) -> contextlib.AbstractContextManager[None]:
        return attributed_to(self._makers[v]) if v in self._makers else contextlib.nullcontext()


def evaluate(eqn: Equation, values: Values) -> None:
    """One operation, whose parts are traced under it as their tag: a divided scan in ranges, others in pieces, else whole."""
    for divided in values.divided:
        if isinstance(eqn, LoopEquation) and eqn in divided.stack.scans:
            _scan_in_ranges(eqn, divided, values)
            return
    if not isinstance(eqn, LoopEquation):
        rule = rule_for(eqn)
        for divided in values.divided:
            factor = _factor_of(eqn, rule, divided)
            if factor is not None:
                _in_pieces(eqn, rule, factor, divided, values)
                return
    results = _part_of(eqn, lambda *operands: bind_equation(eqn, operands))(*map(values.operand, eqn.invars))
    for v, array in zip(eqn.outvars, results, strict=True):
        values.set_whole(v, array)


def _part_of(eqn: Equation, fun: Callable[..., Results]) -> Callable[..., Results]:
    """A function whose operations do parts of an equation: they get its source line, and the equation as their tag."""

    def call(*operands: Any) -> Results:
        with attributed_to(eqn):
            return fun(*jax.tree.map(_as_jax_array, operands))

    return tag_operations(call, eqn)


def _as_jax_array(x: Given) -> jax.Array:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _factor_of(eqn: Equation, rule: FactorRule, divided: Divided) -> str | None:
    """The factor of an operation that counts the layers, if the operation can be done piece by piece along it."""
    dims, length = divided.stack.dims, divided.stack.length
    sides = list(zip((*eqn.invars, *eqn.outvars), (*rule.inputs, *rule.outputs), strict=True))
    for factor in rule.shardable():
        counted = [(v, factor_dims(op, factor)) for v, op in sides if not isinstance(v, Literal)]
        if not any(v in dims and dims[v] in found for v, found in counted) or rule.size_of(factor) % length:
            continue
        minor = any(factor in dim[1:] for _, op in sides for dim in op)
        reduced = factor in dict(rule.reduced)
        if not minor and all(len(found) < 2 for _, found in counted) and not (reduced and rule.seeds):
            return factor
    return None


def _in_pieces(eqn: Equation, rule: FactorRule, factor: str, divided: Divided, values: Values) -> None:
    """An operation piece by piece; where it reduces over the layers, the pieces' results are combined."""
    operands = [_operand_parts(v, op, factor, divided, values) for v, op in zip(eqn.invars, rule.inputs, strict=True)]
    unit = rule.size_of(factor) // divided.stack.length
    monoid = dict(rule.reduced).get(factor)
    mesh = LogicalMesh((1,), ("layers",))

    def compute(*operands: Sequence[jax.Array]) -> list[list[jax.Array]]:
        results = []
        for k, (start, end) in enumerate(divided.ranges):
            own = tuple(parts[k] for parts in operands)
            call = _PieceCall(
                eqn=eqn,
                operands=own,
                rule=rule,
                factor_axes={},
                mesh=mesh,
                factor=factor,
                start=start * unit,
                count=(end - start) * unit,
            )
            results.append(run_on_shard(call))
        of_each = [list(parts) for parts in zip(*results, strict=True)]
        return of_each if monoid is None else [[functools.reduce(COMBINE[monoid], parts)] for parts in of_each]

    results = _part_of(eqn, compute)(*operands)
    for v, operand, parts in zip(eqn.outvars, rule.outputs, results, strict=True):
        if monoid is None:
            values.set_parts(v, factor_dims(operand, factor)[0], parts)
        else:
            values.set_whole(v, parts[0])


def _operand_parts(atom: Atom, operand: Operand, factor: str, divided: Divided, values: Values) -> Sequence[Given]:
    dims = factor_dims(operand, factor)
    if not dims:
        return [values.operand(atom)] * len(divided.ranges)
    return values.parts_between(atom, dims[0], divided.of_size(atom.aval.shape[dims[0]]))


def _scan_in_ranges(eqn: LoopEquation, divided: Divided, values: Values) -> None:
    """A scan as one scan per piece; see the module's text."""
    consts = [values.operand(atom) for atom in eqn.operands_to(Filled.CONSTANT)]
    start = [values.operand(atom) for atom in eqn.operands_to(Filled.CARRY)]
    stacks = [values.parts_between(atom, 0, divided.bounds) for atom in eqn.operands_to(Filled.ROW)]
    adds = _sums(eqn) if eqn in divided.stack.backward else frozenset[int]()
    totals, made = _part_of(eqn, functools.partial(_ranges, eqn, divided.ranges, adds))(consts, start, stacks)
    for v, total in zip(eqn.results_from(Goes.CARRY), totals, strict=True):
        values.set_whole(v, total)
    for v, parts in zip(eqn.results_from(Goes.ROW), made, strict=True):
        values.set_parts(v, 0, parts)


def _ranges(
    eqn: LoopEquation,
    ranges: Sequence[tuple[int, int]],
    adds: frozenset[int],
    consts: Sequence[jax.Array],
    start: Sequence[jax.Array],
    stacks: Sequence[Sequence[jax.Array]],
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """The pieces of a scan, in the order in which it runs: (what it carries at the end, the pieces of its stacks).

    `adds`: the numbers of the sums that each piece takes from zero.
    """
    (body,) = eqn.nested
    order = range(len(ranges))
    carry: Sequence[jax.Array] = start
    totals, made = list(start), dict[int, Sequence[jax.Array]]()
    for place, k in enumerate(reversed(order) if eqn.loop.is_reversed else order):
        given = [jnp.zeros_like(x) if i in adds and place else x for i, x in enumerate(carry)]
        begin, end = ranges[k]
        outs = bind_scan(eqn, [*consts, *given, *(parts[k] for parts in stacks)], length=end - begin)
        carry, made[k] = body.carries_and_rows(outs)
        totals = [totals[i] + x if i in adds and place else x for i, x in enumerate(carry)]
    return totals, [[made[k][number] for k in order] for number in range(len(made[0]))]


def _sums(eqn: LoopEquation) -> frozenset[int]:
    """The numbers of carried values to which each iteration only adds something that does not depend on them."""
    (body,) = eqn.nested
    carried = [exit_ for exit_ in body.exits if exit_.carry is not None]
    return frozenset(
        i for i, e in enumerate(carried) if e.carry is not None and _is_sum(body.program, e.carry.var, e.atom)
    )


def _is_sum(body: Program, given: Var, returned: Atom) -> bool:
    """Whether `returned` is `given` plus something: a chain of single users with one linear operation of two operands."""
    users: dict[Var, list[Equation]] = {}
    for eqn in body.equations:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                users.setdefault(v, []).append(eqn)
    added, v = False, given
    while v is not returned:
        if len(users.get(v, ())) != 1 or any(out is v for out in body.outvars):
            return False
        (eqn,) = users[v]
        if isinstance(eqn, LoopEquation) or len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != v.aval.shape:
            return False
        if len(eqn.invars) == 2 and eqn.invars[0] is v and rule_for(eqn).linear == ((0, 1),):
            added = True
        elif eqn.primitive is not fan_out_p:
            return False
        v = eqn.outvars[0]
    return added
