"""Factor rules of matrix products, and of operations on the last dimensions of a batch: factorizations, Fourier transforms.

In: an equation. Out: its `FactorRule`. What can go wrong: a factorization of one large matrix, which runs whole on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.compat import JaxprEqn
from autopar.rules.by_shape import Factors, linear_factors, shape_of, share_leading_dimensions
from autopar.rules.factor_rule import FactorRule, make_rule
from autopar.rules.on_shard import LocalCall


def dot_general(eqn: JaxprEqn) -> FactorRule:
    """batch m k, batch k n -> batch m n | sum: k, and of integers linear: 0; 1; see `linear_factors`."""
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    factors = Factors()
    left = factors.operand(shape_of(eqn.invars[0]))
    pairs = dict(zip((*right_contract, *right_batch), (*left_contract, *left_batch), strict=True))
    right = [left[pairs[d]] if d in pairs else (factors.new(n),) for d, n in enumerate(shape_of(eqn.invars[1]))]
    out = [left[d] for d in left_batch]
    out += [dim for d, dim in enumerate(left) if d not in (*left_contract, *left_batch)]
    out += [dim for d, dim in enumerate(right) if d not in pairs]
    reduced = {left[d][0]: "sum" for d in left_contract}
    linear = linear_factors(eqn)
    return make_rule([tuple(left), tuple(right)], [tuple(out)], factors.sizes, reduced=reduced, linear=linear)


def factorization(eqn: JaxprEqn) -> FactorRule:
    """a b c -> a b c | whole: b c: the last two dimensions are a matrix, the others a batch of matrices."""
    return share_leading_dimensions(eqn, len(shape_of(eqn.invars[0])) - 2)


def fft(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: b c | linear: 0: the last dimensions are transformed, the others are a batch."""
    return share_leading_dimensions(eqn, len(shape_of(eqn.invars[0])) - len(eqn.params["fft_lengths"]), linear=[(0,)])


def fft_local(call: LocalCall) -> Sequence[jax.Array]:
    """The transform of rows in order: XLA's CPU compiler lays them out otherwise beside a reduce-scatter, and fails."""
    (operand,) = call.operands
    (result,) = call.bind(_row_by_row(operand))
    return (_row_by_row(result),)


def _row_by_row(array: jax.Array) -> jax.Array:
    pinned: jax.Array = with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))
    return pinned
