"""What is sent to whom when an array moves from one mesh to another: pure data, no device is touched.

In: the `Tiling` of each side and the `Links`. Out: a `ReshardPlan`: the boxes that the target devices hold right after the copy
(`between`), who sends which box to whom, and the bytes this costs. The idea: a tile that several devices of one node need
crosses the slow link once, cut into shares, one per device, and is gathered over the fast links behind it; what a sender
holds too much of is cut off before. The plan that moves fewest bytes over the slow link wins, and among those within
`Links.slack_bytes` of it the one with least work beside the copy. What can go wrong: replicas that no set of mesh axes joins
within a node; each then receives its tile over the slow link, and the plan's `slow_bytes` exceed its lower bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from autopar.runtime.resharding.tiles import (
    Box,
    Links,
    Tiling,
    extent,
    index_along,
    intersect,
    lower_bound,
    part_of,
    volume,
)


@dataclasses.dataclass(frozen=True)
class Send:
    """One box from one device to another; from a device to itself it is a copy that crosses no link."""

    sender: int
    receiver: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Cut:
    """Each target tile is cut along `dim` into one part of `chunk` (the last ones may be shorter) per device along `axes`."""

    dim: int
    axes: tuple[int, ...]
    chunk: int


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """How one array moves, and the bytes that this costs.

    `kind`: "copy" sends every device's whole tile to the device of the same number. "tiles" sends the boxes in `sends`, cut
    from the source's tiles and joined by the receivers. Either leaves `between` on the target mesh: the target's tiles, or
    with `cuts` shares of them that all-gathers on the target mesh complete.
    """

    kind: Literal["copy", "tiles"]
    shape: tuple[int, ...]
    itemsize: int
    source: Tiling
    target: Tiling
    between: Tiling
    cuts: tuple[Cut, ...]
    sends: tuple[Send, ...]
    slow_bytes: int
    fast_bytes: int
    lower_bound_bytes: int

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each device sends over any link, not counting relayouts."""
        return self._bytes_by("sender")

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes that each device receives over any link, not counting relayouts."""
        return self._bytes_by("receiver")

    @property
    def sender_imbalance(self) -> float:
        """Bytes of the busiest sender over what it could be spared; 1 is as good as any assignment.

        No sender need do less than a fair share among all source devices, nor less than the busiest receiver takes in:
        the transfer does not end before that one is done.
        """
        sent, received = self.sent_bytes, self.received_bytes
        if not sent:
            return 1.0
        spared = max(sum(sent.values()) / len(self.source.devices), max(received.values()))
        return max(1.0, max(sent.values()) / spared)

    @property
    def calls(self) -> int:
        """Calls into the runtime that one transfer makes."""
        return 1 + bool(self.cuts) + (self._cutters + self._joiners) * (self.kind == "tiles")

    @property
    def local_bytes(self) -> int:
        """Bytes that devices copy to cut, join and gather; a gather along the leading dimension needs no copy."""
        inner = [cut for cut in self.cuts if math.prod(extent(self.target.boxes[0])[: cut.dim]) > 1]
        elements = len(inner) * sum(volume(box) for box in self.target.boxes)
        if self.kind == "tiles":
            for ends in (self._cut_off, self._joined):
                elements += sum(volume(send.box) for send in ends)
        return elements * self.itemsize

    @property
    def _cutters(self) -> int:
        return len({send.sender for send in self._cut_off})

    @property
    def _joiners(self) -> int:
        return len({send.receiver for send in self._joined})

    @property
    def _cut_off(self) -> list[Send]:
        tile = dict(zip(self.source.devices, self.source.boxes, strict=True))
        return [send for send in self.sends if send.box != tile[send.sender]]

    @property
    def _joined(self) -> list[Send]:
        tile = dict(zip(self.between.devices, self.between.boxes, strict=True))
        return [send for send in self.sends if send.box != tile[send.receiver]]

    def _bytes_by(self, end: Literal["sender", "receiver"]) -> dict[int, int]:
        total: dict[int, int] = defaultdict(int)
        for send in self.sends:
            if send.sender != send.receiver:
                total[getattr(send, end)] += volume(send.box) * self.itemsize
        return dict(total)


def plan_reshard(
    shape: Sequence[int],
    itemsize: int,
    source: Tiling,
    target: Tiling,
    *,
    links: Links | None = None,
) -> ReshardPlan:
    """The plan with fewest bytes over the slow link, and among nearly equal ones with least work beside the copy.

    The candidates: `between` is the target's tiling, or shares of its tiles along one of the dimensions; each by boxes cut
    and joined, and by a copy of whole tiles where the source holds these already, in the same order.
    """
    planner = _Planner(tuple(shape), itemsize, source, target, links or Links.between(source, target))
    candidates = list(planner.candidates())
    least = min(plan.slow_bytes for plan in candidates)
    return min(
        (plan for plan in candidates if plan.slow_bytes <= least + planner.links.slack_bytes), key=planner.work_bytes
    )


@dataclasses.dataclass(frozen=True)
class _Planner:
    """One call of `plan_reshard`."""

    shape: tuple[int, ...]
    itemsize: int
    source: Tiling
    target: Tiling
    links: Links

    def work_bytes(self, plan: ReshardPlan) -> float:
        """What a plan costs beside its bytes over the slow link, in such bytes."""
        links = self.links
        return (
            plan.fast_bytes * links.fast_ratio
            + plan.local_bytes * links.local_ratio
            + plan.calls * links.call_bytes
            + (len(plan.sends) if plan.kind == "tiles" else 1) * links.message_bytes
        )

    def candidates(self) -> Iterator[ReshardPlan]:
        """All plans worth comparing."""
        for between, cuts in self._betweens():
            if between.boxes == self.source.boxes:
                yield self._plan("copy", between, cuts, _straight_sends(self.source, between))
            yield self._plan("tiles", between, cuts, self._balanced_sends(between))

    def _betweens(self) -> Iterator[tuple[Tiling, tuple[Cut, ...]]]:
        """The target's tiles, and the shares of them along one dimension or that the source holds in this order."""
        yield self.target, ()
        axes, rank = self.target.replica_axes(self.links), len(self.shape)
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
        """Boxes cut along a dimension into one part per device along mesh axes, and the longest part."""
        mesh_shape = self.target.mesh_shape
        parts = math.prod(mesh_shape[axis] for axis in axes)
        cut = []
        for place, box in zip(np.ndindex(*mesh_shape), boxes, strict=True):
            cut.append((*box[:dim], part_of(box[dim], index_along(place, axes, mesh_shape), parts), *box[dim + 1 :]))
        return tuple(cut), -(-max(stop - start for start, stop in (box[dim] for box in boxes)) // parts)

    def _balanced_sends(self, between: Tiling) -> list[Send]:
        return _balanced(_direct_sends(self.source, between, self.links), self.source.holders, self.links)

    def _plan(
        self, kind: Literal["copy", "tiles"], between: Tiling, cuts: tuple[Cut, ...], sends: list[Send]
    ) -> ReshardPlan:
        slow = sum(volume(send.box) for send in sends if self.links.slow(send.sender, send.receiver))
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
    """Elements that devices want and do not hold, device by device."""
    total = 0
    for have, want in zip(held, wanted, strict=True):
        common = intersect(have, want)
        total += volume(want) - (volume(common) if common is not None else 0)
    return total


def _straight_sends(source: Tiling, between: Tiling) -> list[Send]:
    """Every device's whole tile to the device of the same number."""
    pairs = zip(source.devices, between.devices, between.boxes, strict=True)
    return [Send(sender, receiver, box) for sender, receiver, box in pairs if volume(box)]


def _direct_sends(source: Tiling, between: Tiling, links: Links) -> list[Send]:
    """For every receiver the boxes it needs, each from the nearest holder: itself, its node, the first."""
    sends = []
    for receiver, wanted in zip(between.devices, between.boxes, strict=True):
        for held, holders in source.holders.items():
            box = intersect(held, wanted)
            if box is not None:
                sends.append(Send(_near(receiver, holders, links)[0], receiver, box))
    return sends


def _near(receiver: int, holders: Sequence[int], links: Links) -> Sequence[int]:
    """The holders nearest to a receiver."""
    if receiver in holders:
        return (receiver,)
    return [holder for holder in holders if not links.slow(holder, receiver)] or holders


def _balanced(sends: Sequence[Send], holders: Mapping[Box, Sequence[int]], links: Links) -> list[Send]:
    """The same boxes from senders chosen so that the busiest has little to send.

    The largest box first, each to the holder with least to do; then boxes of the busiest are cut and their ends handed
    to a holder with less, until no sender is busier than the busiest receiver or nothing can be cut.
    """
    holders_of = {device: group for group in holders.values() for device in group}
    load: dict[int, int] = dict.fromkeys(holders_of, 0)
    takes: dict[int, int] = defaultdict(int)
    chosen: list[Send] = []
    for send in sorted(sends, key=lambda send: -volume(send.box)):
        sender = min(_near(send.receiver, holders_of[send.sender], links), key=lambda holder: load[holder])
        chosen.append(dataclasses.replace(send, sender=sender))
        if sender != send.receiver:
            load[sender] += volume(send.box)
            takes[send.receiver] += volume(send.box)
    for _ in range(2 * len(load)):
        busiest = max(load, key=lambda device: load[device])
        if load[busiest] <= max(takes.values(), default=0):
            break
        handed = _hand_over(chosen, busiest, load, holders_of=holders_of, links=links)
        if handed is None:
            break
        position, kept, given = handed
        chosen[position : position + 1] = [kept, given]
        load[busiest] -= volume(given.box)
        load[given.sender] += volume(given.box)
    return sorted(chosen, key=lambda send: (send.receiver, send.box))


def _hand_over(
    chosen: Sequence[Send],
    busiest: int,
    load: Mapping[int, int],
    *,
    holders_of: Mapping[int, Sequence[int]],
    links: Links,
) -> tuple[int, Send, Send] | None:
    """Which of the busiest sender's boxes to cut, and its two ends: kept, and given to another holder."""
    best: tuple[int, Send, Send] | None = None
    for position, send in enumerate(chosen):
        if send.sender != busiest or send.receiver == busiest:
            continue
        other = min(_near(send.receiver, holders_of[busiest], links), key=lambda holder: load[holder])
        dim = max(range(len(send.box)), key=lambda dim: send.box[dim][1] - send.box[dim][0], default=None)
        if dim is None or other == busiest:
            continue
        start, stop = send.box[dim]
        row = volume(send.box) // (stop - start)
        rows = min((load[busiest] - load[other]) // (2 * row), stop - start - 1)
        if rows > 0 and (best is None or rows * row > volume(best[2].box)):
            kept, given = ((start, stop - rows), (stop - rows, stop))
            first, second = ((*send.box[:dim], part, *send.box[dim + 1 :]) for part in (kept, given))
            best = position, Send(busiest, send.receiver, first), Send(other, send.receiver, second)
    return best
