"""Tiers of links, and the levels of a machine that groups of ranks span."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Topology = Literal["switch", "ring", "torus", "hybrid-cube-mesh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """A collective as measured: what it takes when all n ranks are ready, and what it waits for them in a step.

    ready:   latency_s + latency_s_per_rank n + (s_per_byte + s_per_byte_per_rank n) x bytes sent
    waiting: waiting_s_per_rank n

    Bytes sent are those of the ring: (n-1)/n S, twice that for an all-reduce, S for a permute. Ranks wait where devices share
    cores: the last rank comes when its thread has had its turn, and cores idle meanwhile.
    """

    latency_s: float
    s_per_byte: float
    latency_s_per_rank: float = 0.0
    s_per_byte_per_rank: float = 0.0
    waiting_s_per_rank: float = 0.0

    def before_first_byte_s(self, n: int) -> float:
        """Seconds of a collective among n ranks that sends nothing: its latency and its waiting."""
        return self.latency_s + (self.latency_s_per_rank + self.waiting_s_per_rank) * n


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """One level of links.

    Attributes:
        name: What the links are called.
        devices: How many devices one group of this tier holds; None for any number.
        topology: How the members of a group are joined.
        latency_s: Seconds of an empty message.
        bytes_per_s: Bandwidth of one port, one way, before `efficiency`. In the first tier a port belongs to a device, in
            all others to a group of the tier below. In a torus and a hybrid cube mesh it is the bandwidth of one link.
        efficiency: The part of the bandwidth that large messages reach.
        ports: How many ports a group of the tier below has.
        oversubscription: Of a switch: how many times the bandwidth of all these ports is what goes through at once. A rank that
            sends while no other does has its port to itself.
        torus_dimensions: How many dimensions a torus has.
        wraps_at: The least length of a torus dimension whose ends are joined; those of its multiples are too.
        link_counts: `link_counts[i][j]` is the number of links between devices i and j of a hybrid cube mesh.
        fallback_bytes_per_s: The bandwidth between two devices of a hybrid cube mesh without a link.
        measured: For each kind of collective, figures that replace the algorithms for groups within this tier.
    """

    name: str
    devices: int | None
    topology: Topology
    latency_s: float
    bytes_per_s: float
    efficiency: float = 1.0
    ports: int = 1
    oversubscription: float = 1.0
    torus_dimensions: int = 1
    wraps_at: int = 1
    link_counts: tuple[tuple[int, ...], ...] = ()
    fallback_bytes_per_s: float = 0.0
    measured: Mapping[str, MeasuredCollective] = dataclasses.field(default_factory=dict)

    @property
    def sustained_bytes_per_s(self) -> float:
        """Bytes/s that large messages reach through one port or link, one way."""
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimension:
    """One level that a group of ranks spans.

    Attributes:
        tier: The name of the tier.
        topology: How the members are joined.
        size: How many ranks, or groups of ranks, the links of the tier join.
        latency_s: Seconds of an empty message.
        ring_bytes_per_s: What one ring through all ranks of the group gets here.
        rank_bytes_per_s: What each rank gets when all of them send across this level at once.
        sender_bytes_per_s: What a rank gets where one rank of each group sends, as in a tree: groups share the ports of a node.
        link_bytes_per_s: Of a ring or a line of a torus: one link, one way.
        wraps: Of a ring or a line of a torus: whether its ends are joined.
        measured: The tier's measured collectives.
    """

    tier: str
    topology: Topology
    size: int
    latency_s: float
    ring_bytes_per_s: float
    rank_bytes_per_s: float
    sender_bytes_per_s: float
    link_bytes_per_s: float = 0.0
    wraps: bool = False
    measured: Mapping[str, MeasuredCollective] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def switched(self) -> bool:
        """Whether any two ranks may exchange at full speed."""
        return self.topology == "switch"
