"""The tables of a pipeline: its stages and what crosses between them; neighbours that are alike share a row.

In: a `PipelinePlan`. Out: rich tables. Sixteen stages of equal layers are three rows: the first, "1 to 14" and the last. What
differs within a row, such as the microbatches in flight, is a range from the least to the most, whichever stage has it, and the
title says so. What can go wrong: two stages that look alike to three digits; they share a row, and `--full` gives each its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from autopar.explain.paths import path_patterns
from autopar.explain.strategies import PARAMETER_WORDS
from autopar.explain.tables import new_table
from autopar.explain.units import bytes_text, seconds_text
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.plan import Plan

T = TypeVar("T")
N = TypeVar("N", int, float)
RANGES = "ranges from the least to the most"
"""What a title says of a table in which rows stand for several stages."""
MOST_TRANSFERS = 5
"""So many groups of transfers have rows of their own; more are grouped by what they are for."""


def pipeline_tables(plan: PipelinePlan, *, full: bool = False) -> tuple[Table, ...]:
    """The table of stages and that of transfers, which may have no rows; `full`: each has a row."""
    return _stage_table(plan, full), _transfer_table(plan, full)


def runs_of_equals(items: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[list[T]]:
    """Neighbours with equal keys, together."""
    run: list[T] = []
    for item in items:
        if run and key(run[0]) != key(item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending numbers: 3, or 1 to 14, or 0, 2 to 5."""
    runs = runs_of_equals(enumerate(numbers), lambda one: one[1] - one[0])
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ends)


def stages_text(numbers: Sequence[int]) -> str:
    """Stages by their numbers: stage 3, or stages 1 to 14."""
    return f"stage{'s' if len(numbers) > 1 else ''} {numbers_text(numbers)}"


def mesh_text(plan: Plan) -> str:
    """A logical mesh: x=2, y=4."""
    return ", ".join(f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True))


def group_stages(plan: PipelinePlan) -> list[list[StagePlan]]:
    """Neighbours that have equal meshes, and equal times to the digits shown."""
    return list(runs_of_equals(plan.stages, _looks))


def living(groups: Sequence[Sequence[StagePlan]]) -> list[str]:
    """The modules whose parameters live in each group of stages; one that is in several groups is there in part."""
    modules = [_modules([leaf for stage in group for leaf in stage.leaves]) for group in groups]
    shared = {name for s, names in enumerate(modules) for other in modules[s + 1 :] for name in names if name in other}
    texts = []
    for names in modules:
        whole, part = [n for n in names if n not in shared], [n for n in names if n in shared]
        texts.append(", ".join([*_patterns(whole), *(f"{name} (part)" for name in _patterns(part))]) or "-")
    return texts


def group_transfers(plan: PipelinePlan) -> list[list[TransferPlan]]:
    """Transfers that are alike but for their stages."""
    alike: dict[Hashable, list[TransferPlan]] = {}
    for transfer in plan.transfers:
        alike.setdefault(_transfer_cells([transfer]), []).append(transfer)
    return list(alike.values())


def _looks(stage: StagePlan) -> Hashable:
    times, here = (stage.forward_s, stage.backward_s, stage.once_s, stage.plan.compute_s), set(stage.leaves)
    layouts = tuple(sorted((v.shape, v.dtype, v.spec) for v in stage.plan.inputs if v.path in here))
    mesh = (stage.node_kind, stage.plan.mesh_shape, stage.plan.axis_names)
    return *mesh, len(here), layouts, *map(seconds_text, times)


def brief_stage_table(plan: PipelinePlan) -> Table:
    """The stages in so few columns that they fit a page."""
    peak = "peak per device" if plan.virtual_stages == 1 else "part of its mesh's peak"
    columns = ("stage", "devices", "mesh", "what lives there", "forward", "backward", peak)
    groups = group_stages(plan)
    table = new_table(_stages_title(groups), *columns, numbers=columns[-3:])
    for group, lives in zip(groups, living(groups), strict=True):
        first = group[0]
        cells = (
            numbers_text([stage.stage for stage in group]),
            devices_text(group),
            mesh_text(first.plan),
            lives,
            seconds_text(first.forward_s),
            seconds_text(first.backward_s),
            range_text([stage.peak_bytes for stage in group], bytes_text),
        )
        table.add_row(*map(Text, cells))
    return table


