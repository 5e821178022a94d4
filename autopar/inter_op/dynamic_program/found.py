"""What the search over layers chose: stages on submeshes in a timetable, or none that are fast enough.

In: nothing. Out: `Found`, `NotFaster`, for those who plan the chosen stages as wholes. What can go wrong: all seconds here are
sums of layers; a whole may take longer, or not fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from autopar.inter_op.candidates.timetables import Timetable
from autopar.inter_op.dynamic_program.problem import StageChoice
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.plan import Alternative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What the search chose: places of the cuts in the forward chain, and the devices of each stage.

    `find_meshes`: finds `meshes`. `kinds`: of each stage's nodes, by number; all 0 where nodes are alike. `shares`: of each
    stage's forward work, what backward does again. `loop`: the step in the chosen number of microbatches. `one_stage_s`: the
    least time of one stage on all devices, infinite if that does not fit. `alone_s`: what it takes in each number of
    microbatches, whether or not it fits. `alone_fits`: the fewest microbatches in which it fits, with its seconds. `compared`:
    every timetable with what its best stages would take. `ended_early`: the budget ended the search. `others`: choices of other
    numbers of stages, which may be faster if unequal stages wait longer than assumed; what was best before more was planned; of
    other timetables if the budget ended the search, should the first one not fit as wholes. `choose_within`: makes the choice
    again for stages that use this part of the memory limit, should none of these fit as wholes; it raises OutOfMemoryError.
    `choose_several`: makes it again without one stage on all devices, for stages that have to beat this many seconds; where
    nodes are alike.
    """

    cuts: tuple[int, ...]
    sizes: tuple[int, ...]
    find_meshes: Callable[[], tuple[tuple[LogicalMesh, ...], ...]]
    choice: StageChoice
    timetable: Timetable
    shares: tuple[float, ...]
    loop: TimeLoop
    ended_early: bool
    choose_within: Callable[[float], Found | NotFaster]
    choose_several: Callable[[float], Found | NotFaster]
    kinds: tuple[int, ...] = ()
    one_stage_s: float = math.inf
    alone_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    alone_fits: tuple[int, float] | None = None
    compared: tuple[Alternative, ...] = ()
    others: tuple[Found, ...] = ()

    @functools.cached_property
    def meshes(self) -> tuple[tuple[LogicalMesh, ...], ...]:
        """Of each stage the logical meshes that are best for one of its layers, the most frequent first."""
        return self.find_meshes()


@dataclasses.dataclass(frozen=True)
class NotFaster:
    """No stages promise to be faster than the time to beat; `compared`: the least that each timetable would take."""

    compared: tuple[Alternative, ...]
