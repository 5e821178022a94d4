"""The best choice of one mesh whose peak is within a memory limit.

In: a choice problem without memory rows, the memory model of its graph, a limit. Out: `Fits`, `TooLarge`, or the solver's outcome
that ended the search. The rows of the memory model leave out what depends on pairs of choices, such as a gathered operand, so
the peak of each choice is checked. Where it says that this mattered, the rows' limit is lowered and the search repeated. Gathered
copies stay until their last use; only where a choice does not fit so are they dropped and gathered again. What can go wrong:
something fits that the search does not find; `TooLarge` says whether that is possible.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.intra_op.lowering.assignment import copy_span_of
from autopar.intra_op.memory.model import MemoryModel
from autopar.intra_op.tuning import TUNING, Tuning
from autopar.solver.budget import CALL
from autopar.solver.outcomes import (
    Chosen,
    CutOff,
    DoesNotFit,
    NotSearched,
    Numbers,
    Unfinished,
    Unreachable,
)
from autopar.solver.problem import ChoiceProblem, MemoryRow
from autopar.solver.solve import choose


@dataclasses.dataclass(frozen=True)
class Fits:
    """A choice whose peak is within the limit.

    Attributes:
        choice: the choice.
        copy_span: after how many equations without a use a gathered copy is dropped; None: never.
        unlimited_s: seconds of the best choice without a limit.
    """

    choice: Chosen
    copy_span: int | None
    unlimited_s: float


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """No choice was found whose peak is within the limit.

    Attributes:
        tried_bytes: what the least of those that were tried requires per device.
        is_settled: whether the memory rows rule out all choices; else the search ended before it had tried all that may fit.
    """

    tried_bytes: int
    is_settled: bool


def nobody_s() -> float:
    """What others have found, where there are no others."""
    return math.inf


_WORK_PER_NODE = 10 * CALL
"""Units of work of the peak of a choice, for each of its nodes: some 45 microseconds."""

Limited = Fits | TooLarge | CutOff | NotSearched | Unreachable | Unfinished


def choose_within_limit(
    problem: ChoiceProblem,
    memory: MemoryModel,
    limit_bytes: int | None,
    *,
    free: Chosen | None = None,
    seen: Seen | None = None,
    rival_s: Callable[[], float] = nobody_s,
    has_other_ways: bool = False,
    tuning: Tuning = TUNING,
) -> Limited:
    """The best choice within the limit. The search ends where another one has something as fast as the best without a limit.

    Where what a choice above the limit requires above the rows leaves nothing for others, other ways are looked at.

    Args:
        problem: without memory rows.
        memory: the memory of its choices.
        limit_bytes: per device; None: memory does not matter.
        free: the best choice without a limit, if it is known.
        seen: a choice above the limit near that one, if one is known; else that one is looked at.
        rival_s: seconds of the fastest that others have found so far.
        has_other_ways: whether other ways to run the step are looked at if this one does not fit.
        tuning: how often to try.
    """
    if free is None:
        found = choose(problem)
        assert not isinstance(found, DoesNotFit), "a problem without memory rows fits"
        if not isinstance(found, Chosen):
            return found
        free = found
    seen = seen or Seen(memory, free.numbers)
    if limit_bytes is None or seen.required <= limit_bytes:
        return Fits(free, None, free.seconds)
    if has_other_ways and seen.leaves_nothing(problem, limit_bytes, tuning):
        return seen.too_large
    search = _LimitSearch.of(
        problem, free, memory, limit_bytes, seen=seen, rival_s=rival_s, has_other_ways=has_other_ways
    )
    least = seen.required
    spans = (None, copy_span_of(memory.graph.program))
    match search.run(spans, rounds=tuning.memory_rounds):
        case DoesNotFit():
            return TooLarge(least, is_settled=True)
        case TooLarge(tried_bytes):
            least = min(least, tried_bytes)
        case ended if not isinstance(ended, Unfinished):
            return ended
    beaten = CutOff(free.lower_bound_s) if search.is_beaten else None
    return beaten or search.find_met(spans) or TooLarge(least, is_settled=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """A choice that is looked at before the search within the limit; what it requires is found when it is first asked for."""

    memory: MemoryModel
    numbers: Numbers

    @functools.cached_property
    def required(self) -> int:
        """What it requires."""
        return self.memory.required(self.numbers)

    @functools.cached_property
    def rows(self) -> Sequence[MemoryRow]:
        """The memory rows at its peaks."""
        return self.memory.rows(self.numbers)

    def leaves_nothing(self, problem: ChoiceProblem, limit_bytes: int, tuning: Tuning) -> bool:
        """Whether no choice of a problem without rows fits if each requires a part of what this one requires above the rows."""
        limited = dataclasses.replace(problem, rows=self.rows)
        unseen = tuning.unseen_part * max(
            0.0, self.required - float(limited.spans.used_by(np.asarray(self.numbers)).max())
        )
        return limited.least_bytes() + unseen > tuning.met_part * limit_bytes

    @property
    def too_large(self) -> TooLarge:
        """What is known if nothing else is looked at."""
        return TooLarge(self.required, is_settled=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _LimitSearch:
    """A search for a choice whose peak is within `limit_bytes`, by memory rows whose limit is `highest_bytes` at first.

    The rows may say more than is required: by how much, is known of the choice at whose peaks they are. `free`: the best choice
    without a limit. `above_rows`: how much more than the rows say choices that were met require.
    """

    problem: ChoiceProblem
    free: Chosen
    memory: MemoryModel
    limit_bytes: int
    highest_bytes: float
    rival_s: Callable[[], float] = nobody_s
    has_other_ways: bool = False
    _met: dict[Numbers, None] = dataclasses.field(default_factory=dict)
    _above_rows: list[float] = dataclasses.field(default_factory=list)
    _peaks: dict[tuple[Numbers, int | None], int] = dataclasses.field(default_factory=dict)
    _lean: list[int | None] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls,
        problem: ChoiceProblem,
        free: Chosen,
        memory: MemoryModel,
        limit_bytes: int,
        *,
        seen: Seen,
        rival_s: Callable[[], float],
        has_other_ways: bool,
    ) -> _LimitSearch:
        """The search of a problem without rows; `seen`: where they are to be."""
        budget = problem.budget.limit(until=lambda: free.lower_bound_s >= rival_s())
        limited = dataclasses.replace(problem, rows=seen.rows, budget=budget)
        excess = max(0.0, max(row.used(seen.numbers) for row in seen.rows) - seen.required)
        return cls(
            problem=limited,
            free=free,
            memory=memory,
            limit_bytes=limit_bytes,
            highest_bytes=limit_bytes + excess,
            rival_s=rival_s,
            has_other_ways=has_other_ways,
        )

    @property
    def is_beaten(self) -> bool:
        """Whether another one has something as fast as the best without a limit."""
        return self.free.lower_bound_s >= self.rival_s()

    def run(
        self, spans: Sequence[int | None], *, rounds: int
    ) -> Fits | TooLarge | CutOff | DoesNotFit | NotSearched | Unreachable | Unfinished:
        """The first choice that fits; `TooLarge` if none that was tried does; the solver's outcome that ended the search.

        `spans`: for how long copies may be kept. A choice that fits where they are dropped is taken, as no other one that keeps
        the rows is faster, and gathering again costs less than another search. The rows' limit is lowered by what a choice's peak
        is above the limit, twice as far each time, and below what the rows say of that choice, which would be found again; and
        halfway back where no choice keeps the rows, or only slower ones do than are looked for: these say nothing of what the
        memory holds. Where nothing keeps even the first limit of the rows, there is nothing to repeat. Where there are other ways
        to run the step, the search also ends if a peak would have to be much closer to what all choices need by the rows than any
        is.
        """
        row_limit, too_low = self.highest_bytes, 0.0
        least: int | None = None
        tried: tuple[Numbers, ...] = ()
        for number in range(rounds):
            if self.is_beaten:
                return CutOff(self.free.lower_bound_s)
            cutoff_s = min(self.problem.cutoff_s, self.rival_s())
            limited = dataclasses.replace(self.problem, limit_bytes=row_limit, cutoff_s=cutoff_s)
            found = choose(limited, free=self.free, tried=tried)
            if isinstance(found, DoesNotFit | Unfinished | CutOff | NotSearched) and row_limit < self.highest_bytes:
                known = found.least_bytes if isinstance(found, DoesNotFit) else 0.0
                too_low = max(row_limit, min(known, self.highest_bytes))
                if self.has_other_ways and known > self._most_used(TUNING.unseen_part):
                    break
                row_limit = (too_low + self.highest_bytes) / 2
                continue
            if not isinstance(found, Chosen):
                return found
            tried = found.tried
            self._met.update(dict.fromkeys((found.numbers, *tried)))
            required, span = self._leanest(found.numbers, spans)
            if required <= self.limit_bytes:
                return Fits(found, span, self.free.seconds)
            self._above_rows.append(required - self.used(found.numbers))
            least = required if least is None else min(least, required)
            lower = max(row_limit - (required - self.limit_bytes) * 2**number, (too_low + row_limit) / 2)
            row_limit = min(lower, self.used(found.numbers) - 1.0)
            if self.problem.budget.is_over:
                break
        assert least is not None, "the first round returns or finds a choice"
        return TooLarge(least, is_settled=False)

    def _leanest(self, numbers: Numbers, spans: Sequence[int | None]) -> tuple[int, int | None]:
        """What a choice requires and for how long it keeps copies then: the first way that fits, or the one that needs least.

        Where there are other ways to run the step, a choice is left if it does not fit with copies kept as was leanest for the
        first that did not fit.
        """
        if self.has_other_ways and self._lean:
            required = self._required(numbers, self._lean[0])
            if required > self.limit_bytes:
                return required, self._lean[0]
        tried: list[tuple[int, int | None]] = []
        for span in spans:
            tried.append((self._required(numbers, span), span))
            if tried[-1][0] <= self.limit_bytes:
                return tried[-1]
        least = min(tried, key=lambda one: one[0])
        self._lean.append(least[1])
        return least

    def _required(self, numbers: Numbers, copy_span: int | None) -> int:
        """See `MemoryModel.required`, which costs as much as a search of a deep step does."""
        key = numbers, copy_span
        if key not in self._peaks:
            self.problem.budget.spend(_WORK_PER_NODE * len(numbers))
            self._peaks[key] = self.memory.required(numbers, copy_span=copy_span)
        return self._peaks[key]

    def used(self, numbers: Numbers) -> float:
        """Bytes per device that a choice needs by the rows."""
        return float(self.problem.spans.used_by(np.asarray(numbers)).max())

    def _most_used(self, part: float = 1.0) -> float:
        """What a choice may need by the rows so that its peak may be within the limit, by this part of what those met require
        above them.
        """
        return TUNING.met_part * self.limit_bytes - part * min(self._above_rows, default=-math.inf)

    def find_met(self, copy_spans: Sequence[int | None]) -> Fits | None:
        """The fastest choice met on the way whose peak is within the limit: of some the rows say more than they need.

        A peak takes a while to compute. It is left out where it would have to be closer to what the rows say than any that is
        known, by some percent of the limit.
        """
        most = self._most_used()
        values = {n: self.problem.costs.value(n) for n in self._met if most == math.inf or self.used(n) <= most}
        for numbers in sorted(values, key=lambda numbers: values[numbers]):
            if values[numbers] >= self.problem.cutoff_s:
                break
            required, copy_span = self._leanest(numbers, copy_spans)
            if required <= self.limit_bytes:
                choice = Chosen(numbers, values[numbers], self.free.lower_bound_s, tuple(self._met))
                return Fits(choice, copy_span, self.free.seconds)
        return None
