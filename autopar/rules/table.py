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
    once          it calls Python, which one device does for all, and no microbatch by itself
    permutation   the function from an equation to the order in which it puts its operand's dimensions

Those of equinox are here too, of which diffrax's loops are made: nonbatchable, nondifferentiable_backward, nontraceable,
select_if_vmap, unvmap_all, unvmap_any and unvmap_max. A primitive that is not here runs whole on every device, with one
warning; `unlisted/register.py` adds one.
"""

from __future__ import annotations

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
from autopar.rules.primitive_rule import PrimitiveRule, Work

RULES: Mapping[str, PrimitiveRule] = types.MappingProxyType(
    {
        "abs": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "acos": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "acosh": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "add": PrimitiveRule(rule=pointwise.sum_of_two, work=Work.POINTWISE, adds=True),
        "add_any": PrimitiveRule(rule=pointwise.sum_of_two, work=Work.POINTWISE, adds=True),
        "and": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "approx_top_k": PrimitiveRule(rule=reductions.approx_top_k, flops=flops.of_sort),
        "argmax": PrimitiveRule(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "argmin": PrimitiveRule(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "asin": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "asinh": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "atan": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "atan2": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "atanh": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "attention": PrimitiveRule(
            rule=attention.attention,
            work=Work.CONTRACTION,
            local=attention.attention_local,
            flops=attention.flops,
            divided=attention.divided,
            scratch=attention.scratch,
        ),
        "attention_backward": PrimitiveRule(
            rule=attention.attention_backward,
            work=Work.CONTRACTION,
            local=attention.attention_backward_local,
            flops=attention.flops,
            divided=attention.divided,
            scratch=attention.scratch,
        ),
        "batch_statistic": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "bessel_i0e": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "bessel_i1e": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "bitcast_convert_type": PrimitiveRule(rule=pointwise.bitcast, work=Work.POINTWISE),
        "broadcast_in_dim": PrimitiveRule(
            rule=reshaping.broadcast_in_dim, work=Work.FREE, local=on_shard.broadcast_in_dim
        ),
        "cbrt": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "ceil": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "cholesky": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "cholesky_update": PrimitiveRule(rule=by_shape.everything_whole),
        "clamp": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "clz": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "complex": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "concatenate": PrimitiveRule(rule=reshaping.concatenate, work=Work.MOVE),
        "conj": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "constrain": PrimitiveRule(rule=pointwise.copy, work=Work.FREE),
        "conv_general_dilated": PrimitiveRule(
            rule=windows.conv,
            work=Work.CONTRACTION,
            local=windows.conv_local,
            flops=flops.of_conv,
            divided=windows.conv_divided,
        ),
        "convert_element_type": PrimitiveRule(rule=pointwise.convert, work=Work.POINTWISE),
        "copy": PrimitiveRule(rule=pointwise.copy, work=Work.FREE),
        "copy_p": PrimitiveRule(rule=pointwise.copy, work=Work.FREE),
        "cos": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "cosh": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "cumlogsumexp": PrimitiveRule(rule=reductions.cumulative_other),
        "cummax": PrimitiveRule(rule=reductions.cumulative_other),
        "cummin": PrimitiveRule(rule=reductions.cumulative_other),
        "cumprod": PrimitiveRule(rule=reductions.cumulative_other),
        "cumsum": PrimitiveRule(rule=reductions.cumulative_sum),
        "device_put": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "digamma": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "div": PrimitiveRule(rule=pointwise.quotient, work=Work.POINTWISE),
        "dot_general": PrimitiveRule(rule=matrices.dot_general, work=Work.CONTRACTION, flops=flops.of_product),
        "dynamic_slice": PrimitiveRule(
            rule=indexing.dynamic_slice, work=Work.MOVE, local=on_shard.dynamic_slice, picks=True
        ),
        "dynamic_update_slice": PrimitiveRule(rule=indexing.dynamic_update_slice, local=on_shard.dynamic_update_slice),
        "eig": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "eigh": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "empty": PrimitiveRule(rule=pointwise.iota, work=Work.FREE, local=on_shard.empty),
        "empty2": PrimitiveRule(rule=by_shape.everything_whole, work=Work.FREE),
        "eq": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "eq_to": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "erf": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "erf_inv": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "erfc": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "exp": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "exp2": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "expm1": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "fan_out": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "fft": PrimitiveRule(rule=matrices.fft, local=matrices.fft_local, flops=flops.of_fft),
        "floor": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "gather": PrimitiveRule(rule=indexing.gather, work=Work.OTHER, local=indexing.gather_local, picks=True),
        "ge": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "geqp3": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "geqrf": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "gt": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "hessenberg": PrimitiveRule(
            rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization
        ),
        "householder_product": PrimitiveRule(
            rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization
        ),
        "igamma": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "igamma_grad_a": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "igammac": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "imag": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "integer_pow": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "iota": PrimitiveRule(rule=pointwise.iota, work=Work.FREE, local=on_shard.iota),
        "iota_2x32_shape": PrimitiveRule(rule=pointwise.iota, work=Work.FREE, local=on_shard.iota_2x32),
        "is_finite": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "layer_boundary": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "layout_constraint": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "le": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "le_to": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lgamma": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "log": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "log1p": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "log2": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "logistic": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lt": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lt_to": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "lu": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "lu_pivots_to_permutation": PrimitiveRule(rule=matrices.of_vectors),
        "max": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "min": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "mul": PrimitiveRule(rule=pointwise.product, work=Work.POINTWISE),
        "mulhi": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE, local=on_shard.high_halves),
        "name": PrimitiveRule(rule=pointwise.copy, work=Work.FREE),
        "ne": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "neg": PrimitiveRule(rule=pointwise.linear, work=Work.POINTWISE),
        "nextafter": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "nonbatchable": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "nondifferentiable_backward": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "nontraceable": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "not": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "observe": PrimitiveRule(rule=pointwise.observe, work=Work.FREE, local=on_shard.observe),
        "one_minus_square": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "optimization_barrier": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, barrier=True),
        "or": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "ormqr": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "pad": PrimitiveRule(rule=cuts.pad, work=Work.MOVE, local=cuts.pad_local, divided=cuts.pad_divided),
        "philox2x32": PrimitiveRule(rule=pointwise.nonlinear, work=Work.RANDOM, local=on_shard.hash_of_words),
        "philox4x32": PrimitiveRule(rule=pointwise.nonlinear, work=Work.RANDOM, local=on_shard.hash_of_words),
        "pmax": PrimitiveRule(rule=reductions.over_batch_max, work=Work.REDUCTION),
        "pmin": PrimitiveRule(rule=reductions.over_batch_min, work=Work.REDUCTION),
        "polygamma": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "polynomial": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "population_count": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "pow": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "psum": PrimitiveRule(rule=reductions.over_batch_sum, work=Work.REDUCTION),
        "qr": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "ragged_dot_general": PrimitiveRule(
            rule=matrices.ragged_dot, work=Work.CONTRACTION, local=matrices.ragged_dot_local, flops=flops.of_ragged_dot
        ),
        "random_bits": PrimitiveRule(rule=pointwise.random_bits, work=Work.RANDOM, local=on_shard.random_bits),
        "random_clone": PrimitiveRule(rule=by_shape.everything_whole),
        "random_fold_in": PrimitiveRule(rule=by_shape.everything_whole),
        "random_gamma": PrimitiveRule(rule=pointwise.random_gamma, work=Work.RANDOM, local=on_shard.random_gamma),
        "random_gamma_grad": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "random_seed": PrimitiveRule(rule=by_shape.everything_whole),
        "random_split": PrimitiveRule(rule=by_shape.everything_whole),
        "random_unwrap": PrimitiveRule(rule=by_shape.everything_whole),
        "random_wrap": PrimitiveRule(rule=by_shape.everything_whole),
        "real": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "reduce": PrimitiveRule(
            rule=reductions.reduce_by_function, work=Work.REDUCTION, local=on_shard.reduce_by_function
        ),
        "reduce_and": PrimitiveRule(rule=reductions.reduce_and, work=Work.REDUCTION),
        "reduce_max": PrimitiveRule(rule=reductions.reduce_max, work=Work.REDUCTION),
        "reduce_min": PrimitiveRule(rule=reductions.reduce_min, work=Work.REDUCTION),
        "reduce_or": PrimitiveRule(rule=reductions.reduce_or, work=Work.REDUCTION),
        "reduce_precision": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "reduce_prod": PrimitiveRule(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "reduce_sum": PrimitiveRule(rule=reductions.reduce_sum, work=Work.REDUCTION),
        "reduce_window": PrimitiveRule(rule=windows.reduce_window_by_function),
        "reduce_window_max": PrimitiveRule(
            rule=windows.reduce_window_other, local=windows.reduce_window_local, divided=windows.reduce_window_divided
        ),
        "reduce_window_min": PrimitiveRule(
            rule=windows.reduce_window_other, local=windows.reduce_window_local, divided=windows.reduce_window_divided
        ),
        "reduce_window_sum": PrimitiveRule(
            rule=windows.reduce_window_sum, local=windows.reduce_window_local, divided=windows.reduce_window_divided
        ),
        "reduce_xor": PrimitiveRule(rule=reductions.reduce_whole, work=Work.REDUCTION),
        "regularized_incomplete_beta": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "rem": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "reshape": PrimitiveRule(rule=reshaping.reshape, work=Work.FREE, local=on_shard.reshape),
        "rev": PrimitiveRule(rule=reshaping.rev, work=Work.MOVE),
        "rng_bit_generator": PrimitiveRule(rule=by_shape.everything_whole, work=Work.RANDOM),
        "roll": PrimitiveRule(rule=cuts.roll, work=Work.MOVE, local=cuts.roll_local, divided=cuts.roll_divided),
        "round": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "rsqrt": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "scaled_dot": PrimitiveRule(rule=matrices.scaled_dot, work=Work.CONTRACTION, flops=flops.of_scaled_dot),
        "scatter": PrimitiveRule(rule=indexing.scatter_other, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-add": PrimitiveRule(rule=indexing.scatter_add, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-max": PrimitiveRule(rule=indexing.scatter_max, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-min": PrimitiveRule(rule=indexing.scatter_min, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-mul": PrimitiveRule(rule=indexing.scatter_other, work=Work.OTHER, local=indexing.scatter_local),
        "scatter-sub": PrimitiveRule(rule=indexing.scatter_add, work=Work.OTHER, local=indexing.scatter_local),
        "scatter_mul": PrimitiveRule(rule=indexing.scatter_other, work=Work.OTHER, local=indexing.scatter_local),
        "schur": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "select_and_gather_add": PrimitiveRule(rule=windows.select_and_gather_add),
        "select_and_scatter_add": PrimitiveRule(
            rule=windows.select_and_scatter_add,
            local=windows.select_and_scatter_add_local,
            divided=windows.select_and_scatter_add_divided,
        ),
        "select_if_vmap": PrimitiveRule(rule=pointwise.select, work=Work.POINTWISE),
        "select_n": PrimitiveRule(rule=pointwise.select, work=Work.POINTWISE),
        "shift_left": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "shift_right_arithmetic": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "shift_right_logical": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "sign": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "sin": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "sinh": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "slice": PrimitiveRule(
            rule=cuts.slice_, work=Work.MOVE, local=cuts.slice_local, picks=True, divided=cuts.slice_divided
        ),
        "sort": PrimitiveRule(rule=reductions.sort, flops=flops.of_sort),
        "split": PrimitiveRule(rule=reshaping.split, work=Work.MOVE),
        "sqrt": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "square": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "squeeze": PrimitiveRule(rule=reshaping.squeeze, work=Work.FREE),
        "stack": PrimitiveRule(rule=reshaping.stack, work=Work.MOVE),
        "stop_gradient": PrimitiveRule(rule=pointwise.copy, work=Work.FREE),
        "sub": PrimitiveRule(rule=pointwise.sum_of_two, work=Work.POINTWISE, adds=True),
        "svd": PrimitiveRule(rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization),
        "symmetric_product": PrimitiveRule(rule=matrices.factorization, flops=flops.of_factorization),
        "tan": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "tanh": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "threefry2x32": PrimitiveRule(rule=pointwise.nonlinear, work=Work.RANDOM),
        "threefry4x32": PrimitiveRule(rule=pointwise.nonlinear, work=Work.RANDOM),
        "tile": PrimitiveRule(rule=reshaping.tile, work=Work.FREE, local=on_shard.tile),
        "top_k": PrimitiveRule(rule=reductions.top_k, flops=flops.of_sort),
        "transpose": PrimitiveRule(rule=reshaping.transpose, work=Work.MOVE, permutation=reshaping.permutation_of),
        "triangular_solve": PrimitiveRule(
            rule=matrices.triangular_solve, local=matrices.one_by_one, flops=flops.of_triangular_solve
        ),
        "tridiagonal": PrimitiveRule(
            rule=matrices.factorization, local=matrices.one_by_one, flops=flops.of_factorization
        ),
        "tridiagonal_solve": PrimitiveRule(rule=matrices.of_vectors),
        "unstack": PrimitiveRule(rule=reshaping.unstack, work=Work.MOVE),
        "unvmap_all": PrimitiveRule(rule=reductions.all_of_all, work=Work.REDUCTION),
        "unvmap_any": PrimitiveRule(rule=reductions.any_of_all, work=Work.REDUCTION),
        "unvmap_max": PrimitiveRule(rule=reductions.maximum_of_all, work=Work.REDUCTION),
        "with_memory_space_constraint": PrimitiveRule(rule=pointwise.copy, work=Work.FREE, local=on_shard.identity),
        "xor": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
        "zeta": PrimitiveRule(rule=pointwise.nonlinear, work=Work.POINTWISE),
    }
)
USER_RULES: dict[str, PrimitiveRule] = {}
"""What `unlisted/register.py` adds, while the process runs."""
_FALLBACK = PrimitiveRule(rule=by_shape.everything_whole)
_PYTHON = PrimitiveRule(rule=by_shape.everything_whole, local=python_calls.call_python)
_ASKED = PrimitiveRule(rule=by_shape.everything_whole, local=python_calls.ask_once, once=True)
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


def entry_for(eqn: JaxprEqn) -> PrimitiveRule:
    """The table's entry for an equation, the fallback if there is none."""
    name = eqn.primitive.name
    return RULES.get(name) or USER_RULES.get(name) or _WITHOUT_RULE.get(name, _FALLBACK)


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether the table, or the user, says how an equation's primitive shards."""
    entry = entry_for(eqn)  # rules of the table may equal these two
    return entry is not _FALLBACK and entry is not _PYTHON


def rule_for(eqn: JaxprEqn) -> FactorRule:
    """The factor rule of an equation, checked against its shapes. Raises RuleError with the primitive and the user's line."""
    shapes = ([by_shape.shape_of(v) for v in side] for side in (eqn.invars, eqn.outvars))
    try:
        return entry_for(eqn).rule(eqn).check(*shapes)
    except RuleError as error:
        raise RuleError(f"primitive {describe_use(eqn)}: {error}") from None


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
