"""All-reduce, reduce-scatter and all-gather: one closed form per algorithm, in the letters of `algorithms.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cost_model.affine import (
    Affine,
    Levels,
    all_switched,
    binomial_tree,
    double,
    log2_ceil,
    ranks,
    ring_s_per_byte,
    slowest_latency_s,
    star,
)
from autopar.cost_model.tiers import Dimension


def all_reduce(levels: Levels) -> dict[str, Affine | None]:
    """Rings, trees and butterflies, and reduce-scatter inside, all-reduce of the rest across, all-gather inside.

    ring, butterfly, torus: a reduce-scatter and an all-gather. tree: 2 L (a + b S). double tree: 2 L a + 2 b S, in the limit of
    many chunks. naive: each rank sends all to each other, (n-1)(a + b S). parameter server: 2 (n-1)(a + b S).
    """
    two_passes = {name: double(cost) for name, cost in one_pass(levels).items() if name != "hierarchical"}
    one_by_one = star(levels)
    return {
        **two_passes,
        "tree": double(binomial_tree(levels)),
        "double tree": _double_tree(levels),
        "hierarchical": double(_hierarchical_pass(levels)),
        "hierarchical, tree across": _tree_across(levels),
        "naive": one_by_one,
        "parameter server": double(one_by_one),
    }


def one_pass(levels: Levels) -> dict[str, Affine | None]:
    """Reduce-scatter, and all-gather, which is the same backwards; both by ring, butterfly, torus or level by level.

    naive: each pair exchanges its block directly, (n-1)(a + b S/n). parameter server: everything to one rank and back,
    (n-1)(a + b S) + (n-1)(a + b S/n).
    """
    n, one_by_one = ranks(levels), star(levels)
    return {
        "ring": ring(levels),
        "butterfly": _butterfly(levels),
        "torus": _torus(levels),
        "hierarchical": _hierarchical_pass(levels),
        "naive": one_by_one.of_part(1 / n) if one_by_one else None,
        "parameter server": one_by_one + one_by_one.of_part(1 / n) if one_by_one else None,
    }


def ring(levels: Levels) -> Affine:
    """(n-1) a + (n-1)/n b S, at the pace of the slowest link."""
    n = ranks(levels)
    return Affine((n - 1) * slowest_latency_s(levels), (n - 1) / n * ring_s_per_byte(levels))


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
            parts.append(ring([level]).of_part(left[part]))
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


def _double_tree(levels: Levels) -> Affine | None:
    """2 L a + 2 b S: two binary trees, each for half of S in many chunks, inner ranks of one being leaves of the other."""
    if not all_switched(levels):
        return None
    latency_s = sum(2 * log2_ceil(level.size) * level.latency_s for level in levels)
    return Affine(latency_s, 2 * ring_s_per_byte(levels))
