"""How a collective is carried out and what that takes: one closed form per algorithm.

In: the levels of the machine that a group of ranks spans, from the inside out (`topology.Dimension`). Out: for each algorithm
an `Affine`, seconds as latency plus a time per byte, so that the cheapest for a size is a minimum over a few lines. Letters: n
ranks; a seconds per message; b seconds per byte, 1/bandwidth; S bytes: what each rank holds before an all-reduce, reduce-scatter,
all-to-all, broadcast, reduce, send or permute, what it holds after an all-gather, what the root holds in a gather or scatter; L =
ceil(log2 n). A message takes a + b x bytes and keeps its link that long. Sources: Thakur, Rabenseifner and Gropp, "Optimization
of collective communication operations in MPICH" (2005) for ring, tree, butterfly, pairwise and Bruck; Sanders, Speck and Traeff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009) for the double tree; Cho et al., "BlueConnect"
(2019) for hierarchies of rings; `tests/cost_model/event_simulation.py` plays the same algorithms message by message.

What can go wrong: an algorithm that a topology cannot run at full speed, such as a butterfly on a ring. It is not offered there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from autopar.cost_model.topology import Dimension

Kind = Literal[
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "collective-permute",
    "barrier",
]
Levels = Sequence[Dimension]

FOR_COMPARISON = frozenset({"naive", "parameter server"})
"""Algorithms that are priced and never chosen."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """Seconds as a function of bytes: latency_s + s_per_byte x bytes."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def __call__(self, size_bytes: float) -> float:
        """Seconds for so many bytes."""
        return self.latency_s + self.s_per_byte * size_bytes

    def __add__(self, other: Affine) -> Affine:
        """One after the other, on the same number of bytes."""
        return Affine(self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte)

    def of_part(self, part: float) -> Affine:
        """The same on `part` of the bytes."""
        return Affine(self.latency_s, self.s_per_byte * part)

    def times(self, count: float) -> Affine:
        """`count` of these, one after the other."""
        return Affine(self.latency_s * count, self.s_per_byte * count)


def algorithms_for(kind: Kind, levels: Levels) -> dict[str, Affine]:
    """Every algorithm of a collective that these levels can run, by name; a group of one rank needs none: "nothing"."""
    if not levels:
        return {"nothing": Affine()}
    measured = levels[0].measured.get(kind)
    if measured is not None and all(level.tier == levels[0].tier for level in levels):
        n = ranks(levels)
        per_byte = (measured.s_per_byte + measured.s_per_byte_per_rank * n) * bytes_sent(kind, n)
        return {"measured": Affine(measured.before_first_byte_s(n), per_byte)}
    return {name: cost for name, cost in _TABLE[kind](levels).items() if cost is not None}


def ranks(levels: Levels) -> int:
    """n: how many ranks the levels join."""
    return math.prod(level.size for level in levels)


def bytes_sent(kind: Kind, n: int) -> float:
    """Bytes that each rank sends in the ring algorithm, per byte of S: the bus factor of nccl-tests."""
    return {
        "all-reduce": 2.0 * (n - 1) / n,
        "collective-permute": 1.0,
        "send": 1.0,
        "broadcast": 1.0,
        "reduce": 1.0,
    }.get(kind, (n - 1) / n)


def _all_reduce(levels: Levels) -> dict[str, Affine | None]:
    """Rings, trees and butterflies, and reduce-scatter inside, all-reduce of the rest across, all-gather inside.

    ring, butterfly, torus: a reduce-scatter and an all-gather. tree: 2 L (a + b S). double tree: 2 L a + 2 b S, in the limit of
    many chunks. naive: each rank sends all to each other, (n-1)(a + b S). parameter server: 2 (n-1)(a + b S).
    """
    two_passes = {name: _twice(cost) for name, cost in _one_pass(levels).items() if name != "hierarchical"}
    star = _star(levels)
    return {
        **two_passes,
        "tree": _twice(_binomial(levels)),
        "double tree": _double_tree(levels),
        "hierarchical": _twice(_hierarchical_pass(levels)),
        "hierarchical, tree across": _tree_across(levels),
        "naive": star,
        "parameter server": _twice(star),
    }


def _one_pass(levels: Levels) -> dict[str, Affine | None]:
    """Reduce-scatter, and all-gather, which is the same backwards; both by ring, butterfly, torus or level by level.

    naive: each pair exchanges its block directly, (n-1)(a + b S/n). parameter server: everything to one rank and back,
    (n-1)(a + b S) + (n-1)(a + b S/n).
    """
    n, star = ranks(levels), _star(levels)
    return {
        "ring": _ring(levels),
        "butterfly": _butterfly(levels),
        "torus": _torus(levels),
        "hierarchical": _hierarchical_pass(levels),
        "naive": star.of_part(1 / n) if star else None,
        "parameter server": star + star.of_part(1 / n) if star else None,
    }


