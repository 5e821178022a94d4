"""The tables of a report: layouts of state, batch and outputs, collectives, memory at its peak, meshes compared.

Leaves with equal shape, dtype and layout share a row, and so do equal collectives from one line of the user's program:
a model of 48 layers prints as one of two does. With `full`, each has a row of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rich.table import Table

from autopar.explain.figures import moved_text, parts_of, seconds_of
from autopar.explain.fitted import GAP, Cell, FittedTable
from autopar.explain.paths import (
    axes_text,
    file_of,
    is_words,
    layout_text,
    path_patterns,
    shape_text,
    source_text,
    value_text,
)
from autopar.explain.units import bytes_text, seconds_text, slower_text
from autopar.layouts.mesh import AXIS_NAMES
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Candidate, CollectivePlan, LiveTensor, Plan, ValuePlan

BOUNDARY = "Batch and outputs"
MOST_COLLECTIVES = 16
"""So many rows has the table of collectives unless all are asked for."""


def tables(plan: Plan, *, full: bool, boundary: str = BOUNDARY) -> tuple[Table, ...]:
    """Every table of the report; some may have no rows. `boundary`: the title of the one of the batch and the outputs."""
    return (
        time_table(plan),
        *layout_tables(plan, full=full, boundary=boundary),
        _collectives_table(plan, full),
        peak_table(plan),
        candidates_table(plan),
    )


def layout_tables(plan: Plan, *, full: bool = False, boundary: str = BOUNDARY) -> tuple[Table, Table]:
    """The layouts of the state, and of the batch, of what other stages send and of the results."""
    return _state_table(plan, full), _boundary_table(plan, full, boundary)


def new_table(
    title: str, *columns: str, numbers: Sequence[str] = (), aside: Sequence[str] = (), dropped: Sequence[str] = ()
) -> Table:
    """An empty table in the style of a report; columns of `numbers` are set to the right.

    Where it is wider than the terminal, columns of `aside` have a line of their own, and those of `dropped` are left out in turn.
    """
    table = FittedTable(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    table.aside, table.dropped = tuple(aside), tuple(dropped)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


_VALUE_COLUMNS = ("leaf", "leaves", "shape", "dtype", "layout", "per device")


def _value_table(title: str) -> Table:
    return new_table(title, *_VALUE_COLUMNS, numbers=("leaves", "per device"), aside=("leaf",))


def _add_values(table: Table, values: Sequence[ValuePlan], full: bool) -> None:
    """A row per path, or per pattern of paths with equal shape, dtype and layout, in the order of its first path."""
    alike: dict[object, list[ValuePlan]] = {}
    for value in values:
        key = (
            value.path if full or is_words(value.path) else "",
            value.shape,
            value.dtype,
            value.spec,
            value.bytes_per_device,
        )
        alike.setdefault(key, []).append(value)
    order = {value.path: number for number, value in reversed(list(enumerate(values)))}
    rows = [(pattern, group) for group in alike.values() for pattern in path_patterns(v.path for v in group)]
    for pattern, group in sorted(rows, key=lambda row: order[row[0].first]):
        value, covered = group[0], set(pattern.paths)
        number = sum(one.path in covered for one in group)
        cells = (
            shape_text(value.shape),
            value.dtype,
            layout_text(value.spec),
            bytes_text(number * value.bytes_per_device),
        )
        table.add_row(*map(Cell, (str(pattern), str(number), *cells)))


def _state_table(plan: Plan, full: bool) -> Table:
    state = [value for value in plan.inputs if value.role == "state"]
    table = _value_table("Parameters and state")
    _add_values(table, state, full)
    if state:
        table.add_section()
        size = bytes_text(sum(value.bytes_per_device for value in state))
        table.add_row(*map(Cell, ("all", str(len(state)), "", "", "", size)))
    return table


def _boundary_table(plan: Plan, full: bool, title: str) -> Table:
    """Inputs that are no state, then outputs; a returned state that keeps its layouts is one row."""
    table = _value_table(title)
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


def collectives_table(
    title: str, collectives: Sequence[CollectivePlan], *, full: bool = False, most: int = MOST_COLLECTIVES
) -> Table:
    """Collectives with what they take and where they come from, the longest first; equal ones of one line share a row.

    `full` gives each a row, with its algorithm and its slowest link; else `most` have one.
    """
    links = ("algorithm", "link") if full else ()
    columns = ("kind", "axes", "times", "bytes each", "bytes in all", "predicted", "hidden", *links, "operand", "from")
    table = new_table(
        title, *columns, numbers=columns[2:7], aside=("operand", "from", *links), dropped=("bytes in all", "hidden")
    )
    groups = longest_first(group_collectives(collectives, full=full))
    shown = groups if full or len(groups) <= most + 1 else groups[:most]
    for group in shown:
        table.add_row(*map(Cell, _collective_cells(group, with_links=full)))
    if len(shown) < len(groups):
        cells = _collective_cells([item for group in groups[len(shown) :] for item in group])
        more = f"{len(groups) - len(shown)} more"
        table.add_row(*map(Cell, (more, "", cells[2], "", *cells[4:7], "", "each takes less")))
    if collectives:
        table.add_section()
        times, size, seconds, hidden_s = _totals(collectives)
        sums = (f"{times:,.0f}", "", bytes_text(size), seconds_text(seconds), hidden_text(hidden_s))
        table.add_row(*map(Cell, ("all", "", *sums, *("" for _ in columns[7:]))))
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
    table = new_table(
        "Collectives per step", *columns, numbers=columns[5:10], aside=("for", "algorithm", "link", "from")
    )
    for group in longest_first(group_collectives(collectives)):
        first, (times, _, seconds, hidden_s) = group[0], _totals(group)
        words = (first.kind, axes_text(first.axes), moved_text(group), first.algorithm or "-", first.link or "-")
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
        table.add_row(*map(Cell, (first.kind, axes_text(first.axes), moved_text(group), *sums)))
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
    """The modules of operations and the line of the program; the line with its function where no module is named.

    A file that is neither below the current folder nor a package's is told by its name alone.
    """
    line = source_text(source)
    line = file_of(line) if line.startswith("/") else line
    named = [str(pattern) for pattern in path_patterns(scope for scope in scopes if scope)]
    if not named:
        return line
    more = f", and {len(named) - 2} more" if len(named) > 2 else ""
    line = re.sub(r":(\d+)(:\d+)? \(.*\)$", r":\1", line)
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


def _collective_cells(group: Sequence[CollectivePlan], *, with_links: bool = False) -> tuple[str, ...]:
    times, size, seconds, hidden_s = _totals(group)
    first = group[0]
    sums = (f"{times:,.0f}", bytes_text(first.bytes), bytes_text(size), seconds_text(seconds), hidden_text(hidden_s))
    operands = list(dict.fromkeys(item.operand for item in group))
    more = f", and {len(operands) - 2} more" if len(operands) > 2 else ""
    where = where_text([item.scope for item in group], first.source)
    links = (first.algorithm or "-", first.link or "-") if with_links else ()
    return (first.kind, axes_text(first.axes), *sums, *links, ", ".join(operands[:2]) + more, where)


def peak_table(plan: Plan) -> Table:
    """Tensors alive at the peak, those of equal name and shape in one row, the largest first."""
    columns = ("value", "times", "shape", "dtype", "each per device", "from")
    names = columns if any(tensor.scope for tensor in plan.peak_tensors) else columns[:-1]
    table = new_table(
        _peak_title(len(plan.peak_tensors)), *names, numbers=("times", "each per device"), aside=("from",)
    )
    for cells in peak_rows(plan):
        table.add_row(*map(Cell, cells[: len(names)]))
    return table


def peak_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Tensors alive at the peak: what they are, how many, shape, dtype, bytes of each, modules."""
    rows: list[tuple[str, ...]] = []
    for group in group_tensors(plan.peak_tensors):
        first = group[0]
        what, size = value_text(first.name, first.shape), bytes_text(first.bytes_per_device)
        where = ", ".join(map(str, path_patterns(tensor.scope for tensor in group if tensor.scope)))
        rows.append((what, str(len(group)), shape_text(first.shape), first.dtype, size, where))
    return rows


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


