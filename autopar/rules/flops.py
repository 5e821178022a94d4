"""Floating-point operations of one equation, undivided: the functions of the column `flops` of the rule table; their format.

In: an equation and its factor rule. Out: a number of operations, 2 for each multiply-add, or the name of a number format.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jax.lax import DotAlgorithmPreset, Precision

from autopar.avals import dtype_name, itemsize_of
from autopar.compat import JaxprEqn
from autopar.rules.by_shape import shape_of
from autopar.rules.factor_rule import FactorRule

Flops = Callable[[JaxprEqn, FactorRule], float]


def of_elements(eqn: JaxprEqn, rule: FactorRule) -> float:
    """One operation per element of the largest operand or result."""
    return float(max((math.prod(shape_of(v)) for v in (*eqn.invars, *eqn.outvars)), default=0))


def of_product(eqn: JaxprEqn, rule: FactorRule) -> float:
    """One multiply-add for every combination of the factors' values."""
    return 2.0 * math.prod(size for _, size in rule.sizes)


def of_conv(eqn: JaxprEqn, rule: FactorRule) -> float:
    """With windows every output meets each kernel element of its feature once, at borders in the padding; without, a product.

    Zeros between the rows of the left operand are not counted: a kernel element meets one row of so many.
    """
    if not rule.whole:
        return of_product(eqn, rule)
    out, kernel = shape_of(eqn.outvars[0]), shape_of(eqn.invars[1])
    features: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(out) * math.prod(kernel) / features / holes_of_conv(eqn)


def holes_of_conv(eqn: JaxprEqn) -> float:
    """How many times as much is multiplied where the zeros between rows of the left operand are multiplied too.

    Libraries for GPUs step over them (cuDNN's gradient of a convolution's operand); XLA's compiler for CPUs hands them to Eigen,
    which multiplies them.
    """
    return float(math.prod(eqn.params["lhs_dilation"]))


def of_ragged_dot(eqn: JaxprEqn, rule: FactorRule) -> float:
    """A product of which every row meets one group's matrix."""
    return of_product(eqn, rule) / max(groups_of_ragged_dot(eqn), 1.0)


def groups_of_ragged_dot(eqn: JaxprEqn) -> float:
    """How many times as much is multiplied where every row meets every group's matrix, with zeros in place of other groups' rows.

    So JAX 0.10 lowers it for CPUs, and for GPUs without a kernel for groups; a TPU has one.
    """
    return float(shape_of(eqn.invars[2])[-1])


def of_scaled_dot(eqn: JaxprEqn, rule: FactorRule) -> float:
    """A product; the scales are multiplied into operands, which have fewer elements."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = shape_of(eqn.invars[0])
    terms: int = math.prod(left[d] for d in contracted)
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * terms


def of_factorization(eqn: JaxprEqn, rule: FactorRule) -> float:
    """A multiply-add for every row, column and step of elimination; methods differ by a factor of up to ten."""
    *batch, rows, columns = shape_of(eqn.invars[0])
    return 2.0 * math.prod(batch) * rows * columns * min(rows, columns)


def of_substitution(eqn: JaxprEqn, rule: FactorRule) -> float:
    """Half a multiply-add for every element of the matrix and right-hand side."""
    unknowns = shape_of(eqn.invars[0])[-1]
    return float(math.prod(shape_of(eqn.invars[1])) * unknowns)


def of_fft(eqn: JaxprEqn, rule: FactorRule) -> float:
    """5 n log2(n) for every transform of n elements."""
    length = math.prod(eqn.params["fft_lengths"])
    elements = max(math.prod(shape_of(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    return 5.0 * elements * math.log2(max(length, 2))


def of_sort(eqn: JaxprEqn, rule: FactorRule) -> float:
    """A comparison of every element for each doubling of the longest dimension."""
    shape = shape_of(eqn.invars[0])
    return float(math.prod(shape)) * math.log2(max(2, *shape))


TENSORFLOAT32 = "tensorfloat32"
"""What devices that have it round float32 operands of products to, unless the program asks for more: 19 bits."""
_FORMATS = {"F16": "float16", "BF16": "bfloat16", "TF32": TENSORFLOAT32, "F32": "float32", "F64": "float64"}
"""Number formats by the first word in the name of an algorithm for products."""


def number_format(eqn: JaxprEqn) -> str:
    """The number format that a contraction multiplies in: that of its widest operand, or of the algorithm that it names.

    float32 operands are rounded to `tensorfloat32` unless the program asks for `Precision.HIGHEST`; a device that does not name
    that format multiplies them in float32. Source: JAX's page on the precision of products (TF32 on recent GPUs by default).
    """
    widest = dtype_name(max((v.aval for v in eqn.invars[:2]), key=itemsize_of).dtype)
    asked = eqn.params.get("precision")
    if isinstance(asked, DotAlgorithmPreset):
        first, *_, last = asked.name.split("_")
        is_one_product = not last.startswith("X")  # X3: three products of parts of the operands, added up
        return _FORMATS.get(first, widest) if is_one_product else "float32"
    levels = asked if isinstance(asked, tuple) else (asked,)
    return TENSORFLOAT32 if widest == "float32" and Precision.HIGHEST not in levels else widest
