"""Factor rules of operations that follow from shapes alone: pointwise, reductions, products, and data movement.

In: an equation. Out: its `FactorRule`. One function per family; the table in `rules/table.py` says which primitive belongs to
which. What can go wrong: an operation that pairs elements in a way its shapes do not show, which must not be listed
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compat import JaxprEqn, Literal, threefry_is_partitionable
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


def shape_of(var: Any) -> tuple[int, ...]:
    """Shape of an equation's operand."""
    return tuple(var.aval.shape)


def _groups(eqn: JaxprEqn, *groups: Sequence[int]) -> list[tuple[int, ...]]:
    """The linear groups whose members are all variables: a literal is never partial."""
    return [tuple(g) for g in groups if all(not isinstance(eqn.invars[i], Literal) for i in g)]


def pointwise_groups(eqn: JaxprEqn, *groups: Sequence[int], any_monoid: bool = False) -> FactorRule:
    """Equal positions of all operands meet; scalars and dimensions of size one are repeated."""
    factors = Factors()
    out = factors.operand(shape_of(eqn.outvars[0]))
    inputs: list[Operand] = []
    for var in eqn.invars:
        shape = shape_of(var)
        inputs.append(
            tuple(
                dim if n == factors.sizes[dim[0]] else ()
                for n, dim in zip(shape, out[len(out) - len(shape) :], strict=True)
            )
        )
    outputs = [tuple(out)] * len(eqn.outvars)
    return make_rule(inputs, outputs, factors.sizes, linear=_groups(eqn, *groups), any_monoid=any_monoid)


