"""Factor rules of convolutions and of reductions over sliding windows.

A spatial dimension whose window is a single position, or which a window covers completely, is an ordinary factor; the
others stay whole, for neighbouring shards would have to exchange their borders. In: an equation or a `LocalCall`. Out: a
`FactorRule` or local results. What can go wrong: feature groups, a compound dimension (group, feature); a group may be
cut anywhere, a feature only if every group is on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopar.compat import JaxprEqn, Literal, Params
from autopar.rules.by_shape import Factors, keep_dimensions, linear_factors, shape_of
from autopar.rules.factor_rule import Dim, FactorRule, make_rule
from autopar.rules.on_shard import LocalCall


def conv(eqn: JaxprEqn) -> FactorRule:
    """n (g c) h w, (g o) c i j -> n (g o) y x | sum: c | whole: h w i j y x, and of integers linear: 0; 1."""
    params = eqn.params
    numbers, groups, batch_groups = (
        params["dimension_numbers"],
        params["feature_group_count"],
        params["batch_group_count"],
    )
    left_shape, right_shape, out_shape = (shape_of(v) for v in (*eqn.invars, *eqn.outvars))
    factors, whole, reduced = Factors(), [], {}
    group, batch_group = factors.new(groups), factors.new(batch_groups)
    n = factors.new(left_shape[numbers.lhs_spec[0]] // batch_groups)
    c = factors.new(right_shape[numbers.rhs_spec[1]])
    o = factors.new(right_shape[numbers.rhs_spec[0]] // (groups * batch_groups))
    reduced[c] = "sum"
    left: dict[int, Dim] = {numbers.lhs_spec[0]: (batch_group, n), numbers.lhs_spec[1]: (group, c)}
    right: dict[int, Dim] = {numbers.rhs_spec[0]: (group, batch_group, o), numbers.rhs_spec[1]: (c,)}
    out: dict[int, Dim] = {numbers.out_spec[0]: (n,), numbers.out_spec[1]: (group, batch_group, o)}
    for i, (a, b, z) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        plain = tuple(params["padding"][i]) == (0, 0) and params["lhs_dilation"][i] == 1 == params["rhs_dilation"][i]
        if plain and right_shape[b] == 1 and params["window_strides"][i] == 1:
            left[a] = out[z] = (factors.new(left_shape[a]),)
            right[b] = ()
        elif plain and right_shape[b] == left_shape[a]:
            left[a] = right[b] = (factors.new(left_shape[a]),)
            out[z] = ()
            reduced[left[a][0]] = "sum"
        else:
            left[a], right[b], out[z] = ((factors.new(s),) for s in (left_shape[a], right_shape[b], out_shape[z]))
            whole += [left[a][0], right[b][0], out[z][0]]
    operands = [tuple(table[d] for d in range(len(table))) for table in (left, right, out)]
    linear = linear_factors(eqn)
    return make_rule(operands[:2], operands[2:], factors.sizes, reduced=reduced, whole=whole, linear=linear)


def conv_local(call: LocalCall) -> Sequence[jax.Array]:
    """Local group counts: what is left of a group factor that is sharded."""
    numbers = call.params["dimension_numbers"]
    left, right = call.operands
    groups, batch_groups = call.params["feature_group_count"], call.params["batch_group_count"]
    if groups > 1:
        groups = left.shape[numbers.lhs_spec[1]] // right.shape[numbers.rhs_spec[1]]
    if batch_groups > 1:
        batch_groups = left.shape[numbers.lhs_spec[0]] // call.out_shape()[numbers.out_spec[0]]
    return call.bind(left, right, feature_group_count=groups, batch_group_count=batch_groups, out_sharding=None)


def _window_is_point(params: Params, d: int) -> bool:
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(params[name][d] == 1 for name in names if name in params) and tuple(params["padding"][d]) == (0, 0)


def reduce_window(eqn: JaxprEqn, *, linear: bool) -> FactorRule:
    """n h c -> n y c | whole: h y: dimensions with a window of one are untouched."""
    kept = [_window_is_point(eqn.params, d) for d in range(len(shape_of(eqn.invars[0])))]
    return keep_dimensions(eqn, kept, linear=[(0,)] if linear else (), any_monoid=False)


def reduce_window_sum(eqn: JaxprEqn) -> FactorRule:
    """Sums over windows: linear."""
    return reduce_window(eqn, linear=True)


def reduce_window_other(eqn: JaxprEqn) -> FactorRule:
    """Maxima and minima over windows: not linear."""
    return reduce_window(eqn, linear=False)


def reduce_window_by_function(eqn: JaxprEqn) -> FactorRule:
    """n h c, . -> n y c | whole: h y: windows reduced by any function, each operand with a value to begin with."""
    factors, whole, count = Factors(), list[str](), len(eqn.invars) // 2
    operand, out = factors.operand(shape_of(eqn.invars[0])), list[Dim]()
    for d, (dim, size) in enumerate(zip(operand, shape_of(eqn.outvars[0]), strict=True)):
        is_point = _window_is_point(eqn.params, d)
        out.append(dim if is_point else (factors.new(size),))
        whole += [] if is_point else [dim[0], out[-1][0]]
    inputs = [*[tuple(operand)] * count, *[()] * count]
    return make_rule(inputs, [tuple(out)] * count, factors.sizes, whole=whole)


def select_and_scatter_add(eqn: JaxprEqn) -> FactorRule:
    """n y c, n h c -> n h c | whole: y h | linear: 0: the gradient of a maximum over windows."""
    return _two_operands(eqn, linear=True)


def select_and_gather_add(eqn: JaxprEqn) -> FactorRule:
    """n h c, n h c -> n y c | whole: h y | linear: 0."""
    return _two_operands(eqn, linear=True)


def _two_operands(eqn: JaxprEqn, *, linear: bool) -> FactorRule:
    factors, whole = Factors(), []
    operands: list[list[Dim]] = [[], [], []]
    shapes = [shape_of(v) for v in (*eqn.invars[:2], eqn.outvars[0])]
    for d in range(len(shapes[0])):
        if _window_is_point(eqn.params, d):
            shared: Dim = (factors.new(shapes[0][d]),)
            for operand in operands:
                operand.append(shared)
            continue
        by_size: dict[int, Dim] = {}
        for operand, shape in zip(operands, shapes, strict=True):
            if shape[d] not in by_size:
                by_size[shape[d]] = (factors.new(shape[d]),)
                whole.append(by_size[shape[d]][0])
            operand.append(by_size[shape[d]])
    groups = [(0,)] if linear and not isinstance(eqn.invars[0], Literal) else []
    inputs = [tuple(o) for o in operands[:2]]
    return make_rule(inputs, [tuple(operands[2])], factors.sizes, whole=whole, linear=groups)
