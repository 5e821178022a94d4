"""What a planned stage keeps on each of its devices, by how long: for the whole step, or as long as a microbatch is in flight.

In: a `StageProgram`, its plan and assignment. Out: `StageMemory`. The plan counts one microbatch of what passes between stages
(`Leaf.streamed`) and of what forward leaves for backward; each one more in flight adds the same again. What can go wrong: a
value that forward keeps twice, in two layouts; it counts in the one that it was made in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.catalogue import itemsize_of
from autopar.compat import Literal, Var
from autopar.mesh import Layout
from autopar.pieces import PieceName
from autopar.plan import Plan
from autopar.program import Equation
from autopar.spmd import Assignment
from autopar.stage_program import StageProgram


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes per device.

    `peak_bytes`: with one microbatch in flight. Of it, `kept_bytes`: weights and optimizer state; `accumulator_bytes`: what the
    microbatches add up.
    `residual_bytes`: what a microbatch in flight keeps between forward and backward. `received_bytes`: what it gets from the
    forward of other stages.
    """

    peak_bytes: int
    kept_bytes: int
    accumulator_bytes: int
    residual_bytes: int
    received_bytes: int

    def with_in_flight(self, microbatches: int) -> int:
        """The peak with so many microbatches in flight."""
        return self.peak_bytes + (microbatches - 1) * self.residual_bytes

    @property
    def passing_bytes(self) -> int:
        """What comes and goes within a task."""
        return max(0, self.peak_bytes - self.kept_bytes - self.accumulator_bytes - self.residual_bytes)


def stage_memory(
    program: StageProgram, plan: Plan, assignment: Assignment, task_of: Mapping[Equation, str]
) -> StageMemory:
    """The memory of a planned stage; `task_of`: the task of every equation."""
    microbatches = program.cut.loop.plan.microbatches
    ports = list(zip(program.inputs, plan.inputs, strict=False))
    backward = program.cut.pieces.get(PieceName(program.stage, "backward"))
    read = set() if backward is None else set(backward.reads)
    received = [
        (port.var in read, value.bytes_per_device // microbatches)
        for port, value in ports
        if port.source == "received" and port.piece is not None and port.piece.kind == "forward"
    ]
    kept = sum(value.bytes_per_device for port, value in ports if port.source != "received")
    residual = sum(size for is_read, size in received if is_read)
    loop = next((e for e in assignment.program.equations if e.loop is not None and not e.task), None)
    accumulators = 0 if loop is None else _accumulators(loop, assignment)
    residual += 0 if loop is None else _made(loop, assignment, task_of)
    return StageMemory(plan.peak_bytes, kept, accumulators, residual, sum(size for _, size in received))


def _accumulators(loop: Equation, assignment: Assignment) -> int:
    """Bytes of what the loop over microbatches adds up."""
    assert loop.loop is not None
    heads = loop.regions[0].equations[loop.loop.consts : loop.loop.consts + loop.loop.carries]
    return sum(
        assignment.strategies[head].outputs[0].local_bytes(v.aval.shape, itemsize_of(v.aval), assignment.mesh)
        for head in heads
        for v in head.outvars
    )


def _made(loop: Equation, assignment: Assignment, task_of: Mapping[Equation, str]) -> int:
    """Bytes that forward makes and backward reads, of one microbatch."""
    made: dict[Any, Layout] = {}
    total = 0
    for eqn in loop.regions[0].equations:
        if task_of[eqn].startswith("forward"):
            made.update(zip(eqn.outvars, _layouts(eqn, assignment), strict=True))
        elif task_of[eqn].startswith("backward"):
            for v in eqn.invars:
                if not isinstance(v, Literal) and v in made:
                    total += made.pop(v).local_bytes(v.aval.shape, itemsize_of(v.aval), assignment.mesh)
    return total


def _layouts(eqn: Equation, assignment: Assignment) -> tuple[Layout, ...]:
    """The layouts of what an equation makes; of a loop, those of what its body makes."""
    if eqn.loop is None:
        return assignment.strategies[eqn].outputs
    if eqn in assignment.joins:
        return assignment.joins[eqn]
    body = eqn.regions[-1]
    inside: dict[Var, Layout] = {}
    for inner in body.equations:
        inside.update(zip(inner.outvars, _layouts(inner, assignment), strict=True))
    found = []
    for place, atom in enumerate(body.outvars):
        layout = Layout.replicated(len(atom.aval.shape)) if isinstance(atom, Literal) else inside[atom]
        is_stacked = eqn.loop.kind == "scan" and place >= eqn.loop.carries
        found.append(layout.prepend() if is_stacked else layout)
    return tuple(found)
