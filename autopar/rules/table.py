"""THE table: one factor rule per primitive, alphabetical.

Each entry says which rule describes the operation, how it runs on a shard (unchanged unless its parameters speak of
global shapes), and how heavy it is. Nothing else in autopar knows a primitive by name, except control flow, whose
sub-programs `program/` opens. A primitive that is not here runs whole on every device, with one warning;
`register_rule` adds one.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections.abc import Callable, Mapping

from autopar.compat import JaxprEqn, source_line
from autopar.errors import RuleError, warn
from autopar.rules import by_shape, contraction_orders, indexing, on_shard, windows
from autopar.rules.factor_rule import FactorRule, parse

Rule = Callable[[JaxprEqn], FactorRule]


class Making(enum.Enum):
    """How XLA's CPU compiler makes a primitive's result; `footprint` reckons from it which results have memory of their own.

    WHOLE: by itself, from whole buffers to a whole buffer. NAME: it is another name of its operand. SAME: so it is where size
    and type stay, else CHEAP. CHEAP: inside whatever reads it, again for each reader. MOVED: so too, with elements in other
    places. COSTLY: inside its reader where it has only one. QUOTIENT: COSTLY; by a constant CHEAP, because XLA multiplies by
    the inverse. REDUCTION: by itself, reading what is CHEAP without a buffer. LIBRARY: a REDUCTION that, from a size on, a
    library does, which reads only buffers. IN_PLACE: into the memory of its first operand if nobody reads that again.
    """

    WHOLE = "whole"
    NAME = "name"
    SAME = "same"
    CHEAP = "cheap"
    MOVED = "moved"
    COSTLY = "costly"
    QUOTIENT = "quotient"
    REDUCTION = "reduction"
    LIBRARY = "library"
    IN_PLACE = "in place"


@dataclasses.dataclass(frozen=True)
class PrimitiveRule:
    """How one primitive shards. `heavy`: a contraction whose work must be divided; `fused`: XLA folds it into its users;
    `free`: it computes nothing; `random`: it draws random bits, which cost too much to draw again for every reader;
    `making`: what memory its result takes; `library`: the library that does reductions does it too, on its way to one;
    `orders`: for a contraction, the orders of dimensions that need no copy; `picks`: of its first operand it reads no more than
    it returns; `reduces`: it reduces whole dimensions, those in its parameter `axes`; `barrier`: another name of a value, which
    compilers do not see through; `adds`: its result is a sum, of two operands or, made in place, of the first and of updates;
    `permutes`: it puts dimensions in the order of its parameter `permutation`."""

    rule: Rule
    local: on_shard.Local = on_shard.unchanged
    heavy: bool = False
    fused: bool = False
    free: bool = False
    random: bool = False
    making: Making = Making.WHOLE
    library: bool = False
    orders: contraction_orders.OrdersOf | None = None
    picks: bool = False
    reduces: bool = False
    barrier: bool = False
    adds: bool = False
    permutes: bool = False


def _fused(rule: Rule, run: on_shard.Local = on_shard.unchanged, *, making: Making = Making.CHEAP) -> PrimitiveRule:
    return PrimitiveRule(rule, run, fused=True, making=making)


def _free(rule: Rule, run: on_shard.Local = on_shard.unchanged, *, making: Making = Making.NAME) -> PrimitiveRule:
    return PrimitiveRule(rule, run, fused=True, free=True, making=making)


def _moving(rule: Rule, run: on_shard.Local = on_shard.unchanged) -> PrimitiveRule:
    """It only moves elements: priced by itself, and read in place by what XLA folds it into."""
    return PrimitiveRule(rule, run, making=Making.MOVED)


def _reduction(rule: Rule, *, making: Making = Making.REDUCTION) -> PrimitiveRule:
    return PrimitiveRule(rule, making=making, reduces=True)


def _in_place(rule: Rule, run: on_shard.Local) -> PrimitiveRule:
    return PrimitiveRule(rule, run, making=Making.IN_PLACE)


def _names(text: str, entry: PrimitiveRule) -> dict[str, PrimitiveRule]:
    return dict.fromkeys(text.split(), entry)


_POINTWISE = """
    abs and ceil clamp clz complex conj cos eq eq_to floor ge gt imag integer_pow is_finite le le_to lt lt_to max min
    ne nextafter not one_minus_square or polynomial population_count real reduce_precision round shift_left
    shift_right_arithmetic shift_right_logical sign sin square xor
"""
_COSTLY = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cosh digamma erf erf_inv erfc exp exp2 expm1
    igamma igamma_grad_a igammac lgamma log log1p logistic polygamma pow random_gamma_grad regularized_incomplete_beta
    rem rsqrt sinh sqrt tan tanh zeta
"""

