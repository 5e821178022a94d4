"""Attention of some queries to some keys, block by block: what is kept is one block of scores.

In: queries (B, S, K, G, H), keys and values (B, T, K, H), with K heads of keys that G query heads share each, and the positions
of both in the whole sequence. Out, forward: what of a softmax over all keys is known after these, so that keys can come in any
number of parts; backward: what these keys and queries add to the gradients. With x the score of a query and a key,

    peak = max x,    total = sum exp(x - peak),    mixed = sum exp(x - peak) v,    result = mixed / total
    p = exp(x - peak) / total,    dx = p (dr . v - dr . r),    dv = sum p dr,    dq = sum dx k,    dk = sum dx q

where a new part of the keys brings `total` and `mixed` to its own peak first. Blocks that no query may look at are passed over.
What can go wrong: a query that may look at no key at all. As in `jax.nn.dot_product_attention` all scores are then the same
large negative number and its result is the mean of all values, for which no block may be passed over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.attention.tuning import TUNING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same for all queries and keys; hashable, as a parameter of a primitive.

    Attributes:
        scale: what scores are multiplied by.
        is_causal: whether a query looks at no later position.
        window: how many positions a query looks to the left and to the right; None: all.
        has_bias: whether scores have a bias added.
        has_mask: whether a mask says what is looked at.
        queries: positions of the whole sequence of queries.
        keys: positions of that of keys.
        is_balanced: whether devices around a ring may exchange halves of causal queries, so that all have the same work.
    """

    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    has_bias: bool
    has_mask: bool
    queries: int
    keys: int
    is_balanced: bool = True

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far a query looks to the left and to the right; None: to the end."""
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def passes_over(self) -> bool:
        """Whether blocks may be passed over at which no query looks: each query then looks at some key."""
        left, right = self.reach
        if self.has_mask or (right is not None and right < 0) or (left is not None and left < 0):
            return False
        return left is None or self.queries - 1 - left <= self.keys - 1

    @property
    def part(self) -> float:
        """The part of all pairs of a query and a key that has to be computed."""
        left, right = self.reach if self.passes_over else (None, None)
        queries, keys = self.queries, self.keys
        whole = float(queries * keys)
        late = 0.0 if right is None else _pairs_beyond(queries, keys, right)
        early = 0.0 if left is None else _pairs_beyond(keys, queries, left)
        return max(whole - late - early, 1.0) / max(whole, 1.0)

    @property
    def part_in_blocks(self) -> float:
        """The part of all pairs that is computed: blocks at which some query looks are computed whole."""
        left, right = self.reach if self.passes_over else (None, None)
        (_, rows), (keys, columns) = cut_run(self.queries), cut_run(self.keys)
        pairs = 0
        for first in range(0, self.queries, max(rows, 1)):
            end = keys if right is None else min(keys, (first + rows - 1 + right) // columns + 1)
            begin = 0 if left is None else max(0, (first - left) // columns)
            pairs += max(end - begin, 0) * rows * columns
        return max(pairs, 1.0) / max(self.queries * self.keys, 1.0)


def cut_run(positions: int) -> tuple[int, int]:
    """(blocks of a run of so many positions, positions of each block)."""
    count = max(1, -(-positions // TUNING.longest_block))
    return count, -(-positions // count)


def _pairs_beyond(first: int, second: int, reach: int) -> float:
    """How many pairs i of `first`, j of `second` positions have j > i + reach."""
    rows = max(0, min(first, second - 1 - reach))  # the rows that have any
    return rows * (second - 1 - reach) - rows * (rows - 1) / 2


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A sequence of positions in blocks of equal length: `starts` are the first position of each, ascending, (blocks,)."""

    starts: jax.Array
    length: int
    size: int

    @property
    def padded(self) -> int:
        """How many positions all blocks have together."""
        return self.starts.shape[0] * self.length


