"""What fills the memory of a pipeline's stages at their peaks.

In: a `PipelinePlan`. Out: a table with a row for each group of stages that are alike, if these are few: the state and inputs,
the sums over microbatches, what the microbatches in flight keep, and what the tasks need beside that, which add up to the peak.
Stages on one mesh share its memory, so there each mesh has a row. What can go wrong: a plan that was written before plans knew
these parts; the table then has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from autopar.explain.figures import meshes_of
from autopar.explain.fitted import Cell
from autopar.explain.paths import shape_text, value_text
from autopar.explain.stages import RANGES, group_stages, numbers_text, range_text, stages_text
from autopar.explain.tables import group_tensors, new_table
from autopar.explain.units import bytes_text
from autopar.pipeline_plan import PipelinePlan, StagePlan

PARTS = ("state and inputs", "sums over microbatches", "microbatches in flight", "while a task runs")
"""What a stage's peak consists of, in the order of `parts_of_peak`."""
TITLE = "Memory at the peak"
MOST_GROUPS = 4
"""So many groups of stages have rows of their own; of more, the fullest stage has one, and all others."""


def parts_of_peak(stage: StagePlan) -> tuple[int, int, int, int]:
    """Bytes of the state, of sums over microbatches, of microbatches in flight, and of what tasks need: the peak, if known."""
    known = (stage.state_bytes, stage.sum_bytes, stage.in_flight_bytes)
    return (*known, stage.working_bytes)


def knows_parts(plan: PipelinePlan) -> bool:
    """Whether a plan tells what its stages' peaks consist of."""
    return any(stage.state_bytes or stage.sum_bytes or stage.microbatch_bytes for stage in plan.stages)


def memory_table(plan: PipelinePlan, *, full: bool = False) -> Table:
    """What the stages' peaks consist of, and their largest tensors of one microbatch; no rows if the plan does not know."""
    name = "stage" if plan.virtual_stages == 1 else "mesh"
    columns = (name, "peak per device", *PARTS, "largest of one microbatch")
    if not knows_parts(plan):
        return new_table(TITLE, *columns)
    groups = _groups(plan, full=full)
    title = f"{TITLE} ({RANGES})" if any(len(group) > 1 for group in groups) else TITLE
    table = new_table(title, *columns, numbers=columns[1:-1], aside=columns[-1:])
    for group in groups:
        sums = [tuple(map(sum, zip(*map(parts_of_peak, stages), strict=True))) for stages in group]
        cells = (
            _name(group),
            range_text([peak_of(stages) for stages in group], bytes_text),
            *(range_text(sizes, bytes_text) for sizes in zip(*sums, strict=True)),
            _largest(max(group[0], key=lambda stage: stage.peak_bytes)),
        )
        table.add_row(*map(Cell, cells))
    return table


def peak_of(stages: Sequence[StagePlan]) -> int:
    """The peak of a device that these stages share."""
    return sum(stage.peak_bytes for stage in stages)


def _groups(plan: PipelinePlan, *, full: bool) -> list[list[list[StagePlan]]]:
    """The rows of the table: each stands for some stages, or for all those of some meshes."""
    if plan.virtual_stages > 1:
        groups = [[stages] for stages in meshes_of(plan).values()]
    else:
        alike = [[stage] for stage in plan.stages] if full else group_stages(plan)
        groups = [[[stage] for stage in group] for group in alike]
    if full or len(groups) <= MOST_GROUPS:
        return groups
    each = [stages for group in groups for stages in group]
    fullest = max(each, key=peak_of)
    return [[fullest], [stages for stages in each if stages is not fullest]]


def _name(group: Sequence[Sequence[StagePlan]]) -> str:
    """The stages of a row by their numbers, or, of meshes with several, these with their stages."""
    if len(group[0]) == 1:
        return numbers_text([stage.stage for (stage,) in group])
    meshes = numbers_text([stages[0].mesh for stages in group])
    return f"{meshes} ({stages_text(sorted(stage.stage for stages in group for stage in stages))})"


def _largest(stage: StagePlan) -> str:
    """The kind of tensors of a microbatch that takes most at the peak."""
    tensors = group_tensors(stage.plan.peak_tensors)
    if not tensors:
        return "-"
    alike = max(tensors, key=lambda alike: len(alike) * alike[0].bytes_per_device)
    return f"{len(alike)} x {value_text(alike[0].name, alike[0].shape)}, {alike[0].dtype}{shape_text(alike[0].shape)}"
