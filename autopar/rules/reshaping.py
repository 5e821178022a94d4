"""Factor rules of operations that only move elements: into another shape or order, apart, together, or repeated.

In: an equation. Out: its `FactorRule`. What can go wrong: a reshape between sizes without a common divisor, which no factor
describes; the dimensions up to the next common boundary are whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.compat import JaxprEqn
from autopar.rules.by_shape import Factors, everything_whole, keep_dimensions, linear_groups, shape_of
from autopar.rules.factor_rule import Dim, FactorRule, make_rule


def _move_rule(
    eqn: JaxprEqn,
    inputs: Sequence[Sequence[Dim]],
    outputs: Sequence[Sequence[Dim]],
    factors: Factors,
    *,
    whole: Sequence[str] = (),
) -> FactorRule:
    """The rule of an operation that only moves elements: all inputs together may be partial, under every monoid."""
    read, made = ([tuple(operand) for operand in side] for side in (inputs, outputs))
    linear = linear_groups(eqn, tuple(range(len(inputs))))
    return make_rule(read, made, factors.sizes, whole=whole, linear=linear, any_monoid=True)


class _Walk:
    """One shape, walked from its major dimension to its minor one; `dims` are the factors of each dimension so far."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.dims: list[list[str]] = [[] for _ in shape]
        self._ahead = [(d, size) for d, size in enumerate(shape) if size != 1][::-1]

    def size(self) -> int:
        """What is left of the dimension at hand; 1 at the end."""
        return self._ahead[-1][1] if self._ahead else 1

    def pass_factor(self, name: str, size: int) -> None:
        """Give a factor to the dimension at hand, and go on to the next one if that is all of it."""
        dim, rest = self._ahead.pop()
        self.dims[dim].append(name)
        if rest != size:
            self._ahead.append((dim, rest // size))


def reshape(eqn: JaxprEqn) -> FactorRule:
    """(a b) -> a b and back: the common refinement of both shapes, major to minor; `dimensions` reorders the operand first.

    Walk both shapes from the major side. The greatest common divisor of what is left of the two dimensions is a factor
    of both; where it is 1 the rest of the group up to the next common boundary stays whole.
    """
    shape, out_shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if math.prod(shape) == 0:
        return everything_whole(eqn)
    order = eqn.params.get("dimensions") or tuple(range(len(shape)))
    factors, whole = Factors(), list[str]()
    read, made = _Walk([shape[d] for d in order]), _Walk(out_shape)
    while read.size() > 1:
        common = math.gcd(read.size(), made.size())
        if common == 1:
            whole += _pass_group(read, made, factors)
            continue
        name = factors.new(common)
        read.pass_factor(name, common)
        made.pass_factor(name, common)
    operand = [tuple(read.dims[order.index(d)]) for d in range(len(shape))]
    return _move_rule(eqn, [operand], [[tuple(dim) for dim in made.dims]], factors, whole=whole)


def _pass_group(one: _Walk, other: _Walk, factors: Factors) -> list[str]:
    """Go on to the next common boundary of two shapes; the factors passed, which only one of the two has each."""
    passed: list[str] = []
    done = {one: 1, other: 1}
    while done[one] == 1 or done[one] != done[other]:
        walk = one if done[one] <= done[other] else other
        size = walk.size()
        passed.append(factors.new(size))
        walk.pass_factor(passed[-1], size)
        done[walk] *= size
    return passed


def broadcast_in_dim(eqn: JaxprEqn) -> FactorRule:
    """a -> a b | linear: 0 | any: new and stretched dimensions are factors of the output alone."""
    factors = Factors()
    out = factors.operand(shape_of(eqn.outvars[0]))
    shape, places = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
    operand = [out[p] if n == factors.sizes[out[p][0]] else () for n, p in zip(shape, places, strict=True)]
    others = [tuple(factors.operand(shape_of(v))) for v in eqn.invars[1:]]
    linear = linear_groups(eqn, (0,))
    return make_rule([tuple(operand), *others], [tuple(out)], factors.sizes, linear=linear, any_monoid=True)


def tile(eqn: JaxprEqn) -> FactorRule:
    """a b -> a (c b) | linear: 0 | any: repetitions are a factor of the output alone, major to what is repeated."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = [(factors.new(n), *dim) for n, dim in zip(eqn.params["reps"], operand, strict=True)]
    return _move_rule(eqn, [operand], [out], factors)


def permutation_of(eqn: JaxprEqn) -> tuple[int, ...]:
    """The order in which a `transpose` puts the dimensions of its operand."""
    return tuple(eqn.params["permutation"])


def transpose(eqn: JaxprEqn) -> FactorRule:
    """a b -> b a | linear: 0 | any."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    return _move_rule(eqn, [operand], [[operand[d] for d in permutation_of(eqn)]], factors)


def squeeze(eqn: JaxprEqn) -> FactorRule:
    """a 1 b -> a b | linear: 0 | any."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    out = [dim for d, dim in enumerate(operand) if d not in eqn.params["dimensions"]]
    return _move_rule(eqn, [operand], [out], factors)


def rev(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: b c | linear: 0 | any: b are the reversed dimensions."""
    rank = len(shape_of(eqn.invars[0]))
    return keep_dimensions(eqn, [d not in eqn.params["dimensions"] for d in range(rank)])


def concatenate(eqn: JaxprEqn) -> FactorRule:
    """a b, a c -> a d | whole: b c d | linear: 0 1 | any."""
    factors = Factors()
    along = eqn.params["dimension"]
    shared = factors.operand(shape_of(eqn.outvars[0]))
    own = [factors.new(shape_of(v)[along]) for v in eqn.invars]
    inputs = [[*shared[:along], (name,), *shared[along + 1 :]] for name in own]
    return _move_rule(eqn, inputs, [shared], factors, whole=[shared[along][0], *own])


def stack(eqn: JaxprEqn) -> FactorRule:
    """a b, a b -> a n b | whole: n | linear: 0 1 | any."""
    factors = Factors()
    shared = factors.operand(shape_of(eqn.invars[0]))
    along = eqn.params["axis"] % (len(shared) + 1)
    count = factors.new(len(eqn.invars))
    out = [*shared[:along], (count,), *shared[along:]]
    return _move_rule(eqn, [shared] * len(eqn.invars), [out], factors, whole=[count])


def unstack(eqn: JaxprEqn) -> FactorRule:
    """a n b -> a b, a b | whole: n | linear: 0 | any."""
    factors = Factors()
    operand = factors.operand(shape_of(eqn.invars[0]))
    along = eqn.params["axis"] % len(operand)
    out = [dim for d, dim in enumerate(operand) if d != along]
    return _move_rule(eqn, [operand], [out] * len(eqn.outvars), factors, whole=operand[along])


def split(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c, a d | whole: b c d | linear: 0 | any."""
    rank = len(shape_of(eqn.invars[0]))
    return keep_dimensions(eqn, [d != eqn.params["axis"] for d in range(rank)])
