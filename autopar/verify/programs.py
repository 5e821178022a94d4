"""The compiled programs of a step: one on one mesh, one for each task of a pipeline.

In: a compiled step. Out: `CompiledProgram`s, each with its stage, how often a step runs it, and the assignment that it was
lowered from. What can go wrong: nothing that compiling the step has not refused.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax

from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.hlo.census import Collective, collectives
from autopar.hlo.contractions import Arithmetic, arithmetic
from autopar.intra_op.lowering.assignment import Assignment
from autopar.plan import Plan
from autopar.schedules.instructions import Run


class Account(Protocol):
    """XLA's account of the memory of one device, in bytes."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CompiledProgram:
    """One executable: its name, the stage that it is of (None on one mesh), and how often a step runs it.

    `lower`: gives the program as XLA is given it.
    """

    name: str
    stage: int | None
    times: int
    executable: jax.stages.Compiled
    num_devices: int
    lower: Callable[[], jax.stages.Lowered]

    @functools.cached_property
    def text(self) -> str:
        """The optimised HLO."""
        return str(self.executable.as_text())

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """What it communicates in one run."""
        return collectives(self.text, num_devices=self.num_devices)

    @functools.cached_property
    def given_collectives(self) -> tuple[Collective, ...]:
        """What XLA is given to communicate in one run, before it makes equal operations one."""
        return collectives(self.given_text, num_devices=self.num_devices)

    @functools.cached_property
    def given_text(self) -> str:
        """The HLO that XLA is given."""
        return str(self.lower().as_text(dialect="hlo"))

    @functools.cached_property
    def given_arithmetic(self) -> Arithmetic:
        """What XLA is given for one device to compute in one run, before it makes equal products one."""
        return arithmetic(self.given_text)

    @functools.cached_property
    def arithmetic(self) -> Arithmetic:
        """What one device computes in one run."""
        return arithmetic(self.text)

    @property
    def memory(self) -> Account | None:
        """XLA's account of the memory of one device; None where the platform gives none."""
        account: Account | None = self.executable.memory_analysis()
        return account


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PlannedPart:
    """One mesh's program, or a stage's: its plan, the assignment that was lowered, and the programs that came of it."""

    stage: int | None
    plan: Plan
    assignment: Assignment
    programs: tuple[CompiledProgram, ...]


def parts_of(compiled: CompiledStep | CompiledPipeline) -> tuple[PlannedPart, ...]:
    """The stages of a compiled step with their programs; one part for one mesh."""
    if isinstance(compiled, CompiledStep):
        program = CompiledProgram(
            name=compiled.signature.name,
            stage=None,
            times=1,
            executable=compiled.executable,
            num_devices=compiled.plan.num_devices,
            lower=compiled.lower,
        )
        return (PlannedPart(stage=None, plan=compiled.plan, assignment=compiled.assignment, programs=(program,)),)
    runs = collections.Counter(one.task for one in _instructions(compiled) if isinstance(one, Run))
    programs = [
        CompiledProgram(
            name=str(name),
            stage=name.stage,
            times=runs[str(name)],
            executable=executable,
            num_devices=compiled.stages[name.stage].assignment.mesh.size,
            lower=functools.partial(compiled.lower, name),
        )
        for name, executable in compiled.executables().items()
    ]
    return tuple(
        PlannedPart(
            stage=number,
            plan=compiled.plan.stages[number].plan,
            assignment=stage.assignment,
            programs=tuple(one for one in programs if one.stage == number),
        )
        for number, stage in enumerate(compiled.stages)
    )


def _instructions(compiled: CompiledPipeline) -> list[object]:
    meshes = range(compiled.schedule.num_meshes)
    return [instruction for mesh in meshes for instruction in compiled.instructions.of(mesh)]