def _ring(levels: Levels) -> Affine:
    """(n-1) a + (n-1)/n b S, at the pace of the slowest link."""
    n = ranks(levels)
    return Affine((n - 1) * _slowest_latency(levels), (n - 1) / n * _ring_s_per_byte(levels))


def _butterfly(levels: Levels) -> Affine | None:
    """Recursive halving or doubling: over the levels, sum of log2(f) a + (f-1)/f b S / (ranks inside), f a power of two."""
    if not all(level.switched and level.size & (level.size - 1) == 0 for level in levels):
        return None
    return _level_by_level(levels, [_one_butterfly(level) for level in levels])


def _one_butterfly(level: Dimension) -> Affine:
    f = level.size
    return Affine(math.log2(f) * level.latency_s, (f - 1) / f / level.rank_bytes_per_s)


def _torus(levels: Levels) -> Affine | None:
    """d parts of S/d go through the d dimensions, each beginning with another, so that all links work all the time.

    A phase over a dimension of f ranks takes (f-1) a + (f-1)/f b s, where s is what is left of the part; a phase ends when
    its slowest part does. With equal dimensions the sum is d (f-1) a + (n-1)/n b S/d.
    """
    if len(levels) < 2 or any(level.topology != "torus" for level in levels):
        return None
    d = len(levels)
    left = [1 / d] * d
    total = Affine()
    for phase in range(d):
        parts = []
        for part in range(d):
            level = levels[(part + phase) % d]
            parts.append(_ring([level]).of_part(left[part]))
            left[part] /= level.size
        total += Affine(max(p.latency_s for p in parts), max(p.s_per_byte for p in parts))
    return total


def _hierarchical_pass(levels: Levels) -> Affine | None:
    """Each level in turn, from the inside out, on what the levels inside have left: sum of its own algorithm on S/g."""
    if len(levels) < 2:
        return None
    return _level_by_level(levels, [_best_single(level) for level in levels])


def _best_single(level: Dimension) -> Affine:
    """Butterfly where it can run, which beats the ring in latency and equals it in bytes, else the ring."""
    ring = Affine((level.size - 1) * level.latency_s, (level.size - 1) / level.size / level.rank_bytes_per_s)
    return _butterfly([level]) or ring


def _tree_across(levels: Levels) -> Affine | None:
    """Reduce-scatter inside, double tree over S/g at the outermost level, all-gather inside: for many nodes of any number."""
    if len(levels) < 2 or not levels[-1].switched:
        return None
    inside = _level_by_level(levels[:-1], [_best_single(level) for level in levels[:-1]])
    outermost = dataclasses.replace(levels[-1], ring_bytes_per_s=levels[-1].rank_bytes_per_s)
    across = _double_tree([outermost])
    return inside.times(2) + across.of_part(1 / ranks(levels[:-1])) if across else None


def _level_by_level(levels: Levels, costs: Sequence[Affine]) -> Affine:
    total, inside = Affine(), 1
    for level, cost in zip(levels, costs, strict=True):
        total += cost.of_part(1 / inside)
        inside *= level.size
    return total


def _binomial(levels: Levels) -> Affine | None:
    """Broadcast, or reduction, along a binomial tree: over the levels, sum of ceil(log2 f) (a + b S)."""
    if not all(level.switched for level in levels):
        return None
    total = Affine()
    for level in levels:
        total += Affine(level.latency_s, 1 / level.sender_bytes_per_s).times(_log2(level.size))
    return total


def _double_tree(levels: Levels) -> Affine | None:
    """2 L a + 2 b S: two binary trees, each for half of S in many chunks, inner ranks of one being leaves of the other."""
    if not all(level.switched for level in levels):
        return None
    latency_s = sum(2 * _log2(level.size) * level.latency_s for level in levels)
    return Affine(latency_s, 2 * _ring_s_per_byte(levels))


def _star(levels: Levels) -> Affine | None:
    """(n-1)(a + b S): one rank's port takes a message from each other, one after the other."""
    if not all(level.switched for level in levels):
        return None
    total, inside = Affine(), 1
    for level in levels:
        total += Affine(level.latency_s, 1 / level.sender_bytes_per_s).times((level.size - 1) * inside)
        inside *= level.size
    return total


def _all_to_all(levels: Levels) -> dict[str, Affine | None]:
    """pairwise: (n-1) a + (n-1)/n b S; Bruck: log2(n) a + log2(n)/2 b S, n a power of two; or level by level.

    hierarchical: over the levels, sum of (f-1) a + (f-1)/f b S. Rings and tori pass blocks on, `_ring_exchange`.
    """
    n = ranks(levels)
    if not all(level.switched for level in levels):
        return {"torus" if len(levels) > 1 else "ring": _torus_exchange(levels)}
    pairwise, hierarchical, inside = Affine(), Affine(), 1
    for level in levels:
        f, b = level.size, 1 / level.rank_bytes_per_s
        pairwise += Affine(level.latency_s, b / n).times((f - 1) * inside)
        hierarchical += Affine(level.latency_s, b / f).times(f - 1)
        inside *= f
    slowest = max(1 / level.rank_bytes_per_s for level in levels)
    bruck = Affine(_slowest_latency(levels), slowest / 2).times(_log2(n)) if n & (n - 1) == 0 else None
    found: dict[str, Affine | None] = {"pairwise": pairwise, "Bruck": bruck}
    if len(levels) > 1:
        found["hierarchical"] = hierarchical
    return found


