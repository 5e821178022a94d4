"""How many stages, of which layers, on which devices: the inter-operator pass over planned layers.

In: a traced step, the number of devices, the machine, and timetables: numbers of microbatches and schedules. Out: the cuts,
meshes and timetable for `plan_stages`. Ranges of layers have costs (`layer_costs.py`), planned or estimated from what is planned,
and the dynamic program (`choose_stages.py`) chooses once per timetable. Whatever is chosen by an estimate is planned, and the
choice made again, until everything that is chosen has been planned. What can go wrong: the sum leaves out what layers share,
such as a relayout at a boundary saved or an activation freed early. So the chosen stages are planned again as wholes, and their
own figures are the plan's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.forked_jobs import run_side_by_side
from autopar.inter_op.choose_stages import choose_stages, may_fit
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stages import Planner, plan_program
from autopar.inter_op.problem import ChosenStage, CostTable, Manual, StageChoice, StageProblem
from autopar.inter_op.submeshes import Submesh, machine_shape, submeshes
from autopar.inter_op.timetables import Timetable
from autopar.inter_op.tuning import TUNING, Tuning
from autopar.intra_op.request import PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.plan import Alternative
from autopar.progress import enter
from autopar.schedules.schedules import NAMED_SCHEDULES
from autopar.solver.budget import Budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What the search chose: places of the cuts in the forward chain, the devices of each stage, and their logical meshes.

    A stage's meshes are those that are best for one of its layers. `shares`: of each stage's forward work, what backward does
    again. `loop`: the
    step in the chosen number of microbatches. `one_stage_s`: the least time of one stage on all devices, infinite if that does
    not fit. `compared`: every timetable with what its best stages would take.
    """

    cuts: tuple[int, ...]
    sizes: tuple[int, ...]
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    choice: StageChoice
    timetable: Timetable
    shares: tuple[float, ...]
    loop: TimeLoop
    one_stage_s: float
    compared: tuple[Alternative, ...]


@dataclasses.dataclass(frozen=True)
class NotFaster:
    """No stages promise to be faster than the time to beat; `compared`: the least that each timetable would take."""

    compared: tuple[Alternative, ...]


def search_stages(
    loop_of: Callable[[int], TimeLoop],
    request: PlanRequest,
    *,
    devices: int,
    timetables: Sequence[Timetable],
    num_stages: int | None = None,
    shares: Sequence[float] = (0.0,),
    beat_s: float | None = None,
    tuning: Tuning = TUNING,
    planner: Planner = plan_program,
) -> Found | NotFaster:
    """The best stages in the best of these timetables, with as much recomputation as pays.

    Args:
        loop_of: the step in a number of microbatches; the search begins with that of the first timetable.
        request: the machine, the memory limit, the constraints; its meshes are not used.
        devices: their number, all of which the stages use.
        timetables: what is compared.
        num_stages: the number of meshes, if it is given.
        shares: of its forward work, what the backward pass of a stage may do again; each stage gets one of them.
        beat_s: seconds of the step on one mesh, which several stages have to beat; one stage is then no candidate.
        tuning: how long to look.
        planner: how a layer is planned.

    Raises:
        OutOfMemoryError: no stages fit.
        ArgumentError: nothing is left to choose.
    """
    shape, start = machine_shape(request.cluster, devices), timetables[0].microbatches
    options = submeshes(*shape) if beat_s is None else submeshes(*shape)[:-1]
    costs = LayerCosts(
        loop_of, start, request, options, smallest_first=beat_s is not None, tuning=tuning, planner=planner
    )
    search = _StageSearch(
        costs=costs,
        all_ways=tuple(timetables),
        options=options,
        shares=tuple(shares),
        shape=shape,
        limit_bytes=math.inf if request.memory_limit_bytes is None else tuning.room * request.memory_limit_bytes,
        num_stages=num_stages,
        beat_s=math.inf if beat_s is None else beat_s,
        processes=request.processes,
        budget=request.budget,
        tuning=tuning,
    )
    return search.run()


