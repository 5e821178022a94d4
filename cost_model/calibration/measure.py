"""Times compiled cases in rounds: what the devices at hand take for products, pointwise work, collectives and calls.

In: JAX devices and a time limit. Out: `Sample`s, the least seconds of each case over the rounds. The limit counts compiling,
which takes seconds a case where compilers try kernels out:

    the cases that every figure needs    compiled whatever it takes, up to the limit of the whole command
    two rounds of these                  and their samples: a first result
    further cases                        while compiling has part of its share left
    rounds of all                        until the time is over, at least two, and samples again

What can go wrong: a busy machine; `Sample.spread` tells how unsteady the rounds were. Time that is over before all needed cases
are compiled; there are no samples then.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from autopar.cost_model.calibration.cases import Case, Sample, needed_of
from autopar.cost_model.calibration.clocks import step_clock
from autopar.cost_model.calibration.programs import Program, make_program
from autopar.cost_model.calibration.tuning import TUNING

COMPILING = 0.6
"""The share of the time that goes to compiling, if that of the needed cases does not take more."""


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
    devices: Sequence[jax.Device],
    cases: Sequence[Case],
    *,
    seconds: float,
    most_s: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[str, float] | Sample]:
    """Compile cases and time them in rounds until `seconds` are over.

    Yields (what is being done, part done) as it goes, and samples: of the needed cases early, and of all that there was time for
    at the end. None if the needed ones are not compiled within `most_s`.
    """
    begun_s, needed = now(), needed_of(cases)
    prepared: list[_Prepared] = []
    for case in needed:
        if now() - begun_s >= most_s:
            return
        yield f"compiling {case.label}", 0.5 * len(prepared) / len(cases)
        prepared.append(_prepare(case, devices))
    compile_s = (now() - begun_s) / max(len(prepared), 1)
    yield from _measure_rounds(prepared)
    for case in [case for case in cases if case not in needed]:
        if now() - begun_s + compile_s > COMPILING * seconds:
            break
        yield f"compiling {case.label}", 0.5 * len(prepared) / len(cases)
        prepared.append(_prepare(case, devices))
        compile_s = max(compile_s, (now() - begun_s) / len(prepared))
    yield from _measure_rounds(prepared, left_s=lambda: seconds - (now() - begun_s))


def _measure_rounds(
    prepared: Sequence[_Prepared], *, left_s: Callable[[], float] = lambda: 0.0
) -> Iterator[tuple[str, float] | Sample]:
    """Two rounds, and more while there is time for another; then the samples."""
    rounds, first_s = 0, left_s()
    while rounds < 2 or left_s() > (first_s - left_s()) / rounds:
        for one in prepared:
            one.times_s.append(_time(one.run, one.count, one.clock))
            one.empty_s.append(_time(one.run, 0, one.clock))
        rounds += 1
        yield f"round {rounds}", 1.0 - 0.5 * max(0.0, left_s() / first_s if first_s > 0 else 0.0)
    for one in prepared:
        yield one.sample()


def _time(run: Program, count: int, clock: Callable[[], float]) -> float:
    started = clock()
    run(count)
    return clock() - started


def _prepare(case: Case, devices: Sequence[jax.Device]) -> _Prepared:
    """Compile a case and find how often to repeat it."""
    run = make_program(case, devices)
    # One thread of the host calls a step, and copies, whatever the devices do, so the wall's clock counts.
    clock = time.perf_counter if case.kind in ("dispatch", "transfer") else step_clock(devices)
    run(1)
    empty_s, count = _time_least(run, 0, clock), 1
    while (took := _time_least(run, count, clock) - empty_s) < TUNING.case_s / 4 and count < 1 << 16:
        count *= 4
    if 0 < took < TUNING.case_s:
        count = max(1, round(count * TUNING.case_s / took))
    return _Prepared(case=case, run=run, count=count, clock=clock)


def _time_least(run: Program, count: int, clock: Callable[[], float]) -> float:
    return min(_time(run, count, clock) for _ in range(3))
