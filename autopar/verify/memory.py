"""The peak memory of compiled programs, by XLA's own account, beside the predicted one.

In: a compiled step and its parts. Out: a row for the arguments of each program on one mesh, and one for the peak of each
mesh. On one mesh the account of XLA is

    arguments + results - results in the place of donated arguments + temporaries.

In a pipeline every task is a program of its own. What lies on a mesh between tasks follows from the instructions that the
driver executes; the peak is the most of that together with the temporaries of the task that runs. A copy lies there as soon as
another mesh can have sent it, however fast that mesh is: nothing holds it back until its reader runs. Meshes may also be slow, so
that the plan is not held to all copies that might be there.

Tolerance: arguments and results are exact, but for the table of pointers that XLA's CPU runtime counts as a result, 8 bytes
each. For temporaries the model is no compiler: XLA may need up to 1 / 0.85 of what is predicted, the margin that a memory
limit leaves, or less by as much as `SPARE`. Every buffer begins at a multiple of 64 bytes, which `ALIGNMENT` allows for in
programs of few bytes. In stages the plan adds the most that may be in flight to what the greediest task needs, which need not be
at one time, so that it may be above by `SPARE_IN_STAGES` of all. The plan counts as the compiler for its cluster does: that a
program for another platform needs more or less is explained, not matched, and so is less than planned on a TPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Sharding

from autopar.avals import itemsize_of
from autopar.execution.contents import Made, Passed
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.intra_op.memory.tuning import TUNING
from autopar.program.task_name import TaskName
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value
from autopar.verification import Verdict, VerifiedRow
from autopar.verify.programs import PlannedPart

SPARE = 0.25
"""By this share of XLA's temporaries the plan may be above them."""
SPARE_IN_STAGES = 0.16
"""By this share of the whole the plan of a stage may be above it."""
NARROW = re.compile(r"\bb?f16\[")
"""The type of an array of 16 bits in HLO."""
ALIGNMENT = 4096
"""Bytes that do not count: of alignment, of pointers, of scalars."""


def rows(
    compiled: CompiledStep | CompiledPipeline, parts: Sequence[PlannedPart], *, platform: str
) -> Iterator[VerifiedRow]:
    """The rows of one mesh, or one for each mesh of a pipeline."""
    if any(program.memory is None for part in parts for program in part.programs):
        yield VerifiedRow(
            topic="memory",
            what="peak",
            unit="bytes",
            planned=compiled.plan.peak_bytes,
            compiled=None,
            verdict="unknown",
            note="the platform gives no account of memory",
        )
        return
    found = (
        _rows_of_step(compiled, platform)
        if isinstance(compiled, CompiledStep)
        else _rows_of_pipeline(compiled, platform)
    )
    for row in found:
        yield _explain_wider_copies(row, parts) if platform == "cpu" and row.verdict == "differs" else row


def _explain_wider_copies(row: VerifiedRow, parts: Sequence[PlannedPart]) -> VerifiedRow:
    """The row as explained if a program computes in 16 bits, and takes at most twice what was planned.

    XLA's CPU compiler computes products of 16 bits in 32: it makes copies of what they read, once for all trips of a loop.
    """
    assert row.planned is not None
    assert row.compiled is not None
    is_wider = row.what == "peak" and row.planned < row.compiled <= 2 * row.planned
    if not is_wider or not any(NARROW.search(program.text) for part in parts for program in part.programs):
        return row
    note = f"{row.planned / row.compiled - 1:+.1%}: XLA computes products of 16 bits in 32 on CPUs, of copies"
    return dataclasses.replace(row, verdict="explained", note=note)


def _rows_of_step(compiled: CompiledStep, platform: str) -> Iterator[VerifiedRow]:
    account, plan = compiled.memory_analysis(), compiled.plan
    planned_arguments = sum(value.bytes_per_device for value in plan.inputs)
    arguments = account.argument_size_in_bytes
    is_close = abs(arguments - planned_arguments) <= 16 * len(plan.inputs)
    fewer = arguments < planned_arguments
    yield VerifiedRow(
        topic="memory",
        what="arguments",
        unit="bytes",
        planned=planned_arguments,
        compiled=arguments,
        verdict="matches" if is_close else "explained" if fewer else "differs",
        note="" if is_close else "XLA leaves out arguments that nothing reads" if fewer else "",
    )
    kept = arguments + account.output_size_in_bytes - account.alias_size_in_bytes
    temporaries = account.temp_size_in_bytes
    yield _peak_row(plan.peak_bytes, kept, temporaries, mesh=None, platform=platform, counted_as=plan.compiler)


def _rows_of_pipeline(compiled: CompiledPipeline, platform: str) -> Iterator[VerifiedRow]:
    for mesh in range(compiled.schedule.num_meshes):
        stages = [stage for stage in compiled.plan.stages if stage.mesh == mesh]
        planned, counted_as = sum(stage.peak_bytes for stage in stages), stages[0].plan.compiler
        live = LiveBytes(compiled, mesh)
        kept, temporaries = live.peak()
        late = live.peak(is_late=True)
        yield _peak_row(planned, kept, temporaries, late=late, mesh=mesh, platform=platform, counted_as=counted_as)


