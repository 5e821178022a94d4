"""Factor rules of operations along dimensions: reductions, accumulations, sorts.

In: an equation. Out: its `FactorRule`. What can go wrong: a reduction whose partial results no all-reduce combines, such as a
product; the dimensions that it reduces are whole.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from autopar.compat import JaxprEqn
from autopar.rules.by_shape import Factors, everything_whole, keep_dimensions, linear_groups, shape_of
from autopar.rules.factor_rule import FactorRule, make_rule


def reduced_dimensions(eqn: JaxprEqn) -> frozenset[int]:
    """The dimensions of its operands that a reduction reduces; all of them where it does not say which."""
    for name in ("axes", "dimensions"):
        if name in eqn.params:
            return frozenset(eqn.params[name])
    return frozenset(range(len(shape_of(eqn.invars[0]))))


def _reduction(eqn: JaxprEqn, monoid: str | None, *, is_linear: bool = False) -> FactorRule:
    """a b -> a, b reduced; without a monoid that can be all-reduced b stays whole."""
    factors = Factors()
    axes = reduced_dimensions(eqn)
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = tuple(dim for d, dim in enumerate(operand) if d not in axes)
    gone = [dim[0] for d, dim in enumerate(operand) if d in axes]
    return make_rule(
        [tuple(operand)] * len(eqn.invars),
        [out] * len(eqn.outvars),
        factors.sizes,
        reduced=dict.fromkeys(gone, monoid) if monoid else {},
        whole=() if monoid else gone,
        linear=linear_groups(eqn, (0,)) if is_linear else (),
    )


def reduce_sum(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | sum: b | linear: 0."""
    return _reduction(eqn, "sum", is_linear=True)


def reduce_max(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | max: b; complex numbers have an order, but no all-reduce that knows it: b stays whole."""
    return _reduction(eqn, None if is_complex(eqn) else "max")


def reduce_min(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | min: b; of complex numbers b stays whole."""
    return _reduction(eqn, None if is_complex(eqn) else "min")


def over_batch_sum(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | sum: b | linear: 0: a collective of `jax.vmap` with an axis name, over dimensions instead of devices."""
    return _over_batch(eqn, reduce_sum)


def over_batch_max(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | max: b."""
    return _over_batch(eqn, reduce_max)


def over_batch_min(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | min: b."""
    return _over_batch(eqn, reduce_min)


def any_of_all(eqn: JaxprEqn) -> FactorRule:
    """a b -> . | or: a b."""
    return _reduction(eqn, "or")


def all_of_all(eqn: JaxprEqn) -> FactorRule:
    """a b -> . | and: a b."""
    return _reduction(eqn, "and")


def maximum_of_all(eqn: JaxprEqn) -> FactorRule:
    """a b -> . | max: a b."""
    return _reduction(eqn, "max")


def _over_batch(eqn: JaxprEqn, rule: Callable[[JaxprEqn], FactorRule]) -> FactorRule:
    """The rule, unless parts of the dimension are reduced by themselves."""
    return rule(eqn) if eqn.params.get("axis_index_groups") is None else everything_whole(eqn)


def is_complex(eqn: JaxprEqn) -> bool:
    """Whether the first operand holds complex numbers."""
    return bool(jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.complexfloating))


def reduce_or(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | or: b, for truth values; bitwise on integers b stays whole."""
    return _reduction(eqn, "or" if eqn.invars[0].aval.dtype == bool else None)


def reduce_and(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | and: b, for truth values; bitwise on integers b stays whole."""
    return _reduction(eqn, "and" if eqn.invars[0].aval.dtype == bool else None)


def reduce_whole(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | whole: b: products, argmax, argmin."""
    return _reduction(eqn, None)


def reduce_by_function(eqn: JaxprEqn) -> FactorRule:
    """a b, . -> a | whole: b: a reduction by any function, each operand with a value to begin with."""
    factors, axes = Factors(), sorted(reduced_dimensions(eqn))
    count = len(eqn.invars) // 2
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = tuple(dim for d, dim in enumerate(operand) if d not in axes)
    inputs = [*[tuple(operand)] * count, *[()] * count]
    return make_rule(inputs, [out] * count, factors.sizes, whole=[operand[d][0] for d in axes])


def _cumulative(eqn: JaxprEqn, *, is_linear: bool) -> FactorRule:
    """a b -> a b | whole: the axis along which it accumulates."""
    rank = len(shape_of(eqn.invars[0]))
    kept = [d != eqn.params["axis"] for d in range(rank)]
    return keep_dimensions(eqn, kept, linear=[(0,)] if is_linear else (), any_monoid=False)


def cumulative_sum(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: b c | linear: 0."""
    return _cumulative(eqn, is_linear=True)


def cumulative_other(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: b c."""
    return _cumulative(eqn, is_linear=False)


def sort(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b, a b | whole: the sorted dimension."""
    factors = Factors()
    operand = tuple(factors.operand(shape_of(eqn.invars[0])))
    whole = operand[eqn.params["dimension"]]
    return make_rule([operand] * len(eqn.invars), [operand] * len(eqn.outvars), factors.sizes, whole=whole)


def approx_top_k(eqn: JaxprEqn) -> FactorRule:
    """a b -> a k, a k | whole: b k."""
    rank = len(shape_of(eqn.invars[0]))
    kept = [d != eqn.params["reduction_dimension"] % rank for d in range(rank)]
    return keep_dimensions(eqn, kept, linear=(), any_monoid=False)


def top_k(eqn: JaxprEqn) -> FactorRule:
    """a b -> a k, a k | whole: b k."""
    rank = len(shape_of(eqn.invars[0]))
    axis = eqn.params.get("axis", rank - 1) % rank
    return keep_dimensions(eqn, [d != axis for d in range(rank)], linear=(), any_monoid=False)
