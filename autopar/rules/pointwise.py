"""Factor rules of operations on elements: each result depends on the elements at its own position, or on the position alone.

In: an equation. Out: its `FactorRule`. What can go wrong: an operation that is linear for some types of elements only; integer
division, for example, rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import JaxprEqn, is_threefry_key, threefry_is_partitionable
from autopar.rules.by_shape import Factors, everything_whole, linear_groups, shape_of
from autopar.rules.factor_rule import FactorRule, Operand, make_rule


def _pointwise(eqn: JaxprEqn, *groups: Sequence[int], any_monoid: bool = False, literals: bool = False) -> FactorRule:
    """Equal positions of all operands meet; scalars and dimensions of size one are repeated."""
    factors = Factors()
    out = factors.operand(shape_of(eqn.outvars[0]))
    inputs: list[Operand] = []
    for var in eqn.invars:
        shape = shape_of(var)
        matched = zip(shape, out[len(out) - len(shape) :], strict=True)
        inputs.append(tuple(dim if n == factors.sizes[dim[0]] else () for n, dim in matched))
    outputs = [tuple(out)] * len(eqn.outvars)
    return make_rule(
        inputs, outputs, factors.sizes, linear=linear_groups(eqn, *groups, literals=literals), any_monoid=any_monoid
    )


def nonlinear(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b."""
    return _pointwise(eqn)


def linear(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b | linear: 0."""
    return _pointwise(eqn, (0,))


def copy(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b | linear: 0 | any."""
    return _pointwise(eqn, (0,), any_monoid=True)


def sum_of_two(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b | linear: 0 1; a literal counts on one device, on the others a zero takes its place."""
    return _pointwise(eqn, (0, 1), literals=True)


def product(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b | linear: 0; 1."""
    return _pointwise(eqn, (0,), (1,))


def quotient(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b | linear: 0; integer division rounds, so it is linear in nothing."""
    is_floating = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact)
    return linear(eqn) if is_floating else nonlinear(eqn)


def convert(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b | linear: 0 where the new type holds every value of the old one, so that nothing is rounded."""
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    is_exact = jnp.issubdtype(old, jnp.number) and _holds(new, old)
    return linear(eqn) if is_exact else nonlinear(eqn)


def _holds(wide: np.dtype[np.generic], narrow: np.dtype[np.generic]) -> bool:
    """Whether JAX promotes one type to the other; types of eight and fewer bits it promotes to none."""
    try:
        return bool(jnp.promote_types(narrow, wide) == wide)
    except jax.dtypes.TypePromotionError:
        return bool(np.can_cast(narrow, wide, "safe"))


def bitcast(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b: equal widths pair positions; otherwise a minor-most dimension appears or goes, and all is whole."""
    return nonlinear(eqn) if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else everything_whole(eqn)


def select(eqn: JaxprEqn) -> FactorRule:
    """a b, a b, a b -> a b | linear: 1 2 | any: the predicate must be known, the cases may be partial together."""
    return _pointwise(eqn, tuple(range(1, len(eqn.invars))), any_monoid=True)


def iota(eqn: JaxprEqn) -> FactorRule:
    """-> a b: positions; every shard computes its own."""
    factors = Factors()
    return make_rule([], [tuple(factors.operand(shape_of(eqn.outvars[0])))], factors.sizes)


def random_bits(eqn: JaxprEqn) -> FactorRule:
    """. -> a b: with partitionable threefry every shard hashes its own positions; other generators run whole."""
    factors = Factors()
    out = tuple(factors.operand(shape_of(eqn.outvars[0])))
    key = eqn.invars[0].aval
    is_per_position = key.shape == () and is_threefry_key(key.dtype) and threefry_is_partitionable()
    inputs = [tuple(factors.operand(key.shape))]
    return make_rule(inputs, [out], factors.sizes, whole=() if is_per_position else list(factors.sizes))
