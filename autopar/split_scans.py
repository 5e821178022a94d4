"""Divide scans over layers: the same step with each scanned stack in pieces, so that stages can be cut between them.

In: a traced step and, for each of its stacks, the layers at which it is cut. Out: a `SplitStep`, whose program has

    scan over [a_0, a_1); scan over [a_1, a_2); ...     in place of a scan over [0, L)

The pieces hand on what the scan carries, read their part of what it reads layer by layer, and make their part of what it stacks;
a scan that goes backwards runs its pieces from the last to the first. What is stacked stays in pieces through every operation
whose factor rule allows it, exactly as it would be sharded: residuals, gradients, moments, updates. What reduces over the layers
is combined from the pieces by its monoid. Anything else reads the whole stack, joined for it. Leaves of the step that are stacked
become one leaf per piece. A sum that a backward scan carries along, as of the gradient of a weight that all layers share, is
taken in each piece from zero and added up after it: otherwise every stage would wait for the next one's sum.

What can go wrong: an operation between two layers of a stack; it makes the stack whole where it runs, which is right but slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import Literal, Var, attributed_to, name_stack
from autopar.evaluate import bound
from autopar.factors import FactorRule
from autopar.local import LocalCall
from autopar.mesh import LogicalMesh
from autopar.microbatch import COMBINE
from autopar.program import Equation, Program, fan_out_p, program_of
from autopar.rules import entry_for, rule_for
from autopar.split_array import LeafPieces, cut_at
from autopar.stacks import ScanCuts, Stack, factor_dims, find_stacks
from autopar.trace import Leaf, TracedStep, fingerprint_of


@dataclasses.dataclass(frozen=True, eq=False)
class SplitStep:
    """See the module's text. `inputs` and `outputs` say for each leaf of `whole` which leaves of `step` hold it."""

    whole: TracedStep
    step: TracedStep
    cuts: ScanCuts
    inputs: tuple[LeafPieces, ...]
    outputs: tuple[LeafPieces, ...]


def split_scans(traced: TracedStep, cuts: ScanCuts) -> SplitStep:
    """The step with its stacks (`stacks.find_stacks`) cut at these layers; without any it is the step itself."""
    if not any(cuts):
        inputs = tuple(LeafPieces(i) for i in range(len(traced.inputs) - len(traced.constants)))
        return SplitStep(traced, traced, (), inputs, tuple(LeafPieces(i) for i in range(len(traced.outputs))))
    stacks = find_stacks(traced)
    divided = [_Divided(stack, (0, *at, stack.length)) for stack, at in zip(stacks, cuts, strict=True) if at]
    return _Splitter(traced, divided).split(cuts)


