"""Operands in which a product is linear if all others are finite: what a table's row claims beside its factor rule.

In: an equation. Out: groups of operands, as in `FactorRule.linear`, for numbers of 32 bits or more. A sum s of terms t times x is
then the sum of the terms' products, up to rounding, as far as these products do not overflow. Where x is infinite,

    s * x         is infinite, or NaN where s is zero
    sum of t * x  is NaN where terms have both signs or are zero, and infinite otherwise

so that neither is finite. The same holds of x = 0 in s / x, and of each summand of a contraction. In half precision each product
would be rounded once more, in units of a term that may be far larger than the sum.

What can go wrong: what tells an infinity from NaN, such as `jnp.clip`, may see the other of the two. Hence nothing is planned so
but as a last resort (`microbatches/phases.py`).
"""

from __future__ import annotations

import jax.numpy as jnp

from autopar.compat import JaxprEqn, Literal
from autopar.rules.flops import number_format

_LEAST_BITS = 32
_NARROW = ("bfloat16", "float16")


def factors(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Of a product of two: each alone."""
    return [(0,), (1,)] if _is_open(eqn) else []


def contracted(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Of a contraction of two arrays: each alone, unless the program asks for products in half precision."""
    return [] if number_format(eqn) in _NARROW else factors(eqn)


def numerator(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Of a quotient: the numerator, if the divisor is no zero either."""
    return [(0,)] if _is_open(eqn) else []


def right_sides(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Of a system of equations: the right-hand sides, if the matrix is regular, too."""
    return [(1,)] if _is_open(eqn) else []


def _is_open(eqn: JaxprEqn) -> bool:
    """Whether both operands are known only when the program runs, and real or complex numbers of at least float32's precision.

    Of a literal it is known whether it is finite, which the factor rule says.
    """
    operands = eqn.invars[:2]
    dtypes = [v.aval.dtype for v in (*operands, *eqn.outvars)]
    is_wide = all(jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= _LEAST_BITS for dtype in dtypes)
    return is_wide and not any(isinstance(v, Literal) for v in operands)
