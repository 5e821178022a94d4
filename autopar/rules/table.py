"""THE table: what each primitive does, a row each, alphabetical.

Nothing else in autopar knows a primitive by name, except control flow, whose sub-programs `program/` opens, and
`intra_op/xla_cpu/table.py`, which says what one compiler makes of some of these. The columns:

    rule          the function from an equation to its factor rule: which factor indexes each dimension
    work          what the operation's work consists of
    local         how it runs on a shard: unchanged unless its parameters speak of global shapes
    flops         floating-point operations of an equation under its rule, undivided
    adds          its result is the sum or the difference of its two operands, element by element
    picks         of its first operand it reads no more than it returns
    barrier       it is another name of a value, which compilers do not see through
    divided       the function from a division of its factors to what the devices then exchange within it
    scratch       the function from local shapes of its operands to the bytes that a device needs while it runs
    between       the function to the bytes that its own kernels hand to each other, of all devices together; None: none do
    holes         how many times as many operations it takes where zeros between rows are multiplied too; None: there are none
    masks         as many where rows of other groups are masked and multiplied too, as all compilers but those for TPUs do
    once          it calls Python, which one device does for all, and no microbatch by itself
    if_finite     the function to the operands in which it is linear if the others are finite, beside those in its rule
    permutation   the function from an equation to the order in which it puts its operand's dimensions

Those of equinox are here too, of which diffrax's loops are made: nonbatchable, nondifferentiable_backward, nontraceable,
select_if_vmap, unvmap_all, unvmap_any and unvmap_max. A primitive that is not here runs whole on every device, with one
warning; `unlisted/register.py` adds one.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping, Sequence

import jax

from autopar.compat import JaxprEqn, source_line
from autopar.content import digest_of
from autopar.errors import RuleError
from autopar.rules import (
    attention,
    by_shape,
    cuts,
    flops,
    if_finite,
    indexing,
    matrices,
    on_shard,
    pointwise,
    python_calls,
    reductions,
    reshaping,
    windows,
)
from autopar.rules.factor_rule import FactorRule
from autopar.rules.primitive_rule import PrimitiveRule as Row
from autopar.rules.primitive_rule import Work

# What several rows share, so that each is one line.
_FACTORIZATION = Row(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization)
_attention = functools.partial(
    Row,
    work=Work.CONTRACTION,
    flops=attention.flops,
    between=attention.between_kernels,
    divided=attention.divided,
    scratch=attention.scratch,
)
_windows = functools.partial(Row, local=windows.reduce_window_local, divided=windows.reduce_window_divided)

RULES: Mapping[str, Row] = types.MappingProxyType(
    {
        "abs": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "acos": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "acosh": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "add": Row(rule=pointwise.sum_of_two, work=Work.POINTWISE, adds=True),
        "add_any": Row(rule=pointwise.sum_of_two, work=Work.POINTWISE, adds=True),
        "and": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "approx_top_k": Row(rule=reductions.approx_top_k, flops=flops.of_sort),
        "argmax": Row(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "argmin": Row(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "asin": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "asinh": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "atan": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "atan2": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "atanh": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "attention": _attention(rule=attention.attention, local=attention.attention_local),
        "attention_backward": _attention(rule=attention.attention_backward, local=attention.attention_backward_local),
        "batch_statistic": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "bessel_i0e": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "bessel_i1e": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "bitcast_convert_type": Row(rule=pointwise.bitcast, work=Work.POINTWISE),
        "broadcast_in_dim": Row(rule=reshaping.broadcast_in_dim, work=Work.FREE, local=on_shard.broadcast_in_dim),
        "cbrt": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "ceil": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "cholesky": _FACTORIZATION,
        "cholesky_update": Row(rule=by_shape.everything_whole),
        "clamp": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "clz": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "complex": Row(rule=pointwise.sum_of_two, work=Work.POINTWISE),
        "concatenate": Row(rule=reshaping.concatenate, work=Work.MOVE),
        "conj": Row(rule=pointwise.linear, work=Work.POINTWISE),
        "constrain": Row(rule=pointwise.copy, work=Work.FREE),
        "conv_general_dilated": Row(
            rule=windows.conv,
            work=Work.CONVOLUTION,
            local=windows.conv_local,
            flops=flops.of_conv,
            holes=flops.holes_of_conv,
            if_finite=if_finite.contracted,
            divided=windows.conv_divided,
        ),
        "convert_element_type": Row(rule=pointwise.convert, work=Work.POINTWISE),
        "copy": Row(rule=pointwise.copy, work=Work.FREE),
        "copy_p": Row(rule=pointwise.copy, work=Work.FREE),
        "cos": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "cosh": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "cumlogsumexp": Row(rule=reductions.cumulative_other),
        "cummax": Row(rule=reductions.cumulative_other),
        "cummin": Row(rule=reductions.cumulative_other),
        "cumprod": Row(rule=reductions.cumulative_other),
        "cumsum": Row(rule=reductions.cumulative_sum),
        "device_put": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "digamma": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "div": Row(rule=pointwise.quotient, work=Work.POINTWISE, if_finite=if_finite.numerator),
        "dot_general": Row(
            rule=matrices.dot_general, work=Work.CONTRACTION, flops=flops.of_product, if_finite=if_finite.contracted
        ),
        "dynamic_slice": Row(rule=indexing.dynamic_slice, work=Work.MOVE, local=on_shard.dynamic_slice, picks=True),
        "dynamic_update_slice": Row(rule=indexing.dynamic_update_slice, local=on_shard.dynamic_update_slice),
        "eig": _FACTORIZATION,
        "eigh": _FACTORIZATION,
        "empty": Row(rule=pointwise.iota, work=Work.FREE, local=on_shard.empty),
        "empty2": Row(rule=by_shape.everything_whole, work=Work.FREE),
        "eq": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "eq_to": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "erf": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "erf_inv": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "erfc": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "exp": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "exp2": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "expm1": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "fan_out": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "fft": Row(rule=matrices.fft, local=matrices.fft_local, flops=flops.of_fft),
        "floor": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "gather": Row(rule=indexing.gather, work=Work.OTHER, local=indexing.gather_local, picks=True),
        "ge": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "geqp3": _FACTORIZATION,
        "geqrf": _FACTORIZATION,
        "gt": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "hessenberg": _FACTORIZATION,
        "householder_product": _FACTORIZATION,
        "igamma": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "igamma_grad_a": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "igammac": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "imag": Row(rule=pointwise.linear, work=Work.POINTWISE),
        "integer_pow": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "iota": Row(rule=pointwise.iota, work=Work.FREE, local=on_shard.iota),
        "iota_2x32_shape": Row(rule=pointwise.iota, work=Work.FREE, local=on_shard.iota_2x32),
        "is_finite": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "layer_boundary": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "layout_constraint": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "le": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "le_to": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lgamma": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "log": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "log1p": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "log2": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "logistic": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lt": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lt_to": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lu": _FACTORIZATION,
        "lu_pivots_to_permutation": Row(rule=matrices.of_vectors),
        "max": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "min": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "mul": Row(rule=pointwise.product, work=Work.POINTWISE, if_finite=if_finite.factors),
        "mulhi": Row(rule=pointwise.nonlinear, work=Work.POINTWISE, local=on_shard.high_halves),
        "name": Row(rule=pointwise.copy, work=Work.FREE),
        "ne": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "neg": Row(rule=pointwise.linear, work=Work.POINTWISE),
        "nextafter": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "nonbatchable": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "nondifferentiable_backward": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "nontraceable": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "not": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "observe": Row(rule=pointwise.observe, work=Work.FREE, local=on_shard.observe),
        "one_minus_square": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "optimization_barrier": Row(rule=pointwise.copy, work=Work.FREE, barrier=True),
        "or": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "ormqr": _FACTORIZATION,
        "pad": Row(rule=cuts.pad, work=Work.MOVE, local=cuts.pad_local, divided=cuts.pad_divided),
        "philox2x32": Row(rule=pointwise.nonlinear, work=Work.RANDOM, local=on_shard.hash_of_words),
        "philox4x32": Row(rule=pointwise.nonlinear, work=Work.RANDOM, local=on_shard.hash_of_words),
        "pmax": Row(rule=reductions.over_batch_max, work=Work.REDUCTION),
        "pmin": Row(rule=reductions.over_batch_min, work=Work.REDUCTION),
        "polygamma": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "polynomial": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "population_count": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "pow": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "psum": Row(rule=reductions.over_batch_sum, work=Work.REDUCTION),
        "qr": _FACTORIZATION,
        "ragged_dot_general": Row(
            rule=matrices.ragged_dot,
            work=Work.CONTRACTION,
            local=matrices.ragged_dot_local,
            flops=flops.of_ragged_dot,
            masks=flops.groups_of_ragged_dot,
            scratch=matrices.ragged_dot_scratch,
            if_finite=if_finite.contracted,
        ),
        "random_bits": Row(rule=pointwise.random_bits, work=Work.RANDOM, local=on_shard.random_bits),
        "random_clone": Row(rule=by_shape.everything_whole),
        "random_fold_in": Row(rule=by_shape.everything_whole),
        "random_gamma": Row(rule=pointwise.random_gamma, work=Work.RANDOM, local=on_shard.random_gamma),
        "random_gamma_grad": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "random_seed": Row(rule=by_shape.everything_whole),
        "random_split": Row(rule=by_shape.everything_whole),
        "random_unwrap": Row(rule=by_shape.everything_whole),
        "random_wrap": Row(rule=by_shape.everything_whole),
        "real": Row(rule=pointwise.linear, work=Work.POINTWISE),
        "reduce": Row(rule=reductions.reduce_by_function, work=Work.REDUCTION, local=on_shard.reduce_by_function),
        "reduce_and": Row(rule=reductions.reduce_and, work=Work.REDUCTION),
        "reduce_max": Row(rule=reductions.reduce_max, work=Work.REDUCTION),
        "reduce_min": Row(rule=reductions.reduce_min, work=Work.REDUCTION),
        "reduce_or": Row(rule=reductions.reduce_or, work=Work.REDUCTION),
        "reduce_precision": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "reduce_prod": Row(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "reduce_sum": Row(rule=reductions.reduce_sum, work=Work.REDUCTION),
        "reduce_window": Row(rule=windows.reduce_window_by_function),
        "reduce_window_max": _windows(rule=windows.reduce_window_other),
        "reduce_window_min": _windows(rule=windows.reduce_window_other),
        "reduce_window_sum": _windows(rule=windows.reduce_window_sum),
        "reduce_xor": Row(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "regularized_incomplete_beta": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "rem": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "reshape": Row(rule=reshaping.reshape, work=Work.FREE, local=on_shard.reshape),
        "rev": Row(rule=reshaping.rev, work=Work.MOVE),
        "rng_bit_generator": Row(rule=by_shape.everything_whole, work=Work.RANDOM),
        "roll": Row(rule=cuts.roll, work=Work.MOVE, local=cuts.roll_local, divided=cuts.roll_divided),
        "round": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "rsqrt": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "scaled_dot": Row(rule=matrices.scaled_dot, work=Work.CONTRACTION, flops=flops.of_scaled_dot),
        "scatter": Row(rule=indexing.scatter_other, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-add": Row(rule=indexing.scatter_add, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-max": Row(rule=indexing.scatter_max, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-min": Row(rule=indexing.scatter_min, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-mul": Row(rule=indexing.scatter_other, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-sub": Row(rule=indexing.scatter_add, work=Work.OTHER, local=indexing.scatter_local),
        "scatter_mul": Row(rule=indexing.scatter_other, work=Work.OTHER, local=indexing.scatter_local),
        "schur": _FACTORIZATION,
        "select_and_gather_add": Row(rule=windows.select_and_gather_add),
        "select_and_scatter_add": Row(
            rule=windows.select_and_scatter_add,
            local=windows.select_and_scatter_add_local,
            divided=windows.select_and_scatter_add_divided,
        ),
        "select_if_vmap": Row(rule=pointwise.select, work=Work.POINTWISE),
        "select_n": Row(rule=pointwise.select, work=Work.POINTWISE),
        "shift_left": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "shift_right_arithmetic": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "shift_right_logical": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "sign": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "sin": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "sinh": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "slice": Row(rule=cuts.slice_, work=Work.MOVE, local=cuts.slice_local, picks=True, divided=cuts.slice_divided),
        "sort": Row(rule=reductions.sort, flops=flops.of_sort),
        "split": Row(rule=reshaping.split, work=Work.MOVE),
        "sqrt": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "square": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "squeeze": Row(rule=reshaping.squeeze, work=Work.FREE),
        "stack": Row(rule=reshaping.stack, work=Work.MOVE),
        "stop_gradient": Row(rule=pointwise.copy, work=Work.FREE),
        "sub": Row(rule=pointwise.sum_of_two, work=Work.POINTWISE, adds=True),
        "svd": _FACTORIZATION,
        "symmetric_product": Row(rule=matrices.factorization, flops=flops.of_factorization),
        "tan": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "tanh": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "threefry2x32": Row(rule=pointwise.nonlinear, work=Work.RANDOM),
        "threefry4x32": Row(rule=pointwise.nonlinear, work=Work.RANDOM),
        "tile": Row(rule=reshaping.tile, work=Work.FREE, local=on_shard.tile),
        "top_k": Row(rule=reductions.top_k, flops=flops.of_sort),
        "transpose": Row(rule=reshaping.transpose, work=Work.MOVE, permutation=reshaping.permutation_of),
        "triangular_solve": Row(
            rule=matrices.triangular_solve,
            local=matrices.one_by_one,
            flops=flops.of_substitution,
            if_finite=if_finite.right_sides,
        ),
        "tridiagonal": _FACTORIZATION,
        "tridiagonal_solve": Row(rule=matrices.of_vectors),
        "unstack": Row(rule=reshaping.unstack, work=Work.MOVE),
        "unvmap_all": Row(rule=reductions.all_of_all, work=Work.REDUCTION),
        "unvmap_any": Row(rule=reductions.any_of_all, work=Work.REDUCTION),
        "unvmap_max": Row(rule=reductions.maximum_of_all, work=Work.REDUCTION),
        "with_memory_space_constraint": Row(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "xor": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "zeta": Row(rule=pointwise.nonlinear, work=Work.POINTWISE),
    }
)
USER_RULES: dict[str, Row] = {}
"""What `unlisted/register.py` adds, while the process runs."""
_FALLBACK = Row(rule=by_shape.everything_whole)
_PYTHON = Row(rule=by_shape.everything_whole, local=python_calls.call_python)
_ASKED = Row(rule=by_shape.everything_whole, local=python_calls.ask_once, once=True)
_WITHOUT_RULE = {"call_python": _PYTHON, "io_callback": _ASKED, "pure_callback": _PYTHON}
"""How primitives run whole that cannot be bound as they are."""


def find_registered(equations: Iterable[JaxprEqn]) -> list[str]:
    """The primitives among these equations for which the user registered a rule, in alphabetical order."""
    return sorted({eqn.primitive.name for eqn in equations if eqn.primitive.name in USER_RULES})


def find_unlisted(equations: Iterable[JaxprEqn]) -> dict[str, object]:
    """The primitives among these equations that the table does not list, each with the rule that the user registered."""
    return {
        eqn.primitive.name: USER_RULES.get(eqn.primitive.name) for eqn in equations if eqn.primitive.name not in RULES
    }


def are_registered(rules: Mapping[str, object]) -> bool:
    """Whether primitives have these rules still, those with None none."""
    return all(USER_RULES.get(name) == rule for name, rule in rules.items())


def digest_registered(equations: Iterable[JaxprEqn]) -> dict[str, str]:
    """For each of these primitives a digest of its rule, and of how it runs on a shard, with the code of functions."""
    return {name: digest_of(USER_RULES[name])[:16] for name in find_registered(equations)}


def entry_for(eqn: JaxprEqn) -> Row:
    """The table's entry for an equation, the fallback if there is none."""
    name = eqn.primitive.name
    return RULES.get(name) or USER_RULES.get(name) or _WITHOUT_RULE.get(name, _FALLBACK)


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether the table, or the user, says how an equation's primitive shards."""
    entry = entry_for(eqn)  # rules of the table may equal these two
    return entry is not _FALLBACK and entry is not _PYTHON


