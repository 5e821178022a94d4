"""What XLA's CPU compiler makes of each primitive: whether its result has memory of its own, and who computes it.

In: an equation. Out: its `Making`, whether the library for reductions does it too, whether sums move into it, and the orders of
dimensions in which a contraction reads its operands; and one fact of the compiler for GPUs, what that keeps as dear to compute.
Facts of JAX 0.10 to 0.12, as XLA's sources say and its buffer assignments show; what an operation does is in `rules/table.py`,
from which most makings follow. What can go wrong: another version decides otherwise; `benchmarks/memory_error.py` shows it.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable, Mapping

from autopar.compat import MOVES_FACTORS, JaxprEqn, Literal
from autopar.intra_op.xla_cpu.contraction_orders import Orders, OrdersOf, of_convolution, of_product
from autopar.rules.primitive_rule import Work
from autopar.rules.table import RULES


class Making(enum.Enum):
    """How a primitive's result is made.

    WHOLE:     by itself, from whole buffers to a whole buffer.
    NAME:      it is another name of its operand.
    SAME:      NAME where size and type stay, otherwise CHEAP.
    CHEAP:     inside of whatever reads it, again for each reader.
    MOVED:     as CHEAP, with elements in other places.
    COSTLY:    inside of its reader where it has only one.
    REDUCTION: by itself, reading CHEAP operands without a buffer.
    LIBRARY:   as REDUCTION; from `LIBRARY_ELEMENTS` on, a library does it, which reads only buffers.
    IN_PLACE:  into the memory of its first operand if nobody reads that again.
    SELECTED:  as WHOLE, from its second operand and the position of each element of that in each dimension, all in buffers.
    """

    WHOLE = "whole"
    NAME = "name"
    SAME = "same"
    CHEAP = "cheap"
    MOVED = "moved"
    COSTLY = "costly"
    REDUCTION = "reduction"
    LIBRARY = "library"
    IN_PLACE = "in place"
    SELECTED = "selected"


LIBRARY_ELEMENTS = 4096
"""XLA's CPU compiler leaves reductions that read so many elements or more to YNNPACK (its `kMinElements`), from 0.10 to 0.12."""

_USUAL = {
    Work.POINTWISE: Making.CHEAP,
    Work.FREE: Making.NAME,
    Work.MOVE: Making.MOVED,
    Work.REDUCTION: Making.REDUCTION,
}
"""What follows from an operation's work; WHOLE for the others, and for primitives that users register."""
_UNUSUAL: Mapping[Making, str] = {
    Making.CHEAP: "empty2 iota",
    Making.COSTLY: """
        acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cosh digamma div erf erf_inv erfc exp exp2 expm1
        gather igamma igamma_grad_a igammac lgamma log log1p logistic polygamma pow random_gamma_grad
        regularized_incomplete_beta rem rsqrt sinh sqrt tan tanh zeta
    """,
    Making.IN_PLACE: """
        dynamic_update_slice scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_mul
    """,
    Making.LIBRARY: "reduce_max reduce_min reduce_sum",
    Making.NAME: "random_unwrap random_wrap",
    Making.SAME: "broadcast_in_dim convert_element_type tile",
    Making.SELECTED: "select_and_scatter_add",
    Making.WHOLE: "argmax argmin",
}
_MULTIPLIED_BY_INVERSE = frozenset({"div"})
_LIBRARY = """
    abs add add_any broadcast_in_dim ceil convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max
    min mul neg pad pow round rsqrt sign sin sqrt square sub tan tanh transpose
"""
_SUMS = frozenset({"add", "add_any", "scatter-add"})
_KEEPS_ZERO = frozenset(
    "abs broadcast_in_dim convert_element_type copy neg reshape sign sqrt square squeeze transpose".split()  # noqa: SIM905
)
_PRODUCTS = frozenset({"mul", "div"})
_DEAR = {"erfc": 75.0, "tanh": 60.0}
_ORDERS: Mapping[str, OrdersOf] = {"conv_general_dilated": of_convolution, "dot_general": of_product}


def _list_makings() -> dict[str, Making]:
    usual = {name: _USUAL.get(entry.work, Making.WHOLE) for name, entry in RULES.items()}
    return usual | {name: making for making, names in _UNUSUAL.items() for name in names.split()}


MAKINGS: Mapping[str, Making] = types.MappingProxyType(_list_makings())
"""The making of every primitive of the rule table."""
JOINING_LIBRARY = frozenset(_LIBRARY.split())
"""What the library for reductions also computes on the way to a reduction."""


def making_of(eqn: JaxprEqn) -> Making:
    """How an equation's result is made. A division by a constant is CHEAP, because XLA multiplies by the inverse."""
    name = eqn.primitive.name
    if name in _MULTIPLIED_BY_INVERSE and isinstance(eqn.invars[1], Literal):
        return Making.CHEAP
    return MAKINGS.get(name, Making.WHOLE)


def dear_below(eqn: JaxprEqn) -> float:
    """How many float32 operations a GPU may make while it moves an element, for XLA to read the result and not compute it again.

    So compiled, `tanh` is read on A100 (38 in float32), H100 in 16 bits (40) and V100 in float16 (35), and computed again on V100
    (70) and H100 (80) in float32. In bfloat16, which a V100 has not, it is computed again there too.
    """
    return _DEAR.get(eqn.primitive.name, 0.0)


def can_join_library(eqn: JaxprEqn) -> bool:
    """Whether the library that does a large reduction also computes this if it only leads to the reduction."""
    return eqn.primitive.name in JOINING_LIBRARY


def can_move_sums(eqn: JaxprEqn) -> bool:
    """Whether it is a sum, of two operands or onto the first in place, that XLA's simplifier moves into another one."""
    return eqn.primitive.name in _SUMS


def adds_two(eqn: JaxprEqn) -> bool:
    """Whether it is the sum of two operands: XLA's simplifier takes the other one in its place if one is zero everywhere."""
    return eqn.primitive.name in _SUMS and len(eqn.invars) == 2


def keeps_zero(eqn: JaxprEqn) -> bool:
    """Whether XLA knows that the result is zero everywhere if its operand is."""
    return eqn.primitive.name in _KEEPS_ZERO


def factor_of(eqn: JaxprEqn) -> Hashable:
    """The constant factor of a product or quotient, which XLA moves into what the result is multiplied by; None without one.

    (a * constant) * repeated(b) becomes a * repeated(b * constant) in JAX 0.10.2, and no longer in 0.12.0.
    """
    if not MOVES_FACTORS or eqn.primitive.name not in _PRODUCTS:
        return None
    return next(
        ((place, eqn.primitive.name, str(v.val)) for place, v in enumerate(eqn.invars) if isinstance(v, Literal)), None
    )


def takes_factors(eqn: JaxprEqn) -> bool:
    """Whether it is a product or quotient, so that a factor of one operand can move into the other one."""
    return eqn.primitive.name in _PRODUCTS


def shares_repeated(eqn: JaxprEqn, devices: int) -> bool:
    """Whether XLA finds that what is repeated for an equation is what is repeated for others, before its library takes any.

    In a program of several devices each division still divides then, by what it repeats itself; in one of a single device all
    multiply by one inverse, repeated once.
    """
    return devices == 1 or eqn.primitive.name != "div"


def orders_of(eqn: JaxprEqn) -> Orders | None:
    """The orders of dimensions in which a contraction reads its operands; None for everything else."""
    orders = _ORDERS.get(eqn.primitive.name)
    return None if orders is None else orders(eqn)
