"""Factor rules of attention and of its gradients, and both on shards: by examples, heads, queries, or around a ring.

In: an equation or a `LocalCall`. Out: a `FactorRule`, local results, what is exchanged. A division of the queries `s` alone has
all keys on every device; one of queries and keys `t` together lets the keys travel. What can go wrong: a bias or mask is never
divided by keys, `u`, as the same axis divides its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from autopar.attention.blocks import Setting, cut, cut_run
from autopar.attention.ring import Ring, attend, attend_back, is_mirrored, mirrored
from autopar.avals import itemsize_of
from autopar.compat import JaxprEqn
from autopar.layouts.mesh import Axes, LogicalMesh
from autopar.rules.by_shape import Factors, shape_of
from autopar.rules.exchanges import Division, Exchange
from autopar.rules.factor_rule import Dim, FactorRule, Operand, make_rule
from autopar.rules.on_shard import LocalCall

_QUERY, _KEY, _VALUE = 0, 1, 2


def attention(eqn: JaxprEqn) -> FactorRule:
    """b s (k g) h, b t k h, b t k h -> b s (k g) h, b (k g) s, b (k g) s | whole: h t | together: s t."""
    return _Operands(eqn).rule(is_backward=False)


def attention_backward(eqn: JaxprEqn) -> FactorRule:
    """..., b s (k g) h -> b s (k g) h, b t k h, b t k h | sum: s g | whole: h t | together: s t."""
    return _Operands(eqn).rule(is_backward=True)


class _Operands:
    """The dimensions of attention's operands as factors."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.setting: Setting = eqn.params["setting"]
        (batch, queries, all_heads, depth), (_, keys, heads, _) = (shape_of(v) for v in eqn.invars[:2])
        self.factors = factors = Factors()
        self.b, self.s, self.t, self.h = (factors.new(size) for size in (batch, queries, keys, depth))
        self.k, self.g, self.u = factors.new(heads), factors.new(all_heads // heads), factors.new(keys)
        self.query: Operand = ((self.b,), (self.s,), (self.k, self.g), (self.h,))
        self.key: Operand = ((self.b,), (self.t,), (self.k,), (self.h,))
        self.row: Operand = ((self.b,), (self.k, self.g), (self.s,))
        count = 3 + self.setting.has_bias + self.setting.has_mask
        self.pairwise = [self._pairwise(shape_of(v)) for v in eqn.invars[3:count]]

    def _pairwise(self, shape: Sequence[int]) -> Operand:
        names: tuple[Dim, ...] = ((self.b,), (self.k, self.g), (self.s,), (self.u,))
        return tuple(() if size == 1 else name for size, name in zip(shape, names, strict=True))

    def rule(self, *, is_backward: bool) -> FactorRule:
        """The rule of attention, or of its gradients."""
        inputs, results = [self.query, self.key, self.key, *self.pairwise], [self.query, self.row, self.row]
        reduced: list[str] = []
        if is_backward:
            inputs += [*results, self.query]
            results = [self.query, self.key, self.key, *self.pairwise[: self.setting.has_bias]]
            reduced = [f for f in (self.b, self.s, self.k, self.g) if any(not _names(r, f) for r in results)]
        return make_rule(
            inputs,
            results,
            self.factors.sizes,
            reduced=dict.fromkeys(reduced, "sum"),
            whole=(self.h, self.t, self.u),
            together=((self.s, self.t),),
        )


def _names(operand: Operand, factor: str) -> bool:
    return any(factor in dim for dim in operand)


def flops(eqn: JaxprEqn, rule: FactorRule) -> float:
    """Two products of each query with each key of the blocks at which it looks, in the backward pass five."""
    setting: Setting = eqn.params["setting"]
    batch, queries, heads, depth = shape_of(eqn.invars[0])
    keys = shape_of(eqn.invars[1])[1]
    products = 2 if len(eqn.invars) == _count(setting) else 5
    return 2.0 * products * batch * heads * queries * keys * depth * setting.part_in_blocks


def between_kernels(eqn: JaxprEqn) -> float:
    """Bytes that the kernels of its blocks hand to each other, of all devices together: scores, and sums over blocks.

    Scores forward: a product writes them in float32; kernels for the rows' maxima, sums and weights read them, or the first
    writes them again for the others; weights are as narrow as the operands, and a product reads them. Backward: two such
    products, one kernel that reads both and writes weights, and their gradients in two orders, and three products that read
    these; where heads share keys, one of them is transposed first. Tests count the same in programs of XLA.

    Sums: a product writes what a block adds, and a kernel reads that and the sum and writes the sum, all in float32; forward for
    the queries of each block of keys, backward also for the keys of each block of queries, twice.
    """
    setting: Setting = eqn.params["setting"]
    (batch, queries, heads, depth), (_, keys, key_heads, _) = (shape_of(v) for v in eqn.invars[:2])
    (_, rows), (_, columns) = cut_run(queries), cut_run(keys)
    itemsize, precise = itemsize_of(eqn.invars[0].aval), max(itemsize_of(eqn.invars[0].aval), 4)
    each, to_query = 4.0 * precise, 4.0 * precise * depth / max(columns, 1)
    if len(eqn.invars) > _count(setting):
        to_key = 4.0 * precise * depth * key_heads / heads / max(rows, 1)
        each += (6 if key_heads == heads else 8) * itemsize + to_query + 2 * to_key
    else:
        each += 2 * itemsize + to_query
    return float(batch * heads * queries * keys * each * setting.part_in_blocks)


def _count(setting: Setting) -> int:
    """The number of operands of the forward pass."""
    return 3 + setting.has_bias + setting.has_mask


def attention_local(call: LocalCall) -> Sequence[jax.Array]:
    """This device's queries and all keys, which may have to travel here."""
    return attend(call.params["setting"], call.operands, start=_start(call), ring=_ring(call))


def attention_backward_local(call: LocalCall) -> Sequence[jax.Array]:
    """What this device's queries add to the gradients; with a ring, all of those of its keys."""
    return attend_back(call.params["setting"], call.operands, start=_start(call), ring=_ring(call))


def _start(call: LocalCall) -> jax.Array | int:
    return call.offset(call.rule.inputs[_QUERY][1])


def _ring(call: LocalCall) -> Ring | None:
    (factor,) = call.rule.inputs[_KEY][1] or ("",)
    if not call.factor_axes.get(factor):
        return None
    return Ring(*call.line(factor), call.shard_index(factor))


def divided(eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh) -> Division:
    """Keys and values around the ring, and in the backward pass their gradients; mirrored halves there and back."""
    setting: Setting = eqn.params["setting"]
    (query,), (key,) = (rule.inputs[place][1] or ("",) for place in (_QUERY, _KEY))
    ring, parts = axes.get(key, ()), mesh.ways(axes.get(query, ()))
    size = mesh.ways(ring)
    queries, keys = shape_of(eqn.invars[_QUERY])[1] // parts, shape_of(eqn.invars[_KEY])[1] // size
    is_even = is_mirrored(setting, queries, keys, size)
    slowest = 1.0 if is_even else _slowest(setting, parts)
    if size == 1:
        return Division((), slowest)
    sent = _Sent(eqn, rule, axes, mesh, ring)
    return Division((*sent.around(size), *(sent.halves(size) if is_even else ())), slowest)


def scratch(eqn: JaxprEqn, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes of scores of one block, of sums in float32, of a block of each operand, and of what arrives while it is read.

    How many of each, XLA's buffer assignments say.
    """
    setting: Setting = eqn.params["setting"]
    (batch, queries, heads, depth), (_, keys, key_heads, _) = shapes[:2]
    is_backward = len(eqn.invars) > _count(setting)
    (itemsize, *_), precise = (itemsize_of(v.aval) for v in eqn.invars), max(itemsize_of(eqn.invars[0].aval), 4)
    is_ring = keys < setting.keys
    is_halved = is_ring and is_mirrored(setting, queries, keys, setting.keys // keys)
    rows, columns = (_longest_block(size, is_halved=is_halved) for size in (queries, keys))
    scores = (5 if is_backward else 2) * batch * heads * rows * columns * precise
    sums = (2 if is_backward else 1) * batch * queries * heads * depth * precise
    sums += 3 * batch * queries * heads * precise if is_backward else 0
    blocks = batch * depth * (rows * heads * (rows < queries) + 2 * columns * key_heads * (columns < keys)) * itemsize
    arriving = batch * keys * key_heads * depth * (4 * itemsize + 2 * precise * is_backward) if is_ring else 0
    return scores + sums + blocks + arriving


def _longest_block(size: int, *, is_halved: bool) -> int:
    return cut(size, [0, size // 2] if is_halved else [0]).length


def _slowest(setting: Setting, parts: int) -> float:
    """The work of the device whose part of the queries looks at the most keys, over that of the mean."""
    if parts == 1 or setting.part == 1.0 or setting.window is not None:
        return 1.0
    last = 1.0 - (1.0 - setting.part) / parts if setting.queries == setting.keys else 1.0
    return last / setting.part


class _Sent:
    """What one device sends along a ring."""

    def __init__(
        self, eqn: JaxprEqn, rule: FactorRule, axes: Mapping[str, Axes], mesh: LogicalMesh, ring: Axes
    ) -> None:
        self.eqn, self.rule, self.axes, self.mesh, self.ring = eqn, rule, axes, mesh, ring
        self.first_result = len(eqn.invars)
        self.is_backward = self.first_result > _count(eqn.params["setting"])

    def _elements(self, place: int) -> int:
        operand = (*self.rule.inputs, *self.rule.outputs)[place]
        sizes = dict(self.rule.sizes)
        return math.prod(sizes[f] // self.mesh.ways(self.axes.get(f, ())) for dim in operand for f in dim)

    def _itemsize(self, place: int) -> int:
        return itemsize_of((*self.eqn.invars, *self.eqn.outvars)[place].aval)

    def _precise(self) -> int:
        """Bytes of an element of what is summed up."""
        return self._itemsize(self.first_result + 1) if not self.is_backward else self._itemsize(self.first_result - 3)

    def around(self, size: int) -> Iterator[Exchange]:
        """Keys and values go to every other device, their gradients once around; the last hop is waited for."""
        for place in (_KEY, _VALUE):
            yield self._exchange(place, self._elements(place) * self._itemsize(place), size - 1, is_beside_work=True)
        for place in (self.first_result + 1, self.first_result + 2) if self.is_backward else ():
            each = self._elements(place) * self._precise()
            yield self._exchange(place, each, size, is_beside_work=False)

    def halves(self, size: int) -> Iterator[Exchange]:
        """Two halves of each array, or one where every first half is at its place."""
        count = sum(any(mirrored(2 * i + half, size) != i for i in range(size)) for half in (0, 1))
        first = self.first_result
        each = {place: self._elements(place) * self._itemsize(place) // 2 for place in (_QUERY, _KEY, _VALUE)}
        if self.is_backward:  # pairs go as one: query and cotangent, key and value
            sent = [(_QUERY, 2 * each[_QUERY]), (_KEY, 2 * each[_KEY])]
            rows, results = [first - 3] * 3, [first, first + 1, first + 2]
        else:
            sent, rows, results = list(each.items()), [first + 1] * 2, [first]
        sent += [(place, self._elements(place) * self._precise() // 2) for place in rows]
        sent += [(place, self._elements(place) * self._itemsize(place) // 2) for place in results]
        for place, size in sent:
            yield self._exchange(place, size, count, is_beside_work=False)

    def _exchange(self, place: int, size: int, count: int, *, is_beside_work: bool) -> Exchange:
        return Exchange(value=place, axes=self.ring, bytes=size, count=count, is_beside_work=is_beside_work)
