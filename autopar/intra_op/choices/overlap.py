"""Which communication of a step hides behind its compute, and behind which part of it.

In: a traced step. Out: for every value its `Need`, by data flow, and from that the kind of each collective that moves it:

    early     it depends on no example: a parameter, random bits. Its gather can run beside the work before it ("zero3").
    late      no contraction of examples and no other stage waits for it: a gradient, a new parameter. Its reduction runs beside
              the rest of the backward pass, its gather beside the next forward pass ("data_parallel").
    awaited   the rest: the next operation needs it ("tensor"; "expert" for an all-to-all, which nothing hides).

How much of a kind hides is the cluster's (`cost_model.machine.Overlap`). At most the compute that stands beside it hides: all
of it for gathers ahead, two thirds for reductions, which is the backward pass, a third for gathers of new parameters and for
what the gradients of weights stand beside; where it is done once per step, of the last or first microbatch. Where the cluster
says how large buckets of gradients are, one of n equal buckets stands alone at the end, as layers do in the replay of published
runs: (n-1)/n of the smaller of window and exchange hides. The search takes buckets for small and
the windows for large enough, which gives a bound; a plan's own seconds count them. What can go wrong: an optimizer that
multiplies matrices; its gradients count as awaited.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

from autopar.compat import Var
from autopar.cost_model.machine import Overlap
from autopar.cost_model.overlap import Communication, Kind, alone, beside
from autopar.plan import WITHIN, Plan
from autopar.program.loops import LoopEquation, Nested
from autopar.program.program import Program, operands_of, variables_of
from autopar.program.step import TracedStep
from autopar.program.walk import dependents_of
from autopar.rules.table import entry_for

SUMS = ("all-reduce", "reduce-scatter")
_FORWARD, _BACKWARD, _WEIGHT_GRADIENTS = 1 / 3, 2 / 3, 1 / 3
"""Parts of a step's compute: the backward pass of a contraction is two of them, one for the weight."""


class Need(enum.Enum):
    """When a step has a value and what waits for it; see the module's text."""

    EARLY = "early"
    LATE = "late"
    AWAITED = "awaited"


@dataclasses.dataclass(frozen=True, eq=False)
class Needs:
    """The values that depend on examples, and those that a contraction of examples or another stage waits for."""

    examples: frozenset[Var]
    awaited: frozenset[Var]

    def of(self, atom: object) -> Need:
        """The need of a variable; a literal is there early."""
        if atom not in self.examples:
            return Need.EARLY
        return Need.AWAITED if atom in self.awaited else Need.LATE


_NEEDS: Mapping[Kind, Need] = {
    "zero3": Need.EARLY,
    "data_parallel": Need.LATE,
    "tensor": Need.AWAITED,
    "expert": Need.AWAITED,
}
_FOUND: weakref.WeakKeyDictionary[TracedStep, Needs] = weakref.WeakKeyDictionary()


def find_needs(traced: TracedStep) -> Needs:
    """What each value of a step is needed for; found once."""
    if traced not in _FOUND:
        leaves = zip(traced.program.invars, traced.inputs, strict=True)
        examples = dependents_of(traced.program, [v for v, x in leaves if x.role == "batch" or x.streamed])
        outputs = zip(traced.program.outvars, traced.outputs, strict=True)
        awaited = {v for v, leaf in outputs if leaf.streamed and isinstance(v, Var)}
        _mark_awaited(traced.program, awaited, examples)
        _FOUND[traced] = Needs(frozenset(examples), frozenset(awaited))
    return _FOUND[traced]


def kind_of(need: Need, move: str) -> Kind:
    """The kind of communication that a move of a value with this need is."""
    if need is Need.AWAITED:
        return "expert" if move == "all-to-all" else "tensor"
    return "zero3" if need is Need.EARLY else "data_parallel"


@dataclasses.dataclass(frozen=True, eq=False)
class Exposure:
    """The part of its seconds that a step waits for when a value is moved, by the value's need."""

    needs: Needs
    parts: Mapping[Need, float]

    def of(self, var: Var) -> float:
        """The part for this value."""
        return self.parts[self.needs.of(var)]

    def narrowed(self, plan: Plan, overlap: Overlap, *, least: float) -> Exposure | None:
        """What the step of a plan waits for; None if that is longer by less than this part of the step."""
        sums: dict[Need, Communication] = {}
        for (kind, _), each in hide(windows(plan), compute_s=plan.compute_s, overlap=overlap).items():
            need, total = _NEEDS[kind], sums.get(_NEEDS[kind], alone(kind, 0.0))
            sums[need] = Communication(kind, total.total_s + each.total_s, total.exposed_s + each.exposed_s)
        longer_s = sum(each.exposed_s - self.parts[need] * each.total_s for need, each in sums.items())
        if longer_s <= least * plan.step_s:
            return None
        parts = {need: each.exposed_s / each.total_s for need, each in sums.items() if each.total_s}
        return Exposure(self.needs, {**self.parts, **parts})


