"""Plans how one array moves from one mesh to another: pure data, no device is touched.

In: the `Tiling` of each side and the `Links`. Out: a `ReshardPlan`. The idea: a tile that several devices of one node need
crosses the slow link once, cut into shares, one per device, and is gathered over the fast links behind it. What a sender
holds beyond a box is cut off before. The plan that moves fewest bytes over slow links wins; among those within
`Tuning.slack_bytes` of it, the one with least work beside the copy.

What can go wrong: replicas that no set of mesh axes joins within a node. Each then receives its tile over the slow link,
and the plan's `slow_bytes` exceed its lower bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from autopar.runtime.resharding.balance import balance_senders, nearest_holders
from autopar.runtime.resharding.box import Box, index_along, intersect, part_of, volume
from autopar.runtime.resharding.links import Links, lower_bound, replica_axes
from autopar.runtime.resharding.plan import BoxSend, Cut, ReshardPlan
from autopar.runtime.resharding.tiling import Tiling


def plan_reshard(
    shape: Sequence[int],
    itemsize: int,
    source: Tiling,
    target: Tiling,
    *,
    links: Links | None = None,
) -> ReshardPlan:
    """Find the plan with fewest bytes over slow links, and among nearly equal ones with least work beside the copy.

    In the candidates, `between` is the target's tiling or shares of its tiles along one of the dimensions. Each comes by
    boxes cut and joined, and by a copy of whole tiles where the source already holds these in the same order.

    Args:
        shape: The array's shape.
        itemsize: Bytes of an element.
        source: The box that each device holds.
        target: The box that each device is to hold.
        links: Which devices share a node. By default the target mesh is one node, and all devices outside it another.
    """
    planner = _Planner(
        shape=tuple(shape),
        itemsize=itemsize,
        source=source,
        target=target,
        links=links or Links.between(source, target),
    )
    candidates = list(planner.candidates())
    least = min(plan.slow_bytes for plan in candidates)
    return min(
        (plan for plan in candidates if plan.slow_bytes <= least + planner.links.tuning.slack_bytes),
        key=planner.work_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planner:
    """One call of `plan_reshard`."""

    shape: tuple[int, ...]
    itemsize: int
    source: Tiling
    target: Tiling
    links: Links

    def work_bytes(self, plan: ReshardPlan) -> float:
        """Return the cost of a plan beside its bytes over the slow link, in bytes over that link."""
        tuning = self.links.tuning
        return (
            plan.fast_bytes * tuning.fast_ratio
            + plan.local_bytes * tuning.local_ratio
            + plan.calls * tuning.call_bytes
            + (len(plan.sends) if plan.kind == "tiles" else 1) * tuning.message_bytes
        )

    def candidates(self) -> Iterator[ReshardPlan]:
        """Return all plans worth comparing."""
        for between, cuts in self._betweens():
            if between.boxes == self.source.boxes:
                yield self._plan("copy", between, cuts, _copy_sends(self.source, between))
            yield self._plan("tiles", between, cuts, self._balanced_sends(between))

    def _betweens(self) -> Iterator[tuple[Tiling, tuple[Cut, ...]]]:
        """Return the target's tiles, and their shares: along one dimension, or those that the source holds in this order."""
        yield self.target, ()
        axes, rank = replica_axes(self.target, self.links), len(self.shape)
        for dims in itertools.product(range(rank), repeat=len(axes)) if axes else ():
            by_dim = {
                dim: tuple(axis for axis, at in zip(axes, dims, strict=True) if at == dim) for dim in sorted(set(dims))
            }
            boxes, cuts = self.target.boxes, []
            for dim, together in by_dim.items():
                boxes, chunk = self._cut(boxes, dim, together)
                cuts.append(Cut(dim, together, chunk))
            if len(cuts) == 1 or boxes == self.source.boxes:
                yield dataclasses.replace(self.target, boxes=boxes), tuple(cuts)

    def _cut(self, boxes: tuple[Box, ...], dim: int, axes: tuple[int, ...]) -> tuple[tuple[Box, ...], int]:
        """Cut boxes along a dimension into one part per device along mesh axes. Returns the parts and the longest length."""
        mesh_shape = self.target.mesh_shape
        parts = math.prod(mesh_shape[axis] for axis in axes)
        cut = []
        for place, box in zip(np.ndindex(*mesh_shape), boxes, strict=True):
            cut.append((*box[:dim], part_of(box[dim], index_along(place, axes, mesh_shape), parts), *box[dim + 1 :]))
        return tuple(cut), -(-max(stop - start for start, stop in (box[dim] for box in boxes)) // parts)

    def _balanced_sends(self, between: Tiling) -> list[BoxSend]:
        return balance_senders(_direct_sends(self.source, between, self.links), self.source.holders, self.links)

    def _plan(
        self, kind: Literal["copy", "tiles"], between: Tiling, cuts: tuple[Cut, ...], sends: list[BoxSend]
    ) -> ReshardPlan:
        slow = sum(volume(send.box) for send in sends if self.links.is_slow(send.sender, send.receiver))
        fast = sum(volume(send.box) for send in sends if send.sender != send.receiver) - slow
        fast += _missing(between.boxes, self.target.boxes)
        bound = lower_bound(self.source, self.target, self.links)
        return ReshardPlan(
            kind=kind,
            shape=self.shape,
            itemsize=self.itemsize,
            source=self.source,
            target=self.target,
            between=between,
            cuts=cuts,
            sends=tuple(sends),
            slow_bytes=slow * self.itemsize,
            fast_bytes=fast * self.itemsize,
            lower_bound_bytes=bound * self.itemsize,
        )


def _missing(held: Sequence[Box], wanted: Sequence[Box]) -> int:
    """Count the elements that devices want and do not hold, over all devices."""
    total = 0
    for have, want in zip(held, wanted, strict=True):
        common = intersect(have, want)
        total += volume(want) - (volume(common) if common is not None else 0)
    return total


def _copy_sends(source: Tiling, between: Tiling) -> list[BoxSend]:
    """Send every device's whole tile to the device of the same number."""
    pairs = zip(source.devices, between.devices, between.boxes, strict=True)
    return [BoxSend(sender, receiver, box) for sender, receiver, box in pairs if volume(box)]


def _direct_sends(source: Tiling, between: Tiling, links: Links) -> list[BoxSend]:
    """Send every receiver the boxes that it needs, each from the nearest holder: itself, its node, or the first."""
    sends = []
    for receiver, wanted in zip(between.devices, between.boxes, strict=True):
        for held, holders in source.holders.items():
            box = intersect(held, wanted)
            if box is not None:
                sends.append(BoxSend(nearest_holders(receiver, holders, links)[0], receiver, box))
    return sends