def rule_for(eqn: JaxprEqn, *, finite: bool = False) -> FactorRule:
    """The factor rule of an equation, checked against its shapes. Raises RuleError with the primitive and the user's line.

    `finite`: it is also linear in what it is linear in if the other operands are finite.
    """
    shapes = ([by_shape.shape_of(v) for v in side] for side in (eqn.invars, eqn.outvars))
    try:
        rule = entry_for(eqn).rule(eqn).check(*shapes)
    except RuleError as error:
        raise RuleError(f"primitive {describe_use(eqn)}: {error}") from None
    return dataclasses.replace(rule, linear=(*rule.linear, *linear_if_finite(eqn, rule))) if finite else rule


def linear_if_finite(eqn: JaxprEqn, rule: FactorRule) -> tuple[tuple[int, ...], ...]:
    """The operands in which an equation is linear only if the others are finite; `rule`: its own, which has the rest."""
    groups = entry_for(eqn).if_finite
    return () if groups is None else tuple(group for group in groups(eqn) if group not in rule.linear)


def run_on_shard(call: on_shard.LocalCall) -> Sequence[jax.Array]:
    """The local results of an equation. Raises RuleError unless they have the shapes that its rule promises.

    Shapes are compared while the program is traced, so that nothing of it remains when it runs.
    """
    eqn = call.eqn
    try:
        results = entry_for(eqn).local(call)
    except Exception as error:
        if eqn.primitive.name in USER_RULES:
            shapes = ", ".join(str(x.shape) for x in call.operands)
            error.add_note(
                f"while {describe_use(eqn)} ran on a shard, with operands of shapes {shapes}, by the rule '{call.rule}'"
            )
        raise
    difference = call.difference(results)
    if difference is None:
        return results
    raise RuleError(
        f"primitive {describe_use(eqn)}: {difference}. Mend the rule, or say by `local=` of autopar.register_rule how the "
        "operation runs on a shard."
    )


def describe_use(eqn: JaxprEqn) -> str:
    """An equation's primitive, and where the user's program has it."""
    line = source_line(eqn)
    return f"{eqn.primitive.name!r}{line and f' at {line}'}"


def flops_of(eqn: JaxprEqn, rule: FactorRule) -> float:
    """Floating-point operations of an equation under its rule, undivided: 2 for each multiply-add."""
    return entry_for(eqn).flops(eqn, rule)
