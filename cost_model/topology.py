"""From tiers of links and a logical mesh to the levels of the machine that each mesh axis crosses.

In: the tiers of a cluster, the sizes of a row-major mesh. Out: for each axis its `Dimension`s from the inside out, each with
the bandwidth that the axis sees there while all other groups along the same axis communicate too, as they do in an SPMD
program. The idea: with stride s (the product of the sizes after it) an axis of n ranks has m = n or G // s ranks in a group of
G devices; the remaining G / m devices of that group belong to other groups of the axis and share its ports.

Ports, for a group of G devices with p ports of b bytes/s: c = G / m rings leave it, so each has p/c ports, and at most one port
(or p/G, if there are more ports than devices) for each of its m ranks. When every rank sends at once, each has p b / G.

What can go wrong: sizes that do not divide the groups. Then the largest common divisor lies inside, the rest outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

Topology = Literal["switch", "ring", "torus", "hybrid-cube-mesh"]


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """A collective as measured: what it takes when all n ranks are ready, and what it waits for them in a step.

    ready:   latency_s + latency_s_per_rank n + (s_per_byte + s_per_byte_per_rank n) x bytes sent
    waiting: waiting_s_per_rank n

    Bytes sent are those of the ring: (n-1)/n S, twice that for an all-reduce, S for a permute. Ranks wait where devices share
    cores: the last one comes when its thread has had its turn, and cores idle meanwhile.
    """

    latency_s: float
    s_per_byte: float
    latency_s_per_rank: float = 0.0
    s_per_byte_per_rank: float = 0.0
    waiting_s_per_rank: float = 0.0

    def before_first_byte_s(self, n: int) -> float:
        """Seconds of a collective among n ranks that sends nothing: its latency and its waiting."""
        return self.latency_s + (self.latency_s_per_rank + self.waiting_s_per_rank) * n


@dataclasses.dataclass(frozen=True)
class Tier:
    """One level of links. `devices`: how many one group of this tier holds; None for any number.

    `bytes_per_s`: of one port, one way, before `efficiency`; a port belongs to a device in the first tier, and to a group of the
    tier below, which has `ports` of them, in all others. In a torus and a hybrid cube mesh it is that of one link.
    `torus_dimensions` says how many dimensions a torus has, `wraps_at` the least length whose ends are joined (and its
    multiples). `link_counts[i][j]` is the number of links between devices i and j of a hybrid cube mesh; pairs without one
    use `fallback_bytes_per_s`. `measured` replaces the algorithms for groups that lie within this tier.
    """

    name: str
    devices: int | None
    topology: Topology
    latency_s: float
    bytes_per_s: float
    efficiency: float = 1.0
    ports: int = 1
    torus_dimensions: int = 1
    wraps_at: int = 1
    link_counts: tuple[tuple[int, ...], ...] = ()
    fallback_bytes_per_s: float = 0.0
    measured: Mapping[str, MeasuredCollective] = dataclasses.field(default_factory=dict)

    @property
    def sustained_bytes_per_s(self) -> float:
        """Bytes/s that large messages reach through one port or link, one way."""
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One level that a group of ranks spans: `size` ranks, or groups of ranks, joined by links of one tier.

    `ring_bytes_per_s`: what one ring through all ranks of the group gets here. `rank_bytes_per_s`: what each rank gets when
    all of them send across this level at once. `sender_bytes_per_s`: what a rank gets that sends alone. `link_bytes_per_s` and
    `wraps` describe a ring or a line of a torus: one link one way, and whether its ends are joined.
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


def levels_of(tiers: Sequence[Tier], mesh_shape: Sequence[int], axes: Sequence[int]) -> tuple[Dimension, ...]:
    """The levels that groups along `axes` together cross on a row-major mesh, from the inside out; none for size 1."""
    total = math.prod(mesh_shape)
    runs = _runs(mesh_shape, axes)
    inside = [1] * len(runs)
    levels: list[Dimension] = []
    below = 1
    for number, tier in enumerate(tiers):
        outermost = number == len(tiers) - 1
        group = total if outermost or tier.devices is None else min(tier.devices, total)
        ranks_below = math.prod(inside)
        for run, (size, stride) in enumerate(runs):
            left, apart = size // inside[run], stride * inside[run]
            part = left if outermost else _part_inside(left, apart, group)
            if part > 1:
                levels += _within(tier, part, apart, group=group, below=below, inside=ranks_below)
            inside[run] *= part
        below = group
    return _joined(levels)


def check_size(tiers: Sequence[Tier], mesh_shape: Sequence[int], cluster: str) -> None:
    """ValueError if the mesh has more devices than the outermost tier joins."""
    total, most = math.prod(mesh_shape), tiers[-1].devices
    if most is not None and total > most:
        raise ValueError(
            f"the mesh {tuple(mesh_shape)} needs {total} devices, cluster {cluster!r} has at most {most} (its outermost tier "
            f"{tiers[-1].name!r}); use a smaller mesh, or add a tier that joins such machines"
        )


def _runs(mesh_shape: Sequence[int], axes: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of the axes, innermost first; neighbouring axes count as one, and axes of size 1 not at all."""
    runs: list[tuple[int, int]] = []
    stride = 1
    for axis in reversed(range(len(mesh_shape))):
        size = mesh_shape[axis]
        if axis in axes and size > 1:
            if runs and runs[-1][0] * runs[-1][1] == stride:
                runs[-1] = (runs[-1][0] * size, runs[-1][1])
            else:
                runs.append((size, stride))
        stride *= size
    return runs


