"""What fills the memory of a pipeline's stages at their peaks.

In: a `PipelinePlan`. Out: a table with a row for each group of stages that are alike, if these are few: the state, the sums
over microbatches, what the microbatches in flight keep, and what the tasks need beside that, which add up to the peak. What can
go wrong: a plan that was written before plans knew these parts; the table then has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from autopar.explain.cell import Cell
from autopar.explain.paths import shape_text, value_text
from autopar.explain.stages import RANGES, group_stages, numbers_text, range_text
from autopar.explain.tables import group_tensors, new_table
from autopar.explain.units import bytes_text
from autopar.pipeline_plan import PipelinePlan, StagePlan

PARTS = ("state", "sums over microbatches", "microbatches in flight", "while a task runs")
"""What a stage's peak consists of, in the order of `parts_of_peak`."""
TITLE = "Memory at the peak"
MOST_GROUPS = 4
"""So many groups of stages have rows of their own; of more, the fullest stage has one, and all others."""


def parts_of_peak(stage: StagePlan) -> tuple[int, int, int, int]:
    """Bytes of the state, of sums over microbatches, of microbatches in flight, and of what tasks need: the peak, if known."""
    known = (stage.state_bytes, stage.sum_bytes, stage.flying_bytes)
    return (*known, stage.working_bytes)


def knows_parts(plan: PipelinePlan) -> bool:
    """Whether a plan tells what its stages' peaks consist of."""
    return any(stage.state_bytes or stage.sum_bytes or stage.microbatch_bytes for stage in plan.stages)


def memory_table(plan: PipelinePlan, *, full: bool = False) -> Table:
    """What the stages' peaks consist of, and their largest tensors of one microbatch; no rows if the plan does not know."""
    columns = ("stage", "peak per device", *PARTS, "largest of one microbatch")
    if not knows_parts(plan):
        return new_table(TITLE, *columns)
    groups = [[stage] for stage in plan.stages] if full else group_stages(plan)
    if not full and len(groups) > MOST_GROUPS:
        fullest = max(plan.stages, key=lambda stage: stage.peak_bytes)
        groups = [[fullest], [stage for stage in plan.stages if stage is not fullest]]
    title = f"{TITLE} ({RANGES})" if any(len(group) > 1 for group in groups) else TITLE
    table = new_table(title, *columns, numbers=columns[1:-1])
    for group in groups:
        parts = zip(*map(parts_of_peak, group), strict=True)
        cells = (
            numbers_text([stage.stage for stage in group]),
            range_text([stage.peak_bytes for stage in group], bytes_text),
            *(range_text(sizes, bytes_text) for sizes in parts),
            _largest(group),
        )
        table.add_row(*map(Cell, cells))
    return table


def _largest(group: Sequence[StagePlan]) -> str:
    """The kind of tensors of a microbatch that takes most at the peak, of the first stage of a group."""
    tensors = group_tensors(group[0].plan.peak_tensors)
    if not tensors:
        return "-"
    alike = max(tensors, key=lambda alike: len(alike) * alike[0].bytes_per_device)
    return f"{len(alike)} x {value_text(alike[0].name, alike[0].shape)}, {alike[0].dtype}{shape_text(alike[0].shape)}"
