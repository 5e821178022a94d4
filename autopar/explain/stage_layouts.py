"""The layouts of a pipeline's stages in few rows, and the names of stages that are alike.

In: a `PipelinePlan`. Out: tables with a row per pattern of leaves, whichever stages have them; and a plan that stands for a group
of stages: a name that differs between them has a star, `block_*/up`, and what they send each other has words. What can go wrong:
a size that is taken for one microbatch; what stages send each other is stored for all of them, and the title says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Container, Hashable, Sequence
from typing import TypeAlias

from rich.table import Table

from autopar.explain.fitted import Cell
from autopar.explain.paths import is_words, layout_text, path_patterns, shape_text, starred
from autopar.explain.stages import group_stages, mesh_text, module_start, numbers_text, range_text, runs_of_equals
from autopar.explain.strategies import PARAMETER_WORDS
from autopar.explain.tables import new_table, peak_rows
from autopar.explain.units import bytes_text
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.plan import LiveTensor, Plan, ValuePlan

SENT = "Batch, what stages send each other, and outputs (bytes of all microbatches)"
"""The title of the table of what a stage takes and makes beside its state."""
MOST_TENSORS = 3
"""Rows of the largest tensors of each group of stages."""
_SENT = re.compile(r"(received|exchanged) \S+ of (\w+) (\d+)(?:\.\d+)?")
"""The name of a value that another stage makes; see `stages/tasks/ports.py`."""
_Placed = tuple[int, ValuePlan]
"""A stage's number and one of its values."""


def groups_in_full(plan: PipelinePlan) -> list[list[StagePlan]]:
    """Groups of equal stages that also take and make the same beside their state: one table of layouts is true of all."""

    def sides(stage: StagePlan) -> Hashable:
        values = (v for v in (*stage.plan.inputs, *stage.plan.outputs) if v.role != "state")
        return tuple((sent_text(value, stage.stage), value.role, value.shape, value.spec) for value in values)

    return [part for group in group_stages(plan) for part in runs_of_equals(group, sides)]


def pipeline_layouts(plan: PipelinePlan) -> tuple[Table, Table, Table]:
    """The layouts of the state of all stages, those of what they take and make beside it, and their largest tensors."""
    return _state_of_stages(plan), _boundaries_of_stages(plan), _peaks_of_stages(plan)


def _state_of_stages(plan: PipelinePlan) -> Table:
    """A row per pattern of leaves with one layout; those of the optimizer that lie as their parameters are one row."""
    state = [(stage, value) for stage in plan.stages for value in stage.plan.inputs if value.role == "state"]
    placed = [(stage.stage, value) for stage, value in state]
    layouts = {(s, tail, value.shape, value.spec) for s, value in placed for tail in _tails_of_parameter(value.path)}
    follow = [one for one in placed if _follows(one, layouts)]
    table = _layouts_table("Parameters and state of all stages")
    _add_layouts(table, plan, [one for one in placed if one not in follow] if follow else placed)
    if follow:
        sizes = [sum(value.bytes_per_device for s, value in follow if s == stage.stage) for stage in plan.stages]
        stages = numbers_text(sorted({s for s, _ in follow}))
        number = str(len({value.path for _, value in follow}))
        size = range_text([size for size in sizes if size], bytes_text)
        table.add_row(
            *map(Cell, ("optimizer's state, of a stage in all", stages, number, "", "", "as their parameters", size))
        )
    return table


def _tails_of_parameter(path: str) -> list[tuple[str, ...]]:
    """The components of a parameter's path behind the words for parameters; nothing of other leaves."""
    names = path.split("/")
    tail = tuple(names[module_start(names) :]) if PARAMETER_WORDS & set(names) else ()
    return [tail] if tail else []


def _follows(placed: _Placed, layouts: Container[object]) -> bool:
    """Whether a leaf is no parameter, and has the end of the path, the shape and the layout of one on its stage."""
    stage, value = placed
    names = tuple(value.path.split("/"))
    ends = (names[start:] for start in range(1, len(names)))
    return not _tails_of_parameter(value.path) and any((stage, e, value.shape, value.spec) in layouts for e in ends)


def _boundaries_of_stages(plan: PipelinePlan) -> Table:
    """The batch, what other stages send, and the results that are no new state."""
    placed = []
    for stage in plan.stages:
        state = {end for v in stage.plan.inputs if v.role == "state" for end in [v.path.partition("/")[2]] if end}
        taken = [value for value in stage.plan.inputs if value.role != "state"]
        made = [v for v in stage.plan.outputs if not sent_text(v, stage.stage) and not _ends_with(v.path, state)]
        made = [dataclasses.replace(value, path=f"-> {value.path}") for value in made]
        placed += [
            (stage.stage, dataclasses.replace(value, path=sent_text(value, stage.stage) or value.path))
            for value in (*taken, *made)
        ]
    table = _layouts_table(SENT)
    _add_layouts(table, plan, placed)
    return table


def _ends_with(path: str, ends: Container[str]) -> bool:
    """Whether one of `ends` is a tail of the path's components."""
    names = path.split("/")
    return any("/".join(names[start:]) in ends for start in range(len(names)))


