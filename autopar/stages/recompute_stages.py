"""Recomputation by stages: backward does the forward work of its stage again instead of keeping its results.

In: a `StageCut`. Out: one whose backward segments begin with the forward operations whose results they read. So a microbatch in
flight keeps only what the stage received. Operations and operands are the same, and so are the results: a dropout mask comes
from the same key and positions. Forward still makes what other stages read. What can go wrong: a stage whose backward reads
little else than what the stage received saves nothing; the predicted memory of both plans shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autopar.compat import Var
from autopar.program.program import Equation, operands_of
from autopar.program.task_name import TaskName
from autopar.stages.segments import Segment, StageCut


def recompute_in_backward(cut: StageCut) -> StageCut:
    """The same cut with forward work done again in backward."""
    segments = dict(cut.segments)
    for name, segment in cut.segments.items():
        if name.kind == "backward":
            segments[name] = _with_forward(segment, cut.segments[TaskName("forward", name.stage)])
    read = set(_read_by_others(segments.values()))
    for name, segment in segments.items():
        if name.kind == "forward":
            segments[name] = dataclasses.replace(segment, writes=tuple(v for v in segment.writes if v in read))
    return dataclasses.replace(cut, segments=segments)


def _with_forward(backward: Segment, forward: Segment) -> Segment:
    """A backward that first makes again what it reads of its forward."""
    again = _needed(forward, set(backward.reads))
    made = {v for eqn in again for v in eqn.outvars}
    operands = (v for eqn in again for v in operands_of(eqn))
    reads = [v for v in (*backward.reads, *operands) if v not in made]
    equations = (*again, *backward.equations)
    return dataclasses.replace(backward, equations=equations, reads=tuple(dict.fromkeys(reads)))


def _needed(forward: Segment, wanted: set[Var]) -> Sequence[Equation]:
    """The forward operations behind wanted values, in order."""
    chosen = []
    for eqn in reversed(forward.equations):
        if any(v in wanted for v in eqn.outvars):
            chosen.append(eqn)
            wanted.update(operands_of(eqn))
    return chosen[::-1]


def _read_by_others(segments: Iterable[Segment]) -> Iterable[Var]:
    """What some segment reads and a forward does not make for itself."""
    for segment in segments:
        made = set(segment.made()) if segment.name.kind == "forward" else set()
        yield from (v for v in segment.reads if v not in made)
