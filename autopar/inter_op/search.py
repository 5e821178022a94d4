"""How many stages, of which layers, on which devices: the inter-operator pass over planned layers.

In: a traced step, the number of devices, the machine, and timetables: numbers of microbatches and schedules. Out: the cuts,
meshes and timetable for `plan_stages`. Ranges of layers have costs (`layer_costs.py`), planned or estimated from what is planned,
and the dynamic program (`choose_stages.py`) chooses for the timetables that look best (`best_stages.py`). Whatever
is chosen by an estimate is planned, and the choice made again, until everything that is chosen has been planned: first in one
number of microbatches, then in all. Where an estimate keeps too much to be chosen, as devices divided examples of which there are
fewer now, it is planned as well, if it would pay with its state divided. What can go wrong: the sum leaves out what layers share,
such as a relayout at a boundary saved or an activation freed early. So the chosen stages are planned again as wholes, and their
own figures are the plan's.

Where nothing fits the memory in numbers around the usual one, or only with forward work done again, larger ones are compared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from autopar.forks.jobs import run_side_by_side
from autopar.inter_op.best_stages import BestStages, StageRules
from autopar.inter_op.candidates.timetables import Timetable, neighbours
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.costs_by_kind import ALIKE, CostsByKind, KindsInOrder, costs_on
from autopar.inter_op.dynamic_program.choose_stages import may_fit
from autopar.inter_op.dynamic_program.found import Found, NotFaster
from autopar.inter_op.dynamic_program.problem import CostTable, Manual, StageChoice
from autopar.inter_op.dynamic_program.submeshes import kind_of, machine_shape, size_of
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stage import Planner, plan_program
from autopar.intra_op.request import PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.progress import Progress, report
from autopar.solver.budget import Budget


def search_stages(
    loop_of: Callable[[int], TimeLoop],
    request: PlanRequest,
    *,
    devices: int,
    timetables: Sequence[Timetable],
    start: int | None = None,
    larger: Sequence[Timetable] = (),
    num_stages: int | None = None,
    shares: Sequence[float] = (0.0,),
    beat_s: float | None = None,
    budget: Budget | None = None,
    tuning: Tuning = TUNING,
    planner: Planner = plan_program,
    kinds: KindsInOrder = ALIKE,
) -> Found | NotFaster:
    """The best stages in the best of these timetables, with as much recomputation as pays.

    Args:
        loop_of: the step in a number of microbatches.
        request: the machine, the memory limit, the constraints; its meshes are not used.
        devices: their number, all of which the stages use.
        timetables: what is compared.
        start: in how many microbatches layers are planned first, if not in that of the first timetable.
        larger: timetables with more microbatches, compared as well if nothing fits the memory in those, or not as it is.
        num_stages: the number of meshes, if it is given.
        shares: of its forward work, what the backward pass of a stage may do again; each stage gets one of them.
        beat_s: seconds of the step on one mesh, which several stages have to beat; one stage is then no candidate.
        budget: when to look no further; that of the request, which the layers have, unless it is given.
        tuning: how long to look.
        planner: how a layer is planned.
        kinds: of a mixed cluster, all of whose devices are used, also in one stage; none where nodes are alike.

    Raises:
        OutOfMemoryError: no stages fit.
        ArgumentError: nothing is left to choose.
    """
    shape, is_hurried = machine_shape(request.cluster, devices), beat_s is not None
    first = start or timetables[0].microbatches
    make = functools.partial(LayerCosts, loop_of, first, smallest_first=is_hurried, tuning=tuning, planner=planner)
    costs, options, limit = costs_on(shape, request, kinds, make, num_stages)
    most, parts = tuning.room * limit, tuple(kind.part for kind in kinds.order)
    rules = StageRules(
        options=options, shares=tuple(shares), shape=shape, limit_bytes=most, num_stages=num_stages, parts=parts
    )
    own, to_beat_s = budget or request.budget, math.inf if beat_s is None else beat_s
    stages = BestStages(costs, timetables, rules, larger=larger, processes=request.processes, budget=own, tuning=tuning)
    return _StageSearch(costs=costs, stages=stages, rules=rules, beat_s=to_beat_s, budget=own, tuning=tuning).run()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _StageSearch:
    """The loop of the search: choose stages in every way, plan what looks best, until what looks best has been planned.

    `settled`: what was the best, before more was planned of which little was known.
    """

    costs: LayerCosts | CostsByKind
    stages: BestStages
    rules: StageRules
    beat_s: float
    budget: Budget
    tuning: Tuning
    settled: list[tuple[Timetable, StageChoice]] = dataclasses.field(default_factory=list)

    def run(self) -> Found | NotFaster:
        """The best stages in the best way."""
        self._choose_start()
        self._settle_first()
        return self._look()

    def _settle_first(self) -> None:
        """Plan what is chosen in the first number of microbatches, first in one schedule: others have something to beat then."""
        for ways in ([self._first], self.stages.with_count(self._first.microbatches)):
            self.stages.look_only_at(ways)
            while not self.budget.is_over:
                self.stages.solve_promising()
                if not self.stages.choices or not self._plan_chosen(self._best_of(self.stages.choices)):
                    break
        self.stages.look_only_at(None)

    def _plan_chosen(self, best: Timetable) -> bool:
        """Plan layers where the best choice takes estimates of them, unless it is too slow; whether there are any."""
        choice = self.stages.choices[best]
        report(Progress(promised_s=choice.step_s))
        count, submeshes = best.microbatches, [stage.submesh for stage in choice.stages]
        is_new = not self._is_too_slow(choice) and (
            self.costs.plan_more(count, submeshes) or self.costs.plan_others(count, choice.stages)
        )
        if is_new:
            self.stages.outdate()
        return is_new

    def _is_too_slow(self, choice: StageChoice) -> bool:
        return choice.step_s >= (1 + self.tuning.near) * self.beat_s

    def _look(self) -> Found | NotFaster:
        while True:
            self.stages.solve_promising()
            choices = self.stages.choices
            if not choices:
                if self._look_further():
                    continue
                if math.isfinite(self.beat_s):
                    return NotFaster(())  # too few layers, or too little memory in parts of the machine
                raise self.stages.explain()
            if self.budget.is_over:
                return self._end(choices)
            if found := self._go_on(self._best_of(choices)):
                return found

    def _look_further(self) -> bool:
        """Know more where nothing fits: of larger numbers of microbatches, then of larger submeshes; whether there is more.

        Without another plan to fall back on, the clock ends this only once layers are planned in the largest number.
        """
        if self.stages.add_larger():
            return True
        if self.budget.is_over and math.isfinite(self.beat_s):
            return False
        is_new = self._plan_leanest()
        if not is_new and not self.budget.is_over:
            is_new = self.costs.plan_more(self._first.microbatches, self.rules.options)
        is_new = is_new or self.costs.plan_all_others()  # where they seem too large, they need not be
        if is_new:
            self.stages.outdate()
        return is_new

    def _plan_leanest(self) -> bool:
        """Plan layers in the largest number of microbatches too; whether they were not.

        What is fastest in few, such as data parallelism, may keep more state than fits, and other numbers take that over.
        """
        count = max((way.microbatches for way in self.stages.ways), default=self._first.microbatches)
        if count in self.costs.counts:
            return False
        for submesh in self.rules.options:
            if self.costs.is_planned(self._first.microbatches, submesh):
                self.costs.plan_more(count, [submesh])
        return True

    def _choose_within(self, room: float) -> Found | NotFaster:
        """The choice made again, in this part of the memory limit; it takes little time, as layers are planned."""
        limit_bytes = self.rules.limit_bytes * room / self.tuning.room
        return self._choose_by(dataclasses.replace(self.rules, limit_bytes=limit_bytes), self.beat_s)

    def _choose_several(self, beat_s: float) -> Found | NotFaster:
        """The choice made again without one stage on all devices."""
        several = tuple(one for one in self.rules.options if one != self.rules.shape)
        return self._choose_by(dataclasses.replace(self.rules, options=several), beat_s)

    def _choose_by(self, rules: StageRules, beat_s: float) -> Found | NotFaster:
        own = Budget(seconds=self.tuning.last_look_s) if self.budget.is_over else self.budget
        self.stages.choose_by(rules, own)
        return dataclasses.replace(self, rules=rules, beat_s=beat_s, budget=own, settled=[])._look()

    def _go_on(self, best: Timetable) -> Found | NotFaster | None:
        """Plan what the best way is an estimate of. The result of the search if there is nothing of the kind."""
        is_too_slow = self._is_too_slow(self.stages.choices[best])
        if self._plan_chosen(best):
            return None
        self.stages.solve_rest()
        choices = self.stages.choices
        if self._best_of(choices) != best:
            return None
        if self._may_do_without_recomputation(choices[best]) and self.stages.add_larger():
            return None
        if is_too_slow:
            return NotFaster(self.stages.compare(choices))
        if self._plan_neighbour(best, choices) or self._plan_otherwise_divided(best, choices[best]):
            self.stages.outdate()
            return None
        return self._describe(best, choices)

    def _may_do_without_recomputation(self, choice: StageChoice) -> bool:
        """Whether stages do forward work again, whose results they may keep in larger numbers of microbatches."""
        return min(self.rules.shares) == 0 and any(map(self.rules.share_of, choice.stages))

    @property
    def _first(self) -> Timetable:
        return self.stages.ways[0]

    def _best_of(self, choices: Mapping[Timetable, StageChoice]) -> Timetable:
        return min(choices, key=lambda way: self.stages.handicap(way, choices[way].step_s))

    def _choose_start(self) -> None:
        """Plan layers first in a number of microbatches in which those that repeat fit the memory, if nothing else were there.

        Without one the search begins with the usual number, and finds out why nothing fits.
        """
        is_open = self.costs.has_common and math.isfinite(self.rules.limit_bytes)
        counts = sorted(self.stages.counts if is_open else (), key=lambda count: count not in self.costs.counts)
        for start in (start for count in filter(self._may_fit, counts) for start in (self._find_better(count), count)):
            if self.costs.start_with(start):
                return self.stages.begin_with(start)
        self.costs.start_with(self._first.microbatches)

    def _find_better(self, count: int) -> int:
        """A number of microbatches that promises more than `count`; that itself if none does.

        Larger ones may if layers fit only with forward work done again; the next ones, if most work is in layers that repeat.
        """
        first, counts = self._choose_for_common(count), self.stages.counts
        if first is None:
            return count
        if self._may_do_without_recomputation(first):
            others = sorted(number for number in counts if number > count)
        else:
            others = neighbours(count, counts) if self.costs.are_alike else []
        jobs = [functools.partial(self._choose_for_common, number) for number in others]
        found = zip(others, run_side_by_side(jobs, processes=self.stages.processes), strict=True)
        promised_s = {count: first.step_s} | {number: one.step_s for number, one in found if one is not None}
        enough_s = (1 + self.tuning.worth) * min(promised_s.values())
        return next(number for number, seconds in promised_s.items() if seconds <= enough_s)

    def _may_fit(self, count: int) -> bool:
        """Whether the layers that repeat fit the memory in some stages in this number of microbatches."""
        manual = Manual(num_stages=self.rules.num_stages)
        table = functools.cache(lambda is_split: self._table_of_common(count, is_split=is_split))
        problems = (self.rules.problem(way, table(way.is_split)) for way in self.stages.with_count(count))
        return any(may_fit(problem, manual) for problem in problems)

    def _choose_for_common(self, count: int) -> StageChoice | None:
        """The best stages in this number of microbatches as if there were only the layers that repeat; None if there are none."""
        way = self.stages.with_count(count)[0]
        outcome = self.stages.solve(way, costs=self._table_of_common(count, is_split=way.is_split))
        return outcome if isinstance(outcome, StageChoice) else None

    def _table_of_common(self, count: int, *, is_split: bool) -> CostTable:
        return self.costs.table_of_common(count, self.rules.options, shares=self.rules.shares, split=is_split)

    def _end(self, choices: Mapping[Timetable, StageChoice]) -> Found | NotFaster:
        """The best of what is known when the budget is over.

        Several stages of planned layers alone are chosen, in the timetables that promise most first, up to date or not.
        One stage alone is the last resort, and so are stages on submeshes whose layers are only estimated if there is no other
        plan: as wholes they may not fit, and there is no time to look for others.
        """
        last_ways = self.stages.by_promise()
        ended = {way: (choice, self.stages.hoped_s(way, choice)) for way, choice in choices.items()}
        doubtful = {way for way, choice in choices.items() if self._is_doubtful(way, choice) or way not in last_ways}
        last = Budget(seconds=self.tuning.last_look_s)
        for way in last_ways:
            if last.is_over or (way.microbatches not in self.costs.counts and ended.keys() - doubtful):
                break
            below_s = min((seconds for one, (_, seconds) in ended.items() if one not in doubtful), default=math.inf)
            planned = self.stages.solve_planned(way, below_s, last)
            is_first = way in doubtful or way not in ended
            if isinstance(planned, StageChoice):
                hoped_s = self.stages.hoped_s(way, planned)
                if is_first or hoped_s < ended[way][1]:
                    ended[way] = (planned, hoped_s)
                    doubtful.discard(way)
        best = min(ended.keys() - doubtful or ended, key=lambda way: ended[way][1])
        choice = self.stages.even_out(best, ended[best][0], last)
        ended[best] = choice, choice.step_s
        if best.microbatches not in self.costs.counts:
            self.costs.plan_more(best.microbatches, [stage.submesh for stage in choice.stages])
        known = {way: choice for way, (choice, _) in ended.items()}
        if choice.step_s >= self.beat_s:
            return NotFaster(self.stages.compare(known))
        others = [way for way in ended.keys() - doubtful - {best} if way.microbatches in self.costs.counts]
        others = [way for way in others if self.stages.is_planned(way, known[way])]
        next_best = sorted(others, key=lambda way: ended[way][1])[: self.tuning.second_looks]
        return dataclasses.replace(
            self._describe(best, known), others=tuple(self._found(way, known[way]) for way in next_best)
        )

    def _is_doubtful(self, way: Timetable, choice: StageChoice) -> bool:
        """Whether it is one stage, which takes as long to plan as all, or estimated, with no other plan to fall back on."""
        return len(choice.stages) == 1 or (math.isinf(self.beat_s) and not self.stages.is_planned(way, choice))

    def _plan_neighbour(self, best: Timetable, choices: Mapping[Timetable, StageChoice]) -> bool:
        """Early, plan the number of microbatches below or above the best one if its estimate is near; whether there was one.

        The first such number is planned in any case, so that latencies are known.
        """
        if self.budget.used >= self.tuning.early:
            return False
        counts, near_s = self.costs.counts, (1 + self.tuning.near) * choices[best].step_s
        below_s = math.inf if len(counts) == 1 else near_s
        for number in neighbours(best.microbatches, {way.microbatches for way in self.stages.ways}):
            near = [] if number in counts else self.stages.solve_below(self.stages.with_count(number), below_s)
            if near:
                nearest = min(near, key=lambda choice: choice.step_s)
                return self.costs.plan_more(number, [stage.submesh for stage in nearest.stages])
        return False

    def _plan_otherwise_divided(self, best: Timetable, choice: StageChoice) -> bool:
        """Plan layers in the best number of microbatches on submeshes that divide its examples less far than those of the numbers
        in which they are planned; whether there are any that may pay.

        What carries over to them is wrong: devices that divide examples keep all of the state, those that divide weights a part.
        """
        rules, count = self.rules, best.microbatches
        otherwise = [self.costs.is_divided_otherwise(count, one) for one in rules.options]
        if not any(otherwise) or self.budget.is_over:
            return False
        sizes = [size_of(one) for one in rules.options]
        hoped = self.stages.solve(best, costs=self.stages.table(best).with_divided_state(sizes, otherwise))
        if not isinstance(hoped, StageChoice) or hoped.step_s * (1 + self.tuning.worth) >= choice.step_s:
            return False
        new = [one for one, is_new in zip(rules.options, otherwise, strict=True) if is_new]
        if not self.costs.plan_more(count, [stage.submesh for stage in hoped.stages if stage.submesh in new]):
            return False
        self.settled.append((best, choice))
        return True

    def _describe(self, best: Timetable, choices: Mapping[Timetable, StageChoice]) -> Found:
        ways = [way for way in self.stages.ways if way.schedule == self._first.schedule]
        found = self._found(best, choices[best])
        others = [(best, one) for one in self._other_numbers(best, choices[best])]
        others += [(way, one) for way, one in self.settled if one.stages != choices[best].stages]
        others.sort(key=lambda other: other[1].step_s)
        return dataclasses.replace(
            found,
            others=tuple(self._found(way, one) for way, one in others),
            one_stage_s=self.stages.one_stage_s(ways),
            alone_fits=self.stages.first_alone(),
            alone_s={way.microbatches: self.stages.alone_s(way) for way in ways},
            compared=self.stages.compare(choices),
        )

    def _found(self, way: Timetable, choice: StageChoice) -> Found:
        layers = self.costs.of(way.microbatches)
        return Found(
            choose_within=self._choose_within,
            choose_several=self._choose_several,
            cuts=tuple(layers.places[stage.first_layer - 1] for stage in choice.stages[1:]),
            sizes=tuple(size_of(stage.submesh) for stage in choice.stages),
            find_meshes=functools.partial(self._find_meshes, way, choice),
            kinds=tuple(kind_of(stage.submesh) for stage in choice.stages),
            choice=choice,
            timetable=way,
            shares=tuple(self.rules.share_of(stage) for stage in choice.stages),
            loop=layers.loop,
            ended_early=self.budget.is_over,
        )

    def _find_meshes(self, way: Timetable, choice: StageChoice) -> tuple[tuple[LogicalMesh, ...], ...]:
        layers = [self.costs.of(way.microbatches, kind_of(stage.submesh)) for stage in choice.stages]
        for own in dict.fromkeys(layers):
            own.plan_stages([stage for stage, its in zip(choice.stages, layers, strict=True) if its is own])
        return tuple(own.meshes(stage) for own, stage in zip(layers, choice.stages, strict=True))

    def _other_numbers(self, way: Timetable, choice: StageChoice) -> list[StageChoice]:
        """Choices of a few stages more or less that may take hardly longer, the fastest first.

        Only of a schedule with a split backward, whose seconds are exact for equal stages alone.
        """
        count = len(choice.stages)
        if not way.is_split or count == 1 or self.rules.num_stages or self.budget.is_over:
            return []
        near_s = (1 + self.tuning.near) * choice.step_s
        numbers = [number for number in range(max(2, count - 1), count + 3) if number != count]
        solved = [self.stages.solve_number(way, number, near_s) for number in numbers]
        found = [other for other in solved if isinstance(other, StageChoice)]
        return sorted(found, key=lambda other: other.step_s)
