"""The algorithms of each collective on the levels of a machine, as seconds of bytes.

In: the levels of the machine that a group of ranks spans, from the inside out (`tiers.Dimension`). Out: for each algorithm an
`Affine`, seconds as latency plus a time per byte, so that the cheapest for a size is a minimum over a few lines.

Letters: n ranks; a seconds per message; b seconds per byte, 1/bandwidth; L = ceil(log2 n); S bytes: what each rank holds
before an all-reduce, reduce-scatter, all-to-all, broadcast, reduce, send or permute, what it holds after an all-gather, what
the root holds in a gather or scatter. A message takes a + b x bytes and keeps its link that long.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005) for ring, tree,
butterfly, pairwise and Bruck; Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan" (2009) for the double tree; Cho et al., "BlueConnect" (2019) for hierarchies of rings.
`tests/cost_model/event_simulation.py` plays the same algorithms message by message.

What can go wrong: an algorithm that a topology cannot run at full speed, such as a butterfly on a ring. It is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from autopar.cost_model.affine import Affine, Levels, ranks
from autopar.cost_model.exchanges import all_to_all
from autopar.cost_model.reductions import all_reduce, one_pass
from autopar.cost_model.rooted import barrier, broadcast, gather_blocks, permute, send

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

FOR_COMPARISON = frozenset({"naive", "parameter server"})
"""Algorithms that are priced and never chosen."""


def algorithms_for(kind: Kind, levels: Levels) -> dict[str, Affine]:
    """Price every algorithm of a collective that these levels can run, by name.

    A group of one rank needs no algorithm: its one entry is "nothing". Groups within a tier whose collective was measured
    have "measured" alone.
    """
    if not levels:
        return {"nothing": Affine()}
    measured = levels[0].measured.get(kind)
    if measured is not None and all(level.tier == levels[0].tier for level in levels):
        n = ranks(levels)
        per_byte = (measured.s_per_byte + measured.s_per_byte_per_rank * n) * bytes_sent(kind, n)
        return {"measured": Affine(measured.before_first_byte_s(n), per_byte)}
    return {name: cost for name, cost in _TABLE[kind](levels).items() if cost is not None}


def bytes_sent(kind: Kind, n: int) -> float:
    """Bytes that each rank sends in the ring algorithm, per byte of S: the bus factor of nccl-tests."""
    return {
        "all-reduce": 2.0 * (n - 1) / n,
        "collective-permute": 1.0,
        "send": 1.0,
        "broadcast": 1.0,
        "reduce": 1.0,
    }.get(kind, (n - 1) / n)


_TABLE: Mapping[Kind, Callable[[Levels], dict[str, Affine | None]]] = {
    "all-gather": one_pass,
    "all-reduce": all_reduce,
    "all-to-all": all_to_all,
    "barrier": barrier,
    "broadcast": broadcast,
    "collective-permute": permute,
    "gather": gather_blocks,
    "reduce": broadcast,
    "reduce-scatter": one_pass,
    "scatter": gather_blocks,
    "send": send,
}
