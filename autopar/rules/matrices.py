"""Factor rules of matrix products, and of operations on the last dimensions of a batch: factorizations, Fourier transforms.

In: an equation. Out: its `FactorRule`. What can go wrong: a factorization of one large matrix, which runs whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.avals import itemsize_of
from autopar.compat import JaxprEqn
from autopar.rules.by_shape import Factors, linear_factors, shape_of, share_leading_dimensions
from autopar.rules.factor_rule import FactorRule, make_rule
from autopar.rules.on_shard import LocalCall

_LEAST_SHARED_WORK = 200_000
"""Floating-point operations from which on the kernels share a batch among threads, as JAX's source says."""
_MOST_WORK_PER_ENTRY = 100
"""The most operations that they count per entry of a matrix and row, of an eigendecomposition of complex numbers."""


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


def one_by_one(call: LocalCall) -> Sequence[jax.Array]:
    """Matrix after matrix on CPUs, unless the batch is small.

    JAX's CPU kernels hand parts of a larger batch to the threads which the devices of the process run on, and wait for them.
    Where all of these threads wait, as soon as every device has come to such an operation, none is left to do a part.
    """
    batch = call.operands[0].shape[:-2]
    count = math.prod(batch)
    largest = max(x.shape[-2] * x.shape[-1] * max(x.shape[-2:]) for x in call.operands if x.ndim > len(batch) + 1)
    if count <= 1 or _MOST_WORK_PER_ENTRY * count * largest < _LEAST_SHARED_WORK:
        return call.bind(*call.operands)

    def in_turn(*operands: jax.Array) -> list[jax.Array]:
        flat = [x.reshape(count, *x.shape[len(batch) :]) for x in operands]
        results = jax.lax.map(lambda ones: call.bind(*ones), flat)
        return [x.reshape(*batch, *x.shape[1:]) for x in results]

    results: list[jax.Array] = jax.lax.platform_dependent(
        *call.operands, cpu=in_turn, default=lambda *operands: list(call.bind(*operands))
    )
    return results


def of_vectors(eqn: JaxprEqn) -> FactorRule:
    """a b -> a c | whole: b c: the last dimension of operand 0 is a vector, such as a diagonal; the others are a batch."""
    return share_leading_dimensions(eqn, len(shape_of(eqn.invars[0])) - 1)


def triangular_solve(eqn: JaxprEqn) -> FactorRule:
    """a b c, a c d -> a b d | whole: b c: right-hand sides d are solved for one by one; from the right they are rows."""
    factors = Factors()
    right = factors.operand(shape_of(eqn.invars[1]))
    sides = right[-1] if eqn.params["left_side"] else right[-2]
    batch, unknowns = right[:-2], [dim for dim in right[-2:] if dim is not sides]
    matrix = factors.operand(shape_of(eqn.invars[0])[-2:])
    whole = [dim[0] for dim in (*matrix, *unknowns)]
    return make_rule([(*batch, *matrix), tuple(right)], [tuple(right)], factors.sizes, whole=whole)


