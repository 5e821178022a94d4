"""Slices, paddings and rolls along dimensions that devices hold in parts: each takes what it lacks of its part from others.

In: an equation of `slice`, `pad` or `roll`. Out: its factor rule, local result and exchange. Slices and paddings are windows
of one position that slide along the operand's rows, with padding outside and holes between. Every second row of each device's
part needs nothing of others, a part of the rows in the middle a few rows of the next device. In a roll the first device and
the last are neighbours too. What can go wrong: a slice that leaves out much, whose rows would all have to travel, and a padding
that is not zero; these dimensions are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.avals import itemsize_of
from autopar.compat import JaxprEqn, Literal
from autopar.layouts.mesh import Axes, LogicalMesh
from autopar.rules.by_shape import Factors, linear_groups, shape_of
from autopar.rules.exchanges import Division, Exchange
from autopar.rules.factor_rule import Dim, FactorRule, make_rule
from autopar.rules.halos import Slide, crossed, send, with_neighbours
from autopar.rules.on_shard import LocalCall
from autopar.rules.windows import borders, divided_dims

PART_LEFT_OUT = 4
"""A dimension is divided if a slice leaves out, or a padding adds, at most one part of so many; more is worth no exchange."""
Slides = Callable[[JaxprEqn, int], Slide]


def slice_(eqn: JaxprEqn) -> FactorRule:
    """a b c -> a d e | whole: b c d e | together: b d | linear: 0 | any: a is taken from end to end, b evenly or nearly all."""
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)
    return _rule(eqn, [given == taken for given, taken in sizes], _of_slice, linear=(0,), any_monoid=True)


def pad(eqn: JaxprEqn) -> FactorRule:
    """a b c, . -> a d e | whole: b c d e | together: b d | linear: 0 where the padding is zero, or 0 1, which is partial too."""
    value = eqn.invars[1]
    known = np.asarray(value.val if isinstance(value, Literal) else 1)
    is_zero, is_negative = bool(known == 0), bool(np.signbit(known.real))
    kept = [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    slides = _of_padding if is_zero and not is_negative else None
    return _rule(eqn, kept, slides, linear=(0,) if is_zero else (0, 1), any_monoid=False)


def _rule(
    eqn: JaxprEqn, kept: Sequence[bool], slides: Slides | None, *, linear: Sequence[int], any_monoid: bool
) -> FactorRule:
    factors, whole, together = Factors(), list[str](), list[tuple[str, str]]()
    operand, out = factors.operand(shape_of(eqn.invars[0])), list[Dim]()
    for d, ((name,), size) in enumerate(zip(operand, shape_of(eqn.outvars[0]), strict=True)):
        out.append((name,) if kept[d] else (factors.new(size),))
        whole += [] if kept[d] else [name, out[-1][0]]
        if slides is not None and not kept[d] and _may_be_divided(slides(eqn, d)):
            together.append((name, out[-1][0]))
    others: list[tuple[Dim, ...]] = [() for _ in eqn.invars[1:]]
    groups = linear_groups(eqn, tuple(linear))
    made = [tuple(out)]
    return make_rule(
        [tuple(operand), *others],
        made,
        factors.sizes,
        whole=whole,
        linear=groups,
        any_monoid=any_monoid,
        together=together,
    )


def _may_be_divided(slide: Slide) -> bool:
    is_near = slide.dilation == 1 and PART_LEFT_OUT * abs(slide.stride * slide.steps - slide.size) <= slide.size
    return slide.steps > 1 and (slide.lines_up or is_near)


def _of_slice(eqn: JaxprEqn, d: int) -> Slide:
    """How dimension d is read."""
    size, steps, strides = shape_of(eqn.invars[0])[d], shape_of(eqn.outvars[0])[d], eqn.params["strides"]
    first = eqn.params["start_indices"][d]
    return Slide(size=size, steps=steps, stride=strides[d] if strides else 1, span=1, low=-first)


def _of_padding(eqn: JaxprEqn, d: int) -> Slide:
    """How dimension d of the result is read from the operand, with holes between its rows."""
    low, _, between = eqn.params["padding_config"][d]
    size, steps = shape_of(eqn.invars[0])[d], shape_of(eqn.outvars[0])[d]
    return Slide(size=size, steps=steps, stride=1, span=1, low=low, dilation=between + 1)


def slice_local(call: LocalCall) -> Sequence[jax.Array]:
    """A dimension that is taken from end to end is so locally, too; of one that is cut, this device's part of the result."""
    x, (dims,) = call.operands[0], call.rule.inputs
    starts, limits = (list(call.params[name]) for name in ("start_indices", "limit_indices"))
    cut = divided_dims(call.rule, call.factor_axes, 0)
    for d, dim in enumerate(dims):
        if d in cut:
            x = _rows(call, x, d, cut[d], _of_slice(call.eqn, d))
            starts[d], limits[d] = 0, x.shape[d]
        elif call.is_sharded(dim):
            limits[d] = x.shape[d]
    return call.bind(x, start_indices=tuple(starts), limit_indices=tuple(limits))


