"""What a scan on the way back makes of its sums over examples, for its results alone, made after the scan.

In: a scan that is opened. Out: a function that stacks the sums as they are and makes the results of the stacks, all layers at
once; or None where nothing is to gain. The gradient of a weight under `exp` is a sum times that exponential, and a gradient in
half precision a sum that is rounded. Neither is linear in the terms of the sum, for an exponential may be infinite: inside of the
scan it would need the whole sum, over all microbatches or over all devices, for each layer.

A *sum* is one over leading dimensions, which are where a batch has its examples. A *tail* is what is made of sums, constants and
rows of the scan by other than linear operations. What can go wrong: stacks of sums that take more memory than the results, as
those of a gradient that a product makes small; such tails are left inside.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from autopar.avals import bytes_of, is_opaque
from autopar.compat import Literal, Var, attributed_to
from autopar.disjoint_sets import DisjointSets
from autopar.program.evaluate import bind_equation, wait_for
from autopar.program.loops import LoopEquation
from autopar.program.program import CAST, Atom, Equation, Program, operands_of, variables_of

LINEAR = ["reshape", "squeeze", "transpose", "broadcast_in_dim", "copy", "neg", "add", "add_any", "sub", "reduce_sum"]
"""Operations whose result is a sum over examples if all of their operands are."""
ADDING = ("add", "add_any")
"""Those that a carry may add something up with."""
SCALING = ("mul", "div")
"""Those of which the same holds if the other operand, or the second one, is a literal."""
PRODUCTS = ("dot_general", "conv_general_dilated")
ALIASES = ("optimization_barrier",)
"""Operations that keep values apart, which is nothing that a value after the scan needs."""
ALONE = ("random_", "rng_", "threefry", "pure_callback", "io_callback", "ffi_call")
"""What operations begin with that draw other bits for many rows, or ask somebody who may take one row alone."""
MOST_BYTES = 2
"""Stacks of sums may be as many times larger than the results: sums in `float32` of what is stacked in `bfloat16`."""
LITTLE = 0.25
"""Or they may have such a part of the bytes that the scan reads a row of and stacks."""

Arrays = Sequence[jax.Array]
Results = tuple[jax.Array, ...]


def with_late_tails(scan: LoopEquation) -> Callable[..., Arrays] | None:
    """The function of a scan's operands whose tails come after the scan; None if it has none worth it."""
    first, inputs = scan.loop.consts, scan.regions[0].invars
    tails = _Tails(scan, (*inputs[:first], *inputs[first + scan.loop.carries :]))
    moved = tails.worth_moving()
    return _Late(scan, tails, moved).run if moved else None


