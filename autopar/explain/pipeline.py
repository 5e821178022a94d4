"""The report of a pipeline in words: its header, what it costs, and what each stage does with its own mesh.

In: a `PipelinePlan`. Out: sentences that `report` prints. Those of one mesh say what a stage does with its own; stages of which
they say the same share them. What can go wrong is to count twice: a stage's times are per microbatch, its `once_s` per step, and
stages on one mesh share its devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator

from autopar.explain.bound import proof_text
from autopar.explain.figures import Figures, figures_of, mesh_name, meshes_of, node_size, work_of
from autopar.explain.memory import knows_parts
from autopar.explain.sentences import group_sentences
from autopar.explain.stages import range_text
from autopar.explain.strategies import findings, names_text, traffic
from autopar.explain.units import bytes_text, mfu_text, percent_text, seconds_text
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.plan import Plan, ValuePlan

_BALANCED = 1.05
_MOST_WAYS = 4
_READERS = {
    "forward": "for forward passes",
    "backward": "for backward passes",
    "update": "once, for the update",
    "weights": "once, for shared weights",
}
_SMALLER_BUBBLE = {
    "1f1b": "; more microbatches make it smaller, and so do virtual stages",
    "interleaved": "; more microbatches or virtual stages make it smaller",
    "inference": "",
}
"""Where more than microbatches, or not even these, make a bubble smaller."""


def pipeline_header(plan: PipelinePlan) -> str:
    """Stages, devices, schedule, and the predictions for the whole step."""
    again = f", backward repeats {_repeated_text(plan)}" if plan.recompute else ""
    limit = plan.memory_limit_bytes
    of_limit = f" of {bytes_text(limit)} ({percent_text(plan.peak_bytes, limit)})" if limit else ", no limit"
    figures = figures_of(plan)
    return "\n".join(
        (
            f"{_stages_text(plan)} on cluster {plan.cluster}",
            f"{_count(plan.num_microbatches, 'microbatch')}, schedule {plan.schedule}{again}",
            f"predicted step {seconds_text(plan.step_s)}, bubble {plan.bubble:.1%}; peak memory "
            f"{bytes_text(plan.peak_bytes)} per device{of_limit}{mfu_text(figures.mfu)}",
            f"compute {seconds_text(figures.compute_s)} on the {slowest(plan)}; communication "
            f"{seconds_text(figures.comm_s)} in all stages{communication_text(figures)}",
            f"planned in {seconds_text(plan.planning_s)}, {proof_text(plan)}",
        )
    )


def slowest(plan: PipelinePlan) -> str:
    """What computes longest: a stage, or a mesh with several."""
    return "slowest stage" if plan.virtual_stages == 1 else "slowest mesh"


def communication_text(figures: Figures) -> str:
    """What of the collectives of all stages hides, and of the transfers for how long the step waits for them."""
    hidden = f", {seconds_text(figures.hidden_s)} of it hidden behind compute" if figures.hidden_s > 0 else ""
    if not figures.sent_s:
        return hidden
    waited = f"the step waits {seconds_text(figures.waited_s)}" if figures.waited_s else "the step does not wait"
    return f"{hidden}, {seconds_text(figures.sent_s)} of it transfers, for which {waited}"


def _repeated_text(plan: PipelinePlan) -> str:
    """How much forward work is done again, of all stages or of some."""
    shares, named = plan.recomputed_shares, ", except named values" if plan.keeps_named else ""
    least, most = min(shares), max(shares)
    if least == 1:
        return f"forward work{named}"
    return (
        f"{most:.0%} of forward work{named}" if least == most else f"{least:.0%} to {most:.0%} of forward work{named}"
    )


def pipeline_findings(plan: PipelinePlan) -> tuple[str, ...]:
    """What the bubble costs, which mesh is the bottleneck, what crosses, and what each stage does with its mesh."""
    memory = () if knows_parts(plan) else (_memory_text(plan),)  # its table says it otherwise
    sentences = [_bubble_text(plan), _bottleneck_text(plan), *memory, *_crossing(plan), *_nodes(plan)]
    said = [
        (one.stage, text)
        for one in plan.stages
        for text in (*findings(_as_a_step(one)), *traffic(one.plan), *_borrowed(one, plan))
    ]
    return (*sentences, *group_sentences(said))


def schedule_title(plan: PipelinePlan, grid: str) -> str:
    """What the letters in a picture of the schedule mean."""
    words = ["F0 is the forward of microbatch 0"]
    words += ["B0 its backward"] if "B" in grid else []
    words += ["W0 its weight gradient"] if "W" in grid else []
    words += ["F0b its forward on the mesh's second stage"] if plan.virtual_stages > 1 else []
    words += ["- goes on"] if "-" in grid else []
    words += [". waits"] if "." in grid else []
    return f"Schedule: {', '.join(words)} (columns are not to scale)"


def _stages_text(plan: PipelinePlan) -> str:
    sizes = [math.prod(stages[0].plan.mesh_shape) for stages in meshes_of(plan).values()]
    each = f"x {sizes[0]} {'device' if sizes[0] == 1 else 'devices'}"
    devices = each if len(set(sizes)) == 1 else f"on {' + '.join(map(str, sizes))} devices"
    if plan.virtual_stages > 1:
        devices = f"on {_count(len(sizes), 'mesh')} ({plan.virtual_stages} virtual stages each) {devices}"
    return f"{plan.num_stages} stages {devices} ({sum(sizes)} devices)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def _bubble_text(plan: PipelinePlan) -> str:
    busiest_s = plan.num_microbatches * max(work_of(plan).values())
    if not plan.bubble:
        return f"no bubble: the busiest mesh works {seconds_text(busiest_s)} per step without waiting"
    return (
        f"the bubble costs {seconds_text(plan.bubble * busiest_s)} per step: the busiest mesh waits that long for others, and "
        f"works {seconds_text(busiest_s)}{_SMALLER_BUBBLE.get(plan.schedule, '; more microbatches make it smaller')}"
    )


def _bottleneck_text(plan: PipelinePlan) -> str:
    work = work_of(plan)
    most, least = max(work, key=lambda mesh: work[mesh]), min(work, key=lambda mesh: work[mesh])
    if work[most] <= work[least] * _BALANCED:
        return (
            f"the stages are balanced: from {seconds_text(work[least])} to {seconds_text(work[most])} of work per "
            "microbatch"
        )
    times = f", {work[most] / work[least]:.1f} times as much as" if work[least] else ", and the least busy is"
    return (
        f"{mesh_name(plan, most)} is the bottleneck: {seconds_text(work[most])} of work per microbatch{times} "
        f"{mesh_name(plan, least)} with {seconds_text(work[least])}"
    )


def _memory_text(plan: PipelinePlan) -> str:
    peaks = {mesh: sum(stage.peak_bytes for stage in stages) for mesh, stages in meshes_of(plan).items()}
    most = max(peaks, key=lambda mesh: peaks[mesh])
    flying = sum(stage.microbatches_in_flight for stage in meshes_of(plan)[most])
    return (
        f"{mesh_name(plan, most)} needs the most memory: {bytes_text(peaks[most])} per device, with the activations of "
        f"{_count(flying, 'microbatch')} in flight"
    )


def _crossing(plan: PipelinePlan) -> Iterator[str]:
    size: dict[str, int] = defaultdict(int)
    for transfer in plan.transfers:
        size[transfer.what] += transfer.bytes * transfer.count
    if not size:
        yield "the meshes send each other nothing"
        return
    kinds = sorted(size, key=lambda what: list(_READERS).index(what) if what in _READERS else len(_READERS))
    listed = "; ".join(f"{bytes_text(size[what])} {_READERS.get(what, f'for {what}')}" for what in kinds)
    yield f"the meshes send each other per step: {listed}"


def _nodes(plan: PipelinePlan) -> Iterator[str]:
    """Between which stages microbatches go from node to node, and what that costs beside a way within one."""
    size = node_size(plan)
    if size is None:
        return
    nodes = {stage.stage: {place // size for place in stage.devices} for stage in plan.stages}
    forward = [one for one in plan.transfers if one.what == "forward"]
    across = [one for one in forward if len(nodes[one.source] | nodes[one.target]) > 1]
    if not across:
        return
    ways = [f"{one.source} to {one.target}" for one in across]
    listed = ", ".join(ways[:_MOST_WAYS]) + (f", and {len(ways) - _MOST_WAYS} more" if len(ways) > _MOST_WAYS else "")
    within = [one.predicted_s for one in forward if one not in across]
    inside = f", and within one {range_text(within, seconds_text)}" if within else ""
    seconds = range_text([one.predicted_s for one in across], seconds_text)
    yield (
        f"the devices are {len(set().union(*nodes.values()))} nodes of {size}: from stage {listed} activations go from node to "
        f"node, which takes {seconds} each time{inside}"
    )


def _borrowed(stage: StagePlan, plan: PipelinePlan) -> Iterator[str]:
    """The state of other meshes that the stage reads; they send it in every step."""
    mesh_of = {path: other.mesh for other in plan.stages for path in other.leaves}
    read = [v for v in stage.plan.inputs if v.role == "state" and mesh_of.get(v.path, stage.mesh) != stage.mesh]
    if read:
        size = bytes_text(sum(value.bytes_per_device for value in read))
        leaves = "leaf" if len(read) == 1 else "leaves"
        yield f"reads {len(read)} {leaves} of other meshes, {size} per device, once per step: {names_text(read)}"


def _as_a_step(stage: StagePlan) -> Plan:
    """The stage as a step of its own: its batch is also what other stages send forward, its state what lives here."""

    def role(value: ValuePlan) -> str:
        return "batch" if value.from_forward else value.role

    here = [v for v in stage.plan.inputs if v.role != "state" or v.path in stage.leaves]
    return dataclasses.replace(stage.plan, inputs=tuple(dataclasses.replace(v, role=role(v)) for v in here))
