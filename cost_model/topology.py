"""From tiers of links and a logical mesh to the levels of the machine that each mesh axis crosses.

In: the tiers of a cluster, the sizes of a row-major mesh. Out: for each axis its `Dimension`s from the inside out, each with
the bandwidth that the axis sees there while all other groups along the same axis communicate too, as they do in an SPMD
program. With stride s (the product of the sizes after it) an axis of n ranks has m = n or G // s ranks in a group of G
devices. The remaining G / m devices of that group belong to other groups of the axis and share its ports.

Ports, for a group of G devices with p ports of b bytes/s: c = G / m rings leave it, so each has p/c ports, and at most one port
(or p/G, if there are more ports than devices) for each of its m ranks. When every rank sends at once, each has p b / G. When one
rank of each group does, as in a tree, it has p/c ports, and at most one (or p/G).

What can go wrong: sizes that do not divide the groups. Then the largest common divisor lies inside, the rest outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cost_model.tiers import Dimension, Tier


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
                group_of = _Group(devices=group, below=below, ranks_below=ranks_below)
                levels += _levels_within(tier, part, apart, group_of)
            inside[run] *= part
        below = group
    return _join_switches(levels)


def shape_that_crosses(tiers: Sequence[Tier], source: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
    """A row-major mesh whose groups along its first axis cross the same tier as pairs of devices of two meshes do.

    It has as many groups side by side as pairs send at once, or a few more where those do not divide the devices of a group of
    the tier below.
    """
    devices, below = min(len(source), len(target)), 1
    for tier in tiers:
        if tier.devices is None or len({device // tier.devices for ends in (source, target) for device in ends}) == 1:
            break
        below = tier.devices
    if devices >= below:
        return (2, math.ceil(devices / below) * below)
    columns = next(n for n in range(devices, below + 1) if below % n == 0)
    return (2 * below // columns, columns)


def link_of_pairs(tiers: Sequence[Tier], pairs: Sequence[tuple[int, int]]) -> Dimension | None:
    """The slowest link between two devices of a pair in a hybrid cube mesh; None if some do not lie in one such machine."""
    tier, size = tiers[0], tiers[0].devices
    if tier.topology != "hybrid-cube-mesh" or size is None or len({end // size for pair in pairs for end in pair}) != 1:
        return None
    counts = [tier.link_counts[one % size][other % size] for one, other in pairs]
    links = min(counts)
    bandwidth = tier.sustained_bytes_per_s * links if links else tier.fallback_bytes_per_s * tier.efficiency
    return _cube_dimension(tier, 2, bandwidth)


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


def _join_switches(levels: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Neighbouring levels of one switch are one level: any of its ports reaches any other."""
    joined: list[Dimension] = []
    for level in levels:
        if joined and level.switched and joined[-1].tier == level.tier:
            joined[-1] = dataclasses.replace(joined[-1], size=joined[-1].size * level.size)
        else:
            joined.append(level)
    return tuple(joined)


@dataclasses.dataclass(frozen=True)
class _Group:
    """A group of one tier: its devices, those of a group below it, and how many ranks lie in each of these."""

    devices: int
    below: int
    ranks_below: int


def _levels_within(tier: Tier, size: int, stride: int, group: _Group) -> list[Dimension]:
    """The levels of `size` members, `stride` devices apart, within one group of a tier."""
    if tier.topology in ("torus", "ring"):
        return _torus_levels(tier, size, stride=max(1, stride // group.below), group=group.devices // group.below)
    if tier.topology == "hybrid-cube-mesh":
        return [_cube_level(tier, size, stride)]
    ring, each, sender = _port_bandwidths(tier, group.below, group.ranks_below)
    level = Dimension(
        tier=tier.name,
        topology="switch",
        size=size,
        latency_s=tier.latency_s,
        ring_bytes_per_s=ring,
        rank_bytes_per_s=each,
        sender_bytes_per_s=sender,
        measured=tier.measured,
    )
    return [level]


def _port_bandwidths(tier: Tier, below: int, inside: int) -> tuple[float, float, float]:
    """Bytes/s out of a group of `below` devices: of one ring, of each rank when all send, of one sender of each ring."""
    port, at_once = tier.sustained_bytes_per_s, tier.ports / tier.oversubscription
    rings = max(1.0, below / inside)
    alone = max(1.0, tier.ports / below)
    return port * min(at_once / rings, inside * alone), port * at_once / below, port * min(at_once / rings, alone)


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
    return _cube_dimension(tier, size, bandwidth)


def _cube_dimension(tier: Tier, size: int, bandwidth: float) -> Dimension:
    return Dimension(
        tier=tier.name,
        topology=tier.topology,
        size=size,
        latency_s=tier.latency_s,
        ring_bytes_per_s=bandwidth,
        rank_bytes_per_s=bandwidth,
        sender_bytes_per_s=bandwidth,
        measured=tier.measured,
    )


def torus_shape(devices: int, dimensions: int) -> tuple[int, ...]:
    """The most even torus of `devices` in so many dimensions, the shortest first: 64 in 3 is (4, 4, 4), 32 is (2, 4, 4)."""
    if dimensions == 1:
        return (devices,)
    divisors = [d for d in range(1, devices + 1) if devices % d == 0 and d**dimensions <= devices]
    shapes = [(d, *torus_shape(devices // d, dimensions - 1)) for d in divisors]
    return min(shapes, key=lambda shape: (max(shape) / min(shape), shape))


def _torus_levels(tier: Tier, size: int, *, stride: int, group: int) -> list[Dimension]:
    """Rings and lines of a torus. `spacing` interleaved groups share a ring, so each has that part of its links."""
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
    return Dimension(
        tier=tier.name,
        topology="torus",
        size=size,
        latency_s=tier.latency_s * spacing,
        ring_bytes_per_s=each,
        rank_bytes_per_s=each,
        sender_bytes_per_s=tier.sustained_bytes_per_s,
        link_bytes_per_s=link,
        wraps=wraps,
        measured=tier.measured,
    )