def meshes_left(plan: Plan) -> tuple[str, ...]:
    """The meshes that were left although they may be faster: by too little to repay their search."""
    left = (one for one in plan.candidates if one.step_s is None and _may_save(one, plan))
    return tuple(_mesh_text(one.mesh_shape, plan.axis_names) for one in left)


def _seconds_on(candidate: Candidate, plan: Plan) -> float | None:
    """Seconds of a mesh, or that no plan on it beats: by its own bound, or by that of all meshes where that is tighter."""
    if candidate.step_s is not None or candidate.at_least_s is None:
        return candidate.step_s
    return max(candidate.at_least_s, min(plan.one_mesh_bound_s or plan.lower_bound_s, plan.step_s))


def _may_save(candidate: Candidate, plan: Plan) -> bool:
    """Whether a mesh may be faster than the chosen one, by as much as is printed."""
    seconds = _seconds_on(candidate, plan)
    return seconds is not None and seconds < plan.step_s and seconds_text(seconds) != seconds_text(plan.step_s)


def _candidate_text(candidate: Candidate, plan: Plan) -> str:
    seconds = _seconds_on(candidate, plan)
    if seconds is None:
        return "does not fit the memory"
    return f"{'at least ' if candidate.step_s is None else ''}{seconds_text(seconds)}"


def candidates_table(plan: Plan) -> Table:
    """The logical meshes that were compared."""
    table = new_table("Meshes compared", "mesh", "predicted step", "", numbers=("predicted step",))
    for candidate in plan.candidates:
        step = _candidate_text(candidate, plan)
        table.add_row(
            *map(Cell, (_mesh_text(candidate.mesh_shape, plan.axis_names), step, _candidate_verdict(candidate, plan)))
        )
    return table


def _candidate_verdict(candidate: Candidate, plan: Plan) -> str:
    """How a mesh compares with the chosen one; of one that was left by its bound, what it could save at most."""
    if candidate.mesh_shape == plan.mesh_shape:
        return "chosen"
    seconds = _seconds_on(candidate, plan)
    if seconds is None:
        return ""
    if seconds_text(seconds) == seconds_text(plan.step_s):
        return "no faster"
    if _may_save(candidate, plan):
        return f"could save at most {1 - seconds / plan.step_s:.1%}: left, as its search would take longer than that is worth"
    at_least = "at least " if candidate.step_s is None else ""
    return f"{at_least}{slower_text(seconds, plan.step_s)}"


def _mesh_text(shape: Sequence[int], names: Sequence[str]) -> str:
    """A mesh that was compared: x=2, y=4; its sizes alone where no name of an axis is known."""
    known = names if len(names) >= len(shape) else AXIS_NAMES if tuple(names) == AXIS_NAMES[: len(names)] else ()
    if not known:
        return shape_text(shape)
    return ", ".join(f"{name}={size}" for name, size in zip(known, shape, strict=False))
