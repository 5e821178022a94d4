"""The report of a pipeline: its header, what it costs in words, and the tables of its stages and transfers.

In: a `PipelinePlan`. Out: text and tables that `report` prints; what each stage does with its own mesh is said by the
sentences and tables of one mesh. What can go wrong is to count twice: a stage's times are per microbatch, its `once_s` per
step, and stages on one mesh share its devices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from autopar.explain.bound import proof_text
from autopar.explain.paths import path_patterns
from autopar.explain.strategies import PARAMETER_WORDS, findings, names_text, traffic
from autopar.explain.tables import new_table
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.plan import Plan, ValuePlan

_BALANCED = 1.05
_READERS = {
    "forward": "for forward passes",
    "backward": "for backward passes",
    "update": "once, for the update",
    "weights": "once, for shared weights",
}
_SMALLER_BUBBLE = {
    "gpipe": "; more microbatches make it smaller",
    "1f1b": "; more microbatches make it smaller, and so do virtual stages",
    "interleaved": "; more microbatches or virtual stages make it smaller",
    "zb-h1": "; more microbatches make it smaller",
}


def pipeline_header(plan: PipelinePlan) -> str:
    """Stages, devices, schedule, and the predictions for the whole step."""
    again = f", backward repeats {_repeated_text(plan)}" if plan.recompute else ""
    limit = plan.memory_limit_bytes
    of_limit = f" of {bytes_text(limit)} ({percent_text(plan.peak_bytes, limit)})" if limit else ", no limit"
    return "\n".join(
        (
            f"{_stages_text(plan)} on cluster {plan.cluster}",
            f"{_count(plan.num_microbatches, 'microbatch')}, schedule {plan.schedule}{again}",
            f"predicted step {seconds_text(plan.step_s)}, bubble {plan.bubble:.1%}; peak memory "
            f"{bytes_text(plan.peak_bytes)} per device{of_limit}",
            f"planned in {seconds_text(plan.planning_s)}, {proof_text(plan)}",
        )
    )


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
    sentences = [_bubble_text(plan), _bottleneck_text(plan), _once_text(plan), _memory_text(plan), *_crossing(plan)]
    for stage in plan.stages:
        texts = (*findings(_as_a_step(stage)), *traffic(stage.plan), *_borrowed(stage, plan))
        sentences += [f"stage {stage.stage}: {text}" for text in texts]
    return tuple(sentences)


def pipeline_tables(plan: PipelinePlan) -> tuple[Table, ...]:
    """The table of stages and that of transfers, which may have no rows."""
    return _stage_table(plan), _transfer_table(plan)


def schedule_title(plan: PipelinePlan, grid: str) -> str:
    """What the letters in a picture of the schedule mean."""
    words = ["F0 is the forward of microbatch 0"]
    words += ["B0 its backward"] if "B" in grid else []
    words += ["W0 its weight gradient"] if "W" in grid else []
    words += ["F0b its forward on the mesh's second stage"] if plan.virtual_stages > 1 else []
    words += ["- goes on"] if "-" in grid else []
    words += [". waits"] if "." in grid else []
    return f"Schedule: {', '.join(words)} (columns are not to scale)"


def mesh_text(plan: Plan) -> str:
    """A logical mesh: x=2, y=4."""
    return ", ".join(f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True))


def _stages_text(plan: PipelinePlan) -> str:
    sizes = [math.prod(stages[0].plan.mesh_shape) for stages in _by_mesh(plan).values()]
    each = f"x {sizes[0]} {'device' if sizes[0] == 1 else 'devices'}"
    devices = each if len(set(sizes)) == 1 else f"on {' + '.join(map(str, sizes))} devices"
    if plan.virtual_stages > 1:
        devices = f"on {_count(len(sizes), 'mesh')} ({plan.virtual_stages} virtual stages each) {devices}"
    return f"{plan.num_stages} stages {devices} ({sum(sizes)} devices)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def _by_mesh(plan: PipelinePlan) -> dict[int, list[StagePlan]]:
    """The stages of each mesh, in the meshes' order."""
    stages: dict[int, list[StagePlan]] = defaultdict(list)
    for stage in sorted(plan.stages, key=lambda stage: (stage.mesh, stage.stage)):
        stages[stage.mesh].append(stage)
    return dict(stages)


def _work_s(plan: PipelinePlan) -> dict[int, float]:
    """Seconds of work per microbatch of each mesh."""
    return {
        mesh: sum(stage.forward_s + stage.backward_s for stage in stages) for mesh, stages in _by_mesh(plan).items()
    }


def _name(plan: PipelinePlan, mesh: int) -> str:
    """A mesh by its stages: stage 1, or mesh 1 (stages 1 and 3)."""
    numbers = [str(stage.stage) for stage in _by_mesh(plan)[mesh]]
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"mesh {mesh} (stages {' and '.join(numbers)})"


def _bubble_text(plan: PipelinePlan) -> str:
    busiest_s = plan.num_microbatches * max(_work_s(plan).values())
    if not plan.bubble:
        return f"no bubble: the busiest mesh works {seconds_text(busiest_s)} per step without waiting"
    return (
        f"the bubble costs {seconds_text(plan.bubble * busiest_s)} per step: the busiest mesh waits that long for others, and "
        f"works {seconds_text(busiest_s)}{_SMALLER_BUBBLE.get(plan.schedule, '')}"
    )