def _torus_exchange(levels: Levels) -> Affine:
    """Every level in turn, in d parts that begin with another one each where all are dimensions of a torus."""
    singles = [_ring_exchange(level) for level in levels]
    if any(level.topology != "torus" for level in levels):
        return sum(singles, Affine())
    d = len(levels)
    slowest = Affine(max(s.latency_s for s in singles), max(s.s_per_byte for s in singles))
    return slowest.of_part(1 / d).times(d)


def _ring_exchange(level: Dimension) -> Affine:
    """All-to-all on one level of f ranks, blocks of S/f passed from neighbour to neighbour the shorter way.

    Ring: floor(f/2) a + b S floor(f^2/4) / (2 f), b of one link one way: step k carries the blocks that still have k links to
    go, those to the opposite rank half in each direction. Line: (f-1)(a + b S/2), in step k the blocks from k links back.
    A hybrid cube mesh exchanges over its rings as a ring does, at half of the ring bandwidth in each direction.
    """
    f = level.size
    blocks = f * f // 4
    if level.topology == "switch":
        return Affine((f - 1) * level.latency_s, (f - 1) / f / level.rank_bytes_per_s)
    if level.topology == "torus" and not level.wraps:
        return Affine((f - 1) * level.latency_s, (f - 1) / 2 / level.link_bytes_per_s)
    return Affine(f // 2 * level.latency_s, blocks / f / level.ring_bytes_per_s)


def _rooted(levels: Levels) -> dict[str, Affine | None]:
    """Broadcast and reduce. tree: L (a + b S). butterfly: scatter and all-gather, or reduce-scatter and gather.

    ring: the same along a ring, 2 (n-1) a + 2 (n-1)/n b S. naive: (n-1)(a + b S).
    """
    scatter, gather = _blocks(levels), _one_pass(levels)
    halves = {
        "ring": (scatter["ring"], gather["ring"]),
        "butterfly": (scatter["tree"], gather["butterfly"]),
        "hierarchical": (scatter["tree"], gather["hierarchical"]),
    }
    both = {name: one + other if one and other else None for name, (one, other) in halves.items()}
    return {"tree": _binomial(levels), **both, "naive": _star(levels)}


def _blocks(levels: Levels) -> dict[str, Affine | None]:
    """Gather and scatter of n blocks of S/n. tree: L a + (n-1)/n b S. ring, naive: (n-1)(a + b S/n).

    Over several levels the tree goes level by level: sum of ceil(log2 f) a + (f-1) (ranks inside) b S/n.
    """
    n = ranks(levels)
    star = _star(levels)
    tree: Affine | None = None
    if all(level.switched for level in levels):
        tree, inside = Affine(), 1
        for level in levels:
            sent = (level.size - 1) * inside / n
            tree += Affine(_log2(level.size) * level.latency_s, sent / level.sender_bytes_per_s)
            inside *= level.size
    return {"tree": tree, "ring": _ring(levels), "naive": star.of_part(1 / n) if star else None}


def _send(levels: Levels) -> dict[str, Affine | None]:
    """One rank to another, all other links idle: a + b S across the outermost level."""
    outermost = levels[-1]
    return {"direct": Affine(outermost.latency_s, 1 / outermost.sender_bytes_per_s)}


def _permute(levels: Levels) -> dict[str, Affine | None]:
    """Every rank to another one at once: a + b S with the bandwidth that is left when all send."""
    slowest = max(1 / level.rank_bytes_per_s for level in levels)
    return {"direct": Affine(_slowest_latency(levels), slowest)}


def _barrier(levels: Levels) -> dict[str, Affine | None]:
    """dissemination: L rounds of empty messages, L a; else an all-reduce of nothing."""
    found: dict[str, Affine | None] = {}
    if all(level.switched for level in levels):
        found["dissemination"] = Affine(_log2(ranks(levels)) * _slowest_latency(levels))
    for name, cost in _all_reduce(levels).items():
        found[name] = Affine(cost.latency_s) if cost else None
    return found


def _twice(cost: Affine | None) -> Affine | None:
    return cost.times(2) if cost else None


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _slowest_latency(levels: Levels) -> float:
    return max(level.latency_s for level in levels)


def _ring_s_per_byte(levels: Levels) -> float:
    return max(1 / level.ring_bytes_per_s for level in levels)


_TABLE = {
    "all-gather": _one_pass,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _rooted,
    "collective-permute": _permute,
    "gather": _blocks,
    "reduce": _rooted,
    "reduce-scatter": _one_pass,
    "scatter": _blocks,
    "send": _send,
}