_TABLE: dict[str, PrimitiveRule] = {
    **_names(_POINTWISE, _fused(by_shape.pointwise)),
    **_names(_COSTLY, _fused(by_shape.pointwise, making=Making.COSTLY)),
    **_names("add add_any", dataclasses.replace(_fused(by_shape.pointwise_sum), adds=True)),
    **_names("argmax argmin", PrimitiveRule(by_shape.reduce_whole, reduces=True)),
    **_names("bitcast_convert_type", _fused(by_shape.bitcast)),
    **_names("broadcast_in_dim", _free(by_shape.broadcast_in_dim, on_shard.broadcast_in_dim, making=Making.SAME)),
    **_names("cholesky", PrimitiveRule(by_shape.matrices)),
    **_names("concatenate", _moving(by_shape.concatenate)),
    **_names(
        "conv_general_dilated",
        PrimitiveRule(
            windows.conv_general_dilated, windows.conv_local, heavy=True, orders=contraction_orders.of_convolution
        ),
    ),
    **_names("convert_element_type", _fused(by_shape.convert, making=Making.SAME)),
    **_names("copy copy_p stop_gradient", _free(by_shape.pointwise_copy)),
    **_names("cumlogsumexp cummax cummin cumprod", PrimitiveRule(by_shape.cumulative_other)),
    **_names("cumsum", PrimitiveRule(by_shape.cumulative_sum)),
    **_names("div", _fused(by_shape.pointwise_quotient, making=Making.QUOTIENT)),
    **_names("dot_general", PrimitiveRule(by_shape.dot_general, heavy=True, orders=contraction_orders.of_product)),
    **_names("dynamic_slice", dataclasses.replace(_moving(indexing.dynamic_slice, on_shard.dynamic_slice), picks=True)),
    **_names("dynamic_update_slice", _in_place(indexing.dynamic_update_slice, on_shard.dynamic_update_slice)),
    **_names("eigh", PrimitiveRule(by_shape.matrices)),
    **_names("empty2", _free(by_shape.everything_whole, making=Making.CHEAP)),
    **_names("fan_out", _free(by_shape.pointwise_copy, on_shard.identity)),
    **_names("fft", PrimitiveRule(by_shape.fft)),
    **_names("gather", PrimitiveRule(indexing.gather, indexing.gather_local, making=Making.COSTLY, picks=True)),
    **_names("iota", _free(by_shape.iota, on_shard.iota, making=Making.CHEAP)),
    **_names("layer_boundary", _free(by_shape.pointwise_copy, on_shard.identity)),
    **_names("lu", PrimitiveRule(by_shape.matrices)),
    **_names("mul", _fused(by_shape.pointwise_product)),
    **_names("name", _free(by_shape.pointwise_copy)),
    **_names("neg", _fused(by_shape.pointwise_linear)),
    **_names("optimization_barrier", dataclasses.replace(_free(by_shape.pointwise_copy), barrier=True)),
    **_names("pad", _moving(by_shape.pad)),
    **_names("qr", PrimitiveRule(by_shape.matrices)),
    **_names("random_bits", PrimitiveRule(by_shape.random_bits, on_shard.random_bits, random=True)),
    **_names(
        "random_clone random_fold_in random_seed random_split",
        PrimitiveRule(by_shape.everything_whole),
    ),
    **_names("random_unwrap random_wrap", PrimitiveRule(by_shape.everything_whole, making=Making.NAME)),
    **_names("reduce_and", _reduction(by_shape.reduce_and)),
    **_names("reduce_max", _reduction(by_shape.reduce_max, making=Making.LIBRARY)),
    **_names("reduce_min", _reduction(by_shape.reduce_min, making=Making.LIBRARY)),
    **_names("reduce_or", _reduction(by_shape.reduce_or)),
    **_names("reduce_prod reduce_xor", _reduction(by_shape.reduce_whole)),
    **_names("reduce_sum", _reduction(by_shape.reduce_sum, making=Making.LIBRARY)),
    **_names("reduce_window_max reduce_window_min", PrimitiveRule(windows.reduce_window_other)),
    **_names("reduce_window_sum", PrimitiveRule(windows.reduce_window_sum)),
    **_names("reshape", _free(by_shape.reshape, on_shard.reshape)),
    **_names("rev", _moving(by_shape.rev)),
    **_names("scatter scatter_mul", _in_place(indexing.scatter_other, indexing.scatter_local)),
    **_names("scatter-add", dataclasses.replace(_in_place(indexing.scatter_add, indexing.scatter_local), adds=True)),
    **_names("scatter-max", _in_place(indexing.scatter_max, indexing.scatter_local)),
    **_names("scatter-min", _in_place(indexing.scatter_min, indexing.scatter_local)),
    **_names("scatter-mul", _in_place(indexing.scatter_other, indexing.scatter_local)),
    **_names("scatter-sub", _in_place(indexing.scatter_add, indexing.scatter_local)),
    **_names("select_and_gather_add", PrimitiveRule(windows.select_and_gather_add)),
    **_names("select_and_scatter_add", PrimitiveRule(windows.select_and_scatter_add)),
    **_names("select_n", _fused(by_shape.select)),
    **_names("sharding_constraint", _free(by_shape.pointwise_copy, on_shard.identity)),
    **_names("slice", dataclasses.replace(_moving(by_shape.slice_, on_shard.slice_), picks=True)),
    **_names("sort", PrimitiveRule(by_shape.sort)),
    **_names("split", _moving(by_shape.split)),
    **_names("squeeze", _free(by_shape.squeeze)),
    **_names("stack", _moving(by_shape.stack)),
    **_names("sub", _fused(by_shape.pointwise_sum)),
    **_names("svd", PrimitiveRule(by_shape.matrices)),
    **_names("threefry2x32", PrimitiveRule(by_shape.pointwise, random=True)),
    **_names("tile", _free(by_shape.tile, on_shard.tile, making=Making.SAME)),
    **_names("top_k", PrimitiveRule(by_shape.top_k)),
    **_names("transpose", dataclasses.replace(_moving(by_shape.transpose), permutes=True)),
    **_names("triangular_solve", PrimitiveRule(by_shape.matrices)),
    **_names("unstack", _moving(by_shape.unstack)),
}
_LIBRARY = """
    abs add add_any broadcast_in_dim ceil convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max
    min mul neg pad pow round rsqrt sign sin sqrt square sub tan tanh transpose
"""
RULES: Mapping[str, PrimitiveRule] = types.MappingProxyType(
    {**_TABLE, **{name: dataclasses.replace(_TABLE[name], library=True) for name in _LIBRARY.split()}}
)
_USER_RULES: dict[str, PrimitiveRule] = {}
_FALLBACK = PrimitiveRule(by_shape.everything_whole)