def _bottleneck_text(plan: PipelinePlan) -> str:
    work = _work_s(plan)
    most, least = max(work, key=lambda mesh: work[mesh]), min(work, key=lambda mesh: work[mesh])
    if work[most] <= work[least] * _BALANCED:
        return (
            f"the stages are balanced: from {seconds_text(work[least])} to {seconds_text(work[most])} of work per "
            "microbatch"
        )
    times = f", {work[most] / work[least]:.1f} times as much as" if work[least] else ", and the least busy is"
    return (
        f"{_name(plan, most)} is the bottleneck: {seconds_text(work[most])} of work per microbatch{times} "
        f"{_name(plan, least)} with {seconds_text(work[least])}"
    )


def _once_text(plan: PipelinePlan) -> str:
    longest = max(plan.stages, key=lambda stage: stage.once_s)
    return (
        f"what happens once per step, such as the update, takes {seconds_text(longest.once_s)} on stage {longest.stage}, "
        "where it takes longest"
    )


def _memory_text(plan: PipelinePlan) -> str:
    peaks = {mesh: sum(stage.peak_bytes for stage in stages) for mesh, stages in _by_mesh(plan).items()}
    most = max(peaks, key=lambda mesh: peaks[mesh])
    flying = sum(stage.microbatches_in_flight for stage in _by_mesh(plan)[most])
    return (
        f"{_name(plan, most)} needs the most memory: {bytes_text(peaks[most])} per device, with the activations of "
        f"{_count(flying, 'microbatch')} in flight"
    )


def _crossing(plan: PipelinePlan) -> Iterator[str]:
    size: dict[str, int] = defaultdict(int)
    for transfer in plan.transfers:
        size[transfer.what] += transfer.bytes * transfer.count
    if not size:
        yield "nothing crosses between meshes"
        return
    kinds = sorted(size, key=lambda what: list(_READERS).index(what) if what in _READERS else len(_READERS))
    listed = "; ".join(f"{bytes_text(size[what])} {_READERS.get(what, f'for {what}')}" for what in kinds)
    yield f"between meshes cross per step: {listed}"


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


def _stage_table(plan: PipelinePlan) -> Table:
    times = ("forward", "backward", "once per step", "in flight", "peak per device")
    columns = ("stage", "mesh", "devices", "logical mesh", "leaves", "what lives there", *times)
    table = new_table("Stages (forward and backward per microbatch)", *columns, numbers=("leaves", *times))
    for stage, lives in zip(plan.stages, _living(plan.stages), strict=True):
        cells = (
            str(stage.stage),
            str(stage.mesh),
            _devices_text(stage),
            mesh_text(stage.plan),
            str(len(stage.leaves)),
            lives,
            seconds_text(stage.forward_s),
            seconds_text(stage.backward_s),
            seconds_text(stage.once_s),
            str(stage.microbatches_in_flight),
            bytes_text(stage.peak_bytes),
        )
        table.add_row(*map(Text, cells))
    return table


def _devices_text(stage: StagePlan) -> str:
    last = stage.first_device + math.prod(stage.plan.mesh_shape) - 1
    return str(last) if last == stage.first_device else f"{stage.first_device}-{last}"


def _living(stages: Sequence[StagePlan]) -> list[str]:
    """The modules whose parameters live on each stage; one that is on several stages is there in part."""
    modules = [_modules(stage.leaves) for stage in stages]
    shared = {name for s, names in enumerate(modules) for other in modules[s + 1 :] for name in names if name in other}
    texts = []
    for names in modules:
        whole, part = [n for n in names if n not in shared], [n for n in names if n in shared]
        texts.append(", ".join([*_patterns(whole), *(f"{name} (part)" for name in _patterns(part))]) or "-")
    return texts


def _modules(leaves: Sequence[str]) -> list[str]:
    """Names of the modules that parameters belong to: the first component below `params`, or below the argument."""
    split = [leaf.split("/") for leaf in leaves]
    below = [names[_start(names) :] for names in split if PARAMETER_WORDS & set(names)]
    return list(dict.fromkeys(names[0] for names in below or (names[1:] for names in split) if names))


def _start(names: Sequence[str]) -> int:
    """Where the module's name is: behind the last of the leading words for parameters."""
    first = next(i for i, name in enumerate(names) if name in PARAMETER_WORDS)
    return next((i for i in range(first, len(names)) if names[i] not in PARAMETER_WORDS), len(names))


def _patterns(names: Iterable[str]) -> list[str]:
    """Names that differ in a number at the end become one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    return [str(pattern) for group in alike.values() for pattern in path_patterns(group)]


def _transfer_table(plan: PipelinePlan) -> Table:
    numbers = ("times", "bytes each", "bytes in all", "predicted each", "predicted in all")
    table = new_table("Transfers between meshes per step", "from", "to", "for", *numbers, numbers=numbers)
    for transfer in plan.transfers:
        table.add_row(f"stage {transfer.source}", f"stage {transfer.target}", *map(Text, _transfer_cells(transfer)))
    if plan.transfers:
        table.add_section()
        size = sum(transfer.bytes * transfer.count for transfer in plan.transfers)
        seconds = sum(transfer.predicted_s * transfer.count for transfer in plan.transfers)
        count = sum(transfer.count for transfer in plan.transfers)
        table.add_row("all", "", "", str(count), "", bytes_text(size), "", seconds_text(seconds))
    return table


def _transfer_cells(transfer: TransferPlan) -> tuple[str, ...]:
    return (
        "shared weights" if transfer.what == "weights" else transfer.what,
        str(transfer.count),
        bytes_text(transfer.bytes),
        bytes_text(transfer.bytes * transfer.count),
        seconds_text(transfer.predicted_s),
        seconds_text(transfer.predicted_s * transfer.count),
    )