def _layouts_table(title: str) -> Table:
    columns = ("leaf", "stages", "leaves", "shape", "dtype", "layout", "each per device")
    return new_table(title, *columns, numbers=("leaves", "each per device"), aside=("leaf",))


def _add_layouts(table: Table, plan: PipelinePlan, placed: Sequence[_Placed]) -> None:
    """A row per pattern of paths with equal shape, dtype and layout on equal meshes, in the order of its first path."""
    meshes = {stage.stage: mesh_text(stage.plan) for stage in plan.stages}
    alike: dict[Hashable, list[_Placed]] = {}
    for stage, value in placed:
        said = value.path if is_words(value.path) else ""
        key = (said, meshes[stage], value.shape, value.dtype, value.spec, value.bytes_per_device)
        alike.setdefault(key, []).append((stage, value))
    order = {value.path: number for number, (_, value) in reversed(list(enumerate(placed)))}
    rows = [(pattern, group) for group in alike.values() for pattern in path_patterns(v.path for _, v in group)]
    for pattern, group in sorted(rows, key=lambda row: order[row[0].first]):
        value, paths = group[0][1], set(pattern.paths)
        times = Counter(stage for stage, one in group if one.path in paths)
        number = max(times.values()) if is_words(value.path) else pattern.count
        words = (shape_text(value.shape), value.dtype, layout_text(value.spec), bytes_text(value.bytes_per_device))
        table.add_row(*map(Cell, (str(pattern), numbers_text(sorted(times)), str(number), *words)))


_Cells: TypeAlias = tuple[str, ...]


def _peaks_of_stages(plan: PipelinePlan) -> Table:
    """The largest tensors at the peak of one microbatch; stages that have the same share a row, with the names of all of them."""
    alike: dict[_Cells, list[tuple[_Cells, list[int]]]] = {}
    for group in group_stages(plan):
        others, numbers = [stage for stage in plan.stages if stage is not group[0]], [stage.stage for stage in group]
        of_all, own = (peak_rows(as_shown(stages)) for stages in ([group[0], *others], group))
        for cells, one in list(zip(of_all, own if len(own) == len(of_all) else of_all, strict=True))[:MOST_TENSORS]:
            alike.setdefault(cells, []).append((one, numbers))
    rows = {
        found[0][0] if len(found) == 1 else cells: [number for _, numbers in found for number in numbers]
        for cells, found in alike.items()
    }
    columns = ("stages", "value", "times", "shape", "dtype", "each per device", "from")
    shown = columns if any(cells[-1] for cells in rows) else columns[:-1]
    title = "The largest tensors at the peak of one microbatch"
    table = new_table(title, *shown, numbers=("times", "each per device"), aside=("from",))
    for cells, numbers in rows.items():
        table.add_row(*map(Cell, (numbers_text(sorted(numbers)), *cells)[: len(shown)]))
    return table


def as_shown(group: Sequence[StagePlan]) -> Plan:
    """The plan of the first of stages that are alike, with names that are true of all, and plain words for what they send."""
    first, plans = group[0], [stage.plan for stage in group]
    leaves, *others = [[v.path for v in (*plan.inputs, *plan.outputs)] for plan in plans]
    scopes, *more = [
        [*(one.scope for one in plan.collectives), *(one.scope for one in plan.peak_tensors)] for plan in plans
    ]
    names, modules = starred(leaves, others), starred(scopes, more)

    def renamed(value: ValuePlan) -> ValuePlan:
        return dataclasses.replace(value, path=sent_text(value, first.stage) or names[value.path])

    shown = {value.path: renamed(value).path for value in (*first.plan.outputs, *first.plan.inputs)}

    def live(tensor: LiveTensor) -> LiveTensor:
        return dataclasses.replace(tensor, name=shown.get(tensor.name, tensor.name), scope=modules[tensor.scope])

    return dataclasses.replace(
        first.plan,
        inputs=tuple(map(renamed, first.plan.inputs)),
        outputs=tuple(map(renamed, first.plan.outputs)),
        collectives=tuple(dataclasses.replace(one, scope=modules[one.scope]) for one in first.plan.collectives),
        peak_tensors=tuple(map(live, first.plan.peak_tensors)),
    )


def sent_text(value: ValuePlan, stage: int) -> str:
    """What stages send each other, in words, as `stage` takes or makes it; empty for the value of a path."""
    found = _SENT.fullmatch(value.path)
    if not found:
        return ""
    how, kind, maker = found[1], found[2], int(found[3])
    where = {stage - 1: "the stage before", stage + 1: "the next stage"}.get(maker, f"stage {maker}")
    is_made = value.role == "output"
    if how == "received" and kind == "forward":
        return "activations for later stages" if is_made else f"activations from {where}"
    if how == "received":
        return "gradients for the stages before" if is_made else f"gradients from {where}"
    if kind in ("forward", "backward", "input_gradient", "weight_gradient"):
        return "sums over microbatches for other stages" if is_made else f"sums over microbatches from {where}"
    return "values for other stages' updates" if is_made else "values from other stages' updates"
