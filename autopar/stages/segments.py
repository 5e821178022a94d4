"""The pieces of a step in stages: what `stages/cut.py` makes and later passes read, and what it asks of single equations.

Plain data. A `Segment` is the equations of one kind of work of one stage; a `StageCut` is all of them. What can go wrong: nothing
is checked here; `stages.check` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.microbatches.loop import Result, TimeLoop
from autopar.program.program import Equation
from autopar.rules.table import entry_for

Kind = Literal["forward", "backward", "update"]


@dataclasses.dataclass(frozen=True, order=True)
class PieceName:
    """Which piece of work: `level` orders the updates of all stages."""

    stage: int
    kind: Kind
    level: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}" + (f".{self.level}" if self.kind == "update" else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Equations in order; `reads` come from elsewhere, `writes` are read elsewhere; `results` are collected over the loop."""

    name: PieceName
    equations: tuple[Equation, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]
    results: tuple[Result, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class StageCut:
    """See the module's text. `homes`: the stage where each leaf lives; `made_by`: the piece that makes a value for others."""

    loop: TimeLoop
    num_stages: int
    pieces: Mapping[PieceName, Segment]
    made_by: Mapping[Var, PieceName]
    homes: Mapping[Var, int]

    def of_stage(self, stage: int) -> tuple[Segment, ...]:
        """The pieces of one stage: forward, backward, updates by level."""
        kinds = ("forward", "backward", "update")
        mine = [piece for name, piece in self.pieces.items() if name.stage == stage]
        return tuple(sorted(mine, key=lambda p: (kinds.index(p.name.kind), p.name.level)))

    def leaves_of(self, stage: int) -> frozenset[Var]:
        """The leaves that a stage reads, directly or through the prologue."""
        pieces = self.of_stage(stage)
        reads = [v for piece in pieces for v in piece.reads]
        outvars = [self.loop.program.outvars[i] for piece in pieces for i in piece.outputs]
        return self.loop.leaves_of([*reads, *(v for v in outvars if not isinstance(v, JaxLiteral))])

    def lent(self) -> Iterator[tuple[Var, int]]:
        """Leaves of the state and stages that read them where they do not live."""
        roles = {v: leaf.role for v, leaf in zip(self.loop.program.invars, self.loop.traced.inputs, strict=True)}
        for stage in range(self.num_stages):
            for v in self.leaves_of(stage):
                if self.homes[v] != stage and roles[v] not in ("batch", "const"):
                    yield v, stage


def is_costly(eqn: Equation) -> bool:
    """Whether an equation is not to be done twice: a loop, heavy, or random."""
    return bool(eqn.regions) or entry_for(eqn).heavy or entry_for(eqn).random