@dataclasses.dataclass(frozen=True, eq=False)
class _Divided:
    """A stack and the layers between which its pieces are."""

    stack: Stack
    bounds: tuple[int, ...]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(itertools.pairwise(self.bounds))

    def of_size(self, size: int) -> tuple[int, ...]:
        """The bounds along a dimension of this size, of which the layers are the major factor."""
        return tuple(bound * size // self.stack.length for bound in self.bounds)


@dataclasses.dataclass(frozen=True)
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


class _Splitter:
    """Makes the split step: its leaves, its program, its results."""

    def __init__(self, traced: TracedStep, divided: Sequence[_Divided]) -> None:
        self.traced, self.divided = traced, tuple(divided)
        self._given = len(traced.inputs) - len(traced.constants)
        self._leaves = self._pieces_of_leaves()

    def split(self, cuts: ScanCuts) -> SplitStep:
        """The step in pieces."""
        leaves = self._numbered(self._leaves[: self._given])
        outputs = self._numbered(self._pieces_of_results())
        closed = jax.make_jaxpr(functools.partial(self._run, outputs))(*self._avals())
        program, captured = program_of(closed)
        step = dataclasses.replace(
            self.traced,
            program=program,
            constants=(*self._constants(), *captured),
            inputs=self._input_leaves(program),
            outputs=tuple(self._in_pieces(self.traced.outputs, outputs)),
            state_of_output=self._states(leaves, outputs),
        )
        return SplitStep(self.traced, _without_unused_constants(step), cuts, leaves, outputs)

    def _pieces_of_leaves(self) -> list[LeafPieces]:
        return [
            self._pieces_of(v) if leaf.role != "batch" and not _is_opaque(v) else LeafPieces(0)
            for v, leaf in zip(self.traced.program.invars, self.traced.inputs, strict=True)
        ]

    def _pieces_of_results(self) -> list[LeafPieces]:
        """A result that takes a leaf's place is held as the leaf is; others are whole."""
        return [LeafPieces(0) if source is None else self._leaves[source] for source in self.traced.state_of_output]

    def _pieces_of(self, v: Var) -> LeafPieces:
        for divided in self.divided:
            if v in divided.stack.dims:
                dim = divided.stack.dims[v]
                return LeafPieces(0, dim, divided.of_size(v.aval.shape[dim]))
        return LeafPieces(0)

    def _numbered(self, pieces: Sequence[LeafPieces]) -> tuple[LeafPieces, ...]:
        starts = itertools.accumulate((p.count for p in pieces), initial=0)
        return tuple(dataclasses.replace(p, first=first) for p, first in zip(pieces, starts, strict=False))

    def _avals(self) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(shape, v.aval.dtype, weak_type=bool(getattr(v.aval, "weak_type", False)))
            for v, pieces in zip(self.traced.program.invars, self._leaves, strict=True)
            for shape in _shapes(v.aval.shape, pieces)
        ]

    def _constants(self) -> list[Any]:
        return [
            part
            for value, pieces in zip(self.traced.constants, self._leaves[self._given :], strict=True)
            for part in cut_at(value, pieces)
        ]

    def _in_pieces(self, leaves: Sequence[Leaf], pieces: Sequence[LeafPieces]) -> list[Leaf]:
        return [part for leaf, held in zip(leaves, pieces, strict=True) for part in _leaf_pieces(leaf, held)]

    def _input_leaves(self, program: Program) -> tuple[Leaf, ...]:
        held = self._in_pieces(self.traced.inputs, self._leaves)
        added = program.invars[len(held) :]
        names = itertools.count(len(self.traced.constants))
        return (
            *held,
            *(Leaf(f"constant/{next(names)}", "const", tuple(v.aval.shape), v.aval.dtype) for v in added),
        )

    def _states(self, leaves: Sequence[LeafPieces], outputs: Sequence[LeafPieces]) -> tuple[int | None, ...]:
        return tuple(
            None if source is None else leaves[source].first + k
            for source, held in zip(self.traced.state_of_output, outputs, strict=True)
            for k in range(held.count)
        )

    def _run(self, outputs: Sequence[LeafPieces], *arrays: Any) -> list[Any]:
        values = _Values(self.traced.program, self.divided)
        given = iter(arrays)
        for v, pieces in zip(self.traced.program.invars, self._leaves, strict=True):
            parts = [next(given) for _ in range(pieces.count)]
            if pieces.bounds:
                values.set_parts(v, pieces.dim, parts)
            else:
                values.set_whole(v, parts[0])
        for eqn in self.traced.program.equations:
            with attributed_to(eqn):
                _evaluate(eqn, values)
        results: list[Any] = []
        for atom, held in zip(self.traced.program.outvars, outputs, strict=True):
            results += values.parts_between(atom, held.dim, held.bounds) if held.bounds else [values.whole(atom)]
        return results


