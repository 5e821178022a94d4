"""Recomputation by stages: backward does the forward work of its stage again instead of keeping its results.

In: a `StageCut`, and for each stage the share of its forward work to do again, from its beginning. Out: a cut whose backward
segments begin with the forward operations of that share whose results they read. So a microbatch in flight keeps what the stage
received, and the results of the rest. Values that the user named may be kept as well. Operations and operands are the same, and
so are the results: a dropout mask comes from the same key and positions. Forward still makes what other stages read. What can
go wrong: a stage whose backward reads little else than what the stage received saves nothing; the predicted memory of both
plans shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set

from autopar.compat import Var
from autopar.program.checkpoint_names import find_named
from autopar.program.program import Equation, operands_of
from autopar.program.task_name import TaskName
from autopar.stages.segments import Segment, StageCut


def recompute_in_backward(cut: StageCut, shares: Sequence[float], *, keeps_named: bool = False) -> StageCut:
    """The same cut with a share of each stage's forward work, 0 to 1, done again in backward.

    `keeps_named`: values that the user named are kept.
    """
    segments = dict(cut.segments)
    for name, segment in cut.segments.items():
        if name.kind == "backward" and shares[name.stage] > 0:
            forward = cut.segments[TaskName("forward", name.stage)]
            segments[name] = _with_forward(segment, _first_part(forward, shares[name.stage]), keeps_named=keeps_named)
    read = set(_read_by_others(segments.values()))
    made_by = dict(cut.made_by)
    for name, segment in segments.items():
        if name.kind == "forward":
            writes = tuple(v for v in dict.fromkeys((*segment.writes, *segment.made())) if v in read)
            segments[name] = dataclasses.replace(segment, writes=writes)
            made_by |= dict.fromkeys(writes, name)
    return dataclasses.replace(cut, segments=segments, made_by=made_by)


def _first_part(forward: Segment, share: float) -> Sequence[Equation]:
    """The first operations of a forward; their number is this share of all."""
    return forward.equations[: round(share * len(forward.equations))]


def _with_forward(backward: Segment, forward: Sequence[Equation], *, keeps_named: bool) -> Segment:
    """A backward that first makes again what it reads of these operations."""
    named = find_named(forward) if keeps_named else frozenset()
    again = _needed(forward, set(backward.reads) - named, named)
    made = {v for eqn in again for v in eqn.outvars}
    operands = (v for eqn in again for v in operands_of(eqn))
    reads = [v for v in (*backward.reads, *operands) if v not in made]
    equations = (*again, *backward.equations)
    return dataclasses.replace(backward, equations=equations, reads=tuple(dict.fromkeys(reads)))


def _needed(forward: Sequence[Equation], wanted: set[Var], kept: Set[Var]) -> Sequence[Equation]:
    """The forward operations behind wanted values, in order, as far as what is kept."""
    chosen = []
    for eqn in reversed(forward):
        if any(v in wanted for v in eqn.outvars):
            chosen.append(eqn)
            wanted.update(v for v in operands_of(eqn) if v not in kept)
    return chosen[::-1]


def _read_by_others(segments: Iterable[Segment]) -> Iterable[Var]:
    """What some segment reads and a forward does not make for itself."""
    for segment in segments:
        made = set(segment.made()) if segment.name.kind == "forward" else set()
        yield from (v for v in segment.reads if v not in made)
