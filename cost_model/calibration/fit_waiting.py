"""What collectives wait for ranks that share cores: from samples of waiting to figures of a cluster, and back.

waiting      w n, beyond the latency of a collective among n ready ranks    w
merged       m k (latency + waiting) for k all-reduces at once              m
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from autopar.cost_model.calibration.waiting import Waited, are_steady
from autopar.cost_model.machine import Cluster
from autopar.cost_model.tiers import Tier


def add_waiting(cluster: Cluster, samples: Sequence[Waited]) -> Cluster:
    """Make the collectives of a cluster wait for ranks that share cores, as these samples did.

    C(n, k) is the mean over the grains of what k all-reduces at once add among n ranks; with the latency a + a1 n of an
    all-reduce among ready ranks, w = sum_n n (C(n, 1) - a - a1 n) / sum_n n^2, the least squares of a line through zero, and
    m = C(n, k) / (k C(n, 1)) for all ranks and the k that was merged. Without samples, or if other programs ran beside them, the
    cluster is returned as it is.
    """
    if not are_steady(samples):
        return cluster
    latency = cluster.tiers[0].measured["all-reduce"]
    of: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        of.setdefault((sample.ranks, sample.merged), []).append(sample.seconds)
    mean = {key: statistics.fmean(seconds) for key, seconds in of.items()}
    beyond = {n: seconds - latency.before_first_byte_s(n) for (n, merged), seconds in mean.items() if merged == 1}
    waiting_s = max(0.0, sum(n * seconds for n, seconds in beyond.items()) / sum(n * n for n in beyond))
    ranks, merged = max(mean, key=lambda key: key[1])
    part = mean[ranks, merged] / (merged * mean[ranks, 1])
    return _set_waiting(dataclasses.replace(cluster, all_reduce_latency=min(1.0, max(0.0, part))), waiting_s)


def remove_waiting(cluster: Cluster) -> Cluster:
    """Make a cluster as a clock of processor seconds sees it: ranks that wait use no core."""
    return _set_waiting(cluster, 0.0)


def _set_waiting(cluster: Cluster, waiting_s_per_rank: float) -> Cluster:
    def change(tier: Tier) -> Tier:
        measured = {
            kind: dataclasses.replace(figures, waiting_s_per_rank=waiting_s_per_rank)
            for kind, figures in tier.measured.items()
        }
        return dataclasses.replace(tier, measured=measured)

    return dataclasses.replace(cluster, tiers=tuple(map(change, cluster.tiers)))