class _Tails:
    """What the values of a scan's body are; those of which nothing is known are in no set.

    Attributes:
        rows: made of constants and rows of the scan alone, of its weights above all.
        sums: over examples, as far as shapes tell, and what nested scans make of rows: what a tail has from a stack.
        tails: made of sums and rows by operations that are not linear. Those of rows alone are rows, too.
        products: of the shape of a row, as gradients of weights are, which may be sums over examples or not.
        rounded: what casts and linear operations make of products. Of other operations, products have no tails.

    `rows`: the body's inputs that are some. `given`: carries that are sums before each iteration.
    """

    def __init__(self, scan: LoopEquation, rows: Iterable[Var], *, given: Set[Var] = frozenset()) -> None:
        self.scan, (self.body,) = scan, scan.regions
        self.rows, self.sums, self.tails = set(rows), set(given), set[Var]()
        self.products, self.rounded = set[Var](), set[Var]()
        self.like_rows = {tuple(sorted(v.aval.shape)) for v in self.rows}
        self.maker = {v: eqn for eqn in self.body.equations for v in eqn.outvars}
        for eqn in self.body.equations:
            self._enter(eqn)

    def _enter(self, eqn: Equation) -> None:
        """Enter the results of an operation in their sets."""
        operands = operands_of(eqn)
        are_rows = self.rows.issuperset(operands)
        if are_rows and eqn.primitive.name in ALIASES:
            self.rows.update(eqn.outvars)
        elif isinstance(eqn, LoopEquation):
            self.sums.update(self._stacked_by(eqn) if eqn.loop.kind == "scan" else ())
        elif _can_be_batched(eqn):
            self._enter_operation(eqn, operands, are_rows=are_rows)

    def _enter_operation(self, eqn: Equation, operands: Sequence[Var], *, are_rows: bool) -> None:
        if are_rows and (_is_sum(eqn) or eqn.primitive.name not in PRODUCTS):
            self.rows.update(eqn.outvars)
        made_of_sums = any(v in self.sums or v in self.tails for v in operands)
        if made_of_sums and self.sums.issuperset(operands) and _is_linear(eqn):
            self.sums.update(eqn.outvars)
        elif made_of_sums and all(v in self.rows or v in self.sums or v in self.tails for v in operands):
            self.tails.update(eqn.outvars)
        elif _is_sum(eqn):
            self.sums.update(eqn.outvars)
        elif self._is_like_a_row(eqn):
            self.products.update(eqn.outvars)
        elif operands and _rounds(eqn) and all(v in self.products or v in self.rounded for v in operands):
            self.rounded.update(eqn.outvars)

    def _is_like_a_row(self, eqn: Equation) -> bool:
        """Whether it is a product of the shape of a row, as the gradient of a weight is, whichever dimension counts examples."""
        return eqn.primitive.name in PRODUCTS and tuple(sorted(eqn.outvars[0].aval.shape)) in self.like_rows

    def _stacked_by(self, scan: LoopEquation) -> list[Var]:
        """The results of a nested scan that are stacks of sums or of what it makes of rows, or sums added up from zero."""
        (body,), first, carries = scan.regions, scan.loop.consts, scan.loop.carries
        operands = list(zip(body.invars, scan.invars, strict=True))
        rows = [v for v, given in (*operands[:first], *operands[first + carries :]) if self._is_row(given)]
        carried = zip(operands[first : first + carries], body.outvars, strict=False)
        from_zero = {v: out for (v, start), out in carried if self._is_zero(start)}
        added = {v for v, out in from_zero.items() if _is_in(out, _Tails(scan, rows, given={v}).sums)}
        inside = _Tails(scan, rows, given=added)
        found = inside.sums | inside.rows
        return [v for v, out in zip(scan.outvars, body.outvars, strict=True) if _is_in(out, found)]

    def _is_row(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom in self.rows

    def _is_zero(self, atom: Atom) -> bool:
        """Whether it is a literal zero, or an array of them."""
        if isinstance(atom, Literal):
            return not np.any(np.asarray(atom.val))
        eqn = self.maker.get(atom)
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and self._is_zero(eqn.invars[0])

    def worth_moving(self) -> dict[int, Var]:
        """The tails that nobody else reads, and whose sums take little more memory, by the number of the body's result.

        The result is the tail, or a carry to which each iteration adds the tail.
        """
        tails, carries = self._by_result(), self.scan.loop.carries
        behind = {i: self.behind([v]) for i, v in tails.items()}
        groups = DisjointSets[object](behind)
        for i, found in behind.items():
            groups.join((i, *found.sums))
        stacked = set(variables_of(self.body.outvars[carries:]))
        little = LITTLE * sum(map(bytes_of, (*self.body.invars[self.scan.loop.consts + carries :], *stacked)))
        moved = dict[int, Var]()
        for group in groups.groups():
            own = [i for i in group if isinstance(i, int)]
            sums = {v for i in own for v in behind[i].sums}
            made = {v for i in own for eqn in behind[i].made for v in eqn.outvars}
            most = max(MOST_BYTES * sum(bytes_of(tails[i]) for i in own if i >= carries), little)
            is_small = sum(map(bytes_of, sums - stacked)) <= most and all(bytes_of(v) <= most for v in made)
            moved |= {i: tails[i] for i in own} if is_small else {}
        return moved

    def _by_result(self) -> dict[int, Var]:
        """The tails that nothing reads but other such tails, stacks and carries that only add them up."""
        carries = self.scan.loop.carries
        adding = self._adding()
        alone = (self.tails | self.rounded).difference(variables_of(self.body.outvars[:carries]))
        for eqn in reversed(self.body.equations):
            if not alone.issuperset(eqn.outvars) and eqn not in adding.values():
                alone.difference_update(operands_of(eqn))
            if eqn.after is not None:
                alone.discard(eqn.after)
        added = {i: v for i, eqn in adding.items() for v in operands_of(eqn) if v in alone}
        stacks = {i: v for i, v in enumerate(self.body.outvars) if i >= carries and isinstance(v, Var) and v in alone}
        return {i: v for i, v in (added | stacks).items() if self._is_tail(self.behind([v]), alone)}

    def _is_tail(self, behind: _Behind, alone: Set[Var]) -> bool:
        """Whether what is behind a result is not linear, and nobody else reads it."""
        return behind.tails - self.rows <= alone and not all(map(_is_linear, behind.made))

    def _adding(self) -> dict[int, Equation]:
        """The operations that add something to a carry which nothing else reads, by its number."""
        readers = Counter(v for eqn in self.body.equations for v in operands_of(eqn))
        readers.update(variables_of(self.body.outvars))
        found = dict[int, Equation]()
        for i, out in enumerate(self.body.outvars[: self.scan.loop.carries]):
            carry = self.body.invars[self.scan.loop.consts + i]
            eqn = self.maker.get(out) if isinstance(out, Var) else None
            if eqn is not None and eqn.primitive.name in ADDING and carry in eqn.invars and readers[carry] == 1:
                found |= {i: eqn} if readers[eqn.outvars[0]] == 1 else {}
        return found

    def behind(self, values: Iterable[Atom]) -> _Behind:
        """What values are made of, back to sums and to what the scan reads."""
        found, pending = _Behind(), list(values)
        while pending:
            v = pending.pop()
            if isinstance(v, Literal) or v in found.seen:
                continue
            found.seen.add(v)
            if v in self.sums or v in self.products:
                found.sums.append(v)
            elif v in self.maker:
                found.tails.update({v} & (self.tails | self.rounded))
                found.made.append(self.maker[v])
                pending += self.maker[v].invars
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Behind:
    """What is behind some values: all of them, the nearest sums, the tails, and the operations that make them."""

    seen: set[Var] = dataclasses.field(default_factory=set)
    sums: list[Var] = dataclasses.field(default_factory=list)
    tails: set[Var] = dataclasses.field(default_factory=set)
    made: list[Equation] = dataclasses.field(default_factory=list)


class _Late:
    """A scan and then its tails, as a function of the operands of its equation."""

    def __init__(self, scan: LoopEquation, tails: _Tails, moved: Mapping[int, Var]) -> None:
        self.scan, self.moved = scan, moved
        (self.body,) = scan.regions
        behind = tails.behind(moved.values())
        made = set(behind.made)
        self.made = [eqn for eqn in self.body.equations if eqn in made]
        self.stays = [i for i in range(scan.loop.carries, len(self.body.outvars)) if i not in moved]
        self.sums = behind.sums

    def run(self, *operands: jax.Array) -> Arrays:
        """The results of the scan."""
        loop, inputs, results = self.scan.loop, self.body.invars, self.body.outvars
        rows = loop.consts + loop.carries
        consts, start, stacks = operands[: loop.consts], operands[loop.consts : rows], operands[rows:]

        def once(carries: Results, rows: Results) -> tuple[Results, Results]:
            values = dict(zip(inputs, (*consts, *carries, *rows), strict=True))
            _evaluate(self.body, values)
            ends = [x if i in self.moved else _read(results[i], values) for i, x in enumerate(carries)]
            return tuple(ends), tuple(_read(v, values) for v in (*(results[i] for i in self.stays), *self.sums))

        with attributed_to(self.scan):
            ends, made = jax.lax.scan(
                once, start, stacks, length=loop.trips, reverse=loop.is_reversed, unroll=loop.unroll
            )
        found = dict(enumerate(ends)) | dict(zip(self.stays, made, strict=False))
        values = dict(zip((*inputs[: loop.consts], *inputs[rows:]), (*consts, *stacks), strict=True))
        values.update(zip(self.sums, made[len(self.stays) :], strict=True))
        self._add_tails(values, {*inputs[rows:], *self.sums})
        with attributed_to(self.scan):
            for i, v in self.moved.items():
                found[i] = (
                    values[v] if i >= loop.carries else found[i] + jnp.sum(values[v], axis=0, dtype=values[v].dtype)
                )
        return [found[i] for i in range(len(results))]

    def _add_tails(self, values: dict[Var, jax.Array], stacks: set[Var]) -> None:
        """Add what the operations of the tails make, of all rows at once. `stacks`: the values that have a row per iteration."""
        for eqn in self.made:
            own = [isinstance(v, Var) and v in stacks for v in eqn.invars]
            arrays = [_read(v, values) for v in eqn.invars]
            with attributed_to(eqn, out_of=self.scan):
                results = arrays if eqn.primitive.name in ALIASES else _batched(eqn, own)(*arrays)
            values.update(zip(eqn.outvars, results, strict=True))
            stacks.update(eqn.outvars if any(own) else ())


def _batched(eqn: Equation, own: Sequence[bool]) -> Callable[..., Arrays]:
    """An operation on all rows of those operands that have one per iteration."""

    def call(*operands: jax.Array) -> Arrays:
        return bind_equation(eqn, operands)

    return jax.vmap(call, in_axes=[0 if is_stack else None for is_stack in own]) if any(own) else call


def _evaluate(body: Program, values: dict[Var, jax.Array]) -> None:
    for eqn in body.equations:
        with attributed_to(eqn):
            results = bind_equation(eqn, [_read(v, values) for v in eqn.invars])
            if eqn.after is not None:
                results = [wait_for(values[eqn.after], array) for array in results]
        values.update(zip(eqn.outvars, results, strict=True))


def _read(atom: Atom, values: Mapping[Var, jax.Array]) -> jax.Array:
    return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]


