"""Seconds as a function of bytes, and the figures of a group of ranks that the algorithms share.

The letters of `algorithms.py`: n ranks, a seconds per message, b seconds per byte, S bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cost_model.tiers import Dimension

Levels = Sequence[Dimension]
"""The levels of the machine that a group of ranks spans, from the inside out."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """Seconds as a function of bytes: latency_s + s_per_byte x bytes."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def __call__(self, size_bytes: float) -> float:
        """Seconds for so many bytes."""
        return self.latency_s + self.s_per_byte * size_bytes

    def __add__(self, other: Affine) -> Affine:
        """Both, one after the other, on the same number of bytes."""
        return Affine(self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte)

    def of_part(self, part: float) -> Affine:
        """The same algorithm on `part` of the bytes."""
        return Affine(self.latency_s, self.s_per_byte * part)

    def times(self, count: float) -> Affine:
        """`count` of these, one after the other."""
        return Affine(self.latency_s * count, self.s_per_byte * count)


def ranks(levels: Levels) -> int:
    """n: how many ranks the levels join."""
    return math.prod(level.size for level in levels)


def all_switched(levels: Levels) -> bool:
    """Whether any two ranks may exchange at full speed."""
    return all(level.switched for level in levels)


def log2_ceil(n: int) -> int:
    """L = ceil(log2 n)."""
    return (n - 1).bit_length()


def slowest_latency_s(levels: Levels) -> float:
    """a of the slowest level."""
    return max(level.latency_s for level in levels)


def ring_s_per_byte(levels: Levels) -> float:
    """b of a ring through all ranks: that of its slowest level."""
    return max(1 / level.ring_bytes_per_s for level in levels)


def double(cost: Affine | None) -> Affine | None:
    """Twice the cost of an algorithm, if it can run."""
    return cost.times(2) if cost else None


def star(levels: Levels) -> Affine | None:
    """(n-1)(a + b S): one rank's port takes a message from each other rank, one after the other."""
    if not all_switched(levels):
        return None
    total, inside = Affine(), 1
    for level in levels:
        total += Affine(level.latency_s, 1 / level.sender_bytes_per_s).times((level.size - 1) * inside)
        inside *= level.size
    return total


def binomial_tree(levels: Levels) -> Affine | None:
    """A broadcast or a reduction along a binomial tree: over the levels, sum of ceil(log2 f) (a + b S)."""
    if not all_switched(levels):
        return None
    total = Affine()
    for level in levels:
        total += Affine(level.latency_s, 1 / level.sender_bytes_per_s).times(log2_ceil(level.size))
    return total