def _peak_row(
    planned: int,
    kept: int,
    temporaries: int,
    *,
    late: tuple[int, int] | None = None,
    mesh: int | None,
    platform: str,
    counted_as: str,
) -> VerifiedRow:
    """The row of a peak, of which XLA's account has parts that are there anyway, and temporaries.

    `late`: the same parts if other meshes are so slow that each copy comes when it is waited for. `counted_as`: the compiler by
    which the plan counts.
    """
    compiled = kept + temporaries
    least_kept, least_temporaries = late or (kept, temporaries)
    least = least_kept + least_temporaries * TUNING.temporaries_margin
    most = max(compiled + temporaries * SPARE, 0 if mesh is None else compiled * (1 + SPARE_IN_STAGES))
    verdict: Verdict = "matches" if least - ALIGNMENT <= planned <= most + ALIGNMENT else "differs"
    note = f"{planned / compiled - 1:+.1%}; {least / compiled - 1:+.0%} to {most / compiled - 1:+.0%} allowed"
    is_other = (platform == "cpu") != (counted_as == "cpu")
    if verdict == "differs" and (is_other or (platform == "tpu" and planned > most)):
        theirs, ours = counted_as.upper(), platform.upper()
        verdict, note = "explained", f"{planned / compiled - 1:+.1%}: planned for {theirs}s' compiler, this is {ours}s'"
    return VerifiedRow(
        topic="memory",
        what="peak",
        unit="bytes",
        planned=planned,
        compiled=compiled,
        verdict=verdict,
        stage=mesh,
        note=note,
    )


class LiveBytes:
    """What lies on a device of one mesh while the driver executes the instructions of a step.

    `temporaries`: bytes of each task, by its name, beside its arrays.
    """

    def __init__(self, compiled: CompiledPipeline, mesh: int) -> None:
        self.compiled, self.mesh = compiled, mesh
        self.tasks, self.links = compiled.pipeline_tasks, compiled.links
        accounts = {n: e.memory_analysis() for n, e in compiled.executables().items() if self._is_here(n)}
        self.temporaries = {str(name): int(account.temp_size_in_bytes) for name, account in accounts.items() if account}
        self.replaced = {
            str(name): int(account.alias_size_in_bytes)
            for name, account in accounts.items()
            if account and not name.in_loop  # in the loop the instructions know what takes whose place
        }

    def _is_here(self, name: TaskName) -> bool:
        return self.tasks.mesh_of(name.stage) == self.mesh

    def peak(self, *, is_late: bool = False) -> tuple[int, int]:
        """(bytes of arrays, bytes of temporaries) at the moment when both together are most.

        Copies from other meshes come as early as they can, or only when they are waited for.
        What an update returns takes the place of the leaves that it is given, of which the instructions know nothing.
        """
        there = {value: self.size(value) for home, value in self.compiled.instructions.inputs if home == self.mesh}
        peak, early = (sum(there.values()), 0), _arrivals(self.compiled.instructions, self.mesh)
        for place, instruction in enumerate(self.compiled.instructions.of(self.mesh)):
            waited_for = [instruction.value] if isinstance(instruction, Receive) else []
            there |= {value: self.size(value) for value in (waited_for if is_late else early[place])}
            if isinstance(instruction, Run):
                there |= {value: self.size(value) for value in instruction.writes}
                own = sum(there.values()) - self.replaced.get(instruction.task, 0)
                peak = max(peak, (own, self.temporaries.get(instruction.task, 0)), key=sum)
                gone = {instruction.reads[place] for place in instruction.donated} - {*instruction.writes}
                there = {value: size for value, size in there.items() if value not in gone}
            elif isinstance(instruction, Free):
                del there[instruction.value]
        return peak

    def size(self, value: Value) -> int:
        """What the arrays of a slot take on one device: as their maker makes them, or as their reader is given them."""
        group = self.links.groups[value.name]
        source = group.content.source if isinstance(group.content, Passed) else None
        if isinstance(group.content, Passed) and not isinstance(source, Made):
            reader = self.tasks.by_name[group.content.readers[0]]
            shapes = dict(zip(reader.reads, reader.shapes, strict=True))
            given = [shapes[ref] for _, ref in group.items]
            return sum(_bytes_of(shape[0] if isinstance(shape, list) else shape) for shape in given)
        made = [self.tasks.maker_of(item).results[item[1]] for item in group.items]
        if isinstance(source, Made) and self.tasks.mesh_of(source.task.stage) != self.mesh:
            return sum(map(_bytes_of, made, self.links.targets[value.name]))
        return sum(map(_bytes_of, made))


def _arrivals(instructions: InstructionList, mesh: int) -> list[list[Value]]:
    """For each instruction of a mesh, what may have arrived before it and not before the one before it.

    A copy is there as soon as it is sent, which does not wait for the receiver. So it may be there when this mesh has done
    what the sender needs of it, if all other meshes are infinitely fast.
    """
    found: list[list[Value]] = [[] for _ in instructions.of(mesh)]
    done = [0] * instructions.num_meshes  # how many instructions of this mesh each mesh needs for what it has done
    sent: dict[int, int] = {}
    for instruction in instructions.instructions:
        here = instruction.mesh
        done[here] += here == mesh
        if isinstance(instruction, Send):
            sent[instruction.number] = done[here]
        elif isinstance(instruction, Receive) and here == mesh:
            found[sent[instruction.number]].append(instruction.value)
        elif isinstance(instruction, Receive):
            done[here] = max(done[here], sent[instruction.number])
    return found


def _bytes_of(shape: jax.ShapeDtypeStruct, sharding: Sharding | None = None) -> int:
    """Bytes per device."""
    return math.prod((sharding or shape.sharding).shard_shape(shape.shape)) * itemsize_of(shape)
