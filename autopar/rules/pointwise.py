"""Factor rules of operations on elements: each result depends on the elements at its own position, or on the position alone.

In: an equation. Out: its `FactorRule`. What can go wrong: an operation that is linear for some types of elements only; integer
division, for example, rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from autopar.avals import is_opaque
from autopar.compat import THREEFRY, JaxprEqn, Literal, Var, generator_of, threefry_is_partitionable
from autopar.rules.by_shape import Factors, everything_whole, keep_dimensions, linear_groups, shape_of
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


def observe(eqn: JaxprEqn) -> FactorRule:
    """a b, c -> a b | whole: c | linear: 0 | any: a value under another name; the others are shown to Python as they are."""
    return keep_dimensions(eqn, [True] * len(shape_of(eqn.invars[0])))


def sum_of_two(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b | linear: 0 1; a literal counts on one device, on the others a zero takes its place."""
    return _pointwise(eqn, (0, 1), literals=True)


def product(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b | linear: 0; 1, each where the other operand is known to be finite.

    Terms of a sum times infinity are infinities of both signs, or NaN where a term is zero. Their sum is NaN, and that of the
    numbers times infinity is not. Integers wrap in every term as in the sum. `if_finite.py` says what holds of finite numbers.
    """
    return _pointwise(eqn, *((i,) for i in (0, 1) if _is_modular(eqn) or _magnitude(eqn.invars[1 - i]) < np.inf))


def quotient(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b | linear: 0 where the divisor is known, and no zero; see `product`.

    Division of integers rounds. That of complex numbers makes an infinity of one that is infinite and NaN in its parts.
    """
    dtype = eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return nonlinear(eqn)
    return linear(eqn) if float(jnp.finfo(dtype).tiny) <= _magnitude(eqn.invars[1]) < np.inf else nonlinear(eqn)


def _is_modular(eqn: JaxprEqn) -> bool:
    """Whether the numbers are integers, which wrap, or truth values."""
    return not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)


def _magnitude(operand: Var | Literal) -> float:
    """The absolute value of a literal; NaN of what is known only when the program runs."""
    return float(np.abs(np.asarray(operand.val, operand.aval.dtype))) if isinstance(operand, Literal) else np.nan


def convert(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b | linear: 0 where the sum of the converted terms is their converted sum; see `_keeps_sums`."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return linear(eqn) if not is_opaque(eqn.outvars[0].aval) and _keeps_sums(old, new) else nonlinear(eqn)


def _keeps_sums(old: np.dtype[np.generic], new: np.dtype[np.generic]) -> bool:
    """Whether conversion commutes with addition.

    Terms of inexact numbers are rounded, or overflow, unless the new type has at least the mantissa and the exponents of the old
    one. Of complex numbers that become real the real parts are the same sum. Sums of n-bit integers wrap modulo 2^n: fewer bits
    of them are the sum of fewer bits, more bits or a float are not.
    """
    if jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact):
        narrow, wide = jnp.finfo(old), jnp.finfo(new)
        return bool(narrow.nmant <= wide.nmant and narrow.minexp >= wide.minexp and narrow.maxexp <= wide.maxexp)
    is_modular = jnp.issubdtype(old, jnp.integer) and jnp.issubdtype(new, jnp.integer)
    return bool(is_modular and jnp.iinfo(old).bits >= jnp.iinfo(new).bits)


def bitcast(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b: equal widths pair positions; otherwise a minor-most dimension appears or goes, and all is whole."""
    return nonlinear(eqn) if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else everything_whole(eqn)


def select(eqn: JaxprEqn) -> FactorRule:
    """a b, a b, a b -> a b | linear: 1 2 | any: the predicate must be known, the cases may be partial together."""
    return _pointwise(eqn, tuple(range(1, len(eqn.invars))), any_monoid=True)


def iota(eqn: JaxprEqn) -> FactorRule:
    """-> a b: positions, or nothing yet; every shard makes its own."""
    factors = Factors()
    out = tuple(factors.operand(shape_of(eqn.outvars[0])))
    return make_rule([], [out] * len(eqn.outvars), factors.sizes)


def random_bits(eqn: JaxprEqn) -> FactorRule:
    """. -> a b: with partitionable threefry every shard hashes its own positions; other generators run whole."""
    factors = Factors()
    out = tuple(factors.operand(shape_of(eqn.outvars[0])))
    key = eqn.invars[0].aval
    is_per_position = key.shape == () and generator_of(key.dtype) == THREEFRY and threefry_is_partitionable()
    inputs = [tuple(factors.operand(key.shape))]
    return make_rule(inputs, [out], factors.sizes, whole=() if is_per_position else list(factors.sizes))


def random_gamma(eqn: JaxprEqn) -> FactorRule:
    """., a b -> a b: with threefry every element has a key and a parameter of its own; other generators run whole."""
    factors = Factors()
    out = tuple(factors.operand(shape_of(eqn.outvars[0])))
    keys = tuple(factors.operand(shape_of(eqn.invars[0])))
    is_by_element = not keys and generator_of(eqn.invars[0].aval.dtype) == THREEFRY
    return make_rule([keys, out], [out], factors.sizes, whole=() if is_by_element else list(factors.sizes))
