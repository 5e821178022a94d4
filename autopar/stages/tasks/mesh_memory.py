"""What the stages of one mesh take of a device together: less than the sum of what each takes at its own peak.

In: the `StageMemory` of each stage of a mesh, and what a schedule keeps in flight. Out: the part that each stage has of the
mesh's peak (`share_peak`). A mesh runs one task at a time, so the temporaries of one stage are there while those of the others
are not, and a later stage has few microbatches in flight while an earlier one has most. With s for a stage, the peak is

    max(sum of standing_s + most over time of the sum of looping_s, most over s of (alone_s + sum of standing_o, o not s))

of which the second is a stage's task that runs once per step, its prologue or an update, while the other stages stand by. What
can go wrong: an array that two stages of one mesh both read counts for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autopar.schedules.in_flight import InFlight
from autopar.stages.tasks.stage_memory import StageMemory, is_flying


@dataclasses.dataclass(frozen=True)
class StageShare:
    """Bytes of a stage at the peak of its mesh; of them `flying_bytes` are of microbatches that wait for their backward."""

    peak_bytes: int
    flying_bytes: int


def share_peak(stages: Sequence[StageMemory], in_flight: InFlight) -> tuple[StageShare, ...]:
    """The part of each of these stages, all that are on one mesh, of the mesh's peak; what they add up to is the peak."""
    if len(stages) > 1:  # their loops end at different times
        stages = [dataclasses.replace(stage, late_bytes=0) for stage in stages]
    standing = [stage.standing_bytes(in_flight) for stage in stages]
    values = [(place, one) for place, stage in enumerate(stages) for one in stage.looping(in_flight)]
    there = in_flight.at_peak([(stages[place].stage, one) for place, one in values])
    peaks, flying = list(standing), [0] * len(stages)
    for (place, one), size in zip(values, there, strict=True):
        peaks[place] += size
        flying[place] += size if is_flying(one) else 0
    alone = [stage.outside_bytes - own for stage, own in zip(stages, standing, strict=True)]
    most = max(range(len(stages)), key=alone.__getitem__)
    peaks[most] += max(0, sum(standing) + alone[most] - sum(peaks))
    return tuple(map(StageShare, peaks, flying))


def peak_bytes(stages: Sequence[StageMemory], in_flight: InFlight) -> int:
    """The peak of a mesh of these stages."""
    return sum(share.peak_bytes for share in share_peak(stages, in_flight))


def fit_together(stages: Sequence[StageMemory], limits: Sequence[int | None], in_flight: InFlight) -> bool:
    """Whether the stages of each mesh, together, keep within their limits, together; None is no limit."""
    return all(limit is None or most <= limit for _, limit, most in _meshes(stages, limits, in_flight))


def own_limits(
    stages: Sequence[StageMemory], limits: Sequence[int | None], in_flight: InFlight, *, is_sure: bool
) -> tuple[int | None, ...]:
    """How large the peak of each stage alone may be, so that what does not fit together does; None where it fits.

    The stages of a mesh shrink by one factor: to where they fit if the mesh's peak shrinks with them; or, if `is_sure`, to where
    even the sum of their own peaks fits, which is never less than the mesh's.
    """
    found: list[int | None] = [None] * len(stages)
    for places, limit, most in _meshes(stages, limits, in_flight):
        if limit is not None and most > limit:
            alone = [peak_bytes([stages[place]], in_flight) for place in places]
            above = sum(alone) if is_sure else most
            for place, size in zip(places, alone, strict=True):
                found[place] = size * limit // above
    return tuple(found)


def _meshes(
    stages: Sequence[StageMemory], limits: Sequence[int | None], in_flight: InFlight
) -> Iterator[tuple[range, int | None, int]]:
    """Of each mesh the places of its stages, the sum of their limits, and its peak."""
    meshes = in_flight.schedule.num_meshes
    for mesh in range(meshes):
        known = [limit for limit in limits[mesh::meshes] if limit is not None]
        most = peak_bytes(stages[mesh::meshes], in_flight)
        yield range(mesh, len(stages), meshes), sum(known) if known else None, most
