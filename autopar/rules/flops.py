"""Floating-point operations of one equation, undivided: the functions of the column `flops` of the rule table.

In: an equation and its factor rule. Out: a number of operations, 2 for each multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    """With windows every output meets each kernel element of its feature once, at borders in the padding; without, a product."""
    if not rule.whole:
        return of_product(eqn, rule)
    out, kernel = shape_of(eqn.outvars[0]), shape_of(eqn.invars[1])
    features: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(out) * math.prod(kernel) / features
