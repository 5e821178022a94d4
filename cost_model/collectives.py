"""Seconds of a collective: latency plus bytes over bandwidth, along one or several mesh axes.

In: bytes held by one device, the sizes of the mesh axes taken part in, and the link of each. Out: seconds. With n ranks,
S bytes per rank, latency a per collective and b seconds per byte (ring or halving-doubling bandwidth terms, yardstick
README):

    all-reduce       a + 2 b S (n-1)/n          S: operand
    reduce-scatter   a +   b S (n-1)/n          S: operand (the larger side)
    all-gather       a +   b S (n-1)/n          S: result (the larger side)
    all-to-all       a +   b S (n-1)/n          S: operand
    permute          a +   b S                  S: operand

Over several axes a reduction is hierarchical (reduce-scatter inside, all-reduce of the rest across, all-gather inside),
in the cheapest order of axes; where the cluster does not reduce jointly, each axis is paid in full.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class AxisLink:
    """What a collective along one mesh axis sees: latency (s) and inverse bandwidth (s/byte)."""

    alpha_s: float
    beta_s_per_byte: float


@dataclasses.dataclass(frozen=True)
class MeshCosts:
    """Collective times on a logical mesh of `sizes`, one link per axis.

    `all_reduce_latency`: the part of its latency that an all-reduce still pays where the compiler merges all-reduces.
    """

    sizes: tuple[int, ...]
    links: tuple[AxisLink, ...]
    joint_reductions: bool = True
    all_reduce_latency: float = 1.0

    def all_reduce_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to all-reduce `operand_bytes` per device over the ranks of `axes`."""
        merged_s = (1.0 - self.all_reduce_latency) * max(self.links[axis].alpha_s for axis in axes)
        return self._reduction_s(operand_bytes, axes, passes=2.0) - merged_s

    def reduce_scatter_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to reduce-scatter `operand_bytes` per device over the ranks of `axes`."""
        return self._reduction_s(operand_bytes, axes, passes=1.0)

    def all_gather_s(self, result_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to all-gather to `result_bytes` per device over the ranks of `axes`."""
        return self._reduction_s(result_bytes, axes, passes=1.0)

    def all_to_all_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds for every rank of `axes` to exchange `operand_bytes` per device with the others."""
        total = 0.0
        for axis in axes:
            n, link = self.sizes[axis], self.links[axis]
            total += link.alpha_s + link.beta_s_per_byte * operand_bytes * (n - 1) / n
        return total

    def permute_s(self, operand_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to send `operand_bytes` from each device to one other, somewhere along `axes`."""
        alpha = max(self.links[axis].alpha_s for axis in axes)
        beta = max(self.links[axis].beta_s_per_byte for axis in axes)
        return alpha + beta * operand_bytes

    def _reduction_s(self, full_bytes: float, axes: Sequence[int], *, passes: float) -> float:
        if not self.joint_reductions:
            return sum(self._one_axis_s(full_bytes, axis, passes) for axis in axes)
        orders = itertools.permutations(axes) if len(axes) <= 3 else [tuple(axes)]
        return min(self._hierarchical_s(full_bytes, order, passes) for order in orders)

    def _hierarchical_s(self, full_bytes: float, order: Sequence[int], passes: float) -> float:
        alpha = max(self.links[axis].alpha_s for axis in order)
        seconds = alpha
        for axis in order:
            n = self.sizes[axis]
            seconds += passes * self.links[axis].beta_s_per_byte * full_bytes * (n - 1) / n
            full_bytes /= n
        return seconds

    def _one_axis_s(self, full_bytes: float, axis: int, passes: float) -> float:
        n, link = self.sizes[axis], self.links[axis]
        return link.alpha_s + passes * link.beta_s_per_byte * full_bytes * (n - 1) / n
