"""The price of work beside the copy, in bytes over a slow link, and the most that one exchange may move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The first five trade calls against bytes; `benchmarks/resharding.py` shows what they cost. The last two are bounds.

    Attributes:
        slack_bytes: How many bytes more than necessary may cross the slow link where that saves work beside the copy.
        fast_ratio: A byte over a fast link, in bytes over the slow one.
        local_ratio: A byte copied within a device, in bytes over the slow link.
        call_bytes: A call into the runtime, in bytes over the slow link; an executable costs about 0.1 ms of host time.
        message_bytes: A box on its way, in bytes over the slow link.
        portion_arrays: The most arrays that one exchange moves: it takes time to compile for each.
        portion_bytes: The most bytes that one exchange moves, unless one array has more: it takes memory for all at once.
    """

    slack_bytes: int = 1 << 16
    fast_ratio: float = 0.1
    local_ratio: float = 0.05
    call_bytes: int = 1 << 18
    message_bytes: int = 1 << 13
    portion_arrays: int = 64
    portion_bytes: int = 1 << 28


TUNING = Tuning()
