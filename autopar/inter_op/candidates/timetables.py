"""Timetables: the numbers of microbatches and the schedules that a search compares, and costs carried from one to another.

In: the numbers of microbatches that the batch allows, and what the user has decided. Out: a list of `Timetable`s, the usual one
first. The cost of a microbatch under m microbatches is close to

    t(m) = a + b / m        a: latencies and launches, b: the work of the whole batch

so two numbers of microbatches that have been planned tell about all others (`seconds_at`). With only one, the caller says what
part of t is latency in a similar case; without that, the division is perfect. GPipe is no candidate: a step takes about as
long as in eager 1F1B and needs no less memory. What can go wrong: costs that do not follow the formula, because other layouts
are best for other numbers. So no plan is chosen by such an estimate alone: whatever looks best is planned, until the best has
been planned.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np

from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.schedules.schedules import NAMED_SCHEDULES, TRAINING, Open, ScheduleName, interleaves


@dataclasses.dataclass(frozen=True, order=True)
class Timetable:
    """How the stages work through a batch, with `virtual_stages` of them on each mesh."""

    microbatches: int
    schedule: ScheduleName
    virtual_stages: int = 1

    @property
    def is_split(self) -> bool:
        """Whether backward is split into the cotangents of a stage's inputs and the gradients of its weights."""
        return NAMED_SCHEDULES[self.schedule].is_split


def usual_microbatches(counts: Sequence[int], num_stages: int, *, devices: int = 1) -> int:
    """The largest number of microbatches up to four per stage: there the bubble is at most a fifth of the step.

    A smaller one, of two per stage at least, whose examples more of a stage's devices divide evenly: 1,520 examples on 64 devices
    are 20 microbatches of 76, which 4 of 8 devices divide, and 19 of 80.

    Args:
        counts: all that divide the batch; the largest is its number of examples.
        num_stages: on equal parts of the devices.
        devices: of all stages.
    """
    examples, each = max(counts), max(1, devices // num_stages)
    most = max((m for m in counts if m <= 4 * num_stages), default=1)
    near = [m for m in counts if 2 * num_stages <= m <= most]
    return max(near, key=lambda m: (math.gcd(examples // m, each), m), default=most)


def counts_around(counts: Sequence[int], usual: int, tuning: Tuning = TUNING) -> tuple[int, ...]:
    """The numbers of microbatches to compare, ascending: the usual one, and others at about equal ratios around it.

    Args:
        counts: all that divide the batch; the largest is its number of examples.
        usual: one of them.
        tuning: how many, and how far from the usual one.
    """
    near = [m for m in counts if usual / tuning.widest <= m <= usual * tuning.widest]
    spread = _spread(near, max(counts), tuning)
    return spread if len(spread) == len(near) else tuple(sorted({usual, *spread}))


def more_counts(counts: Sequence[int], most: int, tuning: Tuning = TUNING) -> tuple[int, ...]:
    """The numbers of microbatches above `most`, ascending, for a step that fits the memory in no fewer; spread if many."""
    return _spread([m for m in counts if m > most], max(counts), tuning)


def _spread(counts: Sequence[int], examples: int, tuning: Tuning) -> tuple[int, ...]:
    """Of ascending numbers of microbatches as many as are compared, at about equal ratios.

    Of those near each of the ratios the one whose microbatches devices divide best: 1,520 examples are 95 times 16, which are
    divided among 16 devices; 80 times 19 can be divided among one.
    """
    if len(counts) <= tuning.most_counts:
        return tuple(counts)
    steps = np.linspace(math.log(counts[0]), math.log(counts[-1]), tuning.most_counts)
    reach = (steps[1] - steps[0]) / 2

    def rank(count: int, step: float) -> tuple[bool, float, float, int]:
        size, away = examples // count, abs(math.log(count) - step)
        evenness = (size & -size) / size  # of the power of two in it, as devices come in powers of two
        return (True, away, 0.0, count) if away > reach else (False, -evenness, away, count)

    return tuple(sorted({min(counts, key=functools.partial(rank, step=float(step))) for step in steps}))


def likely_microbatches(usual: int, counts: Collection[int], *, kept_bytes: float, room_bytes: float) -> int:
    """The usual number of microbatches, or the next larger one whose stages have room for what they keep for backward.

    The first of S stages holds S microbatches in 1F1B, of each of which it keeps a part in S of what all stages keep.

    Args:
        counts: those that may be taken. Without one that has room the usual number is taken.
        kept_bytes: what all stages keep of the whole batch.
        room_bytes: the memory of a stage's devices for this.
    """
    larger = sorted(count for count in counts if count > usual)
    return next((count for count in (usual, *larger) if kept_bytes / count <= room_bytes), usual)


def list_timetables(
    counts: Sequence[int],
    *,
    usual: int,
    schedule: str,
    virtual_stages: Open,
    gradients: bool,
    tuning: Tuning = TUNING,
) -> tuple[Timetable, ...]:
    """The timetables to compare for these numbers of microbatches, those with the usual number first.

    `gradients`: whether the step has a backward pass. Without one, forwards follow each other, and "inference" is the only
    schedule.
    """
    chunks = tuning.virtual_stages if virtual_stages == "auto" else (virtual_stages,)
    if schedule != "auto":
        shapes = [(schedule, v) for v in (chunks if interleaves(schedule) or virtual_stages != "auto" else (1,))]
    elif not gradients:
        shapes = [("inference", 1 if virtual_stages == "auto" else virtual_stages)]
    else:
        fewest = {name: NAMED_SCHEDULES[name].fewest_chunks for name in TRAINING if NAMED_SCHEDULES[name].is_compared}
        shapes = [(name, 1) for name, least in fewest.items() if least == 1 and virtual_stages in ("auto", 1)]
        shapes += [(name, v) for name, least in fewest.items() if least > 1 for v in chunks if v >= least]
    order = sorted(counts, key=lambda m: (m != usual, abs(math.log(m / usual)), m))
    return tuple(Timetable(m, cast(ScheduleName, name), v) for m in order for name, v in shapes)


def latency_share(known: Mapping[int, np.ndarray], count: int) -> np.ndarray | None:
    """a / t(count) of a planned number of microbatches, from it and the nearest other one; None if there is no other.

    The arrays of `known` hold seconds per microbatch; all have one shape, which is also that of the result.
    """
    others = sorted((m for m in known if m != count), key=lambda m: abs(math.log(m / count)))
    if not others:
        return None
    here, other = known[count], known[others[0]]
    latency = (count * here - others[0] * other) / (count - others[0])
    return np.asarray(np.divide(np.clip(latency, 0, here), here, out=np.zeros_like(here), where=here > 0))


def seconds_at(known: Mapping[int, np.ndarray], count: int, *, share: np.ndarray | float = 0.0) -> np.ndarray:
    """t(count), in seconds, from the planned numbers of microbatches; `share` is a / t if only one is known."""
    if count in known:
        return known[count]
    nearest = min(known, key=lambda m: abs(math.log(m / count)))
    own = latency_share(known, nearest)
    part = share if own is None else own
    return np.asarray(known[nearest] * (part + (1 - part) * nearest / count))


def neighbours(count: int, counts: Collection[int]) -> list[int]:
    """Of these numbers of microbatches, among which `count` is, the next smaller one and the next larger one."""
    smaller, larger = (sorted(one for one in counts if one < count), sorted(one for one in counts if one > count))
    return smaller[-1:] + larger[:1]