def least_exposure(traced: TracedStep, overlap: Overlap) -> Exposure | None:
    """What a step waits for if there is always compute enough to hide the rest behind; None where nothing hides."""
    if not any(overlap.hidden.values()):
        return None
    kinds: Mapping[Need, Kind] = {need: kind_of(need, "") for need in Need}
    parts = {need: beside(overlap, kind, comm_s=1.0, compute_s=1.0).exposed_s for need, kind in kinds.items()}
    return Exposure(find_needs(traced), parts)


def window(kind: Kind, move: str, *, times: float, microbatches: int) -> float:
    """The part of a step's compute that stands beside all moves of a kind which are made so many times per step."""
    if kind == "data_parallel":
        part = _BACKWARD if move in SUMS else _FORWARD
        return part if times >= microbatches else part / microbatches
    return {"zero3": 1.0, "tensor": _WEIGHT_GRADIENTS}.get(kind, 0.0)


class Moved(NamedTuple):
    """Moves of one kind: the part of the step's compute that stands beside them, their seconds and bytes per step."""

    kind: Kind
    part: float
    seconds: float
    bytes: float = 0.0


def windows(plan: Plan) -> Iterator[Moved]:
    """Each collective of a plan between its operations."""
    for item in plan.collectives:
        if item.overlap == WITHIN:
            continue
        kind = cast(Kind, item.overlap)
        part = window(kind, item.kind, times=item.count, microbatches=plan.num_microbatches)
        yield Moved(kind, part, item.count * item.predicted_s, item.count * item.bytes)


def hide(moves: Iterable[Moved], *, compute_s: float, overlap: Overlap) -> dict[tuple[Kind, float], Communication]:
    """What a step waits for, by kind and window."""
    totals: dict[tuple[Kind, float], Moved] = {}
    for one in moves:
        key = one.kind, one.part
        known = totals.get(key, Moved(*key, 0.0))
        totals[key] = Moved(*key, known.seconds + one.seconds, known.bytes + one.bytes)
    return {key: _hide(one, compute_s * one.part, overlap) for key, one in totals.items()}


def _hide(moved: Moved, window_s: float, overlap: Overlap) -> Communication:
    """What a step waits for of moves beside so many seconds of compute."""
    if not window_s:
        return alone(moved.kind, moved.seconds)
    if moved.kind == "data_parallel" and overlap.bucket_bytes and moved.bytes:
        buckets = math.ceil(moved.bytes / overlap.bucket_bytes)
        window_s = (1 - 1 / buckets) * min(moved.seconds, window_s)
    return beside(overlap, moved.kind, comm_s=moved.seconds, compute_s=window_s)


def _mark_awaited(program: Program, awaited: set[Var], examples: set[Var]) -> None:
    """Add what a program's contractions of examples wait for, and what is needed for the values that are marked."""
    for eqn in reversed(program.equations):
        if isinstance(eqn, LoopEquation):
            for nested in reversed(eqn.nested):
                _mark_nested(eqn, nested, awaited, examples)
        elif any(v in awaited for v in eqn.outvars) or (
            entry_for(eqn).heavy and any(v in examples for v in operands_of(eqn))
        ):
            awaited.update(operands_of(eqn))


def _mark_nested(eqn: LoopEquation, nested: Nested, awaited: set[Var], examples: set[Var]) -> None:
    """The same of a nested program, until an iteration adds nothing to what the one before it has to give."""
    before = -1
    while len(awaited) != before:
        before = len(awaited)
        for exit_ in nested.exits:
            is_decision = exit_.place < 0
            if is_decision or eqn.outvars[exit_.place] in awaited or (exit_.carry and exit_.carry.var in awaited):
                awaited.update(variables_of([exit_.atom]))
        _mark_awaited(nested.program, awaited, examples)
    for entry in nested.entries:
        if entry.var in awaited:
            awaited.update(variables_of([entry.atom if entry.passed is None else entry.passed.atom]))
