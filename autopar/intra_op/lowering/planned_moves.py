"""Every move that a lowered program performs, listed without running it.

In: an `Assignment`. Out: `PlannedMove`s, each with how often per step it runs and the equation that asks for it. What can go
wrong: a walk that differs from the lowering's; then a plan would promise other collectives than run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.avals import is_opaque
from autopar.compat import Literal, Var
from autopar.intra_op.lowering.assignment import Assignment, is_gathered
from autopar.layouts.mesh import Layout
from autopar.layouts.moves import Move
from autopar.program.program import Atom, Equation, Program


@dataclasses.dataclass(frozen=True)
class PlannedMove:
    """One move of the lowered program: what it moves, how often per step, and the equation that asks for it."""

    move: Move
    aval: Any
    trips: float
    equation: Equation | None


def planned_moves(assignment: Assignment) -> list[PlannedMove]:
    """Every move that `local_function` performs, without running it."""
    census = _Census(assignment)
    layouts = census.region(assignment.program, list(assignment.inputs), 1.0)
    for layout, wanted, atom in zip(layouts, assignment.outputs, assignment.program.outvars, strict=True):
        census.move(layout, wanted, atom.aval, 1.0, None)
    return census.moves


class _Census:
    """Walks a program as `Lowering` does, with layouts in place of arrays."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.moves: list[PlannedMove] = []

    def move(self, source: Layout, target: Layout, aval: Any, trips: float, eqn: Equation | None) -> None:
        if source != target and not is_opaque(aval):
            space = self.assignment.spaces.between(aval, source, target)
            self.moves += [PlannedMove(move, aval, trips, eqn) for move in space.path(source, target)]

    def region(self, program: Program, inputs: Sequence[Layout], trips: float) -> list[Layout]:
        layouts = dict(zip(program.invars, inputs, strict=True))
        used: dict[tuple[Var, Layout], int] = {}
        position = 0

        def layout_of(atom: Atom) -> Layout:
            return Layout.replicated(len(atom.aval.shape)) if isinstance(atom, Literal) else layouts[atom]

        def need(atom: Atom, target: Layout, eqn: Equation) -> None:
            if isinstance(atom, Literal):
                self.move(layout_of(atom), target, atom.aval, trips, eqn)
                return
            key = (atom, target)
            if key not in used or self._is_stale(layouts[atom], target, atom.aval, position - used[key]):
                self.move(layouts[atom], target, atom.aval, trips, eqn)
            used[key] = position

        for position, eqn in enumerate(program.equations):  # noqa: B007 - `need` reads it
            if eqn.loop is None:
                strategy = self.assignment.strategies[eqn]
                for atom, target in zip(eqn.invars, strategy.inputs, strict=True):
                    need(atom, target, eqn)
                outs: Sequence[Layout] = strategy.outputs
            else:
                outs = self._loop(eqn, need, trips)
            layouts.update(zip(eqn.outvars, outs, strict=True))
        return [layout_of(atom) for atom in program.outvars]

    def _is_stale(self, source: Layout, target: Layout, aval: Any, unused_for: int) -> bool:
        span = self.assignment.copy_span
        if span is None or unused_for <= span or source == target or is_opaque(aval):
            return False
        return is_gathered(self.assignment.spaces.between(aval, source, target).path(source, target))

    def _heads(self, region: Program) -> list[Layout]:
        return [self.assignment.strategies[region.equations[i]].inputs[0] for i in range(len(region.invars))]

    def _loop(self, eqn: Equation, need: Any, trips: float) -> list[Layout]:
        loop = eqn.loop
        assert loop is not None
        inside = trips * max(loop.trips, 1)
        if loop.kind == "cond":
            joins = self.assignment.joins[eqn]
            need(eqn.invars[0], Layout.replicated(0), eqn)
            for region in eqn.regions:
                heads = self._heads(region)
                for atom, head in zip(eqn.invars[1:], heads, strict=True):
                    need(atom, head, eqn)
                for out, join, atom in zip(self.region(region, heads, trips), joins, region.outvars, strict=True):
                    self.move(out, join, atom.aval, trips, eqn)
            return list(joins)
        body = eqn.regions[-1]
        heads = self._heads(body)
        operands = eqn.invars[loop.condition_consts :]
        stack_start = loop.consts + loop.carries
        for place, (atom, head) in enumerate(zip(operands, heads, strict=True)):
            need(atom, head.prepend() if place >= stack_start else head, eqn)
        outs = self.region(body, heads, inside)
        carried = heads[loop.consts : stack_start]
        for out, head, atom in zip(outs, carried, body.outvars, strict=False):
            self.move(out, head, atom.aval, inside, eqn)
        if loop.kind == "while":
            condition = eqn.regions[0]
            checks = self._heads(condition)
            for atom, head in zip(eqn.invars, checks[: loop.condition_consts], strict=False):
                need(atom, head, eqn)
            for head, check, var in zip(
                carried, checks[loop.condition_consts :], condition.invars[loop.condition_consts :], strict=True
            ):
                self.move(head, check, var.aval, inside, eqn)
            (decision,) = self.region(condition, checks, inside)
            self.move(decision, Layout.replicated(0), condition.outvars[0].aval, inside, eqn)
        return [*carried, *(layout.prepend() for layout in outs[loop.carries :])]