def pointwise(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b, linear in nothing."""
    return pointwise_groups(eqn)


def pointwise_sum(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b, linear in both operands together: add, sub."""
    return pointwise_groups(eqn, (0, 1))


def pointwise_product(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b, linear in either operand: mul."""
    return pointwise_groups(eqn, (0,), (1,))


def pointwise_quotient(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b, linear in the numerator; integer division rounds, so it is not."""
    floating = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact)
    return pointwise_groups(eqn, (0,)) if floating else pointwise(eqn)


def pointwise_linear(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b, linear: neg, real, imag."""
    return pointwise_groups(eqn, (0,))


def pointwise_copy(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b, the value itself: any partial result passes."""
    return pointwise_groups(eqn, (0,), any_monoid=True)


def convert(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b, linear where the new format holds every value of the old one, so that nothing is rounded."""
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    exact = jnp.issubdtype(old, jnp.number) and _holds(new, old)
    return pointwise_linear(eqn) if exact else pointwise(eqn)


def _holds(wide: np.dtype[Any], narrow: Any) -> bool:
    """Whether JAX promotes one type to the other; formats of eight and fewer bits it promotes to none."""
    try:
        return bool(jnp.promote_types(narrow, wide) == wide)
    except jax.dtypes.TypePromotionError:
        return bool(np.can_cast(narrow, wide, "safe"))


def select(eqn: JaxprEqn) -> FactorRule:
    """a b, a b, a b -> a b: the predicate must be known, the cases may be partial together."""
    return pointwise_groups(eqn, tuple(range(1, len(eqn.invars))), any_monoid=True)


def everything_whole(eqn: JaxprEqn) -> FactorRule:
    """Every dimension whole: what is known of an operation without a rule."""
    factors = Factors()
    inputs = [tuple(factors.operand(shape_of(v))) for v in eqn.invars]
    outputs = [tuple(factors.operand(shape_of(v))) for v in eqn.outvars]
    return make_rule(inputs, outputs, factors.sizes, whole=list(factors.sizes))


def iota(eqn: JaxprEqn) -> FactorRule:
    """-> a b: positions; every shard computes its own."""
    factors = Factors()
    return make_rule([], [tuple(factors.operand(shape_of(eqn.outvars[0])))], factors.sizes)


def random_bits(eqn: JaxprEqn) -> FactorRule:
    """. -> a b: with partitionable threefry every shard hashes its own positions; other generators run whole."""
    factors = Factors()
    out = tuple(factors.operand(shape_of(eqn.outvars[0])))
    key = eqn.invars[0].aval
    per_position = key.shape == () and "fry" in str(key.dtype) and threefry_is_partitionable()
    inputs = [tuple(factors.operand(key.shape))]
    return make_rule(inputs, [out], factors.sizes, whole=() if per_position else list(factors.sizes))


def reduction(eqn: JaxprEqn, monoid: str | None, *, linear: bool = False) -> FactorRule:
    """a b -> a, b reduced; without a monoid that can be all-reduced b stays whole."""
    factors = Factors()
    axes = set(eqn.params["axes"])
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = tuple(dim for d, dim in enumerate(operand) if d not in axes)
    gone = [dim[0] for d, dim in enumerate(operand) if d in axes]
    return make_rule(
        [tuple(operand)] * len(eqn.invars),
        [out] * len(eqn.outvars),
        factors.sizes,
        reduced=dict.fromkeys(gone, monoid) if monoid else {},
        whole=() if monoid else gone,
        linear=_groups(eqn, (0,)) if linear else (),
    )


def reduce_sum(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | sum: b | linear: 0."""
    return reduction(eqn, "sum", linear=True)


def reduce_max(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | max: b."""
    return reduction(eqn, "max")


def reduce_min(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | min: b."""
    return reduction(eqn, "min")


def reduce_or(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | or: b, for truth values; bitwise on integers it stays whole."""
    return reduction(eqn, "or" if eqn.invars[0].aval.dtype == bool else None)


def reduce_and(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | and: b, for truth values; bitwise on integers it stays whole."""
    return reduction(eqn, "and" if eqn.invars[0].aval.dtype == bool else None)


def reduce_whole(eqn: JaxprEqn) -> FactorRule:
    """a b -> a | whole: b: products, argmax, argmin."""
    return reduction(eqn, None)


def dot_general(eqn: JaxprEqn) -> FactorRule:
    """batch m k, batch k n -> batch m n | sum: k | linear: 0; 1."""
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    factors = Factors()
    left = factors.operand(shape_of(eqn.invars[0]))
    pairs = dict(zip((*right_contract, *right_batch), (*left_contract, *left_batch), strict=True))
    right = [left[pairs[d]] if d in pairs else (factors.new(n),) for d, n in enumerate(shape_of(eqn.invars[1]))]
    out = [left[d] for d in left_batch]
    out += [dim for d, dim in enumerate(left) if d not in (*left_contract, *left_batch)]
    out += [dim for d, dim in enumerate(right) if d not in pairs]
    reduced = {left[d][0]: "sum" for d in left_contract}
    linear = _groups(eqn, (0,), (1,))
    return make_rule([tuple(left), tuple(right)], [tuple(out)], factors.sizes, reduced=reduced, linear=linear)


def reshape(eqn: JaxprEqn) -> FactorRule:
    """(a b) -> a b and back: the common refinement of both shapes, major to minor; `dimensions` reorders the operand first.

    Walk both shapes from the major side. The greatest common divisor of what is left of the two dimensions is a factor
    of both; where it is 1 the rest of the group up to the next common boundary stays whole.
    """
    factors, whole = Factors(), []
    order = eqn.params.get("dimensions") or tuple(range(len(shape_of(eqn.invars[0]))))
    sides = (tuple(shape_of(eqn.invars[0])[d] for d in order), shape_of(eqn.outvars[0]))
    if math.prod(sides[0]) == 0:
        return everything_whole(eqn)
    words: tuple[list[list[str]], list[list[str]]] = ([[] for _ in sides[0]], [[] for _ in sides[1]])
    at, rest = [0, 0], [1, 1]

    def advance(side: int) -> bool:
        while rest[side] == 1 and at[side] < len(sides[side]):
            rest[side] = sides[side][at[side]]
            at[side] += 1
        return rest[side] != 1

    def absorb(side: int, size: int) -> None:
        words[side][at[side] - 1].append(factors.new(size))
        whole.append(words[side][at[side] - 1][-1])

    while advance(0) | advance(1):
        common = math.gcd(rest[0], rest[1])
        if common > 1:
            name = factors.new(common)
            for side in (0, 1):
                words[side][at[side] - 1].append(name)
                rest[side] //= common
            continue
        products = [1, 1]
        while products[0] != products[1] or products[0] == 1:
            side = 0 if products[0] <= products[1] else 1
            advance(side)
            absorb(side, rest[side])
            products[side] *= rest[side]
            rest[side] = 1
    read, outputs = (tuple(tuple(dim) for dim in side) for side in words)
    inputs = tuple(read[order.index(d)] for d in range(len(order)))
    return make_rule([inputs], [outputs], factors.sizes, whole=whole, linear=_groups(eqn, (0,)), any_monoid=True)


def broadcast_in_dim(eqn: JaxprEqn) -> FactorRule:
    """a -> a b | linear: 0 | any: new and stretched dimensions are factors of the output alone."""
    factors = Factors()
    out = factors.operand(shape_of(eqn.outvars[0]))
    shape, places = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
    operand = [out[p] if n == factors.sizes[out[p][0]] else () for n, p in zip(shape, places, strict=True)]
    others = [tuple(factors.operand(shape_of(v))) for v in eqn.invars[1:]]
    inputs = [tuple(operand), *others]
    return make_rule(inputs, [tuple(out)], factors.sizes, linear=_groups(eqn, (0,)), any_monoid=True)


def tile(eqn: JaxprEqn) -> FactorRule:
    """a b -> a (c b) | linear: 0 | any: repetitions are a factor of the output alone, major to what is repeated."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = [(factors.new(n), *dim) for n, dim in zip(eqn.params["reps"], operand, strict=True)]
    return make_rule([tuple(operand)], [tuple(out)], factors.sizes, linear=_groups(eqn, (0,)), any_monoid=True)


def transpose(eqn: JaxprEqn) -> FactorRule:
    """a b -> b a | linear: 0 | any."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = [operand[d] for d in eqn.params["permutation"]]
    return make_rule([tuple(operand)], [tuple(out)], factors.sizes, linear=_groups(eqn, (0,)), any_monoid=True)


def squeeze(eqn: JaxprEqn) -> FactorRule:
    """a 1 b -> a b | linear: 0 | any."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = [dim for d, dim in enumerate(operand) if d not in eqn.params["dimensions"]]
    return make_rule([tuple(operand)], [tuple(out)], factors.sizes, linear=_groups(eqn, (0,)), any_monoid=True)


def kept_dimensions(
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
    whole += [dim[0] for operand_ in others for dim in operand_]
    inputs = [tuple(operand), *others]
    groups = _groups(eqn, *linear)
    return make_rule(inputs, outputs, factors.sizes, whole=whole, linear=groups, any_monoid=any_monoid)


def rev(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b | whole: the reversed dimensions."""
    rank = len(shape_of(eqn.invars[0]))
    return kept_dimensions(eqn, [d not in eqn.params["dimensions"] for d in range(rank)])


def slice_(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: the dimensions that are not taken from end to end."""
    return kept_dimensions(
        eqn, [i == o for i, o in zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)]
    )


def pad(eqn: JaxprEqn) -> FactorRule:
    """a b, . -> a c | whole: the padded dimensions; linear when the padding is zero, or partial as well."""
    value = eqn.invars[1]
    groups: list[tuple[int, ...]] = [(0, 1)]
    if isinstance(value, Literal) and value.val == 0:
        groups = [(0,)]
    kept = [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    return kept_dimensions(eqn, kept, linear=groups, any_monoid=False)


def cumulative(eqn: JaxprEqn, *, linear: bool) -> FactorRule:
    """a b -> a b | whole: the axis along which it accumulates."""
    rank = len(shape_of(eqn.invars[0]))
    kept = [d != eqn.params["axis"] for d in range(rank)]
    return kept_dimensions(eqn, kept, linear=[(0,)] if linear else (), any_monoid=False)


def cumulative_sum(eqn: JaxprEqn) -> FactorRule:
    """cumsum: linear."""
    return cumulative(eqn, linear=True)


def cumulative_other(eqn: JaxprEqn) -> FactorRule:
    """cummax, cummin, cumprod, cumlogsumexp: not linear."""
    return cumulative(eqn, linear=False)


def concatenate(eqn: JaxprEqn) -> FactorRule:
    """a b, a c -> a d | whole: b c d | linear: 0 1 | any."""
    factors, whole = Factors(), []
    along = eqn.params["dimension"]
    shared = factors.operand(shape_of(eqn.outvars[0]))
    whole.append(shared[along][0])
    inputs = []
    for var in eqn.invars:
        own = factors.new(shape_of(var)[along])
        whole.append(own)
        inputs.append(tuple((own,) if d == along else dim for d, dim in enumerate(shared)))
    linear = _groups(eqn, tuple(range(len(inputs))))
    return make_rule(inputs, [tuple(shared)], factors.sizes, whole=whole, linear=linear, any_monoid=True)


def stack(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a n b | whole: n | linear: 0 1 | any."""
    factors = Factors()
    shared = factors.operand(shape_of(eqn.invars[0]))
    along = eqn.params["axis"] % (len(shared) + 1)
    count = factors.new(len(eqn.invars))
    out = [*shared[:along], (count,), *shared[along:]]
    linear = _groups(eqn, tuple(range(len(eqn.invars))))
    inputs = [tuple(shared)] * len(eqn.invars)
    return make_rule(inputs, [tuple(out)], factors.sizes, whole=[count], linear=linear, any_monoid=True)


def unstack(eqn: JaxprEqn) -> FactorRule:
    """a n b -> a b, a b | whole: n | linear: 0 | any."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    along = eqn.params["axis"] % len(operand)
    out = tuple(dim for d, dim in enumerate(operand) if d != along)
    whole = operand[along]
    outputs = [out] * len(eqn.outvars)
    linear = _groups(eqn, (0,))
    return make_rule([tuple(operand)], outputs, factors.sizes, whole=whole, linear=linear, any_monoid=True)


def split(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c, a d | whole: b c d | linear: 0 | any."""
    rank = len(shape_of(eqn.invars[0]))
    return kept_dimensions(eqn, [d != eqn.params["axis"] for d in range(rank)])


def sort(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a b, a b | whole: the sorted dimension."""
    factors = Factors()
    operand = tuple(factors.operand(shape_of(eqn.invars[0])))
    whole = operand[eqn.params["dimension"]]
    return make_rule([operand] * len(eqn.invars), [operand] * len(eqn.outvars), factors.sizes, whole=whole)


def bitcast(eqn: JaxprEqn) -> FactorRule:
    """a b -> a b: equal widths pair positions; otherwise a minor-most dimension appears or goes, and all is whole."""
    return pointwise(eqn) if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else everything_whole(eqn)


def top_k(eqn: JaxprEqn) -> FactorRule:
    """a b -> a k, a k | whole: b k."""
    axis = eqn.params.get("axis", len(shape_of(eqn.invars[0])) - 1)
    rank = len(shape_of(eqn.invars[0]))
    return kept_dimensions(eqn, [d != axis % rank for d in range(rank)], linear=(), any_monoid=False)


def leading_dimensions(eqn: JaxprEqn, count: int, *, linear: Sequence[Sequence[int]] = ()) -> FactorRule:
    """a b, a c -> a d | whole: b c d: the first `count` dimensions of all operands and results are the same, the others whole."""
    factors, whole = Factors(), []
    shared = tuple((factors.new(size),) for size in shape_of(eqn.invars[0])[:count])
    operands: list[Operand] = []
    for var in (*eqn.invars, *eqn.outvars):
        rest = factors.operand(shape_of(var)[count:])
        whole += [dim[0] for dim in rest]
        operands.append((*shared, *rest))
    inputs, outputs = operands[: len(eqn.invars)], operands[len(eqn.invars) :]
    return make_rule(inputs, outputs, factors.sizes, whole=whole, linear=_groups(eqn, *linear))


def fft(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: b c | linear: 0: the last dimensions are transformed, the others are a batch."""
    return leading_dimensions(eqn, len(shape_of(eqn.invars[0])) - len(eqn.params["fft_lengths"]), linear=[(0,)])


def matrices(eqn: JaxprEqn) -> FactorRule:
    """a b c -> a b c | whole: b c: the last two dimensions are a matrix, the others a batch of such."""
    return leading_dimensions(eqn, len(shape_of(eqn.invars[0])) - 2)
