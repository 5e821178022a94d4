"""Factor rules: which factor indexes each dimension of an operation, as in einsum.

A rule is written

    b s c, c e -> b s e | sum: c | linear: 0; 1

Inputs left of the arrow, outputs right; one word per dimension, `1` for a dimension of size one, `.` for a scalar, and
`(h d)` for a dimension that is two factors, major to minor. A factor that is sharded cuts every dimension it indexes
and replicates the rest. After the bars:

    sum: c       c is missing from outputs; sharding it leaves partial sums there (also max, min, or, and)
    whole: n     n must not be sharded
    seed: 0      input 0 is what results accumulate onto: while a reduced factor is sharded it must be partial too
    linear: 0 1; 2   inputs 0 and 1 together, or input 2 alone, may be partial: so are then the outputs
    any          those linear groups carry partial results of every monoid (the operation only moves data)

In: text or tuples. Out: a frozen `FactorRule`. What can go wrong: a rule that does not describe the shapes it is given;
`check` raises `RuleError` naming operand and dimension.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from autopar.errors import RuleError
from autopar.layouts.monoids import MONOIDS

Dim = tuple[str, ...]
Operand = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class FactorRule:
    """See the module's text. `sizes` lists every factor once, in order of appearance."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    sizes: tuple[tuple[str, int], ...]
    reduced: tuple[tuple[str, str], ...] = ()
    whole: frozenset[str] = frozenset()
    seeds: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    any_monoid: bool = False

    def __str__(self) -> str:
        text = f"{_show_operands(self.inputs)} -> {_show_operands(self.outputs)}"
        for monoid in MONOIDS:
            members = [name for name, m in self.reduced if m == monoid]
            text += f" | {monoid}: {' '.join(members)}" if members else ""
        text += f" | whole: {' '.join(n for n, _ in self.sizes if n in self.whole)}" if self.whole else ""
        text += f" | seed: {' '.join(map(str, self.seeds))}" if self.seeds else ""
        if self.linear:
            text += " | linear: " + "; ".join(" ".join(map(str, group)) for group in self.linear)
        return text + (" | any" if self.any_monoid else "")

    def size_of(self, factor: str) -> int:
        """Number of values the factor takes."""
        return dict(self.sizes)[factor]

    def shardable(self) -> tuple[str, ...]:
        """Factors that may be sharded: not whole, and present in every output or reduced."""
        reduced = {name for name, _ in self.reduced}
        return tuple(
            name
            for name, _ in self.sizes
            if name not in self.whole
            and (name in reduced or all(any(name in dim for dim in out) for out in self.outputs))
        )

    def check(self, in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> FactorRule:
        """Return self if the rule describes these shapes; raise RuleError that names the operand that differs."""
        sizes = dict(self.sizes)
        sides = (("input", self.inputs, in_shapes), ("output", self.outputs, out_shapes))
        for side, operands, shapes in sides:
            if len(operands) != len(shapes):
                raise RuleError(f"rule '{self}' has {len(operands)} {side}s, the operation has {len(shapes)}")
            for number, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
                described = tuple(math.prod(sizes[f] for f in dim) for dim in operand)
                if described != tuple(shape):
                    raise RuleError(
                        f"rule '{self}' says {side} {number} has shape {described}, the operation has {tuple(shape)}"
                    )
        return self


def make_rule(
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    sizes: Mapping[str, int],
    *,
    reduced: Mapping[str, str] | None = None,
    whole: Sequence[str] = (),
    seeds: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    any_monoid: bool = False,
) -> FactorRule:
    """A rule from parts; factors of size one are dropped and the rest renamed a, b, c, ... in order of appearance."""
    order: dict[str, None] = {}
    for operand in (*inputs, *outputs):
        for dim in operand:
            order.update(dict.fromkeys(f for f in dim if sizes[f] != 1))
    names = {old: _letter(i) for i, old in enumerate(order)}
    present = list(order)
    return FactorRule(
        tuple(_rename(operand, names) for operand in inputs),
        tuple(_rename(operand, names) for operand in outputs),
        tuple((names[old], sizes[old]) for old in present),
        tuple((names[old], (reduced or {})[old]) for old in present if old in (reduced or {})),
        frozenset(names[old] for old in present if old in set(whole)),
        tuple(seeds),
        tuple(tuple(group) for group in linear),
        any_monoid,
    )


def parse(text: str, in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> FactorRule:
    """Read the notation for an operation of these shapes; RuleError says what is wrong and where."""
    head, *clauses = (part.strip() for part in text.split("|"))
    if head.count("->") != 1:
        raise RuleError(f"rule '{text}' needs exactly one '->' between its inputs and its outputs")
    left, right = head.split("->")
    inputs, outputs = _parse_operands(left), _parse_operands(right)
    fields: dict[str, str] = {}
    for clause in clauses:
        key, _, value = clause.partition(":")
        if key.strip() not in (*MONOIDS, "whole", "seed", "linear", "any"):
            raise RuleError(
                f"rule '{text}': no clause {key.strip()!r}; there are {', '.join(MONOIDS)}, whole, seed, linear, any"
            )
        fields[key.strip()] = value.strip()
    sizes = _solve_sizes(text, (*inputs, *outputs), (*in_shapes, *out_shapes))
    reduced = {factor: monoid for monoid in MONOIDS for factor in fields.get(monoid, "").split()}
    whole = frozenset(fields.get("whole", "").split())
    for factor in (*reduced, *whole):
        if factor not in sizes:
            raise RuleError(f"rule '{text}': factor {factor!r} indexes no dimension")
    rule = FactorRule(
        inputs,
        outputs,
        tuple(sizes.items()),
        tuple(reduced.items()),
        whole,
        tuple(int(word) for word in fields.get("seed", "").split()),
        tuple(tuple(int(w) for w in group.split()) for group in fields.get("linear", "").split(";") if group.strip()),
        "any" in fields,
    )
    return rule.check(in_shapes, out_shapes)


def _solve_sizes(text: str, operands: Sequence[Operand], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    if len(operands) != len(shapes):
        raise RuleError(f"rule '{text}' names {len(operands)} operands, the operation has {len(shapes)}")
    pairs = []
    for number, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
        if len(operand) != len(shape):
            raise RuleError(
                f"rule '{text}': operand {number} has {len(operand)} dimensions, its shape is {tuple(shape)}"
            )
        pairs += list(zip(operand, shape, strict=True))
    sizes: dict[str, int] = {}
    for _ in range(len(pairs) + 1):
        for dim, size in pairs:
            unknown = [f for f in dim if f not in sizes]
            known = math.prod(sizes[f] for f in dim if f in sizes)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known
    missing = sorted({f for dim, _ in pairs for f in dim if f not in sizes})
    if missing:
        raise RuleError(f"rule '{text}': the sizes of {', '.join(missing)} do not follow from the shapes")
    return sizes


def _parse_operands(text: str) -> tuple[Operand, ...]:
    text = text.strip()
    if not text:
        return ()
    return tuple(_parse_operand(part) for part in text.split(","))


def _parse_operand(text: str) -> Operand:
    words = re.findall(r"\([^()]*\)|[^\s()]+", text)
    if words == ["."]:
        return ()
    return tuple(() if word == "1" else tuple(word.strip("()").split()) for word in words)


def _show_operands(operands: Sequence[Operand]) -> str:
    return ", ".join(" ".join(_show_dim(dim) for dim in operand) or "." for operand in operands)


def _show_dim(dim: Dim) -> str:
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


def _rename(operand: Operand, names: Mapping[str, str]) -> Operand:
    return tuple(tuple(names[f] for f in dim if f in names) for dim in operand)


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"f{index}"
