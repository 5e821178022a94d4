"""All-to-all: one closed form per algorithm, in the letters of `algorithms.py`."""

from __future__ import annotations

from autopar.cost_model.affine import Affine, Levels, all_switched, log2_ceil, ranks, slowest_latency_s
from autopar.cost_model.tiers import Dimension


def all_to_all(levels: Levels) -> dict[str, Affine | None]:
    """pairwise: (n-1) a + (n-1)/n b S; Bruck: log2(n) a + log2(n)/2 b S, n a power of two; or level by level.

    hierarchical: over the levels, sum of (f-1) a + (f-1)/f b S. Rings and tori pass blocks on, `_ring_exchange`.
    """
    n = ranks(levels)
    if not all_switched(levels):
        return {"torus" if len(levels) > 1 else "ring": _torus_exchange(levels)}
    pairwise, hierarchical, inside = Affine(), Affine(), 1
    for level in levels:
        f, b = level.size, 1 / level.rank_bytes_per_s
        pairwise += Affine(level.latency_s, b / n).times((f - 1) * inside)
        hierarchical += Affine(level.latency_s, b / f).times(f - 1)
        inside *= f
    slowest = max(1 / level.rank_bytes_per_s for level in levels)
    bruck = Affine(slowest_latency_s(levels), slowest / 2).times(log2_ceil(n)) if n & (n - 1) == 0 else None
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
