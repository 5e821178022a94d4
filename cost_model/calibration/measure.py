"""Times compiled cases in rounds: what the devices at hand take for products, pointwise work, collectives and calls.

In: JAX devices and a time limit. Out: `Sample`s, the least seconds of each case over the rounds. Rounds go through all cases in
turn. What can go wrong: a busy machine; `Sample.spread` tells how unsteady the rounds were.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from autopar.cost_model.calibration.cases import Case, Sample
from autopar.cost_model.calibration.clocks import step_clock
from autopar.cost_model.calibration.programs import Program, make_program
from autopar.cost_model.calibration.tuning import TUNING


@dataclasses.dataclass(kw_only=True)
class _Prepared:
    """A compiled case and the times of its rounds, with and without repetitions."""

    case: Case
    run: Program
    count: int
    clock: Callable[[], float]
    times_s: list[float] = dataclasses.field(default_factory=list)
    empty_s: list[float] = dataclasses.field(default_factory=list)

    def sample(self) -> Sample:
        """The least seconds of one repetition: those of a call with repetitions less those of one without."""
        least = min(self.times_s)
        seconds = max(least - min(self.empty_s), 0.1 * least) / self.count
        return Sample(self.case, seconds, float(np.median(self.times_s)) / least)


def measure(
    devices: Sequence[jax.Device], cases: Sequence[Case], *, seconds: float
) -> Iterator[tuple[str, float] | Sample]:
    """Compile every case, then time all of them in rounds until `seconds` are over; at least two rounds are made.

    Yields (what is being done, part done) as it goes, then the samples.
    """
    started = time.perf_counter()
    prepared = []
    for number, case in enumerate(cases):
        yield f"compiling {case.label}", 0.5 * number / len(cases)
        prepared.append(_prepare(case, devices))
    begun = time.perf_counter()
    rounds = 0
    while rounds < 2 or time.perf_counter() - started < seconds - (time.perf_counter() - begun) / rounds:
        for one in prepared:
            one.times_s.append(_time(one.run, one.count, one.clock))
            one.empty_s.append(_time(one.run, 0, one.clock))
        rounds += 1
        yield f"round {rounds}", 0.5 + 0.5 * min(1.0, (time.perf_counter() - begun) / (seconds - (begun - started)))
    for one in prepared:
        yield one.sample()


def _time(run: Program, count: int, clock: Callable[[], float]) -> float:
    started = clock()
    run(count)
    return clock() - started


def _prepare(case: Case, devices: Sequence[jax.Device]) -> _Prepared:
    """Compile a case and find how often to repeat it."""
    run = make_program(case, devices)
    # One thread of the host calls a step, whatever the devices do, so the wall's clock counts.
    clock = time.perf_counter if case.kind == "dispatch" else step_clock(devices)
    run(1)
    empty_s, count = _time_least(run, 0, clock), 1
    while (took := _time_least(run, count, clock) - empty_s) < TUNING.case_s / 4 and count < 1 << 16:
        count *= 4
    if 0 < took < TUNING.case_s:
        count = max(1, round(count * TUNING.case_s / took))
    return _Prepared(case=case, run=run, count=count, clock=clock)


def _time_least(run: Program, count: int, clock: Callable[[], float]) -> float:
    return min(_time(run, count, clock) for _ in range(3))