def _stage_table(plan: PipelinePlan, full: bool) -> Table:
    peak = "peak per device" if plan.virtual_stages == 1 else "part of its mesh's peak"
    times = ("forward", "backward", "once per step", "compute per step", "in flight", peak)
    columns = ("stage", "mesh", "devices", "logical mesh", "leaves", "what lives there", *times)
    groups = [[stage] for stage in plan.stages] if full else group_stages(plan)
    table = new_table(
        _stages_title(groups),
        *columns,
        numbers=("leaves", *times),
        aside=("what lives there",),
        dropped=("mesh", "leaves", "compute per step"),
    )
    for group, lives in zip(groups, living(groups), strict=True):
        first = group[0]
        meshes = sorted({stage.mesh for stage in group})
        cells = (
            numbers_text([stage.stage for stage in group]),
            numbers_text(meshes),
            devices_text(group),
            mesh_text(first.plan),
            str(len(first.leaves)),
            lives,
            seconds_text(first.forward_s),
            seconds_text(first.backward_s),
            seconds_text(first.once_s),
            seconds_text(first.plan.compute_s),
            range_text([stage.microbatches_in_flight for stage in group], str),
            range_text([stage.peak_bytes for stage in group], bytes_text),
        )
        table.add_row(*map(Text, cells))
    return table


def _stages_title(groups: Sequence[Sequence[StagePlan]]) -> str:
    return f"Stages (forward and backward per microbatch{f'; {RANGES}' if any(len(one) > 1 for one in groups) else ''})"


def range_text(values: Sequence[N], text: Callable[[N], str]) -> str:
    """The smallest and the largest of values, or the one that all have."""
    least, most = text(min(values)), text(max(values))
    return most if most == least else f"{least} to {most}"


def devices_text(group: Sequence[StagePlan]) -> str:
    """The places of a group's devices: 4, or 0-3,8-15, and their kind of node in a mixed cluster."""
    runs: list[range] = []
    for devices in sorted({stage.devices for stage in group}, key=lambda one: one.start):
        if runs and runs[-1].stop == devices.start:
            runs[-1] = range(runs[-1].start, devices.stop)
        else:
            runs.append(devices)
    places = ",".join(str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)
    return f"{places} {group[0].node_kind}".rstrip()


def _modules(leaves: Sequence[str]) -> list[str]:
    """Names of the modules that parameters belong to: the first component below `params`, or below the argument."""
    split = [leaf.split("/") for leaf in leaves]
    below = [names[module_start(names) :] for names in split if PARAMETER_WORDS & set(names)]
    return list(dict.fromkeys(names[0] for names in below or (names[1:] for names in split) if names))


def module_start(names: Sequence[str]) -> int:
    """Where the module's name is: behind the last of the leading words for parameters."""
    first = next(i for i, name in enumerate(names) if name in PARAMETER_WORDS)
    return next((i for i in range(first, len(names)) if names[i] not in PARAMETER_WORDS), len(names))


def _patterns(names: Iterable[str]) -> list[str]:
    """Names that differ in a number at the end become one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    return [str(pattern) for group in alike.values() for pattern in path_patterns(group)]


def _transfer_table(plan: PipelinePlan, full: bool) -> Table:
    numbers = ("times", "bytes each", "bytes in all", "predicted each", "predicted in all")
    table = new_table("Transfers between meshes per step", "from", "to", "for", *numbers, numbers=numbers)
    groups = [[one] for one in plan.transfers] if full else group_transfers(plan)
    if not full and len(groups) > MOST_TRANSFERS:
        groups = _by_use(plan.transfers)
    for group in groups:
        table.add_row(*_ends(group), *map(Text, _transfer_cells(group)))
    if plan.transfers:
        table.add_section()
        count, size, seconds = _transfer_sums(plan.transfers)
        table.add_row("all", "", "", str(count), "", bytes_text(size), "", seconds_text(seconds))
    return table


def _ends(group: Sequence[TransferPlan]) -> tuple[str, str]:
    """Where transfers come from and where they go, in words: of several between neighbours to the next one, or the one before."""
    sources, targets = sorted({t.source for t in group}), sorted({t.target for t in group})
    steps = {t.target - t.source for t in group}
    if len(sources) > 1 and steps <= {1, -1} and len(steps) == 1:
        return stages_text(sources), "the next stage" if steps == {1} else "the stage before"
    return stages_text(sources), stages_text(targets)


def _by_use(transfers: Sequence[TransferPlan]) -> list[list[TransferPlan]]:
    """Transfers that are for the same, whatever their sizes, the ones forward and the ones backward apart."""
    alike: dict[Hashable, list[TransferPlan]] = {}
    for one in transfers:
        alike.setdefault((one.what, one.source < one.target), []).append(one)
    return list(alike.values())


def _transfer_sums(transfers: Sequence[TransferPlan]) -> tuple[int, int, float]:
    """(times, bytes, seconds) per step of all of them together."""
    return (
        sum(one.count for one in transfers),
        sum(one.bytes * one.count for one in transfers),
        sum(one.predicted_s * one.count for one in transfers),
    )


def _transfer_cells(transfers: Sequence[TransferPlan]) -> tuple[str, ...]:
    first = transfers[0]
    count, size, seconds = _transfer_sums(transfers)
    return (
        "shared weights" if first.what == "weights" else first.what,
        str(count),
        range_text([one.bytes for one in transfers], bytes_text),
        bytes_text(size),
        range_text([one.predicted_s for one in transfers], seconds_text),
        seconds_text(seconds),
    )
