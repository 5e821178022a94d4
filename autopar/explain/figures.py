"""The figures of a plan that every form of its report shows: one place computes them, so that they agree.

In: a plan. Out: `Figures`, and the parts of which its step is the sum. Compute of a pipeline is that of its slowest stage, as
stages work side by side; communication is that of all stages and of the transfers between them. What can go wrong: a plan that
was written before collectives told what of them hides; its parts by kind are then left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.cost_model.hardware import PRESETS
from autopar.pipeline_plan import PipelinePlan, StagePlan, sent_once_s
from autopar.plan import WITHIN, CollectivePlan, Plan

KINDS: Mapping[str, str] = {
    "data_parallel": "gradients and new weights",
    "zero3": "weights",
    "tensor": "activations",
    "expert": "activations, all-to-all",
    WITHIN: "within operations",
}
"""What a collective of each `CollectivePlan.overlap` moves, by data flow: `intra_op/choices/overlap.py` tells these apart."""
_NUMBERS = ("float", "bfloat", "complex", "int4", "int8", "uint4", "uint8")
"""Types of operands that may be weights; others that depend on no example are random bits and masks."""
_CLOSE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds per step and bytes per device.

    Attributes:
        step_s: of the whole step.
        compute_s: of compute; of a pipeline on the mesh that computes longest.
        comm_s: of all collectives and transfers.
        hidden_s: what of the collectives hides behind compute, less those by which they slow that.
        sent_s: of all transfers between the meshes of a pipeline, which are a part of `comm_s`.
        waited_s: for how long the step waits for transfers.
        peak_bytes: at the peak of the fullest device.
        mfu: model FLOP utilization, the part of the devices' peak that the step's contractions reach; None if not known.
    """

    step_s: float
    compute_s: float
    comm_s: float
    hidden_s: float
    sent_s: float
    waited_s: float
    peak_bytes: int
    mfu: float | None


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step: seconds in all, those of them that hide behind compute, and those by which the step is longer."""

    name: str
    seconds: float
    hidden_s: float
    waited_s: float


def figures_of(plan: Plan | PipelinePlan) -> Figures:
    """The figures of a plan."""
    mfu = plan.at_peak_s / plan.step_s if plan.at_peak_s and plan.step_s else None
    sent_s = waited_s = 0.0
    if isinstance(plan, Plan):
        compute_s, comm_s, hidden_s = plan.compute_s, plan.comm_s, plan.hidden_s
    else:
        sent_s = sum(item.count * item.predicted_s for item in plan.transfers)
        waited_s = waited_s_of(plan) + sent_once_s(plan.transfers)
        compute_s = max(sum(stage.plan.compute_s for stage in stages) for stages in meshes_of(plan).values())
        comm_s = sum(stage.plan.comm_s for stage in plan.stages) + sent_s
        hidden_s = sum(stage.plan.hidden_s for stage in plan.stages)
    return Figures(
        step_s=plan.step_s,
        compute_s=compute_s,
        comm_s=comm_s,
        hidden_s=hidden_s,
        sent_s=sent_s,
        waited_s=waited_s,
        peak_bytes=plan.peak_bytes,
        mfu=mfu,
    )


def parts_of(plan: Plan | PipelinePlan) -> tuple[Part, ...]:
    """The parts of a step; the seconds that it waits for them add up to the step."""
    return _parts_of_stages(plan) if isinstance(plan, PipelinePlan) else _parts_of_mesh(plan)


def meshes_of(plan: PipelinePlan) -> dict[int, list[StagePlan]]:
    """The stages of each mesh, in the meshes' order."""
    stages: dict[int, list[StagePlan]] = {}
    for stage in sorted(plan.stages, key=lambda stage: (stage.mesh, stage.stage)):
        stages.setdefault(stage.mesh, []).append(stage)
    return stages


def work_of(plan: PipelinePlan) -> dict[int, float]:
    """Seconds of work per microbatch of each mesh."""
    return {mesh: sum(one.forward_s + one.backward_s for one in stages) for mesh, stages in meshes_of(plan).items()}


def waited_s_of(plan: PipelinePlan) -> float:
    """Seconds of a step for which it waits for the transfers of its microbatches: what its other parts leave of it."""
    busy_s = plan.num_microbatches * max(work_of(plan).values())
    once_s = max(stage.once_s for stage in plan.stages) + sent_once_s(plan.transfers)
    left_s = plan.step_s - (1 + plan.bubble) * busy_s - once_s
    return left_s if left_s > _CLOSE * plan.step_s else 0.0


def mesh_name(plan: PipelinePlan, mesh: int) -> str:
    """A mesh by its stages: stage 1, or mesh 1 (stages 1 and 3)."""
    numbers = [str(stage.stage) for stage in meshes_of(plan)[mesh]]
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"mesh {mesh} (stages {' and '.join(numbers)})"


def node_size(plan: Plan | PipelinePlan) -> int | None:
    """Devices of a node, if the plan is for a preset of equal nodes and uses several of them; else None."""
    cluster = PRESETS.get(plan.cluster)
    kinds = [plan.node_kind] if isinstance(plan, Plan) else [stage.node_kind for stage in plan.stages]
    size = None if cluster is None or any(kinds) else cluster.devices_per_node
    return size if size and plan.num_devices > size else None


def moved_text(collectives: Sequence[CollectivePlan]) -> str:
    """What collectives of one `CollectivePlan.overlap` move, in words; random bits and masks are early too, and no weights."""
    kind = collectives[0].overlap
    are_weights = [item.operand.startswith(_NUMBERS) for item in collectives]
    if kind != "zero3" or all(are_weights):
        return KINDS[kind]
    return f"{KINDS[kind]}, random bits" if any(are_weights) else "random bits"


def seconds_of(collectives: Sequence[CollectivePlan]) -> tuple[float, float]:
    """(seconds, hidden seconds) per step of all of them together."""
    return sum(c.count * c.predicted_s for c in collectives), sum(c.count * c.hidden_s for c in collectives)


def _parts_of_mesh(plan: Plan) -> tuple[Part, ...]:
    parts = [Part("compute", plan.compute_s, 0.0, plan.compute_s)]
    if abs(seconds_of(plan.collectives)[1] - plan.hidden_s) <= _CLOSE * plan.step_s:
        for kind in KINDS:
            some = [item for item in plan.collectives if item.overlap == kind]
            seconds, hidden_s = seconds_of(some)
            if some:
                parts.append(Part(f"communication: {moved_text(some)}", seconds, hidden_s, seconds - hidden_s))
    elif plan.collectives:
        parts.append(Part("communication", plan.comm_s, plan.hidden_s, plan.comm_s - plan.hidden_s))
    return tuple(parts)


def _parts_of_stages(plan: PipelinePlan) -> tuple[Part, ...]:
    """The work of the busiest mesh, its waiting for others and for transfers, and what happens once per step."""
    work = work_of(plan)
    most, last = max(work, key=lambda mesh: work[mesh]), max(plan.stages, key=lambda stage: stage.once_s)
    busy_s = plan.num_microbatches * work[most]
    found = (
        (f"work of {mesh_name(plan, most)}, the busiest", busy_s),
        ("bubble", plan.bubble * busy_s),
        ("transfers that are waited for", waited_s_of(plan)),
        (f"once per step, such as the update, on stage {last.stage}", last.once_s),
        ("transfers once per step", sent_once_s(plan.transfers)),
    )
    return tuple(Part(name, seconds, 0.0, seconds) for name, seconds in found if seconds or name == "bubble")