class _Values:
    """The values of a program while it is evaluated: whole, in pieces along a dimension, or both."""

    def __init__(self, program: Program, divided: Sequence[_Divided]) -> None:
        self.divided = tuple(divided)
        self._makers = {v: eqn for eqn in program.equations for v in eqn.outvars}
        self._whole: dict[Var, Any] = {}
        self._parts: dict[tuple[Var, int, tuple[int, ...]], list[Any]] = {}
        self._made_in_parts: dict[Var, tuple[int, tuple[int, ...]]] = {}

    def set_whole(self, v: Var, array: Any) -> None:
        """A value that is made whole."""
        self._whole[v] = array

    def set_parts(self, v: Var, dim: int, parts: Sequence[Any]) -> None:
        """A value that is made in pieces."""
        bounds = tuple(itertools.accumulate((part.shape[dim] for part in parts), initial=0))
        self._made_in_parts[v] = (dim, bounds)
        self._parts[v, dim, bounds] = list(parts)

    def whole(self, atom: Any) -> Any:
        """The value; pieces are joined once, where the value is made."""
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        if atom not in self._whole:
            dim, bounds = self._made_in_parts[atom]
            with self._where_made(atom):
                self._whole[atom] = jax.lax.concatenate(self._parts[atom, dim, bounds], dim)
        return self._whole[atom]

    def parts_between(self, atom: Any, dim: int, bounds: tuple[int, ...]) -> list[Any]:
        """The value in pieces between these bounds; a whole one is cut once, where it is made."""
        if isinstance(atom, Literal):
            return cut_at(self.whole(atom), LeafPieces(0, dim, bounds))
        key = (atom, dim, bounds)
        if key not in self._parts:
            array = self.whole(atom)
            with self._where_made(atom):
                self._parts[key] = cut_at(array, LeafPieces(0, dim, bounds))
        return self._parts[key]

    def _where_made(self, v: Var) -> Any:
        return attributed_to(self._makers[v]) if v in self._makers else contextlib.nullcontext()


def _evaluate(eqn: Equation, values: _Values) -> None:
    """One operation: a divided scan in ranges, others in pieces if they can, else whole."""
    for divided in values.divided:
        if eqn in divided.stack.scans:
            _scan_in_ranges(eqn, divided, values)
            return
    if eqn.loop is None:
        rule = rule_for(eqn)
        for divided in values.divided:
            factor = _factor_of(eqn, rule, divided)
            if factor is not None:
                _in_pieces(eqn, rule, factor, divided, values)
                return
    results = bound(eqn, [values.whole(atom) for atom in eqn.invars])
    for v, array in zip(eqn.outvars, results, strict=True):
        values.set_whole(v, array)


def _factor_of(eqn: Equation, rule: FactorRule, divided: _Divided) -> str | None:
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


def _in_pieces(eqn: Equation, rule: FactorRule, factor: str, divided: _Divided, values: _Values) -> None:
    """An operation piece by piece; where it reduces over the layers, the pieces' results are combined."""
    operands = [_operand_parts(v, op, factor, divided, values) for v, op in zip(eqn.invars, rule.inputs, strict=True)]
    unit = rule.size_of(factor) // divided.stack.length
    results = []
    for k, (start, end) in enumerate(divided.ranges):
        own = tuple(parts[k] for parts in operands)
        mesh = LogicalMesh((1,), ("layers",))
        call = _PieceCall(eqn, own, rule, {}, mesh, factor, start * unit, (end - start) * unit)
        results.append(entry_for(eqn).local(call))
    monoid = dict(rule.reduced).get(factor)
    for v, operand, parts in zip(eqn.outvars, rule.outputs, zip(*results, strict=True), strict=True):
        if monoid is None:
            values.set_parts(v, factor_dims(operand, factor)[0], parts)
        else:
            combine = COMBINE["or" if monoid == "sum" and v.aval.dtype == jnp.bool_ else monoid]
            values.set_whole(v, functools.reduce(combine, parts))


def _operand_parts(atom: Any, operand: Any, factor: str, divided: _Divided, values: _Values) -> Sequence[Any]:
    dims = factor_dims(operand, factor)
    if not dims:
        return [values.whole(atom)] * len(divided.ranges)
    return values.parts_between(atom, dims[0], divided.of_size(atom.aval.shape[dims[0]]))


