"""Parts of factor rules that follow from shapes alone, for the modules that hold the rules of one family each.

In: an equation. Out: fresh factors, one per dimension, and the rules of operations that leave some dimensions as they are. What
can go wrong: an operation that pairs elements in a way its shapes do not show; such a dimension must be whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from autopar.avals import HasAval
from autopar.compat import JaxprEqn, Literal
from autopar.rules.factor_rule import Dim, FactorRule, Operand, make_rule


class Factors:
    """Fresh factor names while one rule is being made."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def new(self, size: int) -> str:
        """A factor of `size` with a name of its own."""
        name = f"n{len(self.sizes)}"
        self.sizes[name] = int(size)
        return name

    def operand(self, shape: Sequence[int]) -> list[Dim]:
        """One fresh factor per dimension."""
        return [(self.new(size),) for size in shape]


def shape_of(var: HasAval) -> tuple[int, ...]:
    """Shape of an equation's operand."""
    return tuple(var.aval.shape)


def linear_groups(eqn: JaxprEqn, *groups: Sequence[int], literals: bool = False) -> list[tuple[int, ...]]:
    """The linear groups whose members are all variables, or with `literals` some of them: a literal alone is never partial."""
    enough = any if literals else all
    return [tuple(g) for g in groups if enough(not isinstance(eqn.invars[i], Literal) for i in g)]


def linear_factors(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """The linear groups of a product of two arrays: each operand alone if all are integers of a width, and none otherwise.

    Integers wrap in every term as in the sum, unless the result has more bits. Terms times infinity have a sum that is NaN where
    the sum times infinity is not, and the other operand of inexact numbers may hold infinities.
    """
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    is_modular = all(jnp.issubdtype(aval.dtype, jnp.integer) for aval in avals)
    wide = is_modular and jnp.iinfo(avals[-1].dtype).bits
    return linear_groups(eqn, *((i,) for i in (0, 1) if is_modular and jnp.iinfo(avals[i].dtype).bits >= wide))


def everything_whole(eqn: JaxprEqn) -> FactorRule:
    """Every dimension whole: what is known of an operation without a rule."""
    factors = Factors()
    inputs = [tuple(factors.operand(shape_of(v))) for v in eqn.invars]
    outputs = [tuple(factors.operand(shape_of(v))) for v in eqn.outvars]
    return make_rule(inputs, outputs, factors.sizes, whole=list(factors.sizes))


def keep_dimensions(
    eqn: JaxprEqn, kept: Sequence[bool], *, linear: Sequence[Sequence[int]] = ((0,),), any_monoid: bool = True
) -> FactorRule:
    """a b -> a c | whole: b c: operand 0 becomes output 0 with some dimensions untouched and the others whole.

    Further operands are whole; several outputs share the untouched dimensions.
    """
    factors, whole = Factors(), []
    operand = factors.operand(shape_of(eqn.invars[0]))
    whole += [dim[0] for dim, keep in zip(operand, kept, strict=True) if not keep]
    outputs = []
    for var in eqn.outvars:
        out = [d if k else (factors.new(n),) for d, k, n in zip(operand, kept, shape_of(var), strict=True)]
        whole += [dim[0] for dim, keep in zip(out, kept, strict=True) if not keep]
        outputs.append(tuple(out))
    others = [tuple(factors.operand(shape_of(v))) for v in eqn.invars[1:]]
    whole += [dim[0] for other in others for dim in other]
    groups = linear_groups(eqn, *linear)
    return make_rule(
        [tuple(operand), *others], outputs, factors.sizes, whole=whole, linear=groups, any_monoid=any_monoid
    )


def share_leading_dimensions(eqn: JaxprEqn, count: int, *, linear: Sequence[Sequence[int]] = ()) -> FactorRule:
    """a b, a c -> a d | whole: b c d: the first `count` dimensions of all operands and results are the same, the others whole."""
    factors, whole = Factors(), []
    shared = tuple((factors.new(size),) for size in shape_of(eqn.invars[0])[:count])
    operands: list[Operand] = []
    for var in (*eqn.invars, *eqn.outvars):
        rest = factors.operand(shape_of(var)[count:])
        whole += [dim[0] for dim in rest]
        operands.append((*shared, *rest))
    inputs, outputs = operands[: len(eqn.invars)], operands[len(eqn.invars) :]
    return make_rule(inputs, outputs, factors.sizes, whole=whole, linear=linear_groups(eqn, *linear))
