"""The tables of a report: layouts of state, batch and outputs, collectives, memory at its peak, meshes compared.

Leaves with equal shape, dtype and layout share a row, and so do equal collectives from one line of the user's program:
a model of 48 layers prints as one of two does. With `full`, each has a row of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rich.table import Table

from autopar.explain.cell import Cell
from autopar.explain.figures import KINDS, parts_of, seconds_of
from autopar.explain.paths import axes_text, layout_text, path_patterns, shape_text, source_text, value_text
from autopar.explain.units import bytes_text, seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Candidate, CollectivePlan, LiveTensor, Plan, ValuePlan

MOST_COLLECTIVES = 16
"""So many rows has the table of collectives unless all are asked for."""


def tables(plan: Plan, *, full: bool) -> tuple[Table, ...]:
    """Every table of the report; some may have no rows."""
    return (
        time_table(plan),
        *layout_tables(plan, full=full),
        _collectives_table(plan, full),
        peak_table(plan),
        candidates_table(plan),
    )


def layout_tables(plan: Plan, *, full: bool = False) -> tuple[Table, Table]:
    """The layouts of the state, and of the batch, of what other stages send and of the results."""
    return _state_table(plan, full), _boundary_table(plan, full)


def new_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table in the style of a report; columns of `numbers` are set to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


_VALUE_COLUMNS = ("leaf", "leaves", "shape", "dtype", "layout", "per device")


def _value_table(title: str) -> Table:
    return new_table(title, *_VALUE_COLUMNS, numbers=("leaves", "per device"))


def _add_values(table: Table, values: Sequence[ValuePlan], full: bool) -> None:
    """A row per value, or per pattern of paths with equal shape, dtype and layout, in the order of its first path."""
    alike: dict[object, list[ValuePlan]] = {}
    for number, value in enumerate(values):
        key = number if full else (value.shape, value.dtype, value.spec, value.bytes_per_device)
        alike.setdefault(key, []).append(value)
    order = {value.path: number for number, value in enumerate(values)}
    rows = [(pattern, group[0]) for group in alike.values() for pattern in path_patterns(v.path for v in group)]
    for pattern, value in sorted(rows, key=lambda row: order[row[0].first]):
        size = bytes_text(pattern.count * value.bytes_per_device)
        cells = (shape_text(value.shape), value.dtype, layout_text(value.spec), size)
        table.add_row(*map(Cell, (str(pattern), str(pattern.count), *cells)))


def _state_table(plan: Plan, full: bool) -> Table:
    state = [value for value in plan.inputs if value.role == "state"]
    table = _value_table("Parameters and state")
    _add_values(table, state, full)
    if state:
        table.add_section()
        size = bytes_text(sum(value.bytes_per_device for value in state))
        table.add_row(*map(Cell, ("all", str(len(state)), "", "", "", size)))
    return table


def _boundary_table(plan: Plan, full: bool) -> Table:
    """Inputs that are no state, then outputs; a returned state that keeps its layouts is one row."""
    table = _value_table("Batch and outputs")
    _add_values(table, [value for value in plan.inputs if value.role != "state"], full)
    outputs = list(plan.outputs)
    returned = [] if full else _returned_state(plan)
    if returned:
        size = bytes_text(sum(value.bytes_per_device for value in returned))
        table.add_row(*map(Cell, ("-> state", str(len(returned)), "", "", "as it came in", size)))
        outputs = [value for value in plan.outputs if value not in returned]
    _add_values(table, [dataclasses.replace(value, path=f"-> {value.path}") for value in outputs], full)
    return table


def _returned_state(plan: Plan) -> list[ValuePlan]:
    """The outputs that take the place of the state's leaves, in the same order and layouts; none if one is missing."""
    waiting = [value for value in plan.inputs if value.role == "state"]
    returned = []
    for output in plan.outputs:
        if waiting and _same_place(waiting[0], output):
            del waiting[0]
            returned.append(output)
    return [] if waiting else returned


def _same_place(state: ValuePlan, output: ValuePlan) -> bool:
    _, _, tail = state.path.partition("/")
    same = (state.shape, state.dtype, state.spec) == (output.shape, output.dtype, output.spec)
    return same and f"/{output.path}".endswith(f"/{tail}" if tail else "")


def _collectives_table(plan: Plan, full: bool) -> Table:
    return collectives_table("Collectives per step", plan.collectives, full=full)


