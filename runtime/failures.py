"""Describe the failure of a mesh: first the cause, then stage, microbatch and mesh, then the lines of the user's program.

In: the exceptions, each with the mesh and its position. Out: a `PipelineError` with the first exception as its cause. What
can go wrong: tracebacks keep the locals of their frames alive, and with them the arrays of the step. `describe_failures`
empties the frames.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.errors import PipelineError
from autopar.schedules.instructions import Free, Instruction, InstructionList, Run

TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Failure:
    """An exception on a mesh, and the number of instructions that the mesh had done before."""

    mesh: int
    position: int
    error: BaseException


def describe_failures(
    program: InstructionList, failures: Sequence[Failure], lines: Callable[[str], str]
) -> BaseException:
    """Return the exception to raise: an error about the failure that is first in the global order, or an interrupt as it is.

    `lines` returns the lines of the user's program that a task comes from.
    """
    for failure in failures:
        _clear_frames(failure.error)
    first = min(failures, key=lambda failure: _global_index(program, failure))
    if isinstance(first.error, KeyboardInterrupt):
        return first.error
    error = PipelineError(_describe(program, first, lines))
    error.__cause__ = first.error
    return error


def _describe(program: InstructionList, failure: Failure, lines: Callable[[str], str]) -> str:
    instruction = _instruction(program, failure)
    place = f"instruction {_global_index(program, failure)} of {len(program.instructions)}"
    where = lines(instruction.task) if isinstance(instruction, Run) else ""
    return (
        f"{type(failure.error).__name__}: {_summary(failure.error)}\n"
        f"{_what_failed(instruction)} on mesh {failure.mesh} ({place}){where and f', which runs {where}'}.\n"
        f"{_advice(failure.error)}All meshes were stopped, and the step can be called again."
    )


def _summary(error: BaseException) -> str:
    """Return the first line of an error. If a traceback follows it, as for a failed callback, return that one's last line."""
    lines = str(error).strip().splitlines()
    if not lines or not lines[0].endswith(TRACEBACK):
        return lines[0] if lines else ""
    return f"{lines[0].removesuffix(TRACEBACK)}{lines[-1].strip()}"


def _advice(error: BaseException) -> str:
    if "RESOURCE_EXHAUSTED" not in str(error):
        return ""
    return (
        "The devices of this mesh have less free memory than the step takes. Use more microbatches or recompute='layer', let go "
        "of other arrays, or set memory_limit_bytes below what is free, so that the plan is made for it.\n"
    )


def _what_failed(instruction: Instruction) -> str:
    if isinstance(instruction, Run):
        at = "" if instruction.microbatch is None else f", microbatch {instruction.microbatch}"
        return f"Stage {instruction.stage}{at}: the {instruction.kind.replace('_', ' ')} failed"
    if isinstance(instruction, Free):
        return f"Freeing {instruction.value} failed"
    return f"Moving {instruction.value} from mesh {instruction.source_mesh} to {instruction.target_mesh} failed"


def _instruction(program: InstructionList, failure: Failure) -> Instruction:
    row = program.of(failure.mesh)
    return row[min(failure.position, len(row) - 1)]


def _global_index(program: InstructionList, failure: Failure) -> int:
    instruction = _instruction(program, failure)
    return next(n for n, other in enumerate(program.instructions) if other is instruction)


def _clear_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