def pad_local(call: LocalCall) -> Sequence[jax.Array]:
    """The padding of whole dimensions, and the rows and holes of this device's part of the result where they are divided."""
    (x, value), config = call.operands, list(call.params["padding_config"])
    for d, factor in divided_dims(call.rule, call.factor_axes, 0).items():
        x = _rows(call, x, d, factor, _of_padding(call.eqn, d))
        config[d] = (0, 0, 0)
    return call.bind(x, value, padding_config=tuple(config))


def _rows(call: LocalCall, x: jax.Array, d: int, factor: str, slide: Slide) -> jax.Array:
    """The positions along a dimension from the first that this device's part of the result shows to the last."""
    found, (low, high) = with_neighbours(call, x, d, factor, slide)
    holes = slide.dilation - 1 if slide.lines_up else 0
    config = [(low, high, holes) if axis == d else (0, 0, 0) for axis in range(x.ndim)]
    return lax.pad(found, jnp.zeros((), x.dtype), config)


def slice_divided(eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh) -> Division:
    """Rows of the neighbours."""
    reaches = {d: _of_slice(eqn, d).reach for d in range(len(shape_of(eqn.invars[0])))}
    return Division(tuple(borders(eqn, 0, rule, axes, mesh, reaches)))


def pad_divided(eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh) -> Division:
    """Rows of the neighbours."""
    reaches = {d: _of_padding(eqn, d).reach for d in range(len(shape_of(eqn.invars[0])))}
    return Division(tuple(borders(eqn, 0, rule, axes, mesh, reaches)))


def roll(eqn: JaxprEqn) -> FactorRule:
    """a b c -> a d c | whole: b d | together: b d | linear: 0 | any: b are the rows that go round."""
    factors, along = Factors(), eqn.params["dimension"]
    operand = factors.operand(shape_of(eqn.invars[0]))
    rows, moved = operand[along][0], factors.new(shape_of(eqn.invars[0])[along])
    out = [*operand[:along], (moved,), *operand[along + 1 :]]
    groups = linear_groups(eqn, (0,))
    return make_rule(
        [tuple(operand)],
        [tuple(out)],
        factors.sizes,
        whole=[rows, moved],
        linear=groups,
        any_monoid=True,
        together=[(rows, moved)],
    )


def roll_local(call: LocalCall) -> Sequence[jax.Array]:
    """The rows that go round, from the devices that have them."""
    (x,), along = call.operands, call.params["dimension"]
    factor = divided_dims(call.rule, call.factor_axes, 0).get(along)
    if factor is None:
        return call.bind(x)
    names, ranks = call.line(factor)
    ways = len(ranks)
    parts: list[jax.Array] = []
    for distance, start, stop in _rolled_rows(call.params["shift"], x.shape[along], ways):
        rows, pairs = lax.slice_in_dim(x, start, stop, axis=along), zip(ranks, np.roll(ranks, -distance), strict=True)
        parts.append(send(rows, names, [(here, int(there)) for here, there in pairs]) if distance else rows)
    return (jnp.concatenate(parts, axis=along),)


def roll_divided(eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh) -> Division:
    """Rows of at most two other devices."""
    along, aval, sizes = eqn.params["dimension"], eqn.invars[0].aval, dict(rule.sizes)
    factor = divided_dims(rule, axes, 0).get(along)
    if factor is None:
        return Division()
    ways, shape = (
        mesh.ways(axes[factor]),
        [math.prod(sizes[f] // mesh.ways(axes.get(f, ())) for f in dim) for dim in rule.inputs[0]],
    )
    row = math.prod(shape) // shape[along] * itemsize_of(aval)
    return Division(
        tuple(
            Exchange(
                value=0,
                axes=crossed(axes[factor], distance, mesh),
                bytes=(stop - start) * row,
                count=1,
                is_beside_work=False,
                part=("roll", along, distance, start, stop),
            )
            for distance, start, stop in _rolled_rows(eqn.params["shift"], shape[along], ways)
            if distance
        )
    )


def _rolled_rows(shift: int, size: int, ways: int) -> list[tuple[int, int, int]]:
    """(how many devices back, first and last row there) of the rows of a device's result, in order; 0 is the device itself."""
    back, rows = divmod(shift, size)
    found = [((back + 1) % ways, size - rows, size), (back % ways, 0, size - rows)]
    return [(distance, start, stop) for distance, start, stop in found if start < stop]
