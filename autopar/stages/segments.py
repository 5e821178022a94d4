"""A step in stages as data: the segments that `cut.py` makes and later passes read.

A `Segment` is the equations of one kind of work of one stage, and a `StageCut` is all segments of a step. Nothing is checked
here; `cut.check` refuses a cut whose values would flow backwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from autopar.compat import Var
from autopar.microbatches.loop import Result, TimeLoop
from autopar.program.program import Equation, variables_of
from autopar.program.task_name import TaskName
from autopar.rules.table import entry_for


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """The equations of a task, in order.

    `reads` come from other segments, from the prologue or from the step's arguments; other segments read `writes`. `results` are
    collected over the microbatches. `outputs` are numbers of the step's outputs that an update returns. `late`: what an equation
    waits for without reading it.
    """

    name: TaskName
    equations: tuple[Equation, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    results: tuple[Result, ...] = ()
    outputs: tuple[int, ...] = ()
    late: Mapping[Equation, Var] = dataclasses.field(default_factory=dict)

    def made(self) -> list[Var]:
        """The results of its equations."""
        return [v for eqn in self.equations for v in eqn.outvars]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StageCut:
    """The segments of a step by name: forward, backward and updates of each stage.

    `made_by`: the segment that makes a value for others. `homes`: the stage where each leaf of the step lives.
    """

    loop: TimeLoop
    num_stages: int
    segments: Mapping[TaskName, Segment]
    made_by: Mapping[Var, TaskName]
    homes: Mapping[Var, int]

    def of_stage(self, stage: int) -> tuple[Segment, ...]:
        """The segments of one stage: forward, backward, updates by level."""
        return tuple(self.segments[name] for name in sorted(self.segments) if name.stage == stage)

    def leaves_of(self, stage: int) -> frozenset[Var]:
        """The leaves that a stage reads, directly or through the prologue."""
        segments = self.of_stage(stage)
        reads = [v for segment in segments for v in segment.reads]
        outvars = [self.loop.program.outvars[i] for segment in segments for i in segment.outputs]
        return self.loop.leaves_of([*reads, *variables_of(outvars)])

    def lent(self) -> Iterator[tuple[Var, int]]:
        """Leaves of the state with each stage that reads them and is not their home."""
        roles = {v: leaf.role for v, leaf in zip(self.loop.program.invars, self.loop.traced.inputs, strict=True)}
        for stage in range(self.num_stages):
            for v in self.leaves_of(stage):
                if self.homes[v] != stage and roles[v] not in ("batch", "const"):
                    yield v, stage


def first_call(eqn: Equation) -> Equation | None:
    """The first operation of an equation, or inside of it, that calls Python once in a step; None if none does."""
    if entry_for(eqn).once:
        return eqn
    return next((inner for region in eqn.regions for inner in region.walk() if entry_for(inner).once), None)


def is_costly(eqn: Equation) -> bool:
    """Whether an equation must not be done twice: it is a loop, heavy, or random."""
    return bool(eqn.regions) or entry_for(eqn).heavy or entry_for(eqn).random