def register_rule(
    primitive: str, notation: str | Rule, *, local: on_shard.Local = on_shard.unchanged, heavy: bool = False
) -> None:
    """Teach autopar how a primitive of your own shards, such as a Pallas kernel or a custom call.

    Args:
        primitive: the primitive's name.
        notation: the factor rule as text, such as `"b s c, c e -> b s e | sum: c"`, or a function from the equation to a
            `FactorRule`.
        local: runs the equation on a shard; by default the primitive is bound with the same parameters.
        heavy: whether it is to be priced as a contraction, 2 operations for every combination of its factors, and not as an
            elementwise operation.

    Raises:
        RuleError: autopar has a rule for the primitive already. A rule that does not describe an equation's shapes is refused
            when a step with it is planned.
    """
    if primitive in RULES:
        raise RuleError(f"primitive {primitive!r} has a rule in autopar; only new primitives can be registered")
    rule = notation if callable(notation) else _from_notation(notation)
    _USER_RULES[primitive] = PrimitiveRule(rule, local, heavy=heavy)


def _from_notation(notation: str) -> Rule:
    def rule(eqn: JaxprEqn) -> FactorRule:
        shapes = [[by_shape.shape_of(v) for v in side] for side in (eqn.invars, eqn.outvars)]
        return parse(notation, *shapes)

    return rule


def entry_for(eqn: JaxprEqn) -> PrimitiveRule:
    """The table's entry for an equation, the fallback if there is none."""
    name = eqn.primitive.name
    return RULES.get(name) or _USER_RULES.get(name) or _FALLBACK


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether the table, or the user, says how an equation's primitive shards."""
    return entry_for(eqn) is not _FALLBACK


def rule_for(eqn: JaxprEqn) -> FactorRule:
    """The factor rule of an equation, checked against its shapes."""
    in_shapes, out_shapes = ([by_shape.shape_of(v) for v in side] for side in (eqn.invars, eqn.outvars))
    return entry_for(eqn).rule(eqn).check(in_shapes, out_shapes)


def warn_of_missing_rules(eqns: list[JaxprEqn]) -> None:
    """One warning that names every primitive without a rule and the user's line that first uses it."""
    missing: dict[str, str] = {}
    for eqn in eqns:
        if not has_rule(eqn):
            missing.setdefault(eqn.primitive.name, source_line(eqn))
    if missing:
        listed = "; ".join(
            f"{name} at {line or 'a line that JAX did not keep'}" for name, line in sorted(missing.items())
        )
        warn(
            f"no factor rule for {listed}. These operations run whole on every device, which is correct but not "
            "parallel. autopar.register_rule(primitive, notation) adds a rule, e.g. "
            'autopar.register_rule("my_kernel", "b s c, c e -> b s e | sum: c").'
        )


def flops_of(eqn: JaxprEqn, rule: FactorRule) -> float:
    """Floating-point operations of one equation, undivided: 2 per multiply-add of a contraction, 1 per result otherwise."""
    if not entry_for(eqn).heavy:
        sizes = [math.prod(by_shape.shape_of(v)) for v in (*eqn.invars, *eqn.outvars)]
        return float(max(sizes, default=0))
    numbers = eqn.params.get("dimension_numbers")
    # With windows every output meets one kernel position per kernel element of its feature.
    if rule.whole and numbers is not None and hasattr(numbers, "rhs_spec"):
        out, kernel = by_shape.shape_of(eqn.outvars[0]), by_shape.shape_of(eqn.invars[1])
        features = kernel[numbers.rhs_spec[0]]
        return float(2 * math.prod(out) * math.prod(kernel) / features / eqn.params["batch_group_count"])
    return 2.0 * math.prod(size for _, size in rule.sizes)