def ragged_dot(eqn: JaxprEqn) -> FactorRule:
    """m k, g k n, g -> m n | sum: k | whole: g: each group of rows m meets a matrix of its own.

    Where the ragged dimension is contracted, m k, m n, g -> g k n | sum: m | whole: g: a product for each group.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contract, right_contract), (left_batch, right_batch) = numbers.dot_dimension_numbers
    left_shape, right_shape, sizes_shape = (shape_of(v) for v in eqn.invars)
    factors, whole = Factors(), list[str]()
    left, sizes = factors.operand(left_shape), factors.operand(sizes_shape)
    pairs = dict(zip((*right_contract, *right_batch), (*left_contract, *left_batch), strict=True))
    right = [left[pairs[d]] if d in pairs else (factors.new(n),) for d, n in enumerate(right_shape)]
    for d in numbers.rhs_group_dimensions:
        right[d] = sizes[-1]
    out = [left[d] for d in left_batch]
    out += [dim for d, dim in enumerate(left) if d not in (*left_contract, *left_batch)]
    out += [dim for d, dim in enumerate(right) if d not in (*pairs, *numbers.rhs_group_dimensions)]
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in left_contract:
        out.insert(0, sizes[-1])
    whole += [dim[0] for dim in sizes]
    if len(sizes) > 1:  # the groups differ from row to row of the dimensions in front
        whole += [left[d][0] for d in range(len(left)) if d == ragged or d not in left_contract]
    reduced = {left[d][0]: "sum" for d in left_contract}
    return make_rule(
        [tuple(left), tuple(right), tuple(sizes)], [tuple(out)], factors.sizes, reduced=reduced, whole=whole
    )


def ragged_dot_local(call: LocalCall) -> Sequence[jax.Array]:
    """Of each group as many rows as this shard has; groups lie one behind the other."""
    left, right, sizes = call.operands
    (ragged,) = call.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    dim = call.rule.inputs[0][ragged]
    if call.is_sharded(dim):
        ends, first, count = jnp.cumsum(sizes, dtype=sizes.dtype), call.offset(dim), call.local_size(dim)
        sizes = jnp.clip(ends - first, 0, count) - jnp.clip(ends - sizes - first, 0, count)
    return call.bind(left, right, sizes)


def ragged_dot_scratch(eqn: JaxprEqn, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes of the rows, once for each group with zeros for those of others, and of the matrices in the order of a product.

    Where the ragged dimension is contracted, both operands are rows. So says XLA's compiler for CPUs (`memory_analysis`).
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contract, _), _ = numbers.dot_dimension_numbers
    left, right = (math.prod(shape) * itemsize_of(v.aval) for shape, v in zip(shapes[:2], eqn.invars[:2], strict=True))
    groups, are_both_rows = shapes[2][-1], set(numbers.lhs_ragged_dimensions) <= set(left_contract)
    return groups * (left + right) if are_both_rows else groups * left + right


def scaled_dot(eqn: JaxprEqn) -> FactorRule:
    """batch m (k g), batch (k g) n, batch m k, batch k n -> batch m n | sum: k | whole: g: g elements share a scale.

    Where one operand has more scales than the other, k is their greatest common divisor. A scale for all of k is on every device.
    If both operands have just that, pairs of elements stay together: JAX wants a scale to be of two elements at least.
    """
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_shape, right_shape, left_scales, right_scales = (shape_of(v) for v in eqn.invars)
    factors, whole, reduced = Factors(), list[str](), dict[str, str]()
    left, right = factors.operand(left_shape), factors.operand(right_shape)
    for d, e in zip(left_batch, right_batch, strict=True):
        right[e] = left[d]
    left_scale, right_scale = list(left), list(right)
    for d, e in zip(left_contract, right_contract, strict=True):
        counts = left_scales[d], right_scales[e]
        size = left_shape[d]
        common = math.gcd(*(count for count in counts if count > 1)) or (size // 2 if size and size % 2 == 0 else 1)
        blocks, members, *others = map(factors.new, (common, size // common, *(n // common for n in counts)))
        whole += [members, *others]
        reduced[blocks] = "sum"
        left[d] = right[e] = (blocks, members)
        left_scale[d], right_scale[e] = (
            (blocks, other) if count > 1 else () for count, other in zip(counts, others, strict=True)
        )
    out = [left[d] for d in left_batch]
    out += [dim for d, dim in enumerate(left) if d not in (*left_contract, *left_batch)]
    out += [dim for d, dim in enumerate(right) if d not in (*right_contract, *right_batch)]
    operands = [tuple(operand) for operand in (left, right, left_scale, right_scale)]
    return make_rule(operands, [tuple(out)], factors.sizes, reduced=reduced, whole=whole)


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
