"""Factor rules: which factor indexes each dimension of an operation, as in einsum.

A rule is written

    b s c, c e -> b s e | sum: c | linear: 0; 1

Inputs left of the arrow, outputs right; one word per dimension, `1` for a dimension of size one, `.` for a scalar, and
`(h d)` for a dimension that is two factors, major to minor. A factor that is sharded cuts every dimension it indexes
and replicates the rest. After the bars:

    sum: c       c is missing from outputs; sharding it leaves partial sums there (also max, min, or, and)
    whole: n     n must not be sharded
    together: s t   an axis may shard s and t at once: the operation itself exchanges what their shards need of each other
    seed: 0      input 0 is what results accumulate onto: while a reduced factor is sharded it must be partial too
    linear: 0 1; 2   inputs 0 and 1 together, or input 2 alone, may be partial: so are then the outputs
    any          those linear groups carry partial results of every monoid (the operation only moves data)

In: the parts of a rule; `notation.py` reads it from text. Out: a frozen `FactorRule`, which prints in the notation. What can go
wrong: a rule that does not describe the shapes it is given; `check` raises `RuleError` naming the operand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar.errors import RuleError
from autopar.layouts.monoids import MONOIDS

Dim = tuple[str, ...]
Operand = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    together: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        text = f"{show_operands(self.inputs)} -> {show_operands(self.outputs)}"
        for monoid in MONOIDS:
            members = [name for name, m in self.reduced if m == monoid]
            text += f" | {monoid}: {' '.join(members)}" if members else ""
        text += f" | whole: {' '.join(n for n, _ in self.sizes if n in self.whole)}" if self.whole else ""
        text += f" | together: {'; '.join(map(' '.join, self.together))}" if self.together else ""
        text += f" | seed: {' '.join(map(str, self.seeds))}" if self.seeds else ""
        if self.linear:
            text += " | linear: " + "; ".join(" ".join(map(str, group)) for group in self.linear)
        return text + (" | any" if self.any_monoid else "")

    def size_of(self, factor: str) -> int:
        """Number of values the factor takes."""
        return dict(self.sizes)[factor]

    def shardable(self) -> tuple[str, ...]:
        """Factors that may be sharded alone: not whole, and present in every output or reduced."""
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
    together: Sequence[Sequence[str]] = (),
) -> FactorRule:
    """A rule from parts; factors of size one and their groups are dropped, the rest renamed a, b, c, ... as they appear."""
    order = dict.fromkeys(f for operand in (*inputs, *outputs) for dim in operand for f in dim if sizes[f] != 1)
    names = {old: letter(i) for i, old in enumerate(order)}
    reduced = reduced or {}
    return FactorRule(
        inputs=tuple(_rename(operand, names) for operand in inputs),
        outputs=tuple(_rename(operand, names) for operand in outputs),
        sizes=tuple((name, sizes[old]) for old, name in names.items()),
        reduced=tuple((name, reduced[old]) for old, name in names.items() if old in reduced),
        whole=frozenset(names[old] for old in whole if old in names),
        seeds=tuple(seeds),
        linear=tuple(tuple(group) for group in linear),
        any_monoid=any_monoid,
        together=tuple(tuple(names[old] for old in group) for group in together if all(old in names for old in group)),
    )


def show_operands(operands: Sequence[Operand]) -> str:
    """Operands as a rule is written."""
    return ", ".join(" ".join(_show_dim(dim) for dim in operand) or "." for operand in operands)


def _show_dim(dim: Dim) -> str:
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


def _rename(operand: Operand, names: Mapping[str, str]) -> Operand:
    return tuple(tuple(names[f] for f in dim if f in names) for dim in operand)


def letter(index: int) -> str:
    """The name of a factor by its number."""
    return chr(ord("a") + index) if index < 26 else f"f{index}"
