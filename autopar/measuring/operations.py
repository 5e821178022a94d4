"""What was seen of a program, as recorded operations: every kernel has a place, and what is not known of it is said.

In: executions as the profiler has seen them, the text of the program, the plan. Out: `OperationsThatRan`. Executions that name
another module are left out; those that name none are the program's, since a call runs no other. What can go wrong: kernels that
cannot be led back to operations of the program. They are recorded under their own names, those of NCCL as collectives and others
as compute, and a sentence tells their share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from autopar.explain.units import seconds_text
from autopar.hlo.text import Computation, parse_module
from autopar.measuring.kernels import collective_of_kernel, instructions_of
from autopar.measuring.profile import Seen
from autopar.measuring.program import module_name, operations_of
from autopar.plan import Plan
from autopar.recording.recorded import KERNEL, ProgramOperation, RecordedOperation

Ran = tuple[int, Seen, str | None]
"""The number of a call, what was seen of it, and the operation's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationsThatRan:
    """The operations by name, their executions, and what is not known, in words."""

    program: dict[str, ProgramOperation]
    operations: list[RecordedOperation]
    missing: tuple[str, ...] = ()


def operations_that_ran(
    seen: Sequence[tuple[int, Seen]], hlo_text: str, plan: Plan, places: Mapping[int, int]
) -> OperationsThatRan:
    """What ran of a program.

    Args:
        seen: the numbers of calls, with what was seen of them.
        hlo_text: of the program.
        plan: of the program.
        places: in the mesh, by the numbers of devices.
    """
    known, module = operations_of(hlo_text, plan.mesh_shape, plan.axis_names), module_name(hlo_text)
    computations = parse_module(hlo_text)
    instructions = {name for computation in computations.values() for name in computation.instructions}
    starts: dict[int, float] = {}
    for call, one in seen:
        starts[call] = min(one.start_s, starts.get(call, one.start_s))
    own = [(call, one) for call, one in seen if one.device in places and one.module in (module, "")]
    kernels = [(call, one) for call, one in own if one.kernel]
    ran: list[Ran] = [(call, one, one.name) for call, one in own if not one.kernel and one.name in known]
    ran += _of_kernels(kernels, computations)
    program = {operation.name: operation for _, one, name in ran for operation in [_operation(one, name, known)]}
    operations = [
        RecordedOperation(
            call=call,
            name=_operation(one, name, known).name,
            device=places[one.device],
            start_s=one.start_s - starts[call],
            end_s=one.end_s - starts[call],
            goes_on=goes_on,
        )
        for (call, one, name), goes_on in zip(ran, _go_on(ran), strict=True)
    ]
    strange = [one for _, one in own if not one.kernel and one.name not in instructions]
    missing = (*_missing(program, operations), *(_left_out(strange) if operations and strange else ()))
    return OperationsThatRan(program=program, operations=operations, missing=missing)


def _of_kernels(kernels: Sequence[tuple[int, Seen]], program: Mapping[str, Computation]) -> Iterator[Ran]:
    """The kernels of each call on each device in order, with the names of their operations."""
    ordered = sorted(kernels, key=lambda one: (one[0], one[1].device, one[1].start_s))
    for (call, _), group in itertools.groupby(ordered, key=lambda one: (one[0], one[1].device)):
        own = [one for _, one in group]
        yield from zip(itertools.repeat(call), own, instructions_of(own, program), strict=False)


def _operation(one: Seen, name: str | None, known: Mapping[str, ProgramOperation]) -> ProgramOperation:
    """The operation of the program; a kernel's own if it is not known, and of a loop its copy of whether it goes on."""
    if name is None:
        return ProgramOperation(name=one.kernel, opcode=KERNEL, collective=collective_of_kernel(one.kernel))
    return known[name] if name in known else ProgramOperation(name=name, opcode=name.split(".")[0])


def _go_on(ran: Sequence[Ran]) -> Iterator[bool]:
    """Whether each is another kernel of the operation of the one before, such as a fill of memory for a product."""
    yield from (False for _ in ran[:1])
    for (call, before, name), (next_call, one, next_name) in itertools.pairwise(ran):
        same = (call, before.device, name, before.graph) == (next_call, one.device, next_name, one.graph)
        yield same and name is not None and bool(one.kernel)


def _missing(program: Mapping[str, ProgramOperation], operations: Sequence[RecordedOperation]) -> Iterator[str]:
    if not operations:
        yield "the time of each operation: the profiler's names are not those of the compiled program"
    unknown_s = sum(one.seconds for one in operations if program[one.name].opcode == KERNEL)
    if unknown_s:
        share = unknown_s / sum(one.seconds for one in operations)
        yield (
            f"which operations of the program {seconds_text(unknown_s)} of kernels ({share:.1%}) ran for; they are recorded "
            "under the kernels' own names"
        )


def _left_out(strange: Sequence[Seen]) -> Iterator[str]:
    """What a profiler names as the program's, and the program does not name."""
    total_s = sum(one.end_s - one.start_s for one in strange)
    yield f"{seconds_text(total_s)} of operations that the compiled program does not name, such as {strange[0].name}"
