"""What stands on a page: sections of sentences, tables and charts.

In: a plan. Out: `Section`s for the template. Tables are those of the terminal's report, so that every figure is the same. What
can go wrong: a plan of an earlier version, which knows nothing of memory over the step; that chart is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from rich.table import Column, Table

from autopar.explain.compared import compared_table, what_is_missing, why_chosen
from autopar.explain.figures import figures_of, meshes_of, node_size, parts_of
from autopar.explain.memory import PARTS, knows_parts, memory_table, parts_of_peak
from autopar.explain.pipeline import communication_text, pipeline_findings, slowest
from autopar.explain.stage_layouts import SENT, as_shown, groups_in_full
from autopar.explain.stages import group_stages, mesh_text, pipeline_tables, range_text, stages_text
from autopar.explain.strategies import findings
from autopar.explain.tables import candidates_table, layout_tables, links_table, peak_table, time_table
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.inter_op.candidates.pipeline_seconds import find_exposed_s, schedule_of, simulate_stages
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.plan import Plan
from autopar.reports.html import charts
from autopar.reports.html.pipeline_memory import memory_over_step
from autopar.schedules.instructions import Run

MOST_CELLS = 512
"""Devices that are drawn one by one."""
MOST_BLOCKS = 6000
"""Pieces of work that the picture of a pipeline may have."""
_WORDS = ("from", "leaf", "what lives there", "value", "operand", "")
"""Columns that hold long texts."""

Node = tuple[str, tuple[str, ...]]
"""A node's name, empty if nodes are not known, and the cells of its devices."""


@dataclasses.dataclass(frozen=True)
class Cells:
    """A table as text: its title, the columns with the class of each in the style, and the rows."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page; `folded` tables are shown when somebody opens them. `devices`: (name, series, nodes) of each mesh."""

    title: str
    sentences: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()
    tables: tuple[Cells, ...] = ()
    folded: tuple[tuple[str, tuple[Cells, ...]], ...] = ()
    devices: tuple[tuple[str, int, tuple[Node, ...]], ...] = ()


def key_figures(plan: Plan | PipelinePlan) -> list[tuple[str, str, str]]:
    """Return (name, figure, whole of which it is a part) of the figures that a reader looks for first."""
    figures, limit = figures_of(plan), plan.memory_limit_bytes
    of_limit = f"{percent_text(figures.peak_bytes, limit)} of {bytes_text(limit)}" if limit else "no limit"
    where, moved = "per step", f"{seconds_text(figures.hidden_s)} of it hidden"
    if isinstance(plan, PipelinePlan):
        where, moved = f"on the {slowest(plan)}", f"in all stages{communication_text(figures)}"
    found = [
        ("step", seconds_text(figures.step_s), "predicted"),
        ("compute", seconds_text(figures.compute_s), where),
        ("communication", seconds_text(figures.comm_s), moved),
        ("peak memory", bytes_text(figures.peak_bytes), of_limit),
    ]
    if isinstance(plan, PipelinePlan):
        found.append(("bubble", f"{plan.bubble:.1%}", "of the busiest mesh's work"))
    if figures.mfu is not None:
        found.append(("MFU", f"{figures.mfu:.1%}", "of the devices' peak"))
    return found


def sections(plan: Plan | PipelinePlan) -> list[Section]:
    """Every section of the page, in order."""
    said = pipeline_findings(plan) if isinstance(plan, PipelinePlan) else findings(plan)
    found = [
        Section(
            title="The devices", sentences=tuple(said), devices=tuple(_devices(plan)), tables=_cells(*_stages(plan))
        ),
        _time(plan),
        *_pipeline(plan),
        _memory(plan),
        _layouts(plan),
        _alternatives(plan),
    ]
    return [one for one in found if one.sentences or one.charts or one.tables or one.folded]


def _stages(plan: Plan | PipelinePlan) -> Sequence[Table]:
    return pipeline_tables(plan) if isinstance(plan, PipelinePlan) else ()