def cut(size: int, starts: Sequence[jax.Array | int]) -> Blocks:
    """`size` positions that are equal runs from these starts on, in blocks; only a single run may end in a part of one."""
    run = size // len(starts)
    count, length = cut_run(run)
    assert len(starts) == 1 or length * count == run
    offsets = jnp.arange(count, dtype=jnp.int32) * length
    return Blocks(jnp.concatenate([offsets + jnp.asarray(start, jnp.int32) for start in starts]), length, size)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of the softmax of some queries after some keys.

    peak, total: float32 (B, K, G, S). mixed: float32 (B, S, K, G, H).
    """

    peak: jax.Array
    total: jax.Array
    mixed: jax.Array


jax.tree_util.register_dataclass(Known, ["peak", "total", "mixed"], [])


def nothing_known(query: jax.Array, blocks: Blocks) -> Known:
    """What is known of queries (B, S, K, G, H) before any key; with room for whole blocks."""
    batch, _, heads, group, depth = query.shape
    kind = jnp.promote_types(query.dtype, jnp.float32)
    shape = (batch, heads, group, blocks.padded)
    mixed = jnp.zeros((batch, blocks.padded, heads, group, depth), kind)
    return Known(jnp.full(shape, -jnp.inf, kind), jnp.zeros(shape, kind), mixed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Queries and keys that meet, with what is known of every pair.

    bias, mask: (B or 1, N or 1, S or 1, all keys or 1), or None; the rows are those of the queries. Both are as long as whole
    blocks need.
    """

    setting: Setting
    queries: Blocks
    keys: Blocks
    bias: jax.Array | None
    mask: jax.Array | None

    def range_of(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first block of keys at which block i of queries looks, and the first after all of these."""
        starts, count = self.keys.starts, self.keys.starts.shape[0]
        left, right = self.setting.reach if self.setting.passes_over else (None, None)
        first, last = self.queries.starts[i], self.queries.starts[i] + self.queries.length - 1
        end = jnp.int32(count) if right is None else jnp.sum(starts <= last + right, dtype=jnp.int32)
        begin = jnp.int32(0)
        if left is not None:
            begin = jnp.sum(starts + self.keys.length - 1 < first - left, dtype=jnp.int32)
        return begin, end

    def scores(
        self, query: jax.Array, key: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Scores (B, K, G, q, t) of two blocks, and where they are the products of queries and keys; None: everywhere."""
        kind = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("bqkgh,btkh->bkgqt", query, key, preferred_element_type=kind)
        scores = scores * jnp.asarray(self.setting.scale, kind)
        if self.bias is not None:
            scores = (scores + self._pairwise(self.bias, query, i, j)).astype(kind)
        allowed = self._allowed(query, i, j)
        if allowed is not None:
            scores = jnp.where(allowed, scores, jnp.asarray(-0.7 * float(jnp.finfo(kind).max), kind))
        if self.keys.padded != self.keys.size:
            is_key = jnp.arange(self.keys.length) + j * self.keys.length < self.keys.size
            scores = jnp.where(is_key, scores, -jnp.inf)
            allowed = is_key if allowed is None else jnp.logical_and(allowed, is_key)
        return scores, allowed

    def _allowed(self, query: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array | None:
        """Where a query may look at a key; None: everywhere."""
        at = self.queries.starts[i] + jnp.arange(self.queries.length, dtype=jnp.int32)[:, None]
        to = self.keys.starts[j] + jnp.arange(self.keys.length, dtype=jnp.int32)[None, :]
        left, right = self.setting.reach
        allowed = [] if self.mask is None else [self._pairwise(self.mask, query, i, j)]
        allowed += [] if left is None else [at <= to + left]
        allowed += [] if right is None else [at >= to - right]
        return functools.reduce(jnp.logical_and, allowed) if allowed else None

    def _pairwise(self, given: jax.Array, query: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """The part of a bias or mask that is for two blocks: (B or 1, K or 1, G or 1, q or 1, t or 1)."""
        heads, group = query.shape[2:4]
        if given.shape[2] > 1:
            given = take(given, i * self.queries.length, self.queries.length, axis=2)
        if given.shape[3] > 1:
            given = take(given, self.keys.starts[j], self.keys.length, axis=3)
        split = (heads, group) if given.shape[1] > 1 else (1, 1)
        return given.reshape(given.shape[0], *split, *given.shape[2:])


def take(x: jax.Array, start: jax.Array | int, length: int, *, axis: int) -> jax.Array:
    """So many elements from a place on."""
    return lax.dynamic_slice_in_dim(x, start, length, axis=axis)


def put(x: jax.Array, part: jax.Array, start: jax.Array | int, *, axis: int) -> jax.Array:
    """The array with a part in the place of what stands there."""
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=axis)


def pad_to(x: jax.Array, length: int, *, axis: int, value: float = 0) -> jax.Array:
    """The array with a value behind its end."""
    missing = length - x.shape[axis]
    widths = [(0, missing if dim == axis else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def look(known: Known, query: jax.Array, key: jax.Array, value: jax.Array, pairs: Pairs) -> Known:
    """What is known after these keys too. Queries, keys and values are padded to whole blocks, as `known` is."""
    rows, columns = pairs.queries.length, pairs.keys.length

    def each_block(i: jax.Array, known: Known) -> Known:
        own = take(query, i * rows, rows, axis=1)
        begin, end = pairs.range_of(i)

        def each_key(j: jax.Array, known: Known) -> Known:
            theirs, values = (take(x, j * columns, columns, axis=1) for x in (key, value))
            scores, _ = pairs.scores(own, theirs, i, j)
            return _join(known, scores, values)

        peak, total = (take(x, i * rows, rows, axis=3) for x in (known.peak, known.total))
        part = lax.fori_loop(begin, end, each_key, Known(peak, total, take(known.mixed, i * rows, rows, axis=1)))
        return Known(
            put(known.peak, part.peak, i * rows, axis=3),
            put(known.total, part.total, i * rows, axis=3),
            put(known.mixed, part.mixed, i * rows, axis=1),
        )

    found: Known = lax.fori_loop(0, pairs.queries.starts.shape[0], each_block, known)
    return found


def _join(known: Known, scores: jax.Array, values: jax.Array) -> Known:
    """What is known after one more block of scores (B, K, G, q, t) of keys with these values (B, t, K, H)."""
    peak = jnp.maximum(known.peak, jnp.max(scores, axis=-1))
    stable = jnp.where(peak == -jnp.inf, 0.0, peak)  # a row of infinities has no sum yet, and may get one
    weights = jnp.exp(scores - stable[..., None])
    kept = jnp.exp(known.peak - stable)
    total = known.total * kept + jnp.sum(weights, axis=-1)
    new = jnp.einsum("bkgqt,btkh->bqkgh", weights.astype(values.dtype), values, preferred_element_type=total.dtype)
    return Known(peak, total, known.mixed * jnp.moveaxis(kept, 3, 1)[..., None] + new)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What pairs have added so far: query (B, S, K, G, H), key and value (B, T, K, H), in float32; bias as it is, or None."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


jax.tree_util.register_dataclass(Gradients, ["query", "key", "value", "bias"], [])


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the backward pass knows of queries: peak, total and delta (B, K, G, S), and the cotangent (B, S, K, G, H)."""

    peak: jax.Array
    total: jax.Array
    delta: jax.Array
    cotangent: jax.Array

    def block(self, start: jax.Array, length: int) -> Seen:
        """Of some of the queries."""
        peak, total, delta = (take(x, start, length, axis=3) for x in (self.peak, self.total, self.delta))
        return Seen(peak, total, delta, take(self.cotangent, start, length, axis=1))


def look_back(
    sums: Gradients, query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen, pairs: Pairs
) -> Gradients:
    """The gradients with what these pairs add. Everything is padded to whole blocks."""
    rows, columns = pairs.queries.length, pairs.keys.length

    def each_block(i: jax.Array, sums: Gradients) -> Gradients:
        own, known = take(query, i * rows, rows, axis=1), seen.block(i * rows, rows)
        begin, end = pairs.range_of(i)

        def each_key(j: jax.Array, sums: Gradients) -> Gradients:
            theirs, values = (take(x, j * columns, columns, axis=1) for x in (key, value))
            weights, change = _weights_and_change(own, theirs, values, known, pairs, i, j)
            kind = sums.query.dtype
            bias = None if sums.bias is None else _add_bias(sums.bias, change, pairs, i, j)
            sent, scaled = known.cotangent, (change * pairs.setting.scale).astype(key.dtype)
            to_query = jnp.einsum("bkgqt,btkh->bqkgh", scaled, theirs, preferred_element_type=kind)
            to_key = jnp.einsum("bkgqt,bqkgh->btkh", scaled, own, preferred_element_type=kind)
            to_value = jnp.einsum("bkgqt,bqkgh->btkh", weights.astype(sent.dtype), sent, preferred_element_type=kind)
            return Gradients(
                add(sums.query, to_query, i * rows, axis=1),
                add(sums.key, to_key, j * columns, axis=1),
                add(sums.value, to_value, j * columns, axis=1),
                bias,
            )

        added: Gradients = lax.fori_loop(begin, end, each_key, sums)
        return added

    found: Gradients = lax.fori_loop(0, pairs.queries.starts.shape[0], each_block, sums)
    return found


def add(x: jax.Array, part: jax.Array, start: jax.Array | int, *, axis: int) -> jax.Array:
    """The array with a part added from a place on."""
    return put(x, lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis=axis) + part, start, axis=axis)


def _weights_and_change(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen, pairs: Pairs, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weights of two blocks and the gradients of their scores, both (B, K, G, q, t)."""
    scores, allowed = pairs.scores(query, key, i, j)
    weights = jnp.exp(scores - seen.peak[..., None]) / seen.total[..., None]
    sent = jnp.einsum("bqkgh,btkh->bkgqt", seen.cotangent, value, preferred_element_type=scores.dtype)
    change = weights * (sent - seen.delta[..., None])
    return weights, change if allowed is None else jnp.where(allowed, change, 0.0)


def _add_bias(sums: jax.Array, change: jax.Array, pairs: Pairs, i: jax.Array, j: jax.Array) -> jax.Array:
    """The gradient of a bias with that of two blocks' scores: summed where the bias is the same for several."""
    given = pairs.bias
    assert given is not None
    batch, heads, group, rows, columns = change.shape
    part = change.reshape(batch, heads * group, rows, columns)
    for dim, size in enumerate(given.shape):
        part = jnp.sum(part, axis=dim, keepdims=True) if size == 1 else part
    row = i * pairs.queries.length if given.shape[2] > 1 else jnp.int32(0)
    column = pairs.keys.starts[j] if given.shape[3] > 1 else jnp.int32(0)
    starts = (jnp.int32(0), jnp.int32(0), row.astype(jnp.int32), column.astype(jnp.int32))
    before = lax.dynamic_slice(sums, starts, part.shape)
    return lax.dynamic_update_slice(sums, (before + part).astype(sums.dtype), starts)
