"""A recorded run beside its plan, as text.

In: a plan, and what was recorded of it. Out: the recording's page, and for a pipeline the predicted step above the measured one,
a line for each mesh, drawn to one scale. What can go wrong: a recording of another plan; ArgumentError says of which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autopar.errors import ArgumentError
from autopar.explain.report import standard_output
from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.recording.page import page
from autopar.recording.predicted import predicted_spans
from autopar.recording.recorded import Recorded, RecordedSpan

LETTERS = {
    "forward": "F",
    "backward": "B",
    "input_gradient": "B",
    "weight_gradient": "W",
    "prologue": "U",
    "epilogue": "U",
}
"""What stands for each kind of task."""
_HEAD = 24
"""Characters in front of a line of the picture, and one behind it."""
_LEAST_WIDTH = 20
"""Moments of a picture, however narrow the terminal is."""
_WAITS = "."


def of_plan(plan: Plan | PipelinePlan, recorded: Recorded) -> Recorded:
    """What was recorded, if it is of this plan. Raises ArgumentError if it is of another."""
    own, other = (dataclasses.replace(one, planning_s=0.0) for one in (plan, recorded.plan))
    if own != other:
        raise ArgumentError(
            f"the recording is of another plan of {recorded.step}: {recorded.plan!r}. Show it with that one, or record this one "
            "with autopar.record"
        )
    return recorded


def measured_text(plan: Plan | PipelinePlan, recorded: Recorded) -> str:
    """The page of a recording and, in stages, the pictures. Raises ArgumentError if it is of another plan."""
    text = page(of_plan(plan, recorded))
    drawn = "\n".join(_pictures(plan, recorded)) if isinstance(plan, PipelinePlan) and recorded.spans else ""
    return f"{text}\n{drawn}".rstrip()


def _pictures(plan: PipelinePlan, recorded: Recorded) -> Iterator[str]:
    call, width = recorded.detailed[0], max(_LEAST_WIDTH, standard_output().width - _HEAD)
    predicted = predicted_spans(plan)
    measured = [span for span in recorded.spans if span.call == call and span.kind in LETTERS]
    until_s = max(span.end_s for span in (*predicted, *measured))
    yield (
        "The pipeline: F forward, B backward, W weight gradient, U once per step, . waits; a character is "
        f"{seconds_text(until_s / width)}"
    )
    for name, spans in (("predicted", predicted), ("measured", measured)):
        for mesh in sorted({span.mesh for span in spans}):
            row = [span for span in spans if span.mesh == mesh]
            yield f"{name:<9} mesh {mesh:<3} | {draw_row(row, until_s, width)}"


def draw_row(spans: Sequence[RecordedSpan], until_s: float, width: int) -> str:
    """What a mesh does at each of `width` moments at equal distances."""
    row = [_WAITS] * width
    for span in spans:
        first = min(width - 1, int(span.start_s / until_s * width))
        for place in range(first, max(first + 1, min(width, round(span.end_s / until_s * width)))):
            row[place] = LETTERS[span.kind]
    return "".join(row).rstrip(_WAITS)
