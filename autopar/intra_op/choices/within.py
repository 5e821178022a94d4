"""Seconds of what devices exchange while an operation runs, and how many of these the operation waits for.

In: a `Division`, the network, and the seconds that the operation computes. Out: seconds. Of h hops beside the work, each runs
beside one of h + 1 equal parts of it; the rest is waited for. What can go wrong: a compiler that does not start a hop
before the work beside it, as XLA's does on CPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.layouts.moves import Network
from autopar.rules.exchanges import Division, Exchange


@dataclasses.dataclass(frozen=True, eq=False)
class Within:
    """What devices exchange within an operation by each strategy, and the seconds that it waits for that, (strategies,)."""

    divisions: tuple[Division, ...]
    waited_s: np.ndarray


def hop_s(exchange: Exchange, network: Network) -> float:
    """Seconds of one permutation."""
    return network.costs.permute_s(exchange.bytes, exchange.axes)


def sent_s(exchanges: Sequence[Exchange], network: Network) -> float:
    """Seconds of all permutations, one after the other."""
    return sum(exchange.count * hop_s(exchange, network) for exchange in exchanges)


def waited_s(division: Division, network: Network, work_s: float) -> float:
    """Seconds of permutations that an operation waits for which computes for `work_s`."""
    beside = [e for e in division.exchanges if e.is_beside_work]
    alone = [e for e in division.exchanges if not e.is_beside_work]
    hops = max((e.count for e in beside), default=0)
    return sent_s(alone, network) + max(0.0, sent_s(beside, network) - work_s * hops / (hops + 1))