def _devices(plan: Plan | PipelinePlan) -> Iterator[tuple[str, int, tuple[Node, ...]]]:
    """For each mesh its stages, a colour, and its devices with their places along the axes, by nodes."""
    if plan.num_devices > MOST_CELLS:
        return
    size = node_size(plan)
    if isinstance(plan, Plan):
        yield f"mesh {mesh_text(plan)}", 0, tuple(_nodes(plan, plan.first_device, size))
        return
    for mesh, stages in meshes_of(plan).items():
        first = stages[0]
        name = stages_text(sorted(stage.stage for stage in stages))
        nodes = tuple(_nodes(first.plan, first.first_device, size))
        yield f"{name}: {mesh_text(first.plan)}", mesh % len(charts.SERIES), nodes


def _nodes(plan: Plan, first: int, size: int | None) -> Iterator[Node]:
    """The devices of a mesh from the place `first` on, those of each node together: its name, if nodes are known, and cells."""
    places = enumerate(_places(plan), start=first)
    for node, cells in itertools.groupby(places, lambda one: one[0] // size if size else None):
        yield "" if node is None else f"node {node}", tuple(f"{number} {where}".rstrip() for number, where in cells)


def _places(plan: Plan) -> Iterator[str]:
    """The place of each device along the axes of its mesh; nothing of a single device."""
    for place in itertools.product(*(range(size) for size in plan.mesh_shape)):
        named = zip(plan.axis_names, place, strict=True)
        yield " ".join(f"{axis}{number}" for axis, number in named) if plan.num_devices > 1 else ""


def _time(plan: Plan | PipelinePlan) -> Section:
    parts = parts_of(plan)
    legend = [part.name for part in parts]
    drawn = [charts.stacked_bars("step", [("step", [part.waited_s for part in parts])], legend)]
    stages = plan.stages if isinstance(plan, PipelinePlan) else ()
    if stages:
        groups = group_stages(plan) if isinstance(plan, PipelinePlan) else []
        rows = [(stages_text([stage.stage for stage in group]), _stage_seconds(group[0])) for group in groups]
        drawn.append(charts.stacked_bars("stages", rows, ("compute", "communication that is waited for")))
    every = (
        plan.collectives if isinstance(plan, Plan) else [item for stage in stages for item in stage.plan.collectives]
    )
    return Section(
        title="The time of a step",
        charts=tuple(drawn),
        tables=_cells(time_table(plan)),
        folded=((f"All {len(every)} collectives: algorithm, link, and what of them hides", _cells(links_table(every))),)
        if every
        else (),
    )


def _stage_seconds(stage: StagePlan) -> tuple[float, float]:
    return stage.plan.compute_s, max(0.0, stage.plan.comm_s - stage.plan.hidden_s)


def _pipeline(plan: Plan | PipelinePlan) -> Iterator[Section]:
    """The schedule by the predicted clock."""
    if not isinstance(plan, PipelinePlan) or 2 * plan.num_stages * plan.num_microbatches > MOST_BLOCKS:
        return
    schedule, seconds = schedule_of(plan), [(stage.forward_s, stage.backward_s) for stage in plan.stages]
    done = simulate_stages(schedule, seconds)
    rows: list[tuple[str, list[charts.Block]]] = [(f"mesh {mesh}", []) for mesh in range(done.timeline.num_meshes)]
    kinds: list[str] = []
    for span in done.timeline.spans:
        if isinstance(span.instruction, Run) and span.end_s > span.start_s:
            kind = span.instruction.kind
            kinds += [kind] if kind not in kinds else []
            rows[span.instruction.mesh][1].append((span.start_s, span.end_s - span.start_s, kinds.index(kind)))
    exposed_s = find_exposed_s(schedule, seconds, plan.transfers)
    for mesh, stages in meshes_of(plan).items():
        once_s = sum(stage.once_s for stage in stages)
        rows[mesh][1].append((done.makespan_s + exposed_s, once_s, len(kinds)))
    sentence = (
        f"The work of {plan.num_microbatches} microbatches by the predicted clock. Before the update, the transfers that "
        f"are waited for add {seconds_text(exposed_s)}."
    )
    legend = [*(kind.replace("_", " ") for kind in kinds), "once per step"]
    yield Section(title="The pipeline", sentences=(sentence,), charts=(charts.gantt("pipeline", rows, legend),))


def _memory(plan: Plan | PipelinePlan) -> Section:
    limit = plan.memory_limit_bytes
    if isinstance(plan, Plan):
        over_step = (charts.area("memory", plan.memory_bytes, limit=limit),) if plan.memory_bytes else ()
        return Section(title="Memory", charts=over_step, tables=_cells(peak_table(plan)))
    if knows_parts(plan):
        return _memory_of_parts(plan)
    rows = [(f"mesh {mesh}", [float(stage.peak_bytes) for stage in stages]) for mesh, stages in meshes_of(plan).items()]
    legend = (
        ["peak per device"]
        if plan.virtual_stages == 1
        else [f"stage {n + 1} of the mesh" for n in range(plan.virtual_stages)]
    )
    drawn = charts.stacked_bars("memory", rows, legend, limit=limit, bytes_=True)
    return Section(title="Memory", charts=(drawn,), folded=_filling(plan))


def _memory_of_parts(plan: PipelinePlan) -> Section:
    """What each mesh's peak consists of, and the fullest mesh over the step."""
    limit, meshes = plan.memory_limit_bytes, meshes_of(plan)
    peaks = {mesh: sum(stage.peak_bytes for stage in stages) for mesh, stages in meshes.items()}
    rows = [
        (f"mesh {mesh}", [float(sum(sizes)) for sizes in zip(*map(parts_of_peak, stages), strict=True)])
        for mesh, stages in meshes.items()
    ]
    drawn = [charts.stacked_bars("memory", rows, PARTS, limit=limit, bytes_=True)]
    sentences = []
    if 2 * plan.num_stages * plan.num_microbatches <= MOST_BLOCKS:
        fullest = max(peaks, key=lambda mesh: peaks[mesh])
        values = memory_over_step(plan, fullest)
        drawn.append(charts.area("memory-over-step", values, limit=limit, of="time of the work on microbatches"))
        sentences = [f"The second picture is a device of mesh {fullest}, the fullest, over the step."]
    return Section(
        title="Memory",
        sentences=tuple(sentences),
        charts=tuple(drawn),
        tables=_cells(memory_table(plan)),
        folded=_filling(plan),
    )


def _filling(plan: PipelinePlan) -> tuple[tuple[str, tuple[Cells, ...]], ...]:
    """The largest tensors of each group of stages."""
    return tuple((_filling_text(group), _cells(peak_table(as_shown(group)))) for group in group_stages(plan))


def _filling_text(group: Sequence[StagePlan]) -> str:
    flying = range_text([stage.microbatches_in_flight for stage in group], str)
    return (
        f"{stages_text([stage.stage for stage in group])}: what fills the peak of one microbatch, of {flying} in flight"
    )


def _layouts(plan: Plan | PipelinePlan) -> Section:
    sentence = (
        "A layout has an entry for each dimension: the mesh axes that split it, or -. What is not split over an axis is repeated "
        "along it."
    )
    if isinstance(plan, Plan):
        return Section(title="The layouts", sentences=(sentence,), tables=_cells(*layout_tables(plan)))
    folded = tuple(
        (
            f"{stages_text([stage.stage for stage in group])}, mesh {mesh_text(group[0].plan)}",
            _cells(*layout_tables(as_shown(group), boundary=SENT)),
        )
        for group in groups_in_full(plan)
    )
    return Section(title="The layouts", sentences=(sentence,), folded=folded)


def _alternatives(plan: Plan | PipelinePlan) -> Section:
    tables = [compared_table(plan, full=True)]
    if isinstance(plan, Plan):
        tables.append(candidates_table(plan))
    sentences = (*what_is_missing(plan), *why_chosen(plan))
    return Section(title="What else was compared", sentences=sentences, tables=_cells(*tables))


def _style(column: Column) -> str:
    """Numbers are set to the right; words may be folded."""
    return "number" if column.justify == "right" else "words" if column.header in _WORDS else "short"


def cells_of(*tables: Table) -> tuple[Cells, ...]:
    """Tables that have rows, as text, for sections that others write."""
    return _cells(*tables)


def _cells(*tables: Table) -> tuple[Cells, ...]:
    """Tables that have rows, as text."""
    found = []
    for table in tables:
        if table.row_count:
            columns = tuple((str(column.header), _style(column)) for column in table.columns)
            rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
            found.append(Cells(str(table.title), columns, tuple(rows)))
    return tuple(found)
