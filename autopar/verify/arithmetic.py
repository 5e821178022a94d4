"""The operations of compiled products and convolutions beside those of the plan's strategies, on all devices together.

In: the parts of a step. Out: one row. What the plan says follows from its strategies: an operation that is divided into w
parts takes 1 / w of its operations on each device, so one that devices repeat counts once for each; what backward makes again
counts again.

    planned = sum of flops(equation) / ways(strategy) * times per step * devices

What can go wrong: XLA makes a product of very few elements as sums, leaves out one whose result is not needed, or does not
multiply the zeros of a dilated image. It may do that much less than was planned, `LEFT_OUT`, and never more than `TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.hlo.contractions import Arithmetic
from autopar.intra_op.lowering.assignment import Assignment
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.loops import LoopEquation
from autopar.rules.table import entry_for, flops_of
from autopar.verification import Verdict, VerifiedRow
from autopar.verify.programs import CompiledProgram, PlannedPart

TOLERANCE = 0.02
"""By this share of what was planned the compiled programs may compute less, or more."""
LEFT_OUT = 0.1
"""By this share they may compute less: of convolutions that are strided backwards XLA does not multiply the zeros."""


def rows(parts: Sequence[PlannedPart], plan: Plan | PipelinePlan) -> Iterator[VerifiedRow]:
    """One row for all parts; none if the step has no contractions."""
    planned = sum(_planned(part.assignment) for part in parts)
    programs = [program for part in parts for program in part.programs]
    compiled = _computed(programs, [one.arithmetic for one in programs])
    unknown = list(dict.fromkeys(name for one in programs for name in one.arithmetic.unknown))
    if not planned and not compiled:
        return
    verdict: Verdict = "differs"
    note = f"more than {TOLERANCE:.0%} apart"
    masked = sum(_planned(part.assignment, masks=True) for part in parts)
    if planned != masked and abs(masked - compiled) <= TOLERANCE * masked:
        planned, verdict, note = (
            masked,
            "matches",
            "each row of a ragged product with every group's matrix, others masked",
        )
    elif math.isclose(planned, compiled, rel_tol=1e-9):
        verdict, note = "matches", _repeats(planned, plan)
    elif abs(planned - compiled) <= TOLERANCE * planned:
        verdict, note = "matches", f"within {TOLERANCE:.0%}"
    elif compiled < planned and _is_given(programs, planned):
        verdict, note = "explained", "XLA is given all, and makes equal products one: also forward and its repetition"
    elif 0 <= planned - compiled <= LEFT_OUT * planned:
        verdict, note = "explained", _left_out(planned, plan)
    elif unknown:
        verdict, note = "unknown", f"calls of libraries whose operations are not known: {', '.join(unknown)}"
    elif not all(one.arithmetic.is_exact for one in programs):
        verdict, note = "unknown", "in a loop whose length XLA does not know"
    yield VerifiedRow(
        topic="arithmetic",
        what="products and convolutions",
        unit="flops",
        planned=planned,
        compiled=compiled,
        verdict=verdict,
        note=note,
    )


def _computed(programs: Sequence[CompiledProgram], each: Sequence[Arithmetic]) -> float:
    """Operations per step of all devices, if one device computes so many in a run of each program."""
    return sum(one.flops * program.times * program.num_devices for program, one in zip(programs, each, strict=True))


def _is_given(programs: Sequence[CompiledProgram], planned: float) -> bool:
    """Whether XLA is given just what is planned."""
    given = [one.given_arithmetic for one in programs]
    return all(one.is_exact for one in given) and math.isclose(planned, _computed(programs, given), rel_tol=1e-9)


def _left_out(planned: float, plan: Plan | PipelinePlan) -> str:
    """What XLA may do less."""
    zeros = "XLA leaves out zeros between the pixels of a dilated image"
    is_repeated = bool(plan.flops) and planned > plan.flops * (1 + 1e-9)
    return f"{zeros}, or merges what backward does again with what forward did" if is_repeated else zeros


def _repeats(planned: float, plan: Plan | PipelinePlan) -> str:
    """How much of it is work that is done more than once."""
    if not plan.flops or planned <= plan.flops * (1 + 1e-9):
        return "each once"
    return f"{planned / plan.flops - 1:.0%} is done again, or by several devices"


def _planned(assignment: Assignment, *, masks: bool = False) -> float:
    """Operations per step of all devices of a mesh. `masks`: with those on rows that are masked."""
    total = 0.0
    for eqn, _, trips in assignment.seconds:
        if isinstance(eqn, LoopEquation) or not entry_for(eqn).heavy:
            continue
        axes = {axis for _, several in dict(assignment.strategies[eqn].factor_axes).items() for axis in several}
        masked = entry_for(eqn).masks if masks else None
        times = trips if masked is None else trips * masked(eqn)
        total += flops_of(eqn, assignment.rules[eqn]) / assignment.mesh.ways(axes) * times
    return total * assignment.mesh.size