def collectives_table(title: str, collectives: Sequence[CollectivePlan], *, full: bool = False) -> Table:
    """Collectives with what they take and where they come from; equal ones of one line share a row."""
    columns = ("kind", "axes", "times", "bytes each", "bytes in all", "predicted", "hidden", "operand", "from")
    table = new_table(title, *columns, numbers=columns[2:7])
    groups = group_collectives(collectives, full=full)
    shown = groups if full or len(groups) <= MOST_COLLECTIVES + 1 else longest_first(groups)[:MOST_COLLECTIVES]
    for group in shown:
        table.add_row(*map(Cell, _collective_cells(group)))
    if len(shown) < len(groups):
        rest = [item for group in longest_first(groups)[len(shown) :] for item in group]
        cells = _collective_cells(rest)
        table.add_row(
            *map(Cell, (f"{len(groups) - len(shown)} more", "", cells[2], "", *cells[4:7], "", "each takes less"))
        )
    if collectives:
        table.add_section()
        times, size, seconds, hidden_s = _totals(collectives)
        sums = (f"{times:,.0f}", "", bytes_text(size), seconds_text(seconds), hidden_text(hidden_s))
        table.add_row(*map(Cell, ("all", "", *sums, "", "")))
    return table


def links_table(collectives: Sequence[CollectivePlan]) -> Table:
    """Collectives with their algorithms and links, what of them hides and what the step waits for; the longest first."""
    columns = (
        "kind",
        "axes",
        "for",
        "algorithm",
        "link",
        "times",
        "bytes each",
        "predicted",
        "hidden",
        "waited for",
        "from",
    )
    table = new_table("Collectives per step", *columns, numbers=columns[5:10])
    for group in longest_first(group_collectives(collectives)):
        first, (times, _, seconds, hidden_s) = group[0], _totals(group)
        words = (first.kind, axes_text(first.axes), KINDS[first.overlap], first.algorithm or "-", first.link or "-")
        sums = (f"{times:,.0f}", bytes_text(first.bytes), seconds_text(seconds), hidden_text(hidden_s))
        where = where_text([item.scope for item in group], first.source)
        table.add_row(*map(Cell, (*words, *sums, seconds_text(seconds - hidden_s), where)))
    if collectives:
        times, _, seconds, hidden_s = _totals(collectives)
        total = (f"{times:,.0f}", "", seconds_text(seconds), hidden_text(hidden_s), seconds_text(seconds - hidden_s))
        table.add_row(*map(Cell, ("all", "", "", "", "", *total, "")))
    return table


def longest_first(groups: Sequence[list[CollectivePlan]]) -> list[list[CollectivePlan]]:
    """Groups of collectives, those first that take the most seconds per step."""
    return sorted(groups, key=lambda group: -seconds_of(group)[0])


def kinds_table(title: str, collectives: Sequence[CollectivePlan]) -> Table:
    """Collectives by kind, axes and what they are for."""
    columns = ("kind", "axes", "for", "times", "bytes in all", "predicted", "hidden")
    table = new_table(title, *columns, numbers=columns[3:])
    alike: dict[object, list[CollectivePlan]] = {}
    for item in collectives:
        alike.setdefault((item.kind, item.axes, item.overlap), []).append(item)
    for group in longest_first(list(alike.values())):
        first, (times, size, seconds, hidden_s) = group[0], _totals(group)
        sums = (f"{times:,.0f}", bytes_text(size), seconds_text(seconds), hidden_text(hidden_s))
        table.add_row(*map(Cell, (first.kind, axes_text(first.axes), KINDS[first.overlap], *sums)))
    if collectives:
        table.add_section()
        times, size, seconds, hidden_s = _totals(collectives)
        table.add_row("all", "", "", f"{times:,.0f}", bytes_text(size), seconds_text(seconds), hidden_text(hidden_s))
    return table


def group_collectives(collectives: Sequence[CollectivePlan], *, full: bool = False) -> list[list[CollectivePlan]]:
    """Equal collectives of one line together; each alone with `full`."""
    alike: dict[object, list[CollectivePlan]] = {}
    for number, item in enumerate(collectives):
        key = number if full else (item.kind, item.axes, item.bytes, item.source)
        alike.setdefault(key, []).append(item)
    return list(alike.values())


def where_text(scopes: Sequence[str], source: str) -> str:
    """The modules of operations and the line of the program; the line with its function where no module is named."""
    named = [str(pattern) for pattern in path_patterns(scope for scope in scopes if scope)]
    if not named:
        return source_text(source)
    more = f", and {len(named) - 2} more" if len(named) > 2 else ""
    line = re.sub(r":(\d+)(:\d+)? \(.*\)$", r":\1", source_text(source))
    return f"{', '.join(named[:2])}{more}, {line}" if line else f"{', '.join(named[:2])}{more}"