def _is_in(atom: Atom, variables: Set[Var]) -> bool:
    return isinstance(atom, Var) and atom in variables


def _can_be_batched(eqn: Equation) -> bool:
    """Whether JAX has the operation for all rows at once, with the same results."""
    if eqn.regions or eqn.after is not None or eqn.primitive.name.startswith(ALONE):
        return False
    return eqn.primitive in batching.fancy_primitive_batchers and not any(
        is_opaque(v.aval) for v in (*eqn.invars, *eqn.outvars)
    )


def _is_sum(eqn: Equation) -> bool:
    """Whether an operation adds up over the leading dimension of what it takes."""
    if eqn.primitive.name == "reduce_sum":
        return 0 in eqn.params["axes"]
    if eqn.primitive.name == "dot_general":
        return all(0 in dims for dims in eqn.params["dimension_numbers"][0])
    if eqn.primitive.name == "conv_general_dilated":
        return bool(eqn.params["dimension_numbers"].lhs_spec[1] == 0)
    return False


def _rounds(eqn: Equation) -> bool:
    """Whether an operation hands on what it takes in another type, or another shape, or added up."""
    return eqn.primitive.name == CAST or eqn.primitive.name in LINEAR


def _is_linear(eqn: Equation) -> bool:
    """Whether the result of an operation on sums over examples is one, too."""
    name = eqn.primitive.name
    if name == CAST:
        return not _narrows(eqn.invars[0], eqn.outvars[0])
    if name in SCALING:
        return isinstance(eqn.invars[1], Literal) or (name == "mul" and isinstance(eqn.invars[0], Literal))
    return name in LINEAR and not any(isinstance(v, Literal) for v in eqn.invars)


def _narrows(before: Atom, after: Atom) -> bool:
    """Whether numbers lose digits between two types, or are no floating-point numbers."""
    old, new = before.aval.dtype, after.aval.dtype
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return True
    return bool(jnp.finfo(old).nmant > jnp.finfo(new).nmant)
