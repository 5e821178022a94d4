"""THE table: what each primitive does, one line each, alphabetical.

Nothing else in autopar knows a primitive by name, except control flow, whose sub-programs `program/` opens, and
`intra_op/xla_cpu/table.py`, which says what one compiler makes of some of these. The columns:

    rule          the function from an equation to its factor rule: which factor indexes each dimension
    work          what the operation's work consists of
    local         how it runs on a shard: unchanged unless its parameters speak of global shapes
    flops         floating-point operations of an equation under its rule, undivided
    adds          its result is the sum or the difference of its two operands, element by element
    picks         of its first operand it reads no more than it returns
    barrier       it is another name of a value, which compilers do not see through
    permutation   the function from an equation to the order in which it puts its operand's dimensions

A primitive that is not here runs whole on every device, with one warning; `register_rule` adds one.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence

from autopar.compat import JaxprEqn, source_line
from autopar.errors import RuleError, warn
from autopar.rules import by_shape, flops, indexing, matrices, on_shard, pointwise, reductions, reshaping, windows
from autopar.rules.factor_rule import FactorRule
from autopar.rules.notation import parse
from autopar.rules.primitive_rule import PrimitiveRule, Rule, Work

RULES: Mapping[str, PrimitiveRule] = types.MappingProxyType(
    {
        "abs": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "acos": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "acosh": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "add": PrimitiveRule(pointwise.sum_of_two, Work.POINTWISE, adds=True),
        "add_any": PrimitiveRule(pointwise.sum_of_two, Work.POINTWISE, adds=True),
        "and": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "argmax": PrimitiveRule(reductions.reduce_whole, Work.REDUCTION),
        "argmin": PrimitiveRule(reductions.reduce_whole, Work.REDUCTION),
        "asin": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "asinh": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "atan": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "atan2": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "atanh": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "bessel_i0e": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "bessel_i1e": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "bitcast_convert_type": PrimitiveRule(pointwise.bitcast, Work.POINTWISE),
        "broadcast_in_dim": PrimitiveRule(reshaping.broadcast_in_dim, Work.FREE, on_shard.broadcast_in_dim),
        "cbrt": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "ceil": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "cholesky": PrimitiveRule(matrices.factorization),
        "clamp": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "clz": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "complex": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "concatenate": PrimitiveRule(reshaping.concatenate, Work.MOVE),
        "conj": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "conv_general_dilated": PrimitiveRule(windows.conv, Work.CONTRACTION, windows.conv_local, flops=flops.of_conv),
        "convert_element_type": PrimitiveRule(pointwise.convert, Work.POINTWISE),
        "copy": PrimitiveRule(pointwise.copy, Work.FREE),
        "copy_p": PrimitiveRule(pointwise.copy, Work.FREE),
        "cos": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "cosh": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "cumlogsumexp": PrimitiveRule(reductions.cumulative_other),
        "cummax": PrimitiveRule(reductions.cumulative_other),
        "cummin": PrimitiveRule(reductions.cumulative_other),
        "cumprod": PrimitiveRule(reductions.cumulative_other),
        "cumsum": PrimitiveRule(reductions.cumulative_sum),
        "digamma": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "div": PrimitiveRule(pointwise.quotient, Work.POINTWISE),
        "dot_general": PrimitiveRule(matrices.dot_general, Work.CONTRACTION, flops=flops.of_product),
        "dynamic_slice": PrimitiveRule(indexing.dynamic_slice, Work.MOVE, on_shard.dynamic_slice, picks=True),
        "dynamic_update_slice": PrimitiveRule(indexing.dynamic_update_slice, Work.OTHER, on_shard.dynamic_update_slice),
        "eigh": PrimitiveRule(matrices.factorization),
        "empty2": PrimitiveRule(by_shape.everything_whole, Work.FREE),
        "eq": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "eq_to": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "erf": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "erf_inv": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "erfc": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "exp": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "exp2": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "expm1": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "fan_out": PrimitiveRule(pointwise.copy, Work.FREE, on_shard.identity),
        "fft": PrimitiveRule(matrices.fft),
        "floor": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "gather": PrimitiveRule(indexing.gather, Work.OTHER, indexing.gather_local, picks=True),
        "ge": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "gt": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "igamma": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "igamma_grad_a": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "igammac": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "imag": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "integer_pow": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "iota": PrimitiveRule(pointwise.iota, Work.FREE, on_shard.iota),
        "is_finite": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "layer_boundary": PrimitiveRule(pointwise.copy, Work.FREE, on_shard.identity),
        "le": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "le_to": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "lgamma": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "log": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "log1p": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "logistic": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "lt": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "lt_to": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "lu": PrimitiveRule(matrices.factorization),
        "max": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "min": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "mul": PrimitiveRule(pointwise.product, Work.POINTWISE),
        "name": PrimitiveRule(pointwise.copy, Work.FREE),
        "ne": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "neg": PrimitiveRule(pointwise.linear, Work.POINTWISE),
        "nextafter": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "not": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "one_minus_square": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "optimization_barrier": PrimitiveRule(pointwise.copy, Work.FREE, barrier=True),
        "or": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "pad": PrimitiveRule(reshaping.pad, Work.MOVE),
        "polygamma": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "polynomial": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "population_count": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "pow": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "qr": PrimitiveRule(matrices.factorization),
        "random_bits": PrimitiveRule(pointwise.random_bits, Work.RANDOM, on_shard.random_bits),
        "random_clone": PrimitiveRule(by_shape.everything_whole),
        "random_fold_in": PrimitiveRule(by_shape.everything_whole),
        "random_gamma_grad": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "random_seed": PrimitiveRule(by_shape.everything_whole),
        "random_split": PrimitiveRule(by_shape.everything_whole),
        "random_unwrap": PrimitiveRule(by_shape.everything_whole),
        "random_wrap": PrimitiveRule(by_shape.everything_whole),
        "real": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "reduce_and": PrimitiveRule(reductions.reduce_and, Work.REDUCTION),
        "reduce_max": PrimitiveRule(reductions.reduce_max, Work.REDUCTION),
        "reduce_min": PrimitiveRule(reductions.reduce_min, Work.REDUCTION),
        "reduce_or": PrimitiveRule(reductions.reduce_or, Work.REDUCTION),
        "reduce_precision": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "reduce_prod": PrimitiveRule(reductions.reduce_whole, Work.REDUCTION),
        "reduce_sum": PrimitiveRule(reductions.reduce_sum, Work.REDUCTION),
        "reduce_window_max": PrimitiveRule(windows.reduce_window_other),
        "reduce_window_min": PrimitiveRule(windows.reduce_window_other),
        "reduce_window_sum": PrimitiveRule(windows.reduce_window_sum),
        "reduce_xor": PrimitiveRule(reductions.reduce_whole, Work.REDUCTION),
        "regularized_incomplete_beta": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "rem": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "reshape": PrimitiveRule(reshaping.reshape, Work.FREE, on_shard.reshape),
        "rev": PrimitiveRule(reshaping.rev, Work.MOVE),
        "round": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "rsqrt": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "scatter": PrimitiveRule(indexing.scatter_other, Work.OTHER, indexing.scatter_local),
        "scatter-add": PrimitiveRule(indexing.scatter_add, Work.OTHER, indexing.scatter_local),
        "scatter-max": PrimitiveRule(indexing.scatter_max, Work.OTHER, indexing.scatter_local),
        "scatter-min": PrimitiveRule(indexing.scatter_min, Work.OTHER, indexing.scatter_local),
        "scatter-mul": PrimitiveRule(indexing.scatter_other, Work.OTHER, indexing.scatter_local),
        "scatter-sub": PrimitiveRule(indexing.scatter_add, Work.OTHER, indexing.scatter_local),
        "scatter_mul": PrimitiveRule(indexing.scatter_other, Work.OTHER, indexing.scatter_local),
        "select_and_gather_add": PrimitiveRule(windows.select_and_gather_add),
        "select_and_scatter_add": PrimitiveRule(windows.select_and_scatter_add),
        "select_n": PrimitiveRule(pointwise.select, Work.POINTWISE),
        "sharding_constraint": PrimitiveRule(pointwise.copy, Work.FREE, on_shard.identity),
        "shift_left": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "shift_right_arithmetic": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "shift_right_logical": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "sign": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "sin": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "sinh": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "slice": PrimitiveRule(reshaping.slice_, Work.MOVE, on_shard.slice_, picks=True),
        "sort": PrimitiveRule(reductions.sort),
        "split": PrimitiveRule(reshaping.split, Work.MOVE),
        "sqrt": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "square": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "squeeze": PrimitiveRule(reshaping.squeeze, Work.FREE),
        "stack": PrimitiveRule(reshaping.stack, Work.MOVE),
        "stop_gradient": PrimitiveRule(pointwise.copy, Work.FREE),
        "sub": PrimitiveRule(pointwise.sum_of_two, Work.POINTWISE, adds=True),
        "svd": PrimitiveRule(matrices.factorization),
        "tan": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "tanh": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "threefry2x32": PrimitiveRule(pointwise.nonlinear, Work.RANDOM),
        "tile": PrimitiveRule(reshaping.tile, Work.FREE, on_shard.tile),
        "top_k": PrimitiveRule(reductions.top_k),
        "transpose": PrimitiveRule(reshaping.transpose, Work.MOVE, permutation=reshaping.permutation_of),
        "triangular_solve": PrimitiveRule(matrices.factorization),
        "unstack": PrimitiveRule(reshaping.unstack, Work.MOVE),
        "xor": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
        "zeta": PrimitiveRule(pointwise.nonlinear, Work.POINTWISE),
    }
)
_USER_RULES: dict[str, PrimitiveRule] = {}
_FALLBACK = PrimitiveRule(by_shape.everything_whole)


@dataclasses.dataclass(frozen=True)
class _Notated:
    """A rule that a user wrote down: every equation is described by the same text."""

    notation: str

    def __call__(self, eqn: JaxprEqn) -> FactorRule:
        return parse(self.notation, *_shapes(eqn))


def register_rule(
    primitive: str,
    notation: str | Rule,
    *,
    local: on_shard.Local = on_shard.unchanged,
    heavy: bool = False,
    replace: bool = False,
) -> None:
    """Teach autopar how a primitive of your own shards, such as a Pallas kernel or a custom call.

    Args:
        primitive: the primitive's name.
        notation: the factor rule as text, such as `"b s c, c e -> b s e | sum: c"`, or a function from the equation to a
            `FactorRule`.
        local: runs the equation on a shard; by default the primitive is bound with the same parameters.
        heavy: whether it is to be priced as a contraction, 2 operations for every combination of its factors, and not as an
            elementwise operation.
        replace: whether the rule may take the place of another one that was registered for the primitive.

    Raises:
        RuleError: autopar has a rule for the primitive already, or another one was registered for it and `replace` is False. A
            rule that does not describe an equation's shapes is refused when a step with it is planned.
    """
    if primitive in RULES:
        raise RuleError(f"primitive {primitive!r} has a rule in autopar; only new primitives can be registered")
    rule = notation if callable(notation) else _Notated(notation)
    work, count = (Work.CONTRACTION, flops.of_product) if heavy else (Work.OTHER, flops.of_elements)
    entry = PrimitiveRule(rule, work, local, flops=count)
    known = _USER_RULES.get(primitive)
    if known is not None and known != entry and not replace:
        raise RuleError(
            f"primitive {primitive!r} has been registered with another rule, {_describe(known)}; pass replace=True to "
            f"register {_describe(entry)} in its place"
        )
    _USER_RULES[primitive] = entry


def find_registered(equations: Iterable[JaxprEqn]) -> list[str]:
    """The primitives among these equations for which the user registered a rule, in alphabetical order."""
    return sorted({eqn.primitive.name for eqn in equations if eqn.primitive.name in _USER_RULES})


def _describe(entry: PrimitiveRule) -> str:
    """A registered rule as its user wrote it."""
    rule = repr(entry.rule.notation) if isinstance(entry.rule, _Notated) else f"the function {entry.rule!r}"
    local = "" if entry.local is on_shard.unchanged else f" with local={entry.local!r}"
    return f"{rule}{local}{' and heavy=True' if entry.heavy else ''}"


def entry_for(eqn: JaxprEqn) -> PrimitiveRule:
    """The table's entry for an equation, the fallback if there is none."""
    name = eqn.primitive.name
    return RULES.get(name) or _USER_RULES.get(name) or _FALLBACK


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether the table, or the user, says how an equation's primitive shards."""
    return entry_for(eqn) is not _FALLBACK


def rule_for(eqn: JaxprEqn) -> FactorRule:
    """The factor rule of an equation, checked against its shapes."""
    return entry_for(eqn).rule(eqn).check(*_shapes(eqn))


def flops_of(eqn: JaxprEqn, rule: FactorRule) -> float:
    """Floating-point operations of an equation under its rule, undivided: 2 for each multiply-add."""
    return entry_for(eqn).flops(eqn, rule)


def _shapes(eqn: JaxprEqn) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of an equation's operands and of its results."""
    return [by_shape.shape_of(v) for v in eqn.invars], [by_shape.shape_of(v) for v in eqn.outvars]


def warn_of_missing_rules(eqns: Sequence[JaxprEqn]) -> None:
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