def hidden_text(seconds: float) -> str:
    """Seconds that hide; - if none do."""
    return seconds_text(seconds) if seconds else "-"


def _totals(collectives: Sequence[CollectivePlan]) -> tuple[float, float, float, float]:
    """(times, bytes, seconds, hidden seconds) per step of all of them together."""
    return (
        sum(item.count for item in collectives),
        sum(item.count * item.bytes for item in collectives),
        *seconds_of(collectives),
    )


def _collective_cells(group: Sequence[CollectivePlan]) -> tuple[str, ...]:
    times, size, seconds, hidden_s = _totals(group)
    first = group[0]
    sums = (f"{times:,.0f}", bytes_text(first.bytes), bytes_text(size), seconds_text(seconds), hidden_text(hidden_s))
    operands = list(dict.fromkeys(item.operand for item in group))
    more = f", and {len(operands) - 2} more" if len(operands) > 2 else ""
    where = where_text([item.scope for item in group], first.source)
    return (first.kind, axes_text(first.axes), *sums, ", ".join(operands[:2]) + more, where)


def peak_table(plan: Plan) -> Table:
    """Tensors alive at the peak, those of equal name and shape in one row, the largest first."""
    columns = ("value", "times", "shape", "dtype", "each per device", "from")
    names = columns if any(tensor.scope for tensor in plan.peak_tensors) else columns[:-1]
    table = new_table(_peak_title(len(plan.peak_tensors)), *names, numbers=("times", "each per device"))
    for group in group_tensors(plan.peak_tensors):
        first = group[0]
        what, size = value_text(first.name, first.shape), bytes_text(first.bytes_per_device)
        cells = (what, str(len(group)), shape_text(first.shape), first.dtype, size)
        where = ", ".join(map(str, path_patterns(tensor.scope for tensor in group if tensor.scope)))
        table.add_row(*map(Cell, (*cells, where)[: len(names)]))
    return table


def _peak_title(number: int) -> str:
    """How many tensors there are in the table: a plan knows the largest alone."""
    return f"The {number} largest tensors at the memory peak" if number > 1 else "The largest tensor at the memory peak"


def group_tensors(tensors: Sequence[LiveTensor]) -> list[list[LiveTensor]]:
    """Tensors of equal name and shape together, the largest first."""
    alike: dict[object, list[LiveTensor]] = {}
    for tensor in tensors:
        alike.setdefault(dataclasses.replace(tensor, scope=""), []).append(tensor)
    return sorted(alike.values(), key=lambda group: -group[0].bytes_per_device)


def time_table(plan: Plan | PipelinePlan) -> Table:
    """The parts of a step; what it waits for adds up to the step."""
    hides = isinstance(plan, Plan) and bool(plan.collectives)
    columns = ("part", "seconds", "hidden", "waited for") if hides else ("part", "seconds")
    table = new_table("Time of the step", *columns, numbers=columns[1:])
    for part in parts_of(plan):
        cells = (part.name, seconds_text(part.seconds), hidden_text(part.hidden_s), seconds_text(part.waited_s))
        table.add_row(*map(Cell, cells[: len(columns)]))
    table.add_section()
    end = ("step", "", "", seconds_text(plan.step_s)) if hides else ("step", seconds_text(plan.step_s))
    table.add_row(*map(Cell, end))
    return table


def _candidate_text(candidate: Candidate) -> str:
    if candidate.step_s is not None:
        return seconds_text(candidate.step_s)
    return (
        "does not fit the memory" if candidate.at_least_s is None else f"at least {seconds_text(candidate.at_least_s)}"
    )


def candidates_table(plan: Plan) -> Table:
    """The logical meshes that were compared."""
    table = new_table("Meshes compared", "mesh", "predicted step", "", numbers=("predicted step",))
    for candidate in plan.candidates:
        step = _candidate_text(candidate)
        table.add_row(*map(Cell, (shape_text(candidate.mesh_shape), step, _candidate_verdict(candidate, plan))))
    return table


def _candidate_verdict(candidate: Candidate, plan: Plan) -> str:
    """How a mesh compares with the chosen one; of one that was left by its bound, what it could save at most."""
    if candidate.mesh_shape == plan.mesh_shape:
        return "chosen"
    seconds = candidate.at_least_s if candidate.step_s is None else candidate.step_s
    if seconds is None:
        return ""
    if seconds < plan.step_s:
        return f"could save at most {1 - seconds / plan.step_s:.1%}: left, as its search would take longer than that is worth"
    at_least = "at least " if candidate.step_s is None else ""
    return f"{at_least}{seconds / plan.step_s - 1:.1%} slower"
