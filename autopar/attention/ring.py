"""Attention on one of several devices that hold the sequence in parts: keys and values travel around a ring.

In: this device's queries, keys and values (B, S, N, H) and (B, T, K, H), where its queries stand, and the `Ring` along which the
keys are split; without one it has all of them. Out: its part of the results, and of the gradients. Each device looks at its own
keys first, then at those that its neighbour has handed on, and so around; in the backward pass the gradients of keys and values
travel with them, and arrive at home. While a device works on one part, the next is on its way.

In causal attention the last part of the sequence has the most to look at. If every device has as many queries as keys, each
works on one part of the front half and on its mirror in the back half instead: device d of n gets halves d and 2n-1-d of the 2n
halves that n parts have. Then all devices do the same work in every step. Two permutations bring halves there, and back. Without
`Setting.is_balanced` keys and values alone travel, each device has its own queries, and the last one works the longest.

What can go wrong: a device elsewhere along the other mesh axes of the sequence has other queries, and the same keys. `start` is
where this one's queries stand in the whole sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.attention.blocks import (
    Blocks,
    Gradients,
    Known,
    Pairs,
    Seen,
    Setting,
    cut,
    look,
    look_back,
    nothing_known,
    pad_to,
)
from autopar.attention.tuning import TUNING

Arrays = tuple[jax.Array, ...]
Starts = Sequence[jax.Array | int]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices that hold a sequence in parts, one after the other.

    Attributes:
        names: the mesh axes along which they stand, in the mesh's order.
        ranks: of the device that has each part, its number along these axes, the last one counting fastest.
        index: the part that this device has.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    index: jax.Array | int

    @property
    def size(self) -> int:
        """The number of parts."""
        return len(self.ranks)

    def hand_on(self, x: jax.Array) -> jax.Array:
        """What the device before this one has."""
        return self._send(x, [(i, (i + 1) % self.size) for i in range(self.size)])

    def mirror(self, x: jax.Array, *, axis: int) -> jax.Array:
        """Halves `index` and `2 * size - 1 - index` of what all devices hold of a dimension in order."""
        first, second = (self._send(x, pairs) for x, pairs in zip(jnp.split(x, 2, axis), self._halves(), strict=True))
        return self._join(first, second, axis)

    def restore(self, x: jax.Array, *, axis: int) -> jax.Array:
        """Undo `mirror`."""
        low, high = jnp.split(x, 2, axis)
        is_even = self.index % 2 == 0
        parts = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
        back = ([(to, at) for at, to in pairs] for pairs in self._halves())
        return jnp.concatenate([self._send(part, pairs) for part, pairs in zip(parts, back, strict=True)], axis)

    def _join(self, first: jax.Array, second: jax.Array, axis: int) -> jax.Array:
        """Even devices get their low half from the first halves, odd ones from the second."""
        is_even = self.index % 2 == 0
        low, high = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
        return jnp.concatenate([low, high], axis)

    def _halves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Where each device's first half goes, and its second."""
        first, second = ([(i, mirrored(2 * i + half, self.size)) for i in range(self.size)] for half in (0, 1))
        return first, second

    def _send(self, x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        if all(at == to for at, to in pairs):
            return x
        sent: jax.Array = lax.ppermute(x, self.names, [(self.ranks[at], self.ranks[to]) for at, to in pairs])
        return sent


def mirrored(half: int, devices: int) -> int:
    """The device that works on this one of 2 * `devices` halves."""
    return half if half < devices else 2 * devices - 1 - half


def is_mirrored(setting: Setting, queries: int, keys: int, ring_size: int) -> bool:
    """Whether devices that hold so many queries and keys each work on mirrored halves."""
    half = queries // 2
    blocks = max(1, -(-half // TUNING.longest_block))
    is_plain = setting.is_causal and setting.window is None and not setting.has_bias and not setting.has_mask
    is_plain = is_plain and setting.is_balanced
    is_even = queries == keys and keys * ring_size == setting.keys == setting.queries and queries % 2 == 0
    return ring_size > 1 and is_plain and is_even and half % blocks == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """What one device does.

    bias, mask: its rows of them, or None. start: of its queries. keys: how many it holds.
    """

    setting: Setting
    ring: Ring
    bias: jax.Array | None
    mask: jax.Array | None
    start: jax.Array | int
    queries: int
    keys: int

    @property
    def is_mirrored(self) -> bool:
        return is_mirrored(self.setting, self.queries, self.keys, self.ring.size)

    def bring(self, x: jax.Array, axis: int) -> jax.Array:
        """What this device works on, of an array that has the sequence along a dimension."""
        return self.ring.mirror(x, axis=axis) if self.is_mirrored else x

    def bring_pair(self, x: jax.Array, y: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        """The same of two alike, sent as one.

        Halves that the forward pass has brought alone are thus not found again by a compiler, which would keep them until now.
        """
        if not self.is_mirrored:
            return x, y
        first, second = self.ring.mirror(jnp.stack([x, y]), axis=axis + 1)
        return first, second

    def back(self, x: jax.Array, axis: int) -> jax.Array:
        """Undo `bring`."""
        return self.ring.restore(x, axis=axis) if self.is_mirrored else x

    def _starts_of(self, device: jax.Array | int) -> Starts:
        half = self.keys // 2
        return [device * half, (2 * self.ring.size - 1 - device) * half] if self.is_mirrored else [device * self.keys]

    @property
    def query_blocks(self) -> Blocks:
        return cut(self.queries, self._starts_of(self.ring.index) if self.is_mirrored else [self.start])

    def key_blocks(self, owner: jax.Array | int) -> Blocks:
        return cut(self.keys, self._starts_of(owner))

    def pairs(self, step: jax.Array | int) -> Pairs:
        """The pairs of this device's queries and the keys that it has after so many steps."""
        queries, keys = self.query_blocks, self.key_blocks((self.ring.index - step) % self.ring.size)
        beyond = keys.padded - keys.size
        bias, mask = (_pad_pairwise(x, queries.padded, beyond) for x in (self.bias, self.mask))
        return Pairs(setting=self.setting, queries=queries, keys=keys, bias=bias, mask=mask)


def _pad_pairwise(given: jax.Array | None, rows: int, beyond: int) -> jax.Array | None:
    """A bias or mask with rows for whole blocks of queries, and so many keys more."""
    if given is None:
        return None
    padded = pad_to(given, rows, axis=2) if given.shape[2] > 1 else given
    return pad_to(padded, padded.shape[3] + beyond, axis=3) if given.shape[3] > 1 else padded


def attend(
    setting: Setting, operands: Sequence[jax.Array], *, start: jax.Array | int = 0, ring: Ring | None = None
) -> Arrays:
    """Attention of this device's queries to all keys.

    Args:
        setting: what holds for all.
        operands: query (B, S, N, H), key and value (B, T, K, H), then bias and mask if the setting has them.
        start: the position of the first query.
        ring: the devices that hold the keys; None: this one has all.

    Returns:
        The result (B, S, N, H), and peak and total of each query's softmax, float32 (B, N, S).
    """
    query, key, value, *pairwise = operands
    task = _task(setting, query, key, pairwise, start, ring)
    grouped = _by_groups(task.bring(query, 1), key.shape[2])
    key, value = task.bring(key, 1), task.bring(value, 1)
    blocks = task.query_blocks
    padded = pad_to(grouped, blocks.padded, axis=1)

    def visit(known: Known, key: jax.Array, value: jax.Array, step: jax.Array | int) -> Known:
        pairs = task.pairs(step)
        key, value = (pad_to(x, pairs.keys.padded, axis=1) for x in (key, value))
        return look(known, padded, key, value, pairs)

    def hop(
        carry: tuple[Known, jax.Array, jax.Array], step: jax.Array
    ) -> tuple[tuple[Known, jax.Array, jax.Array], None]:
        known, key, value = carry
        following = task.ring.hand_on(key), task.ring.hand_on(value)
        return (visit(known, key, value, step), *following), None

    carry = nothing_known(grouped, blocks), key, value
    if task.ring.size > 1:
        carry, _ = lax.scan(hop, carry, jnp.arange(task.ring.size - 1, dtype=jnp.int32))
    known = visit(*carry, task.ring.size - 1)
    total = jnp.moveaxis(known.total, 3, 1)[..., None]
    result = (known.mixed / total)[:, : task.queries].astype(query.dtype).reshape(query.shape)
    peak, total = (_by_heads(x, task.queries) for x in (known.peak, known.total))
    return task.back(result, 1), task.back(peak, 2), task.back(total, 2)


def attend_back(
    setting: Setting, operands: Sequence[jax.Array], *, start: jax.Array | int = 0, ring: Ring | None = None
) -> Arrays:
    """Gradients of this device's queries, keys and values.

    Args:
        setting: what holds for all.
        operands: those of `attend`, then its results and the cotangent of the first.
        start: the position of the first query.
        ring: the devices that hold the keys; None: this one has all.

    Returns:
        The gradients of query, key and value, and of bias if there is one. Without a ring those of key, value and bias are what
        these queries add to them, as is that of bias with one.
    """
    query, key, value, *pairwise = operands[:-4]
    result, peak, total, cotangent = operands[-4:]
    task, heads = _task(setting, query, key, pairwise, start, ring), key.shape[2]
    product = cotangent.astype(peak.dtype) * result.astype(peak.dtype)
    delta = jnp.moveaxis(jnp.sum(product, axis=-1), 2, 1)
    grouped, sent = (_by_groups(x, heads) for x in task.bring_pair(_not_before(cotangent, query), cotangent, 1))
    blocks, own = task.query_blocks, task.bring_pair(key, value, 1)
    grouped, sent = (pad_to(x, blocks.padded, axis=1) for x in (grouped, sent))
    shape = sent.shape[0], heads, sent.shape[3], blocks.padded
    peaks, totals, deltas = (
        pad_to(task.bring(x, 2), blocks.padded, axis=2, value=one).reshape(shape)
        for x, one in ((peak, 0), (total, 1), (delta, 0))
    )
    seen = Seen(peaks, totals, deltas, sent)

    def visit(to_query: jax.Array, to_bias: jax.Array | None, travelling: Arrays, step: jax.Array | int) -> Gradients:
        pairs = task.pairs(step)
        key, value, to_key, to_value = (pad_to(x, pairs.keys.padded, axis=1) for x in travelling)
        return look_back(Gradients(to_query, to_key, to_value, to_bias), grouped, key, value, seen, pairs)

    def hop(carry: _Carry, step: jax.Array) -> tuple[_Carry, None]:
        to_query, to_bias, travelling = carry
        keys = tuple(task.ring.hand_on(x) for x in travelling[:2])
        sums = visit(to_query, to_bias, travelling, step)
        gradients = tuple(task.ring.hand_on(x[:, : task.keys]) for x in (sums.key, sums.value))
        return (sums.query, sums.bias, (*keys, *gradients)), None

    nothing = tuple(jnp.zeros(x.shape, peak.dtype) for x in own)
    bias = task.pairs(0).bias
    to_bias = None if bias is None else jnp.zeros(bias.shape, peak.dtype)
    carry: _Carry = jnp.zeros(grouped.shape, peak.dtype), to_bias, (*own, *nothing)
    if task.ring.size > 1:
        carry, _ = lax.scan(hop, carry, jnp.arange(task.ring.size - 1, dtype=jnp.int32))
    sums = visit(*carry, task.ring.size - 1)
    return _bring_home(task, sums, query, key)


def _not_before(late: jax.Array, x: jax.Array) -> jax.Array:
    """The same array, of which a compiler does not know it before `late` is there.

    Where there is one block of queries and one of keys, XLA opens the loops over them. It would find that forward has the same
    scores, and keep these until now. It drops barriers (CPU, JAX 0.10), so a condition stands here that is never true.
    """
    if late.size == 0:
        return x
    number = jnp.ravel(late)[0]
    return jnp.where(number * number < -1, jnp.zeros_like(x), x)


def _bring_home(task: _Task, sums: Gradients, query: jax.Array, key: jax.Array) -> Arrays:
    """The gradients where their arrays are: those of keys and values are one hop before it."""
    at_home = [x[:, : task.keys] for x in (sums.key, sums.value)]
    if task.ring.size > 1:
        at_home = [task.ring.hand_on(x) for x in at_home]
    to_query = sums.query[:, : task.queries].astype(query.dtype).reshape(query.shape)
    gradients = (task.back(to_query, 1), *(task.back(x.astype(key.dtype), 1) for x in at_home))
    if sums.bias is None or task.bias is None:
        return gradients
    rows, columns = task.bias.shape[2:]
    return *gradients, sums.bias[:, :, :rows, :columns].astype(task.bias.dtype)


_Carry = tuple[jax.Array, jax.Array | None, Arrays]


def _task(
    setting: Setting,
    query: jax.Array,
    key: jax.Array,
    pairwise: Sequence[jax.Array],
    start: jax.Array | int,
    ring: Ring | None,
) -> _Task:
    given = list(pairwise)
    return _Task(
        setting=setting,
        ring=ring or Ring((), (0,), 0),
        bias=given.pop(0) if setting.has_bias else None,
        mask=given.pop(0) if setting.has_mask else None,
        start=start,
        queries=query.shape[1],
        keys=key.shape[1],
    )


def _by_groups(x: jax.Array, heads: int) -> jax.Array:
    """(B, S, N, H) as (B, S, K, G, H): neighbouring heads share a key."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, x.shape[3])


def _by_heads(x: jax.Array, size: int) -> jax.Array:
    """(B, K, G, S and more) as (B, N, S)."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])[:, :, :size]
