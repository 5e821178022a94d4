"""In how many microbatches, in which schedule: the timetables that a search compares, and costs carried from one to another.

In: the numbers of microbatches that the batch allows, and what the user has decided. Out: a list of `Timetable`s, the usual one
first. What a microbatch costs under m microbatches is close to

    t(m) = a + b / m        a: latencies and launches, b: the work of the whole batch

so two numbers of microbatches that have been planned tell about all others (`seconds_at`); with one, a is what part of t a like
case had, or nothing: perfect division. GPipe is no candidate: a step takes as long as in 1F1B and needs no less memory.
What can go wrong: costs that are not like this, because other layouts are best for other numbers. So nothing is chosen by such a
figure alone: what looks best is planned, until what looks best has been planned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from autopar.schedules.schedules import Open, ScheduleName

VIRTUAL_STAGES = (2, 4)
"""How many stages per mesh interleaved schedules are tried with."""
WIDEST = 8
"""Numbers of microbatches are compared from the usual one divided by this to the usual one times this."""
MOST_COUNTS = 7
"""Of more numbers of microbatches than so many, those that grow evenly are compared."""
WORTH = 0.03
"""A timetable that promises a smaller gain than this is not planned; estimates are hardly more exact."""


@dataclasses.dataclass(frozen=True, order=True)
class Timetable:
    """How stages work through a batch; `virtual_stages` on each mesh."""

    microbatches: int
    schedule: ScheduleName
    virtual_stages: int = 1


def usual_microbatches(counts: Sequence[int], num_stages: int) -> int:
    """The most microbatches up to four per stage, so that the bubble is at most a fifth of the step."""
    return max((m for m in counts if m <= 4 * num_stages), default=1)


def counts_around(counts: Sequence[int], usual: int) -> tuple[int, ...]:
    """The numbers of microbatches that are compared, ascending: the usual one and others, evenly apart in proportion."""
    near = [m for m in counts if usual / WIDEST <= m <= usual * WIDEST]
    if len(near) <= MOST_COUNTS:
        return tuple(near)
    steps = np.linspace(math.log(near[0]), math.log(near[-1]), MOST_COUNTS)
    return tuple(sorted({usual, *(min(near, key=lambda m: (abs(math.log(m) - step), m)) for step in steps)}))


def timetables(
    counts: Sequence[int], *, usual: int, schedule: str, virtual_stages: Open, gradients: bool
) -> tuple[Timetable, ...]:
    """What is left to compare if these numbers of microbatches are; the usual one, and what is usual with it, first.

    `gradients`: whether the step has a backward pass; without, forwards follow each other, and nothing else is to be decided.
    """
    chunks = VIRTUAL_STAGES if virtual_stages == "auto" else (virtual_stages,)
    if schedule != "auto":
        shapes = [(schedule, v) for v in (chunks if schedule == "interleaved" or virtual_stages != "auto" else (1,))]
    elif not gradients:
        shapes = [("inference", 1 if virtual_stages == "auto" else virtual_stages)]
    else:
        shapes = [(name, 1) for name in ("1f1b", "zb-h1") if virtual_stages in ("auto", 1)]
        shapes += [("interleaved", v) for v in chunks if v > 1]
    order = sorted(counts, key=lambda m: (m != usual, abs(math.log(m / usual)), m))
    return tuple(Timetable(m, cast(ScheduleName, name), v) for m in order for name, v in shapes)


def latency_share(known: Mapping[int, np.ndarray], count: int) -> np.ndarray | None:
    """a / t(count) for a planned number of microbatches, from it and the nearest other one; None if there is no other."""
    others = sorted((m for m in known if m != count), key=lambda m: abs(math.log(m / count)))
    if not others:
        return None
    here, other = known[count], known[others[0]]
    latency = (count * here - others[0] * other) / (count - others[0])
    return np.asarray(np.divide(np.clip(latency, 0, here), here, out=np.zeros_like(here), where=here > 0))


def seconds_at(known: Mapping[int, np.ndarray], count: int, *, share: np.ndarray | float = 0.0) -> np.ndarray:
    """t(count) from the planned numbers of microbatches; `share` is a / t where only one is known."""
    if count in known:
        return known[count]
    nearest = min(known, key=lambda m: abs(math.log(m / count)))
    own = latency_share(known, nearest)
    part = share if own is None else own
    return np.asarray(known[nearest] * (part + (1 - part) * nearest / count))
