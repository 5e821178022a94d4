"""How many stages, of which layers, on which devices: the inter-operator pass over planned layers.

In: a traced step, the number of devices, the machine, and timetables: numbers of microbatches and schedules. Out: the cuts,
meshes and timetable for `staging.plan_stages`. Ranges of layers have costs (`inter_op/layer_costs.py`), planned or carried
over from what was planned, and the dynamic program (`inter_op/choose_stages.py`) chooses once per timetable. What is chosen
and not planned is planned, until what is chosen is. What can go wrong: the sum leaves out what layers share, such as a
relayout at a boundary saved or an activation freed early; so the chosen stages are planned again as wholes, and their own
figures are the plan's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.choose_stages import choose_stages
from autopar.inter_op.forked_jobs import side_by_side
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.problem import CostTable, Manual, StageChoice, StageProblem
from autopar.inter_op.submeshes import Submesh, machine_shape, submeshes
from autopar.inter_op.timetables import WORTH, Timetable
from autopar.intra_op.planner import PlanRequest
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.plan import Alternative
from autopar.schedules.schedules import NAMED_SCHEDULES

TOLERANCE = 1e-3
"""Relative gain below which the search over stages lets go; layers' costs are less exact."""
ROOM = 0.92
"""Part of the memory that stages may take by the sum of their layers, so that they fit as wholes."""
NEAR = 0.15
"""By how much an estimate may exceed the best and be planned all the same, for a number of microbatches next to the best one, or
what stages have to beat: its bubble is that of equal stages, and unequal ones may idle less."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the search chose: places of the cuts in the forward chain, the devices of each stage, and their logical meshes.

    A stage's meshes are those that are best for one of its layers. `recompute`: backward does forward's work again. `loop`: the
    step in the chosen number of microbatches. `one_stage_s`: the least time of one stage on all devices, infinite if that does
    not fit. `compared`: every timetable with what its best stages would take.
    """

    cuts: tuple[int, ...]
    sizes: tuple[int, ...]
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    choice: StageChoice
    timetable: Timetable
    recompute: bool
    loop: TimeLoop
    one_stage_s: float
    compared: tuple[Alternative, ...]


@dataclasses.dataclass(frozen=True)
class NotFaster:
    """No stages promise to be faster than what they had to beat; `compared`: the least that each timetable would take."""

    compared: tuple[Alternative, ...]


def search_stages(
    loop_of: Callable[[int], TimeLoop],
    request: PlanRequest,
    *,
    devices: int,
    timetables: Sequence[Timetable],
    num_stages: int | None = None,
    recompute: Sequence[bool] = (False,),
    beat_s: float | None = None,
) -> Found | NotFaster:
    """The best stages in the best of these timetables, with or without recomputation. Raises OutOfMemoryError, ArgumentError.

    `loop_of`: the step in so many microbatches. The search begins with the number of the first timetable. `beat_s`: seconds of
    the step on one mesh, which several stages have to beat; `NotFaster` as soon as none comes near it. One stage is then no
    candidate, and `one_stage_s` is infinite.
    """
    shape, start = machine_shape(request.cluster, devices), timetables[0].microbatches
    options = submeshes(*shape) if beat_s is None else submeshes(*shape)[:-1]
    costs = LayerCosts(loop_of, start, request, options, smallest_first=beat_s is not None)
    limit = math.inf if request.memory_limit_bytes is None else ROOM * request.memory_limit_bytes
    ways = tuple(itertools.product(timetables, recompute))
    target_s = math.inf if beat_s is None else beat_s
    return _Search(costs, ways, options, shape, limit, num_stages, target_s, request.processes).run()


