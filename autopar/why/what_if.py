"""What more memory or a faster link would buy: the step planned again on a better machine.

In: the settings and the step of a plan. Out: a `PricedPlan` for 1 GiB more memory per device, and for each tier of links
between the devices with twice the bandwidth. What was open is open again, so each price is that of the best plan on that
machine. What can go wrong: a search that the clock ends may find less on the better machine; its row says that it ended early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rich.table import Table

from autopar.cost_model.hardware import Cluster
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.settings import Settings, choose_cluster, count_devices, make_request
from autopar.why.priced import PricedPlan, asked_of, price_each, priced_table, table_text

MORE_BYTES = 2**30
_TIMES = 2


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """What a better machine would buy; prints as a table."""

    plan: Plan | PipelinePlan
    rows: tuple[PricedPlan, ...]

    @property
    def table(self) -> Table | str:
        """The table, or why there is none."""
        if not self.rows:
            return "There is no memory limit and no link between devices: nothing to ask for."
        return priced_table("What a better machine would buy, planned on it", self.plan, self.rows, this="as it is")

    def __str__(self) -> str:
        """The table as text."""
        return self.table if isinstance(self.table, str) else table_text(self.table)

    def __repr__(self) -> str:
        """The same, for interactive use."""
        return str(self)


def what_if(plan: Plan | PipelinePlan, asked: tuple[object, object] | None) -> WhatIf:
    """Plan a plan's step on better machines. Raises PlanError if the plan knows no step."""
    settings, traced = asked_of(asked)
    return WhatIf(plan, price_each(better_machines(settings), traced))


def better_machines(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """What is better, with the settings that say so: memory, then the tiers of links from the inside out."""
    limit = make_request(settings).memory_limit_bytes
    if limit is not None:
        more = dataclasses.replace(settings, memory_limit_bytes=limit + MORE_BYTES)
        yield "1 GiB more memory per device", more
    cluster = choose_cluster(settings)
    for number in reached_tiers(cluster, count_devices(settings)):
        faster = dataclasses.replace(settings, cluster=with_faster_tier(cluster, number))
        yield f"{_TIMES}x bandwidth of {cluster.tiers[number].name}", faster


def reached_tiers(cluster: Cluster, devices: int) -> list[int]:
    """The numbers of the tiers that so many neighbouring devices have links of."""
    below = [1, *(tier.devices or devices for tier in cluster.tiers)]
    return [number for number in range(len(cluster.tiers)) if devices > below[number]]


def with_faster_tier(cluster: Cluster, number: int) -> Cluster:
    """The cluster with twice the bandwidth in one tier; what was measured there takes half the seconds per byte."""
    tiers, tier = list(cluster.tiers), cluster.tiers[number]
    measured = {
        kind: dataclasses.replace(
            one, s_per_byte=one.s_per_byte / _TIMES, s_per_byte_per_rank=one.s_per_byte_per_rank / _TIMES
        )
        for kind, one in tier.measured.items()
    }
    tiers[number] = dataclasses.replace(
        tier,
        bytes_per_s=_TIMES * tier.bytes_per_s,
        fallback_bytes_per_s=_TIMES * tier.fallback_bytes_per_s,
        measured=measured,
    )
    return dataclasses.replace(cluster, tiers=tuple(tiers))
