"""Choose who sends which box, so that no sender is the bottleneck of a transfer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.runtime.resharding.box import Box, volume
from autopar.runtime.resharding.links import Links
from autopar.runtime.resharding.plan import BoxSend


def nearest_holders(receiver: int, holders: Sequence[int], links: Links) -> Sequence[int]:
    """Return the holders nearest to a receiver: itself, those of its node, or all."""
    if receiver in holders:
        return (receiver,)
    return [holder for holder in holders if not links.is_slow(holder, receiver)] or holders


def balance_senders(sends: Sequence[BoxSend], holders: Mapping[Box, Sequence[int]], links: Links) -> list[BoxSend]:
    """Choose senders for the same boxes so that the busiest has little to send.

    The largest boxes are given out first, each to the holder with least to do. Then boxes of the busiest sender are cut and
    their ends handed to a holder with less, until no sender is busier than the busiest receiver or nothing can be cut.
    """
    holders_of = {device: group for group in holders.values() for device in group}
    load: dict[int, int] = dict.fromkeys(holders_of, 0)
    takes: dict[int, int] = defaultdict(int)
    chosen: list[BoxSend] = []
    for send in sorted(sends, key=lambda send: -volume(send.box)):
        sender = min(nearest_holders(send.receiver, holders_of[send.sender], links), key=lambda holder: load[holder])
        chosen.append(dataclasses.replace(send, sender=sender))
        if sender != send.receiver:
            load[sender] += volume(send.box)
            takes[send.receiver] += volume(send.box)
    for _ in range(2 * len(load)):
        busiest = max(load, key=lambda device: load[device])
        if load[busiest] <= max(takes.values(), default=0):
            break
        handed = _find_handover(chosen, busiest, load, holders_of=holders_of, links=links)
        if handed is None:
            break
        position, kept, given = handed
        chosen[position : position + 1] = [kept, given]
        load[busiest] -= volume(given.box)
        load[given.sender] += volume(given.box)
    return sorted(chosen, key=lambda send: (send.receiver, send.box))


def _find_handover(
    chosen: Sequence[BoxSend],
    busiest: int,
    load: Mapping[int, int],
    *,
    holders_of: Mapping[int, Sequence[int]],
    links: Links,
) -> tuple[int, BoxSend, BoxSend] | None:
    """Choose a box of the busiest sender to cut. Returns its number and its two ends: kept, and given to another holder."""
    best: tuple[int, BoxSend, BoxSend] | None = None
    for position, send in enumerate(chosen):
        if send.sender != busiest or send.receiver == busiest:
            continue
        other = min(nearest_holders(send.receiver, holders_of[busiest], links), key=lambda holder: load[holder])
        dim = max(range(len(send.box)), key=lambda dim: send.box[dim][1] - send.box[dim][0], default=None)
        if dim is None or other == busiest:
            continue
        start, stop = send.box[dim]
        row = volume(send.box) // (stop - start)
        rows = min((load[busiest] - load[other]) // (2 * row), stop - start - 1)
        if rows > 0 and (best is None or rows * row > volume(best[2].box)):
            kept, given = ((start, stop - rows), (stop - rows, stop))
            first, second = ((*send.box[:dim], part, *send.box[dim + 1 :]) for part in (kept, given))
            best = position, BoxSend(busiest, send.receiver, first), BoxSend(other, send.receiver, second)
    return best
