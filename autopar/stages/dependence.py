"""What the operations of a step depend on, and which stages have which values.

In: a `TimeLoop`, and for `StagesOfValues` the stage of each forward equation. Out: the forward and backward equations of
the body, and for every value of forward the stages that make or read it. What can go wrong: a value that no stage has; it
must travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.avals import bytes_of
from autopar.compat import Var
from autopar.microbatches.loop import TimeLoop
from autopar.program.program import Equation, operands_of
from autopar.program.step import TracedStep
from autopar.program.task_name import TaskName
from autopar.program.walk import dependents_of
from autopar.stages.backward import find_backward
from autopar.stages.segments import is_costly


def takes_gradients(traced: TracedStep) -> bool:
    """Whether a step has a backward pass."""
    return bool(find_backward(traced).equations)


def kept_for_backward(traced: TracedStep) -> float:
    """The bytes of what the forward pass makes of the whole batch and backward reads, however the batch is cut."""
    backward = find_backward(traced).equations
    leaves = zip(traced.program.invars, traced.inputs, strict=True)
    examples = dependents_of(traced.program, [v for v, leaf in leaves if leaf.role == "batch"])
    forward = {v for eqn in traced.program.equations if eqn not in backward for v in eqn.outvars}
    read = {v for eqn in backward for v in operands_of(eqn)}
    return float(sum(bytes_of(v) for v in read & forward & examples))


class Dependence:
    """What each equation of the body depends on, also through the prologue."""

    def __init__(self, traced: TracedStep, prologue: Sequence[Equation], body: Sequence[Equation]) -> None:
        self.traced, self.prologue, self.body = traced, tuple(prologue), tuple(body)
        roles = {v: leaf.role for v, leaf in zip(traced.program.invars, traced.inputs, strict=True)}
        self._examples = {v for v, role in roles.items() if role == "batch"}
        self._weights = {v for v, role in roles.items() if role != "batch" and v.aval.shape}
        for eqn in (*self.prologue, *self.body):
            for kind in (self._examples, self._weights):
                if any(v in kind for v in operands_of(eqn)):
                    kind.update(eqn.outvars)
        found = find_backward(traced)
        self.backward, self.gradients = found.equations.intersection(self.body), found.gradients

    @classmethod
    def of(cls, loop: TimeLoop) -> Dependence:
        """Of a step in microbatches."""
        return cls(loop.traced, loop.plan.of_phase("prologue"), loop.plan.of_phase("body"))

    @classmethod
    def of_whole(cls, traced: TracedStep) -> Dependence:
        """Of a step that is not cut into microbatches."""
        return cls(traced, (), traced.program.equations)

    def is_anchored(self, eqn: Equation) -> bool:
        """Whether it depends on examples and on weights, so that it has one place."""
        outs = eqn.outvars
        return any(v in self._examples for v in outs) and any(v in self._weights for v in outs)

    def forward(self) -> list[Equation]:
        """The chain that is cut."""
        return [eqn for eqn in self.body if self.is_anchored(eqn) and eqn not in self.backward]


class StagesOfValues:
    """The stages that have a value of forward, because they make or read it, or what it is computed from anywhere."""

    def __init__(self, kinds: Dependence, segment_of: Mapping[Equation, TaskName]) -> None:
        self._origins: dict[Var, frozenset[Var]] = {}
        self._stages: dict[Var, set[int]] = {}
        weights = {
            v
            for v, leaf in zip(kinds.traced.program.invars, kinds.traced.inputs, strict=True)
            if leaf.role != "batch" and v.aval.shape
        }
        for eqn in (*kinds.prologue, *kinds.body):
            sources = [self._origins.get(v, frozenset({v} & weights)) for v in operands_of(eqn)]
            segment = segment_of.get(eqn)
            if segment is not None:
                for origin in frozenset().union(*sources):
                    self._stages.setdefault(origin, set()).add(segment.stage)
            for v in eqn.outvars:
                if segment is not None or is_costly(eqn):
                    self._origins[v] = frozenset({v})
                elif not kinds.is_anchored(eqn):
                    self._origins[v] = frozenset().union(*sources)
                if segment is not None:
                    self._stages.setdefault(v, set()).add(segment.stage)
        self._weights = weights

    def of(self, value: Var) -> set[int]:
        """The stages whose forward has a value."""
        return self._stages.get(value, set())

    def highest(self, eqn: Equation, last: int) -> int:
        """The highest stage up to `last` that has all operands of forward; those that no such stage has must travel."""
        origins = frozenset().union(*(self._origins.get(v, frozenset({v} & self._weights)) for v in operands_of(eqn)))
        places = [[s for s in self._stages.get(origin, ()) if s <= last] for origin in origins]
        return min((max(stages) for stages in places if stages), default=last)
