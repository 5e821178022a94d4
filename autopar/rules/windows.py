"""Factor rules of convolutions and of reductions over sliding windows.

A spatial dimension whose window is a single position, or which a window covers completely, is an ordinary factor. Others are
divided together with the places of the window if the parts line up; neighbours then exchange their borders (`halos`). In the
gradient of a convolution's kernel the window is what comes out, and the places are its positions. In: an equation or a
`LocalCall`. Out: a `FactorRule`, local results, what is exchanged. What can go wrong: feature groups, a compound dimension
(group, feature); a group may be cut anywhere, a feature only if every group is on its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.avals import itemsize_of
from autopar.compat import JaxprEqn, Literal, Params
from autopar.layouts.mesh import Axes, LogicalMesh
from autopar.rules.by_shape import Factors, linear_factors, linear_groups, shape_of
from autopar.rules.exchanges import Division, Exchange
from autopar.rules.factor_rule import Dim, FactorRule, make_rule
from autopar.rules.halos import Slide, extend, sent, with_neighbours
from autopar.rules.on_shard import LocalCall


def conv(eqn: JaxprEqn) -> FactorRule:
    """n (g c) h w, (g o) c i j -> n (g o) y x | sum: c | whole: h w i j y x | together: h y; w x, and of integers linear: 0; 1.

    In the gradient of a kernel, where i and j are longer than y and x: sum: c i j | together: h i; w j.
    """
    params = eqn.params
    numbers, groups, batch_groups = (
        params["dimension_numbers"],
        params["feature_group_count"],
        params["batch_group_count"],
    )
    left_shape, right_shape, out_shape = (shape_of(v) for v in (*eqn.invars, *eqn.outvars))
    factors, whole, reduced, together = Factors(), [], {}, []
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
            if _conv_slide(eqn, i).may_be_divided:
                is_of_kernel = _is_of_kernel(eqn, i)
                together.append((left[a][0], (right[b] if is_of_kernel else out[z])[0]))
                reduced |= {right[b][0]: "sum"} if is_of_kernel else {}
    operands = [tuple(table[d] for d in range(len(table))) for table in (left, right, out)]
    linear = linear_factors(eqn)
    return make_rule(
        operands[:2], operands[2:], factors.sizes, reduced=reduced, whole=whole, linear=linear, together=together
    )


def _conv_sizes(eqn: JaxprEqn, i: int) -> tuple[int, int, int]:
    """Of spatial dimension i: positions of the left operand, of the right one, of the result."""
    numbers = eqn.params["dimension_numbers"]
    places = numbers.lhs_spec[2 + i], numbers.rhs_spec[2 + i], numbers.out_spec[2 + i]
    left, right, out = (shape_of(v)[d] for v, d in zip((*eqn.invars, *eqn.outvars), places, strict=True))
    return left, right, out


def _is_of_kernel(eqn: JaxprEqn, i: int) -> bool:
    """Whether spatial dimension i is summed over, and few positions come out, as in the gradient of a kernel."""
    _, right, out = _conv_sizes(eqn, i)
    return right > out


def _conv_slide(eqn: JaxprEqn, i: int) -> Slide:
    """How the window slides along spatial dimension i: its places are those of the result, or of what the left operand meets."""
    left, right, out = _conv_sizes(eqn, i)
    stride, apart = eqn.params["window_strides"][i], eqn.params["rhs_dilation"][i]
    if _is_of_kernel(eqn, i):
        right, out, stride, apart = out, right, apart, stride
    low, dilation = eqn.params["padding"][i][0], eqn.params["lhs_dilation"][i]
    return Slide(size=left, steps=out, stride=stride, span=(right - 1) * apart + 1, low=low, dilation=dilation)


def conv_local(call: LocalCall) -> Sequence[jax.Array]:
    """Local group counts: what is left of a group factor that is sharded."""
    numbers = call.params["dimension_numbers"]
    left, right = call.operands
    groups, batch_groups = call.params["feature_group_count"], call.params["batch_group_count"]
    if groups > 1:
        groups = left.shape[numbers.lhs_spec[1]] // right.shape[numbers.rhs_spec[1]]
    if batch_groups > 1:
        batch_groups = left.shape[numbers.lhs_spec[0]] // call.out_shape()[numbers.out_spec[0]]
    padding = list(call.params["padding"])
    for dim, factor in divided_dims(call.rule, call.factor_axes, 0).items():
        i = numbers.lhs_spec.index(dim) - 2
        left, padding[i] = with_neighbours(call, left, dim, factor, _conv_slide(call.eqn, i))
    changed = {"padding": tuple(padding), "feature_group_count": groups, "batch_group_count": batch_groups}
    return call.bind(left, right, **changed, out_sharding=None)


def divided_dims(rule: FactorRule, axes: Mapping[str, Axes], operand: int) -> dict[int, str]:
    """The dimensions of an operand that are divided together with others, each with its factor."""
    exchanged = {factor for group in rule.together for factor in group}
    names = {d: dim[0] for d, dim in enumerate(rule.inputs[operand]) if dim}
    return {d: name for d, name in names.items() if name in exchanged and axes.get(name)}


def conv_divided(eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh) -> Division:
    """Borders of the left operand."""
    numbers = eqn.params["dimension_numbers"]
    reaches = {dim: _conv_slide(eqn, i).reach for i, dim in enumerate(numbers.lhs_spec[2:])}
    return Division(tuple(borders(eqn, 0, rule, axes, mesh, reaches)))


def borders(
    eqn: JaxprEqn,
    place: int,
    rule: FactorRule,
    axes: Mapping[str, Axes],
    mesh: LogicalMesh,
    reaches: Mapping[int, Callable[[int], tuple[int, int]]],
    *,
    fill: float | None = None,
) -> Iterator[Exchange]:
    """What a device sends of one operand, by the reach along each dimension, a function of the number of its parts."""
    sizes, aval = dict(rule.sizes), eqn.invars[place].aval
    shape = [math.prod(sizes[f] // mesh.ways(axes.get(f, ())) for f in dim) for dim in rule.inputs[place]]
    divided = {d: axes[f] for d, f in divided_dims(rule, axes, place).items()}
    reached = {d: (names, reaches[d](mesh.ways(names))) for d, names in divided.items()}
    return sent(place, shape, itemsize_of(aval), reached, mesh, fill=fill)


def _always(reach: tuple[int, int]) -> Callable[[int], tuple[int, int]]:
    """A reach that is the same in any number of parts."""
    return lambda ways: reach


def _window_is_point(params: Params, d: int) -> bool:
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(params[name][d] == 1 for name in names if name in params) and tuple(params["padding"][d]) == (0, 0)


def _window_slide(eqn: JaxprEqn, d: int) -> Slide:
    """How a window slides along dimension d of operand 0."""
    params, size, steps = eqn.params, shape_of(eqn.invars[0])[d], shape_of(eqn.outvars[0])[d]
    span = (params["window_dimensions"][d] - 1) * params["window_dilation"][d] + 1
    return Slide(
        size=size,
        steps=steps,
        stride=params["window_strides"][d],
        span=span,
        low=params["padding"][d][0],
        dilation=params["base_dilation"][d],
    )


def reduce_window(eqn: JaxprEqn, *, linear: bool) -> FactorRule:
    """n h c -> n y c | whole: h y | together: h y: dimensions with a window of one are untouched."""
    factors, whole, together = Factors(), list[str](), list[tuple[str, str]]()
    operand, out = factors.operand(shape_of(eqn.invars[0])), list[Dim]()
    for d, ((name,), size) in enumerate(zip(operand, shape_of(eqn.outvars[0]), strict=True)):
        is_point = _window_is_point(eqn.params, d)
        out.append((name,) if is_point else (factors.new(size),))
        whole += [] if is_point else [name, out[-1][0]]
        together += [] if is_point or not _window_slide(eqn, d).may_be_divided else [(name, out[-1][0])]
    groups = linear_groups(eqn, (0,)) if linear else []
    return make_rule([tuple(operand)], [tuple(out)], factors.sizes, whole=whole, linear=groups, together=together)


def reduce_window_local(call: LocalCall) -> Sequence[jax.Array]:
    """The local windows, with the neighbours' borders; outside of the whole is what leaves the result as it is."""
    (x,), padding, fill = call.operands, list(call.params["padding"]), _outside(call.eqn)
    for dim, factor in divided_dims(call.rule, call.factor_axes, 0).items():
        x, padding[dim] = with_neighbours(call, x, dim, factor, _window_slide(call.eqn, dim), fill=fill)
    return call.bind(x, padding=tuple(padding))


