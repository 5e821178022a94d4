"""What is said of chosen stages: their figures, and why nothing is left or nothing fits.

In: stages as the recursion finds them, with their `Family` and problem. Out: data of `problem.py`, and the words of errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar.inter_op.dynamic_program.families import Family
from autopar.inter_op.dynamic_program.problem import ChosenStage, Manual, StageProblem
from autopar.inter_op.dynamic_program.recursion import Limited, Stages, exact, quick, stages_of


def describe_stages(stages: Stages, family: Family) -> tuple[ChosenStage, ...]:
    """The stages with their costs, in the places that they have in a choice of this family."""
    problem, count = family.problem, len(stages)
    costs = problem.costs

    def working_bytes(stage: tuple[int, int, int], in_flight: float) -> float:
        """What is there beside the rest: what a task needs, or more if the stage needs more however few are in flight."""
        i, j, z = stage
        rest = float(costs.weight_bytes[z, i, j] + in_flight * costs.activation_bytes[z, i, j])
        return max(float(costs.working_bytes[z, i, j]), float(costs.least_bytes[z, i, j]) - rest * family.chunks)

    return tuple(
        ChosenStage(
            first_layer=i,
            end_layer=j,
            mesh=s % (count // family.chunks),
            option=z,
            submesh=problem.options[z],
            stage_s=float(costs.seconds[z, i, j]),
            once_s=float(costs.once_s[z, i, j]),
            in_flight=family.in_flight[count][count - 1 - s],
            weight_bytes=float(costs.weight_bytes[z, i, j]),
            activation_bytes=float(costs.activation_bytes[z, i, j]),
            working_bytes=working_bytes((i, j, z), family.in_flight[count][count - 1 - s]) / family.chunks,
        )
        for s, (i, j, z) in enumerate(stages)
    )


def explain_nothing_left(problem: StageProblem, manual: Manual) -> str:
    """What the user decided by hand if no choice of stages is left, memory aside."""
    decided = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(manual).items() if v is not None) or "nothing"
    return (
        f"No choice of stages is left: {problem.layers} layers on {problem.machine_text}, "
        f"schedule {problem.schedule!r} with {problem.microbatches} microbatches, decided by hand: {decided}. A stage needs a "
        "layer and a submesh with a plan, and the stages must use all devices; 'interleaved' also needs a number of meshes that "
        "divides devices and microbatches. Decide less by hand, or allow more layers."
    )


def explain_out_of_memory(problem: StageProblem, families: Sequence[Family]) -> str:
    """The tightest stage of the choice that comes closest to the memory: the one whose tightest stage needs the least."""
    least, needed = math.inf, None
    for family in families:
        for count in family.counts:
            kept = family.in_flight[count]
            options = range(len(problem.options))
            needs = [np.where(family.open_places(z)[..., :count], family.bytes(z, kept), np.inf) for z in options]
            table = Limited.at_all(np.stack(needs))
            if quick(table.costs.min(axis=3), family.devices, np.maximum) < least:
                best = exact(table, family.devices, np.maximum)
                if best[0, count, -1] < least:
                    least = float(best[0, count, -1])
                    tightest = stages_of(best, table, devices=family.devices, count=count, combine=np.maximum)
                    stages = describe_stages(tightest, family)
                    needed = max(stages, key=lambda stage: stage.peak_bytes), stages.index, count, family.chunks
    assert needed is not None
    stage, number_of, count, chunks = needed
    shared = f", and a device holds {chunks} chunks" if chunks > 1 else ""
    working = f"{stage.working_bytes:,.0f} while a task runs, " if stage.working_bytes else ""
    return (
        f"No choice of stages fits into {problem.memory_bytes:,.0f} bytes per device. The one that comes closest has {count} "
        f"stage{'s' if count > 1 else ''}; its stage {number_of(stage)}, layers {stage.first_layer} to {stage.end_layer - 1} on "
        f"a submesh of {stage.submesh[0]} x {stage.submesh[1]} devices, needs {stage.peak_bytes:,.0f} bytes per device"
        f"{shared}: {stage.weight_bytes:,.0f} of parameters, optimizer state and gradients, {working}and {stage.in_flight:g} x "
        f"{stage.activation_bytes:,.0f} of activations, one for each microbatch in flight. More microbatches (now "
        f"{problem.microbatches}), recompute='layer', schedule='1f1b' (now {problem.schedule!r}) or more devices need less."
    )