def _scan_in_ranges(eqn: Equation, divided: _Divided, values: _Values) -> None:
    """A scan as one scan per piece; see the module's text."""
    loop = eqn.loop
    assert loop is not None
    carried = slice(loop.consts, loop.consts + loop.carries)
    consts = [values.whole(atom) for atom in eqn.invars[: loop.consts]]
    start = [values.whole(atom) for atom in eqn.invars[carried]]
    stacks = [values.parts_between(atom, 0, divided.bounds) for atom in eqn.invars[carried.stop :]]
    adds = _sums(eqn) if "transpose(" in name_stack(eqn) else frozenset()
    order = range(len(divided.ranges))
    carry, totals, made = list(start), list(start), dict[int, Sequence[Any]]()
    for place, k in enumerate(reversed(order) if eqn.params["reverse"] else order):
        given = [jnp.zeros_like(x) if i in adds and place else x for i, x in enumerate(carry)]
        begin, end = divided.ranges[k]
        shorter = {"length": end - begin, "unroll": min(eqn.params["unroll"], end - begin)}
        outs = bound(eqn, [*consts, *given, *(parts[k] for parts in stacks)], **shorter)
        carry, made[k] = list(outs[: loop.carries]), outs[loop.carries :]
        totals = [totals[i] + x if i in adds and place else x for i, x in enumerate(carry)]
    for v, total in zip(eqn.outvars, totals, strict=False):
        values.set_whole(v, total)
    for number, v in enumerate(eqn.outvars[loop.carries :]):
        values.set_parts(v, 0, [made[k][number] for k in order])


def _sums(eqn: Equation) -> frozenset[int]:
    """The numbers of carried values to which each iteration only adds something that does not depend on them."""
    loop, (body,) = eqn.loop, eqn.regions
    assert loop is not None
    return frozenset(i for i in range(loop.carries) if _is_sum(body, body.invars[loop.consts + i], body.outvars[i]))


def _is_sum(body: Program, given: Var, returned: Any) -> bool:
    """Whether `returned` is `given` plus something: a chain of single users with one linear operation of two operands."""
    users: dict[Any, list[Equation]] = {}
    for eqn in body.equations:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                users.setdefault(v, []).append(eqn)
    added, v = False, given
    while v is not returned:
        if len(users.get(v, ())) != 1 or any(out is v for out in body.outvars):
            return False
        (eqn,) = users[v]
        if eqn.loop is not None or len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != v.aval.shape:
            return False
        if len(eqn.invars) == 2 and eqn.invars[0] is v and rule_for(eqn).linear == ((0, 1),):
            added = True
        elif eqn.primitive is not fan_out_p:
            return False
        v = eqn.outvars[0]
    return added


def _shapes(shape: Sequence[int], pieces: LeafPieces) -> list[tuple[int, ...]]:
    if not pieces.bounds:
        return [tuple(shape)]
    dim = pieces.dim
    return [(*shape[:dim], b - a, *shape[dim + 1 :]) for a, b in itertools.pairwise(pieces.bounds)]


def _leaf_pieces(leaf: Leaf, pieces: LeafPieces) -> list[Leaf]:
    """A leaf's pieces; their paths end in what they are of the whole, such as [0:2]."""
    if not pieces.bounds:
        return [leaf]
    head = f"{leaf.path}[{':, ' * pieces.dim}"
    parts = zip(itertools.pairwise(pieces.bounds), _shapes(leaf.shape, pieces), strict=True)
    return [
        dataclasses.replace(leaf, path=f"{head}{a}:{b}]", shape=shape, piece_of=leaf.path) for (a, b), shape in parts
    ]


def _is_opaque(v: Var) -> bool:
    return not isinstance(v.aval.dtype, np.dtype)


def _without_unused_constants(step: TracedStep) -> TracedStep:
    """Pieces of constants that no operation reads any more are not kept."""
    used = {v for eqn in step.program.equations for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in step.program.outvars if not isinstance(v, Literal)}
    first = len(step.inputs) - len(step.constants)
    kept = [i for i, v in enumerate(step.program.invars) if i < first or v in used]
    program = dataclasses.replace(step.program, invars=tuple(step.program.invars[i] for i in kept))
    return dataclasses.replace(
        step,
        program=program,
        inputs=tuple(step.inputs[i] for i in kept),
        constants=tuple(step.constants[i - first] for i in kept if i >= first),
        fingerprint=fingerprint_of(program),
    )
