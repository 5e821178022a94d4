"""The boxes that devices send when an array moves from one mesh to another: pure data, no device is touched."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Literal

from autopar.runtime.resharding.box import Box, extent, volume
from autopar.runtime.resharding.tiling import Tiling


@dataclasses.dataclass(frozen=True)
class BoxSend:
    """One box from one device to another; from a device to itself it is a copy that crosses no link."""

    sender: int
    receiver: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Cut:
    """Each target tile is cut along `dim` into parts of `chunk`, one per device along `axes`; the last may be shorter."""

    dim: int
    axes: tuple[int, ...]
    chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """The plan by which one array moves, and the bytes that this costs.

    Attributes:
        kind: "copy" sends every device's whole tile to the device of the same number. "tiles" sends the boxes in `sends`, cut
            from the source's tiles and joined by the receivers.
        shape: The array's shape.
        itemsize: Bytes of an element.
        source: The box that each device holds before.
        target: The box that each device holds at the end.
        between: The boxes on the target mesh right after the copy: the target's tiles, or with `cuts` shares of them, which
            all-gathers on the target mesh complete.
        cuts: How the target's tiles are cut into shares.
        sends: The boxes that are sent.
        slow_bytes: Bytes over slow links.
        fast_bytes: Bytes over fast links, those of the all-gathers included.
        lower_bound_bytes: The least bytes over slow links of any plan.
    """

    kind: Literal["copy", "tiles"]
    shape: tuple[int, ...]
    itemsize: int
    source: Tiling
    target: Tiling
    between: Tiling
    cuts: tuple[Cut, ...]
    sends: tuple[BoxSend, ...]
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
    def _cut_off(self) -> list[BoxSend]:
        tile = dict(zip(self.source.devices, self.source.boxes, strict=True))
        return [send for send in self.sends if send.box != tile[send.sender]]

    @property
    def _joined(self) -> list[BoxSend]:
        tile = dict(zip(self.between.devices, self.between.boxes, strict=True))
        return [send for send in self.sends if send.box != tile[send.receiver]]

    def _bytes_by(self, end: Literal["sender", "receiver"]) -> dict[int, int]:
        total: dict[int, int] = defaultdict(int)
        for send in self.sends:
            if send.sender != send.receiver:
                total[getattr(send, end)] += volume(send.box) * self.itemsize
        return dict(total)
