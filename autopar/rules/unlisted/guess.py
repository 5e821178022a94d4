"""A first guess at the rule of an operation that nobody has described, from shapes alone.

In: an equation. Out: a rule as text, in which the k-th dimension of a size in one operand is taken for that of the others; what
is not in an operand and in every result is whole. What can go wrong: dimensions that are as long by chance, and ones along which
elements depend on each other; random strategies tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.compat import JaxprEqn
from autopar.rules.by_shape import shape_of
from autopar.rules.factor_rule import letter, show_operands


def guess_rule(eqn: JaxprEqn) -> str:
    """The guess, in the notation."""
    return guess_from([shape_of(v) for v in eqn.invars], [shape_of(v) for v in eqn.outvars])


def guess_from(in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> str:
    """The guess for operands and results of these shapes, in the notation."""
    names: dict[tuple[int, int], str] = {}
    inputs, outputs = ([_name(shape, names) for shape in side] for side in (in_shapes, out_shapes))
    given = {factor for operand in inputs for dim in operand for factor in dim}
    made = [{factor for dim in operand for factor in dim} for operand in outputs]
    whole = [name for name in names.values() if name not in given or not all(name in factors for factors in made)]
    return f"{show_operands(inputs)} -> {show_operands(outputs)}{' | whole: ' + ' '.join(whole) if whole else ''}"


def _name(shape: Sequence[int], names: dict[tuple[int, int], str]) -> tuple[tuple[str, ...], ...]:
    """A factor for every dimension but those of size one: the same for the k-th dimension of a size, wherever it is."""
    seen: Counter[int] = Counter()
    dims: list[tuple[str, ...]] = []
    for size in shape:
        seen[size] += 1
        dims.append(() if size == 1 else (names.setdefault((size, seen[size]), letter(len(names))),))
    return tuple(dims)