def _part_inside(size: int, stride: int, group: int) -> int:
    """How many of `size` members, `stride` devices apart, lie in a group of devices."""
    return size if size * stride <= group else math.gcd(size, max(1, group // stride))


def _joined(levels: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Neighbouring levels of one switch are one level: any of its ports reaches any other."""
    joined: list[Dimension] = []
    for level in levels:
        if joined and level.switched and joined[-1].tier == level.tier:
            joined[-1] = dataclasses.replace(joined[-1], size=joined[-1].size * level.size)
        else:
            joined.append(level)
    return tuple(joined)


def _within(tier: Tier, size: int, stride: int, *, group: int, below: int, inside: int) -> list[Dimension]:
    """The dimensions of `size` members, `stride` devices apart, in one tier's group; `inside` ranks lie in each `below`."""
    if tier.topology in ("torus", "ring"):
        return _torus_levels(tier, size, max(1, stride // below), group // below)
    if tier.topology == "hybrid-cube-mesh":
        return [_cube_level(tier, size, stride)]
    ring, each, sender = _port_bandwidths(tier, below, inside)
    return [Dimension(tier.name, "switch", size, tier.latency_s, ring, each, sender, measured=tier.measured)]


def _port_bandwidths(tier: Tier, below: int, inside: int) -> tuple[float, float, float]:
    """Bytes/s out of a group of `below` devices: of one ring, of each rank when all send, of one rank that sends alone."""
    port = tier.sustained_bytes_per_s
    rings = max(1.0, below / inside)
    alone = max(1.0, tier.ports / below)
    return port * min(tier.ports / rings, inside * alone), port * tier.ports / below, port * alone


def _cube_level(tier: Tier, size: int, stride: int) -> Dimension:
    """A group's rings in a hybrid cube mesh: as many, one way, as its least connected member has links inside the group.

    Each undirected cycle takes two links of a member and makes two rings, one in each direction.
    """
    counts = tier.link_counts
    span = size * stride
    starts = [base + offset for base in range(0, len(counts), span) for offset in range(stride)]
    groups = [
        [start + stride * i for i in range(size)] for start in starts if start + stride * (size - 1) < len(counts)
    ]
    rings = min(min(sum(counts[i][j] for j in members) for i in members) for members in groups)
    bandwidth = tier.sustained_bytes_per_s * rings if rings else tier.fallback_bytes_per_s * tier.efficiency
    return Dimension(
        tier.name, tier.topology, size, tier.latency_s, bandwidth, bandwidth, bandwidth, measured=tier.measured
    )


def torus_shape(devices: int, dimensions: int) -> tuple[int, ...]:
    """The most even torus of `devices` in so many dimensions, the shortest first: 64 in 3 is (4, 4, 4), 32 is (2, 4, 4)."""
    if dimensions == 1:
        return (devices,)
    divisors = [d for d in range(1, devices + 1) if devices % d == 0 and d**dimensions <= devices]
    shapes = [(d, *torus_shape(devices // d, dimensions - 1)) for d in divisors]
    return min(shapes, key=lambda shape: (max(shape) / min(shape), shape))


def _torus_levels(tier: Tier, size: int, stride: int, group: int) -> list[Dimension]:
    """Rings and lines of a torus; `spacing` interleaved groups share a ring, so each has that part of its links."""
    levels: list[Dimension] = []
    inside, below = 1, 1
    for length in reversed(torus_shape(group, 1 if tier.topology == "ring" else tier.torus_dimensions)):
        part = _part_inside(size // inside, stride * inside, below * length)
        if part > 1:
            spacing = max(1, stride * inside // below)
            wraps = part * spacing == length and length > 2 and length % tier.wraps_at == 0
            levels.append(_ring_level(tier, part, spacing, wraps=wraps))
        inside, below = inside * part, below * length
    return levels


def _ring_level(tier: Tier, size: int, spacing: int, *, wraps: bool) -> Dimension:
    """A ring, whose two directions both carry, or a line, whose end has one link only."""
    link = tier.sustained_bytes_per_s / spacing
    each = 2 * link if wraps else link
    latency_s = tier.latency_s * spacing
    return Dimension(
        tier.name, "torus", size, latency_s, each, each, tier.sustained_bytes_per_s, link, wraps, tier.measured
    )
