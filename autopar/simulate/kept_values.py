"""What a training step of one part keeps in memory between forward and backward.

In: an `Assignment` of a step that runs forward, forward again where that is recomputed, and backward; the inputs from which
backward starts, and those that are parameters. Out: the values that are made, or given, before and read after, with their bytes
on one device. Kernels are those of `fusion`: what is computed again on the way, because that moves less, is not kept. Forward
again is what depends on a value kept apart (`barrier` in the rule table) and backward what depends on a gradient that is given.
What can go wrong: a step whose backward does not start from an input; all of it is forward then, and nothing is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from autopar.avals import itemsize_of
from autopar.compat import Var
from autopar.intra_op.choices.kernels import Kernels
from autopar.intra_op.lowering.assignment import Assignment
from autopar.layouts.mesh import Layout
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, Program
from autopar.rules.table import entry_for

FORWARD, AGAIN, BACKWARD = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value in memory: its shape over all devices, and its bytes on one."""

    shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Kept:
    """`kept` from the forward pass until later; `again`: what forward makes again and backward reads."""

    kept: tuple[KeptValue, ...]
    again: tuple[KeptValue, ...]


def kept_values(assignment: Assignment, given: Collection[Var], parameters: Collection[Var]) -> Kept:
    """See the module; `given` are the inputs from which backward starts, `parameters` are in memory in any case."""
    program = assignment.program
    stage_of = stages_of_step(program, given)
    kernels = Kernels(program, stage_of)
    kernels.traffic()
    layouts = _layouts(assignment)
    apart = {eqn.outvars[0] for eqn in program.equations if entry_for(eqn).barrier}
    others = {*given, *apart, *_of_parameters(program, parameters)}
    made_in = {v: stage_of[eqn] for eqn in program.equations for v in eqn.outvars}
    found: dict[int, list[KeptValue]] = {FORWARD: [], AGAIN: []}
    for var, readers in kernels.readers.items():
        stage = made_in.get(var, FORWARD)
        later = any(stage_of[eqn] > stage for eqn in readers)
        if later and var not in others and layouts.get(var) is not None:
            size = layouts[var].local_bytes(var.aval.shape, itemsize_of(var.aval), assignment.mesh)
            found[stage].append(KeptValue(tuple(var.aval.shape), size))
    return Kept(tuple(found[FORWARD]), tuple(found[AGAIN]))


def _of_parameters(program: Program, parameters: Collection[Var]) -> set[Var]:
    """Parameters, and what is made of nothing else, such as a kernel turned round: it is made when it is needed."""
    found = set(parameters)
    for eqn in program.equations:
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        if operands and found.issuperset(operands):
            found.update(eqn.outvars)
    return found


def stages_of_step(program: Program, given: Collection[Var]) -> Mapping[Equation, int]:
    """Whether each equation is forward, forward again or backward."""
    reached: dict[Any, int] = dict.fromkeys(given, BACKWARD)
    stages = {}
    for eqn in program.equations:
        own = AGAIN if entry_for(eqn).barrier else FORWARD
        stages[eqn] = max([own, *(reached.get(v, FORWARD) for v in eqn.invars if isinstance(v, Var))])
        reached.update(dict.fromkeys(eqn.outvars, stages[eqn]))
    return stages


def _layouts(assignment: Assignment) -> Mapping[Var, Layout]:
    """The layout in which each value is made."""
    found = dict(zip(assignment.program.invars, assignment.inputs, strict=True))
    for eqn in assignment.program.equations:
        if not isinstance(eqn, LoopEquation):
            found.update(zip(eqn.outvars, assignment.strategies[eqn].outputs, strict=True))
    return found