def _outside(eqn: JaxprEqn) -> float | int | None:
    """What a maximum or a minimum over windows, or its gradient, finds outside of its operand; None for a sum: zeros."""
    name, dtype = eqn.primitive.name, eqn.invars[-1].aval.dtype
    if name == "reduce_window_sum":
        return None
    is_max = name == "reduce_window_max" or eqn.params.get("select_prim") is lax.ge_p
    if jnp.issubdtype(dtype, jnp.bool_):
        return not is_max
    if jnp.issubdtype(dtype, jnp.inexact):
        return -math.inf if is_max else math.inf
    return int(jnp.iinfo(dtype).min if is_max else jnp.iinfo(dtype).max)


def reduce_window_divided(eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh) -> Division:
    """Borders of the operand."""
    reaches = {d: _window_slide(eqn, d).reach for d in range(len(shape_of(eqn.invars[0])))}
    return Division(tuple(borders(eqn, 0, rule, axes, mesh, reaches, fill=_outside(eqn))))


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
    """n y c, n h c -> n h c | whole: y h | together: y h | linear: 0: the gradient of a maximum over windows."""
    return _two_operands(eqn, linear=True, together=True)


@dataclasses.dataclass(frozen=True)
class _Scattered:
    """How windows of `span` positions lie along a dimension of n positions, whose gradients are scattered to it.

    A device also needs what its neighbours' windows give to its positions: these windows, and all that they look at.
    """

    slide: Slide

    @property
    def windows(self) -> tuple[int, int]:
        """Windows before and after a device's own that look at positions of its."""
        slide = self.slide
        before, after = (slide.span - 1 - slide.low) // slide.stride, (slide.low - 1) // slide.stride + 1
        return max(0, before), max(0, after)

    @property
    def positions(self) -> tuple[int, int]:
        """Positions before and after a device's own at which all these windows look."""
        slide, (before, after) = self.slide, self.windows
        return (
            max(0, slide.stride * before + slide.low),
            max(0, slide.stride * after - slide.stride - slide.low + slide.span),
        )

    def padding(self, ways: int) -> tuple[int, int]:
        """Padding around a device's positions and these, so that windows begin where they do in the whole."""
        slide, windows, (before, after) = self.slide, self.windows, self.positions
        low = slide.stride * windows[0] + slide.low - before
        needed = slide.stride * (slide.steps // ways + sum(windows) - 1) + slide.span
        return low, needed - low - (slide.size // ways + before + after)


def _scattered(eqn: JaxprEqn, d: int) -> _Scattered:
    params, (steps, size) = eqn.params, (shape_of(v)[d] for v in eqn.invars[:2])
    stride, span = params["window_strides"][d], params["window_dimensions"][d]
    return _Scattered(Slide(size=size, steps=steps, stride=stride, span=span, low=params["padding"][d][0]))


def select_and_scatter_add_local(call: LocalCall) -> Sequence[jax.Array]:
    """Gradients of all windows that look at local positions, of which the local positions are kept."""
    (source, x), padding, kept = call.operands, list(call.params["padding"]), list[tuple[int, int, int]]()
    for dim, factor in divided_dims(call.rule, call.factor_axes, 1).items():
        found, size = _scattered(call.eqn, dim), x.shape[dim]
        (windows,) = call.rule.inputs[0][dim]
        source = extend(call, source, dim, windows, found.windows)
        x = extend(call, x, dim, factor, found.positions, fill=_outside(call.eqn))
        padding[dim] = found.padding(call.ways(factor))
        kept.append((dim, found.positions[0], size))
    (result,) = call.bind(source, x, padding=tuple(padding))
    for dim, start, size in kept:
        result = lax.slice_in_dim(result, start, start + size, axis=dim)
    return (result,)


def select_and_scatter_add_divided(
    eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh
) -> Division:
    """Borders of the gradients and of what the windows look at."""
    found = {d: _scattered(eqn, d) for d in range(len(shape_of(eqn.invars[0])))}
    windows = borders(eqn, 0, rule, axes, mesh, {d: _always(each.windows) for d, each in found.items()})
    reaches = {d: _always(each.positions) for d, each in found.items()}
    positions = borders(eqn, 1, rule, axes, mesh, reaches, fill=_outside(eqn))
    return Division((*windows, *positions))


def select_and_gather_add(eqn: JaxprEqn) -> FactorRule:
    """n h c, n h c -> n y c | whole: h y | linear: 0."""
    return _two_operands(eqn, linear=True)


def _two_operands(eqn: JaxprEqn, *, linear: bool, together: bool = False) -> FactorRule:
    factors, whole, pairs = Factors(), [], []
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
            if shape[d] not in by_size or (together and operand is operands[1]):
                by_size[shape[d]] = (factors.new(shape[d]),)
                whole.append(by_size[shape[d]][0])
            operand.append(by_size[shape[d]])
        if together and _scattered(eqn, d).slide.lines_up:
            pairs.append((operands[0][d][0], operands[1][d][0]))
    groups = [(0,)] if linear and not isinstance(eqn.invars[0], Literal) else []
    inputs = [tuple(o) for o in operands[:2]]
    return make_rule(inputs, [tuple(operands[2])], factors.sizes, whole=whole, linear=groups, together=pairs)
