"""Collectives with a root, messages from rank to rank, and barriers: closed forms in the letters of `algorithms.py`."""

from __future__ import annotations

from autopar.cost_model.affine import (
    Affine,
    Levels,
    all_switched,
    binomial_tree,
    log2_ceil,
    ranks,
    slowest_latency_s,
    star,
)
from autopar.cost_model.reductions import all_reduce, one_pass, ring


def broadcast(levels: Levels) -> dict[str, Affine | None]:
    """Broadcast and reduce. tree: L (a + b S). butterfly: scatter and all-gather, or reduce-scatter and gather.

    ring: the same along a ring, 2 (n-1) a + 2 (n-1)/n b S. naive: (n-1)(a + b S).
    """
    scatter, gather = gather_blocks(levels), one_pass(levels)
    halves = {
        "ring": (scatter["ring"], gather["ring"]),
        "butterfly": (scatter["tree"], gather["butterfly"]),
        "hierarchical": (scatter["tree"], gather["hierarchical"]),
    }
    both = {name: one + other if one and other else None for name, (one, other) in halves.items()}
    return {"tree": binomial_tree(levels), **both, "naive": star(levels)}


def gather_blocks(levels: Levels) -> dict[str, Affine | None]:
    """Gather and scatter of n blocks of S/n. tree: L a + (n-1)/n b S. ring, naive: (n-1)(a + b S/n).

    Over several levels the tree goes level by level: sum of ceil(log2 f) a + (f-1) (ranks inside) b S/n.
    """
    n = ranks(levels)
    one_by_one = star(levels)
    tree: Affine | None = None
    if all_switched(levels):
        tree, inside = Affine(), 1
        for level in levels:
            sent = (level.size - 1) * inside / n
            tree += Affine(log2_ceil(level.size) * level.latency_s, sent / level.sender_bytes_per_s)
            inside *= level.size
    return {"tree": tree, "ring": ring(levels), "naive": one_by_one.of_part(1 / n) if one_by_one else None}


def send(levels: Levels) -> dict[str, Affine | None]:
    """One rank of each group to another: a + b S across the outermost level, whose ports the groups share."""
    outermost = levels[-1]
    return {"direct": Affine(outermost.latency_s, 1 / outermost.sender_bytes_per_s)}


def permute(levels: Levels) -> dict[str, Affine | None]:
    """Every rank to another one at once: a + b S with the bandwidth that is left when all send."""
    slowest = max(1 / level.rank_bytes_per_s for level in levels)
    return {"direct": Affine(slowest_latency_s(levels), slowest)}


def barrier(levels: Levels) -> dict[str, Affine | None]:
    """dissemination: L rounds of empty messages, L a; else an all-reduce of nothing."""
    found: dict[str, Affine | None] = {}
    if all_switched(levels):
        found["dissemination"] = Affine(log2_ceil(ranks(levels)) * slowest_latency_s(levels))
    for name, cost in all_reduce(levels).items():
        found[name] = Affine(cost.latency_s) if cost else None
    return found