@dataclasses.dataclass(frozen=True)
class _Unsolved:
    """A way in which no stages can be chosen, and why."""

    error: OutOfMemoryError | ArgumentError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _StageSearch:
    """The loop of the search: choose stages in every way, plan what looks best, until what looks best has been planned."""

    costs: LayerCosts
    all_ways: tuple[Timetable, ...]
    options: tuple[Submesh, ...]
    shares: tuple[float, ...]
    shape: Submesh
    limit_bytes: float
    num_stages: int | None
    beat_s: float
    processes: int
    budget: Budget
    tuning: Tuning

    def run(self) -> Found | NotFaster:
        """The best stages in the best way."""
        took_s: dict[Timetable, float] = {}
        self._choose_start()
        while True:
            outcomes = self._solve_all(took_s)
            choices = {way: outcome for way, outcome in outcomes.items() if isinstance(outcome, StageChoice)}
            if not choices:
                if not self.budget.is_over and self.costs.plan_more(self.all_ways[0].microbatches, self.options):
                    continue
                if math.isfinite(self.beat_s):
                    return NotFaster(())  # too few layers, or too little memory in parts of the machine
                raise self._explain(outcomes)
            if self.budget.is_over:
                return self._end(choices)
            best = min(choices, key=lambda way: self._handicapped_s(way, choices[way]))
            if choices[best].step_s >= (1 + self.tuning.near) * self.beat_s:
                return NotFaster(self._compare(choices))
            submeshes = [stage.submesh for stage in choices[best].stages]
            if not self.costs.plan_more(best.microbatches, submeshes) and not self._plan_neighbour(best, choices):
                return self._describe(best, choices)

    def _choose_start(self) -> None:
        """Plan layers first in a number of microbatches in which those that repeat fit the memory, if nothing else were there.

        Without such a number the search begins with the usual one, and finds out why nothing fits.
        """
        if not self.costs.has_common or math.isinf(self.limit_bytes):
            return
        for count in dict.fromkeys(way.microbatches for way in self.all_ways):
            ways = [way for way in self.all_ways if way.microbatches == count]
            if any(self._may_fit(way) for way in ways) and self.costs.start_with(count):
                return

    def _may_fit(self, way: Timetable) -> bool:
        """Whether the layers that repeat fit the memory in some stages."""
        is_split = NAMED_SCHEDULES[way.schedule].is_split
        table = self.costs.table_of_common(way.microbatches, self.options, shares=self.shares, split=is_split)
        return may_fit(self._problem(way, table), Manual(num_stages=self.num_stages))

    def _end(self, choices: Mapping[Timetable, StageChoice]) -> Found | NotFaster:
        """The best of what is known: on submeshes and in numbers of microbatches whose layers are planned, if there is any."""
        outcomes = {way: self._solve_planned(way) for way in choices if way.microbatches in self.costs.counts}
        planned = {way: outcome for way, outcome in outcomes.items() if isinstance(outcome, StageChoice)}
        choices = {**choices, **planned}
        best = min(planned or choices, key=lambda way: choices[way].step_s)
        if best.microbatches not in self.costs.counts:
            self.costs.plan_more(best.microbatches, [stage.submesh for stage in choices[best].stages])
        is_faster = choices[best].step_s < self.beat_s
        return self._describe(best, choices) if is_faster else NotFaster(self._compare(choices))

    def _solve_planned(self, way: Timetable) -> StageChoice | _Unsolved:
        """The choice among submeshes on which layers are planned, as an estimate need not come true."""
        table = self._table(way)
        is_known = [self.costs.is_planned(way.microbatches, submesh) for submesh in self.options] * len(self.shares)
        seconds = np.where(np.array(is_known)[:, None, None], table.seconds, np.inf)
        return self._choose(self._problem(way, dataclasses.replace(table, seconds=seconds)), self.num_stages)

    def _solve_all(self, took_s: dict[Timetable, float]) -> dict[Timetable, StageChoice | _Unsolved]:
        """Choose stages in every way that is left, side by side; `took_s` holds seconds and is brought up to date."""
        ways = self._possible_ways()
        for way in ways:
            self._table(way)  # here, not in a fork: it plans layers, which this process keeps
        enter("choosing stages")
        found = run_side_by_side(
            [functools.partial(self._solve_timed, way) for way in ways],
            processes=self.processes,
            weights=[took_s.get(way, 0.0) for way in ways],
        )
        took_s |= {way: seconds for way, (_, seconds) in zip(ways, found, strict=True)}
        return {way: outcome for way, (outcome, _) in zip(ways, found, strict=True)}

    def _possible_ways(self) -> list[Timetable]:
        return [way for way in self.all_ways if way.microbatches not in self.costs.impossible]

    def _table(self, way: Timetable) -> CostTable:
        is_split = NAMED_SCHEDULES[way.schedule].is_split
        return self.costs.table(way.microbatches, self.options, shares=self.shares, split=is_split)

    def _solve_timed(self, way: Timetable) -> tuple[StageChoice | _Unsolved, float]:
        """The choice in the number of stages that is wanted, and the seconds that it took."""
        started = time.perf_counter()
        return self._solve(way, self.num_stages), time.perf_counter() - started

    def _solve(self, way: Timetable, num_stages: int | None, *, explain: bool = False) -> StageChoice | _Unsolved:
        return self._choose(self._problem(way, self._table(way)), num_stages, explain=explain)

    def _choose(
        self, problem: StageProblem, num_stages: int | None, *, explain: bool = False
    ) -> StageChoice | _Unsolved:
        manual, tolerance = Manual(num_stages=num_stages), self.tuning.tolerance
        try:
            return choose_stages(problem, manual=manual, tolerance=tolerance, explain=explain)
        except (OutOfMemoryError, ArgumentError) as error:
            return _Unsolved(error)

    def _problem(self, way: Timetable, costs: CostTable) -> StageProblem:
        return StageProblem(
            costs=costs,
            options=self.options * len(self.shares),
            cluster=self.shape,
            microbatches=way.microbatches,
            schedule=way.schedule,
            virtual_stages=way.virtual_stages,
            memory_bytes=self.limit_bytes,
        )

    def _explain(self, outcomes: Mapping[Timetable, StageChoice | _Unsolved]) -> OutOfMemoryError | ArgumentError:
        """The error of a way that does not fit the memory if there is one, with what its tightest stage needs."""

        def is_out_of_memory(way: Timetable) -> bool:
            outcome = outcomes[way]
            return isinstance(outcome, _Unsolved) and isinstance(outcome.error, OutOfMemoryError)

        explained = self._solve(max(outcomes, key=is_out_of_memory), self.num_stages, explain=True)
        assert isinstance(explained, _Unsolved)
        return explained.error

    def _handicapped_s(self, way: Timetable, choice: StageChoice) -> float:
        """Seconds of a step; more if its number of microbatches is only estimated, as that must promise something."""
        is_planned = way.microbatches in self.costs.counts
        return choice.step_s * (1.0 if is_planned else 1 + self.tuning.worth)

    def _plan_neighbour(self, best: Timetable, choices: Mapping[Timetable, StageChoice]) -> bool:
        """Plan the number of microbatches below or above the best one if its estimate is near; whether there was one.

        The first such number is planned in any case, so that latencies are known.
        """
        count = best.microbatches
        numbers = sorted({way.microbatches for way in choices} | {count})
        place = numbers.index(count)
        for number in (*numbers[max(0, place - 1) : place], *numbers[place + 1 : place + 2]):
            way = min((way for way in choices if way.microbatches == number), key=lambda way: choices[way].step_s)
            near_s = (1 + self.tuning.near) * choices[best].step_s
            is_near = len(self.costs.counts) == 1 or choices[way].step_s < near_s
            if number not in self.costs.counts and is_near:
                return self.costs.plan_more(number, [stage.submesh for stage in choices[way].stages])
        return False

    def _describe(self, best: Timetable, choices: Mapping[Timetable, StageChoice]) -> Found:
        choice, layers = choices[best], self.costs.of(best.microbatches)
        first_schedule = self.all_ways[0].schedule
        alone = [self._solve(way, 1) for way in self._possible_ways() if way.schedule == first_schedule]
        return Found(
            cuts=tuple(layers.places[stage.first_layer - 1] for stage in choice.stages[1:]),
            sizes=tuple(math.prod(stage.submesh) for stage in choice.stages),
            meshes=tuple(map(layers.meshes, choice.stages)),
            choice=choice,
            timetable=best,
            shares=tuple(self._share_of(stage) for stage in choice.stages),
            loop=layers.loop,
            one_stage_s=min((one.step_s for one in alone if isinstance(one, StageChoice)), default=math.inf),
            compared=self._compare(choices),
        )

    def _share_of(self, stage: ChosenStage) -> float:
        """Of its forward work, what the backward pass of a stage does again."""
        return self.shares[stage.option // len(self.options)]

    def _compare(self, choices: Mapping[Timetable, StageChoice]) -> tuple[Alternative, ...]:
        """Every timetable with what its best stages would take."""
        return tuple(
            Alternative(
                num_stages=len(choices[way].stages),
                num_microbatches=way.microbatches,
                schedule=way.schedule,
                virtual_stages=way.virtual_stages,
                recompute=any(map(self._share_of, choices[way].stages)),
                estimate_s=choices[way].step_s,
            )
            for way in sorted(choices)
        )
