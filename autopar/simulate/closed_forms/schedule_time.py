"""Seconds of a pipeline schedule from the seconds of its stages; bubbles in closed form.

Letters: t_i seconds that stage i needs for one microbatch, forward and backward, transfers included; m microbatches,
p stages, v virtual stages per device. With T = max t_i,

    GPipe, 1F1B      m T + (sum t_i - T)
    interleaved      m T + (sum t_i - T)/v

since the slowest stage works without a pause once the first microbatch has come to it, and its fill and drain pass every
other stage once, or with v chunks per device a v-th of it. For equal stages the bubble is (p-1)/(v m) of the ideal time.
What can go wrong: m < p leaves holes in the middle that the interleaved form does not show; m must be a multiple of p there.
"""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_s(stage_s: Sequence[float], *, microbatches: float, virtual_stages: int = 1) -> float:
    """Seconds from the first forward pass to the last backward pass."""
    slowest = max(stage_s)
    return microbatches * slowest + (sum(stage_s) - slowest) / virtual_stages
