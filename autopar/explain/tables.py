"""The tables of a report: layouts of state, batch and outputs, collectives, memory at its peak, meshes compared.

Leaves with equal shape, dtype and layout share a row, and so do equal collectives from one line of the user's program:
a model of 48 layers prints as one of two does. With `full`, each has a row of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from autopar.explain.paths import axes_text, layout_text, path_patterns, shape_text, source_text
from autopar.explain.units import bytes_text, seconds_text
from autopar.plan import Candidate, CollectivePlan, Plan, ValuePlan


def tables(plan: Plan, *, full: bool) -> tuple[Table, ...]:
    """Every table of the report; some may have no rows."""
    return (
        _state_table(plan, full),
        _boundary_table(plan, full),
        _collectives_table(plan, full),
        _peak_table(plan),
        _candidates_table(plan),
    )


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
        table.add_row(*map(Text, (str(pattern), str(pattern.count), *cells)))


def _state_table(plan: Plan, full: bool) -> Table:
    state = [value for value in plan.inputs if value.role == "state"]
    table = _value_table("Parameters and state")
    _add_values(table, state, full)
    if state:
        table.add_section()
        size = bytes_text(sum(value.bytes_per_device for value in state))
        table.add_row(*map(Text, ("all", str(len(state)), "", "", "", size)))
    return table


def _boundary_table(plan: Plan, full: bool) -> Table:
    """Inputs that are no state, then outputs; a returned state that keeps its layouts is one row."""
    table = _value_table("Batch and outputs")
    _add_values(table, [value for value in plan.inputs if value.role != "state"], full)
    outputs = list(plan.outputs)
    returned = [] if full else _returned_state(plan)
    if returned:
        size = bytes_text(sum(value.bytes_per_device for value in returned))
        table.add_row(*map(Text, ("-> state", str(len(returned)), "", "", "as it came in", size)))
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
    columns = ("kind", "axes", "times", "bytes each", "bytes in all", "predicted", "operand", "from")
    table = new_table("Collectives per step", *columns, numbers=columns[2:6])
    alike: dict[object, list[CollectivePlan]] = {}
    for number, item in enumerate(plan.collectives):
        key = number if full else (item.kind, item.axes, item.bytes, item.source)
        alike.setdefault(key, []).append(item)
    for group in alike.values():
        table.add_row(*map(Text, _collective_cells(group)))
    if plan.collectives:
        table.add_section()
        times, size, seconds = _totals(plan.collectives)
        table.add_row(*map(Text, ("all", "", f"{times:,.0f}", "", bytes_text(size), seconds_text(seconds), "", "")))
    return table


def _totals(collectives: Sequence[CollectivePlan]) -> tuple[float, float, float]:
    """(times, bytes, seconds) per step of all of them together."""
    return (
        sum(item.count for item in collectives),
        sum(item.count * item.bytes for item in collectives),
        sum(item.count * item.predicted_s for item in collectives),
    )


def _collective_cells(group: Sequence[CollectivePlan]) -> tuple[str, ...]:
    times, size, seconds = _totals(group)
    first = group[0]
    figures = (f"{times:,.0f}", bytes_text(first.bytes), bytes_text(size), seconds_text(seconds))
    operands = list(dict.fromkeys(item.operand for item in group))
    more = f", and {len(operands) - 2} more" if len(operands) > 2 else ""
    return (first.kind, axes_text(first.axes), *figures, ", ".join(operands[:2]) + more, source_text(first.source))


def _peak_table(plan: Plan) -> Table:
    """Tensors alive at the peak, those of equal name and shape in one row, the largest first."""
    columns = ("value", "times", "shape", "dtype", "each per device")
    table = new_table("Largest at the memory peak", *columns, numbers=("times", "each per device"))
    alike = Counter(plan.peak_tensors)
    for tensor in sorted(alike, key=lambda tensor: -tensor.bytes_per_device):
        cells = (shape_text(tensor.shape), tensor.dtype, bytes_text(tensor.bytes_per_device))
        table.add_row(*map(Text, (tensor.name, str(alike[tensor]), *cells)))
    return table


def _candidate_text(candidate: Candidate) -> str:
    if candidate.step_s is not None:
        return seconds_text(candidate.step_s)
    return (
        "does not fit the memory" if candidate.at_least_s is None else f"at least {seconds_text(candidate.at_least_s)}"
    )


def _candidates_table(plan: Plan) -> Table:
    table = new_table("Meshes compared", "mesh", "predicted step", "", numbers=("predicted step",))
    for candidate in plan.candidates:
        step = _candidate_text(candidate)
        chosen = "chosen" if candidate.mesh_shape == plan.mesh_shape else ""
        table.add_row(*map(Text, (shape_text(candidate.mesh_shape), step, chosen)))
    return table
