"""The best stages in every timetable, brought up to date while layers are planned, as far as they may still be the best.

In: costs of layers, which become better known (`layer_costs.py`), and timetables. Out: for each timetable the best stages, the
seconds that they exceed, or why there are none. What costs have changed under it keeps its time as a promise. It is solved again
when no other timetable beats that promise, and given up as soon as it cannot come near the best one. What can go wrong: costs
that fall may hide behind an old promise, so whoever is about to decide asks for all of them (`solve_rest`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.forks.jobs import run_side_by_side
from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.candidates.tuning import Tuning
from autopar.inter_op.costs_by_kind import CostsByKind
from autopar.inter_op.dynamic_program.choose_stages import choose_faster_stages, choose_stages
from autopar.inter_op.dynamic_program.problem import (
    ChosenStage,
    CostTable,
    Manual,
    SlowerStages,
    StageChoice,
    StageProblem,
)
from autopar.inter_op.dynamic_program.submeshes import Submesh, size_of
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.layer_sums import Repetition, repetitions
from autopar.plan import Alternative
from autopar.progress import enter
from autopar.solver.budget import Budget


@dataclasses.dataclass(frozen=True)
class Unsolved:
    """A way in which no stages can be chosen, and why."""

    error: OutOfMemoryError | ArgumentError


Outcome: TypeAlias = StageChoice | SlowerStages | Unsolved


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRules:
    """What all timetables have in common; `shares` of forward work that a stage may do again, `shape` of the cluster.

    `parts`: see `StageProblem`.
    """

    options: tuple[Submesh, ...]
    shares: tuple[float, ...]
    shape: Submesh
    limit_bytes: float
    num_stages: int | None
    parts: tuple[Submesh, ...] = ()

    @property
    def repetitions(self) -> tuple[Repetition, ...]:
        """What backward may do again: for each, all submeshes are options."""
        return repetitions(self.shares)

    def share_of(self, stage: ChosenStage) -> float:
        """Of its forward work, what the backward pass of a stage does again."""
        return self.repetitions[stage.option // len(self.options)].share

    def problem(self, way: Timetable, costs: CostTable) -> StageProblem:
        """The choice of stages in a timetable."""
        return StageProblem(
            costs=costs,
            options=self.options * len(self.repetitions),
            cluster=self.shape,
            microbatches=way.microbatches,
            schedule=way.schedule,
            virtual_stages=way.virtual_stages,
            memory_bytes=self.limit_bytes,
            parts=self.parts,
        )


class BestStages:
    """See the module's text. `outcomes`: what is known of each timetable; `ways`: all timetables.

    `larger`: timetables with more microbatches, which are compared from `add_larger` on. `processes`: how many may choose.
    """

    def __init__(
        self,
        costs: LayerCosts | CostsByKind,
        ways: Sequence[Timetable],
        rules: StageRules,
        *,
        larger: Sequence[Timetable] = (),
        processes: int,
        budget: Budget,
        tuning: Tuning,
    ) -> None:
        self.outcomes: dict[Timetable, Outcome] = {}
        self._costs, self._ways, self._rules = costs, tuple(ways), rules
        self._larger = tuple(larger)
        self.processes, self._budget, self._tuning = processes, budget, tuning
        self._current: set[Timetable] = set()
        self._took_s: dict[Timetable, float] = {}
        self._only: frozenset[Timetable] | None = None

    @property
    def ways(self) -> list[Timetable]:
        """All timetables into which the step can be cut."""
        return [way for way in self._ways if way.microbatches not in self._costs.impossible]

    @property
    def choices(self) -> dict[Timetable, StageChoice]:
        """The stages of those timetables that have some and are up to date."""
        found = ((way, self.outcomes[way]) for way in self.ways if way in self._current)
        return {way: outcome for way, outcome in found if isinstance(outcome, StageChoice)}

    @property
    def least_s(self) -> Mapping[Timetable, float]:
        """Seconds that the given-up timetables take at least, by the costs when they were solved."""
        return {way: one.at_least_s for way in self.ways if isinstance(one := self.outcomes.get(way), SlowerStages)}

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of microbatches of all timetables, those of `larger` last."""
        return tuple(dict.fromkeys(way.microbatches for way in (*self.ways, *self._larger)))

    def with_count(self, count: int) -> list[Timetable]:
        """All timetables with a number of microbatches, those of `larger` as well."""
        return [way for way in (*self.ways, *self._larger) if way.microbatches == count]

    def begin_with(self, count: int) -> None:
        """Look at timetables with this number of microbatches first, which may be one of `larger`."""
        if any(way.microbatches == count for way in self._larger):
            self.add_larger()
        self._ways = tuple(sorted(self._ways, key=lambda way: way.microbatches != count))

    def add_larger(self) -> bool:
        """From now on, compare the timetables of `larger` as well; whether there are any new ones."""
        new, self._larger = self._larger, ()
        self._ways += new
        return bool(new)

    def look_only_at(self, ways: Sequence[Timetable] | None) -> None:
        """From now on, solve these timetables alone; all again if it is None."""
        self._only = None if ways is None else frozenset(ways)

    def outdate(self) -> None:
        """Note that costs have changed."""
        self._current.clear()

    def choose_by(self, rules: StageRules, budget: Budget) -> None:
        """From now on, choose by these stricter rules, in so much time; what was known of the same submeshes is a promise."""
        self.outcomes = self.outcomes if rules.options == self._rules.options else {}
        self._rules, self._budget = rules, budget
        self.outdate()

    def solve_promising(self) -> None:
        """Solve timetables, the most promising first, until no promise is better than what is up to date."""
        while waiting := sorted(self._waiting(), key=self.promised_s):
            best_s = self._best_s()
            if self.promised_s(waiting[0]) >= best_s < math.inf or self._is_late():
                return
            together = waiting[: self._tuning.ways_at_once if self.outcomes else 1]
            together = [way for way in together if not self.promised_s(way) >= best_s < math.inf]
            self._solve_all(together, self._hoped_s(together, best_s))

    def _hoped_s(self, ways: Sequence[Timetable], best_s: float) -> float:
        """Seconds below which to solve these timetables; any, if all have been given up, as what fits nowhere looks slow."""
        if math.isfinite(best_s):
            return min(best_s, self.promised_s(ways[-1]) or math.inf) * (1 + self._tuning.worth)
        if self._current.issuperset(self.ways):
            return math.inf
        return (self.promised_s(ways[-1]) or math.inf) * (1 + self._tuning.near)

    def solve_rest(self) -> None:
        """Bring all timetables up to date that may be the best."""
        if (waiting := self._waiting()) and not self._is_late():
            self._solve_all(waiting, self._best_s() * (1 + self._tuning.worth))

    def solve_below(self, ways: Sequence[Timetable], below_s: float) -> list[StageChoice]:
        """The best stages of those of these timetables in which a step takes less than so many seconds."""
        self._solve_all(
            [way for way in ways if way not in self._current or self.least_s.get(way, math.inf) < below_s], below_s
        )
        found = (self.outcomes[way] for way in ways)
        return [choice for choice in found if isinstance(choice, StageChoice) and choice.step_s < below_s]

    def handicap(self, way: Timetable, seconds: float) -> float:
        """Seconds of a step; more if its number of microbatches is only estimated, as that must promise something.

        It need not promise much while little of the time is used: layers in another number are soon planned then.
        """
        if way.microbatches in self._costs.counts:
            return seconds
        is_early = self._budget.used < self._tuning.early
        return seconds * (1 + (self._tuning.worth_early if is_early else self._tuning.worth_late))

    def solve(
        self, way: Timetable, *, num_stages: int | None = None, explain: bool = False, costs: CostTable | None = None
    ) -> StageChoice | Unsolved:
        """The best stages of one timetable, however slow; of so many if a number is given, for these costs if they are given."""
        manual = Manual(num_stages=self._rules.num_stages if num_stages is None else num_stages)
        problem = self._rules.problem(way, self.table(way) if costs is None else costs)
        try:
            return choose_stages(problem, manual=manual, tolerance=self._tuning.tolerance, explain=explain)
        except (OutOfMemoryError, ArgumentError) as error:
            return Unsolved(error)

    def explain(self) -> OutOfMemoryError | ArgumentError:
        """The error of a way that does not fit the memory if there is one, with what its tightest stage needs."""
        errors = {way: one.error for way, one in self.outcomes.items() if isinstance(one, Unsolved)}
        explained = self.solve(
            max(self.ways, key=lambda way: isinstance(errors.get(way), OutOfMemoryError)), explain=True
        )
        assert isinstance(explained, Unsolved)
        return explained.error

    def one_stage_s(self, ways: Sequence[Timetable]) -> float:
        """The least seconds of a step in one stage on all devices; infinite if it fits in none of these timetables."""
        alone = [self.solve(way, num_stages=1) for way in ways]
        return min((one.step_s for one in alone if isinstance(one, StageChoice)), default=math.inf)

    def first_alone(self) -> tuple[int, float] | None:
        """(microbatches, seconds of the step) of the fewest in which one stage on all devices fits.

        Larger numbers than those of the timetables are looked at as well: more stages than one may fit in fewer microbatches.
        """
        for count in sorted(self.counts):
            if self._budget.is_over:
                break
            alone = self.solve(self.with_count(count)[0], num_stages=1)
            if isinstance(alone, StageChoice):
                return count, alone.step_s
        return None

    def solve_number(self, way: Timetable, num_stages: int, below_s: float) -> Outcome:
        """The best stages of one timetable in that number, if a step takes less than so many seconds."""
        problem = self._rules.problem(way, self.table(way))
        return self._choose(problem, below_s, num_stages=num_stages)

    def solve_planned(
        self, way: Timetable, below_s: float, budget: Budget, *, submeshes: tuple[Submesh, ...] | None = None
    ) -> Outcome:
        """The choice of several stages, within a budget of its own, on submeshes on which layers are planned.

        The estimates of others need not come true. `submeshes`: those of all meshes, if they are given.
        """
        table, rules = self.table(way), self._rules
        known = [one != rules.shape and self._costs.is_planned(way.microbatches, one) for one in rules.options]
        is_known = known * len(rules.repetitions)
        seconds = np.where(np.array(is_known)[:, None, None], table.seconds, np.inf)
        problem = rules.problem(way, dataclasses.replace(table, seconds=seconds))
        return self._choose(problem, below_s, budget=budget, submeshes=submeshes)

    def by_promise(self) -> list[Timetable]:
        """Timetables of the first schedule that may fit: planned numbers of microbatches, the fastest first, then the others.

        Other schedules keep more or less of what is known of whole stages alone. They are priced once these are planned.
        """
        promised_s = {way: self.promised_s(way) for way in self.ways if self._is_first_schedule(way)}
        ways = [way for way, seconds in promised_s.items() if math.isfinite(seconds)]
        counts = self._costs.counts
        return sorted(ways, key=lambda way: (way.microbatches not in counts, promised_s[way] or math.inf))

    def _is_first_schedule(self, way: Timetable) -> bool:
        return (way.schedule, way.virtual_stages) == (self.ways[0].schedule, self.ways[0].virtual_stages)

    def even_out(self, way: Timetable, choice: StageChoice, budget: Budget) -> StageChoice:
        """Stages on equal submeshes, if they may be as fast: equal stages are planned as wholes once, unlike ones take long."""
        if len({stage.submesh for stage in choice.stages}) == 1 or self._rules.parts:
            return choice
        devices, near_s = math.prod(self._rules.shape), (1 + self._tuning.worth_early) * choice.step_s
        even: list[StageChoice] = []
        for submesh in self._rules.options:
            count, rest = divmod(devices, size_of(submesh))
            if count > 1 and not rest and self._costs.is_planned(way.microbatches, submesh):
                found = self.solve_planned(way, near_s, budget, submeshes=(submesh,) * count)
                even += [found] if isinstance(found, StageChoice) and found.step_s <= near_s else []
        return min(even, key=lambda one: one.step_s, default=choice)

    def is_planned(self, way: Timetable, choice: StageChoice, *, carried: bool = True) -> bool:
        """Whether layers are planned on the devices of all stages; see `LayerCosts.is_planned`."""
        count = way.microbatches
        return all(self._costs.is_planned(count, stage.submesh, carried=carried) for stage in choice.stages)

    def hoped_s(self, way: Timetable, choice: StageChoice) -> float:
        """Seconds of a step; more if on devices of some stages no layer is planned, or in other numbers of microbatches alone."""
        is_exact, is_known = (self.is_planned(way, choice, carried=carried) for carried in (False, True))
        return choice.step_s * (1.0 if is_exact else 1 + self._tuning.worth if is_known else self._tuning.hoped)

    def promised_s(self, way: Timetable) -> float:
        """What a step takes in a timetable, or at least takes, by the costs when it was solved; 0 if it never was."""
        match self.outcomes.get(way):
            case StageChoice(step_s=seconds) | SlowerStages(at_least_s=seconds):
                return self.handicap(way, seconds)
            case Unsolved():
                return math.inf
            case None:
                return 0.0

    def compare(self, choices: Mapping[Timetable, StageChoice]) -> tuple[Alternative, ...]:
        """Every timetable with what its best stages would take, or at least take.

        Stages for which the clock left no time to plan a layer promise what perfect division gives: they take that at least.
        """
        known = {way: one for way, one in choices.items() if not self._budget.is_over or self.is_planned(way, one)}
        hoped_s = {way: one.step_s for way, one in choices.items() if way not in known}
        rows = [
            Alternative(
                num_stages=len(choice.stages),
                num_microbatches=way.microbatches,
                schedule=way.schedule,
                virtual_stages=way.virtual_stages,
                recompute=any(map(self._rules.share_of, choice.stages)),
                estimate_s=choice.step_s,
            )
            for way, choice in known.items()
        ]
        rows += [
            Alternative(
                num_stages=None,
                num_microbatches=way.microbatches,
                schedule=way.schedule,
                virtual_stages=way.virtual_stages,
                at_least_s=seconds,
            )
            for way, seconds in {**self.least_s, **hoped_s}.items()
            if way not in known
        ]
        return tuple(sorted(rows, key=lambda one: (one.num_microbatches, one.schedule, one.virtual_stages)))

    def alone_s(self, way: Timetable) -> float:
        """Seconds of a step in one stage on all devices, whatever the memory; infinite if there is no plan."""
        if self._rules.options[-1] != self._rules.shape:
            return math.inf
        table, place = self.table(way), len(self._rules.options) - 1
        return float(way.microbatches * table.seconds[place, 0, -1] + table.once_s[place, 0, -1])

    def table(self, way: Timetable) -> CostTable:
        """What layers cost in a timetable."""
        return self._costs.table(way.microbatches, self._rules.options, shares=self._rules.shares, split=way.is_split)

    def _is_late(self) -> bool:
        return bool(self.choices) and self._budget.is_over

    def _best_s(self) -> float:
        return min((self.handicap(way, choice.step_s) for way, choice in self.choices.items()), default=math.inf)

    def _waiting(self) -> list[Timetable]:
        """The timetables of which too little is known: solved under other costs, or given up below the best one's seconds."""
        below_s = self._best_s()
        given_up = {way for way, seconds in self.least_s.items() if self.handicap(way, seconds) < below_s}
        ways = [way for way in self.ways if self._only is None or way in self._only]
        return [way for way in ways if way not in self._current or way in given_up]

    def _solve_all(self, ways: Sequence[Timetable], below_s: float) -> None:
        """Solve timetables side by side, each as far as it may take less than so many seconds; see `handicap`."""
        for way in ways:
            self.table(way)  # here, not in a fork: it plans layers, which this process keeps
        enter("choosing stages")
        found = run_side_by_side(
            [functools.partial(self._solve_timed, way, below_s / self.handicap(way, 1.0)) for way in ways],
            processes=self.processes,
            weights=[self._took_s.get(way, 0.0) for way in ways],
        )
        for way, (outcome, seconds) in zip(ways, found, strict=True):
            self.outcomes[way], self._took_s[way] = outcome, seconds
        self._current.update(ways)

    def _solve_timed(self, way: Timetable, below_s: float) -> tuple[Outcome, float]:
        """The choice in the number of stages that is wanted, and the seconds that it took."""
        started = time.perf_counter()
        outcome = self._choose(self._rules.problem(way, self.table(way)), below_s)
        return outcome, time.perf_counter() - started

    def _choose(
        self,
        problem: StageProblem,
        below_s: float,
        *,
        num_stages: int | None = None,
        submeshes: tuple[Submesh, ...] | None = None,
        budget: Budget | None = None,
    ) -> Outcome:
        manual = Manual(num_stages=num_stages or self._rules.num_stages, submeshes=submeshes)
        own, tolerance = budget or self._budget, self._tuning.tolerance
        try:
            return choose_faster_stages(problem, below_s, manual=manual, tolerance=tolerance, budget=own)
        except (OutOfMemoryError, ArgumentError) as error:
            return Unsolved(error)
