"""What a layer costs on a number of devices in a number of microbatches, and what that says of other numbers.

In: figures of a layer that is planned in some numbers of microbatches, or on some numbers of devices. Out: estimates of others.
What can go wrong: layouts that are best for few examples, or few devices, need not be for many; whoever chooses by an estimate
has that planned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from autopar.inter_op.candidates.timetables import seconds_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """What a layer costs on some devices: seconds per microbatch, of the update per step, and bytes as in `StageMemory`.

    `again_s`: of the forward what backward does again if it keeps no results. `within_bytes`: what comes and goes in a
    microbatch whose forward and backward are in one task, as then. `stacked_bytes`, of a layer that is a piece of a scan: the
    gradients of a microbatch, which that makes of all its layers before they are added up. `joined_bytes`, of such a layer:
    what forward makes for backward, which a scan does again for all its layers at once.
    """

    forward_s: float = 0.0
    again_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    looped_bytes: float = 0.0
    beside_bytes: float = 0.0
    passing_bytes: float = 0.0
    within_bytes: float = 0.0
    residual_bytes: float = 0.0
    received_bytes: float = 0.0
    late_residual_bytes: float = 0.0
    cotangent_bytes: float = 0.0
    stacked_bytes: float = 0.0
    joined_bytes: float = 0.0

    def with_seconds(self, forward_s: float, backward_s: float) -> LayerFigures:
        """The same with other seconds per microbatch; of the forward, the same part is done again."""
        times = forward_s / self.forward_s if self.forward_s else 1.0
        return dataclasses.replace(self, forward_s=forward_s, again_s=times * self.again_s, backward_s=backward_s)

    def slower(self, times: float) -> LayerFigures:
        """The same, if a microbatch takes so many times longer."""
        return self.with_seconds(times * self.forward_s, times * self.backward_s)

    def scaled(self, before: LayerFigures, after: LayerFigures, *, divided: float) -> LayerFigures:
        """The same elsewhere: seconds and bytes as many times more as those of another layer, which became `after` of `before`.

        `divided`: what bytes are multiplied by if they are divided evenly there. Bytes that the other layer has none of are, and
        are never more than they were: what is taken for too large is not chosen, and so not planned.
        """
        old_s, new_s = (one.forward_s + one.backward_s for one in (before, after))
        times, times_once = new_s / old_s if old_s else 1.0, after.once_s / before.once_s if before.once_s else 1.0
        sizes = {}
        for field in dataclasses.fields(self):
            if field.name.endswith("_bytes"):
                mine, old, new = (getattr(one, field.name) for one in (self, before, after))
                sizes[field.name] = mine * (new / old if old else min(1.0, divided))
        return dataclasses.replace(self.slower(times), once_s=times_once * self.once_s, **sizes)


def nearest_of(planned: Mapping[int, LayerFigures], count: int) -> int:
    """The planned number of microbatches that is nearest to a number."""
    return min(planned, key=lambda m: abs(math.log(m / count)))


def task_seconds(figures: LayerFigures) -> np.ndarray:
    """(forward, backward) seconds of a microbatch."""
    return np.array([figures.forward_s, figures.backward_s])


def carry_over(planned: Mapping[int, LayerFigures], count: int, *, share: np.ndarray | float) -> LayerFigures:
    """Figures under another number of microbatches: seconds by their latency, what a microbatch keeps by its size."""
    nearest = nearest_of(planned, count)
    near, smaller = planned[nearest], nearest / count
    forward_s, backward_s = seconds_at({m: task_seconds(f) for m, f in planned.items()}, count, share=share)
    return dataclasses.replace(
        near.with_seconds(float(forward_s), float(backward_s)),
        passing_bytes=smaller * near.passing_bytes,
        within_bytes=smaller * near.within_bytes,
        residual_bytes=smaller * near.residual_bytes,
        received_bytes=smaller * near.received_bytes,
        late_residual_bytes=smaller * near.late_residual_bytes,
        cotangent_bytes=smaller * near.cotangent_bytes,
        joined_bytes=smaller * near.joined_bytes,
    )