_Way: TypeAlias = tuple[Timetable, bool]
"""A timetable, and whether backward does forward's work again."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
    """The loop of the search: solve every case, plan what looks best, until what looks best has been planned."""

    costs: LayerCosts
    all_ways: tuple[_Way, ...]
    options: tuple[Submesh, ...]
    shape: Submesh
    limit_bytes: float
    num_stages: int | None
    beat_s: float
    processes: int

    def run(self) -> Found | NotFaster:
        """The best stages over all timetables."""
        took_s: dict[_Way, float] = {}
        while True:
            ways = self._ways()
            for way in ways:
                self._table(way)  # which plans layers, and keeps what it has planned
            jobs = [functools.partial(self._solved, way) for way in ways]
            weights = [took_s.get(way, 0.0) for way in ways]
            found = side_by_side(jobs, processes=self.processes, weights=weights)
            took_s |= {way: seconds for way, (_, seconds) in zip(ways, found, strict=True)}
            solved = {way: choice for way, (choice, _) in zip(ways, found, strict=True)}
            choices = {way: choice for way, choice in solved.items() if isinstance(choice, StageChoice)}
            if not choices:
                if self.costs.plan_more(self.all_ways[0][0].microbatches, self.options):
                    continue
                if math.isfinite(self.beat_s):
                    return NotFaster(())  # too few layers, or too little memory in parts of the machine
                way = max(solved, key=lambda way: isinstance(solved[way], OutOfMemoryError))
                error = self._solve(way, self.num_stages, explain=True)
                assert not isinstance(error, StageChoice)
                raise error
            best = min(choices, key=lambda way: self._handicapped(way, choices[way]))
            if choices[best].step_s >= (1 + NEAR) * self.beat_s:
                return NotFaster(_compared(choices))
            sizes = [stage.submesh for stage in choices[best].stages]
            if not self.costs.plan_more(best[0].microbatches, sizes) and not self._plan_neighbour(best, choices):
                return self._found(best, choices)

    def _ways(self) -> list[_Way]:
        return [way for way in self.all_ways if way[0].microbatches not in self.costs.impossible]

    def _table(self, way: _Way) -> CostTable:
        timetable, again = way
        is_split = NAMED_SCHEDULES[timetable.schedule].is_split
        return self.costs.table(timetable.microbatches, self.options, recompute=again, split=is_split)

    def _solved(self, way: _Way) -> tuple[StageChoice | OutOfMemoryError | ArgumentError, float]:
        """`_solve` in the number of stages wanted, and the seconds that it took."""
        started = time.perf_counter()
        return self._solve(way, self.num_stages), time.perf_counter() - started

    def _solve(
        self, way: _Way, num_stages: int | None, *, explain: bool = False
    ) -> StageChoice | OutOfMemoryError | ArgumentError:
        timetable, _ = way
        problem = StageProblem(
            self._table(way),
            self.options,
            self.shape,
            timetable.microbatches,
            timetable.schedule,
            timetable.virtual_stages,
            memory_bytes=self.limit_bytes,
        )
        try:
            return choose_stages(problem, manual=Manual(num_stages=num_stages), tolerance=TOLERANCE, explain=explain)
        except (OutOfMemoryError, ArgumentError) as error:
            return error

    def _handicapped(self, way: _Way, choice: StageChoice) -> float:
        """The time of a step; where its number of microbatches has not been planned it must promise something."""
        is_planned = way[0].microbatches in self.costs.counts
        return choice.step_s * (1.0 if is_planned else 1 + WORTH)

    def _plan_neighbour(self, best: _Way, choices: Mapping[_Way, StageChoice]) -> bool:
        """Plan the number of microbatches below or above the best one if it is near by its estimate; whether there was one.

        The first such number is planned in any case, so that latencies are known.
        """
        count = best[0].microbatches
        numbers = sorted({way[0].microbatches for way in choices} | {count})
        place = numbers.index(count)
        for number in (*numbers[max(0, place - 1) : place], *numbers[place + 1 : place + 2]):
            way = min((way for way in choices if way[0].microbatches == number), key=lambda way: choices[way].step_s)
            is_near = len(self.costs.counts) == 1 or choices[way].step_s < (1 + NEAR) * choices[best].step_s
            if number not in self.costs.counts and is_near:
                return self.costs.plan_more(number, [stage.submesh for stage in choices[way].stages])
        return False

    def _found(self, best: _Way, choices: Mapping[_Way, StageChoice]) -> Found:
        timetable, again = best
        choice, layers = choices[best], self.costs.of(timetable.microbatches)
        alone = [self._solve(way, 1) for way in self._ways() if way[0].schedule == self.all_ways[0][0].schedule]
        return Found(
            tuple(layers.places[stage.first_layer - 1] for stage in choice.stages[1:]),
            tuple(math.prod(stage.submesh) for stage in choice.stages),
            tuple(map(layers.meshes, choice.stages)),
            choice,
            timetable,
            again,
            layers.loop,
            min((one.step_s for one in alone if isinstance(one, StageChoice)), default=math.inf),
            _compared(choices),
        )


def _compared(choices: Mapping[_Way, StageChoice]) -> tuple[Alternative, ...]:
    """Every timetable with what its best stages would take, with or without recomputation."""
    best = {
        way[0]: Alternative(
            num_stages=len(found.stages),
            num_microbatches=way[0].microbatches,
            schedule=way[0].schedule,
            virtual_stages=way[0].virtual_stages,
            recompute=way[1],
            step_s=None,
            estimate_s=found.step_s,
        )
        for way, found in sorted(choices.items(), key=lambda item: -item[1].step_s)
    }
    return tuple(best[timetable] for timetable in sorted(best))
