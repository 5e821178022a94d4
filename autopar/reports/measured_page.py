"""What was measured of a step, on its plan's page: the predicted step and the measured one in one picture, to one scale.

In: what was recorded. Out: `Section`s. What can go wrong: more operations than a picture has room for; those that follow each
other closely are drawn as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.compare import Comparison, compare, parts_of_step
from autopar.recording.page import comparison_table, operations_table, sentences
from autopar.recording.predicted import predicted_spans
from autopar.recording.recorded import Recorded, RecordedSpan
from autopar.reports.html import charts
from autopar.reports.html.contents import Section, cells_of

MOST_SPANS = 3000
"""Pieces of work that the picture of a pipeline may have."""
_FINEST = 1000
"""Operations whose distance is less than this part of the step are drawn as one."""
_KINDS = {"input_gradient": "backward", "prologue": "once per step", "epilogue": "once per step"}


def measured_sections(recorded: Recorded) -> Iterator[Section]:
    """The sections of a recorded run."""
    comparison = compare(recorded)
    drawn, of_call = [_parts(comparison)], list[str]()
    plan = recorded.plan
    if isinstance(plan, PipelinePlan):
        predicted = predicted_spans(plan)
        if recorded.spans and len(predicted) <= MOST_SPANS:
            of_call.append(_pipeline(predicted, recorded))
    if recorded.operations:
        of_call.append(_devices(recorded))
    if any(of_call):
        drawn += [_captioned("".join(of_call), recorded)]
    yield Section(
        title="Measured beside predicted",
        sentences=tuple(sentences(recorded)),
        charts=tuple(filter(None, drawn)),
        tables=cells_of(comparison_table(comparison)),
        folded=(("The operations that took longest", cells_of(operations_table(recorded, most=100))),)
        if recorded.operations
        else (),
    )


def _parts(comparison: Comparison) -> str:
    """The parts that add up to the step, and to the call that was looked into, beside each other."""
    parts = parts_of_step(comparison)
    rows = [
        ("predicted", [part.predicted_s or 0.0 for part in parts]),
        ("measured, the call that was looked into", [part.measured_s or 0.0 for part in parts]),
    ]
    legend = [part.what for part in parts]
    return charts.stacked_bars("measured-parts", rows, legend) if any(map(any, (row for _, row in rows))) else ""


def _captioned(picture: str, recorded: Recorded) -> str:
    """The picture of a call, above it which call that is, and how long it and the others took."""
    number = recorded.detailed[0]
    (seconds,) = (call.wall_s for call in recorded.calls if call.number == number)
    others = sum(not call.is_detailed for call in recorded.timed)
    whose = "the one other" if others == 1 else f"the {others} others, at the median,"
    beside = f"; {whose} took {seconds_text(recorded.wall_s)}" if others else "; no other call was timed"
    said = f"Measured is call {number}, which was looked into and took {seconds_text(seconds)}{beside}."
    return f"<p>{said}</p>{picture}"


def _pipeline(predicted: Sequence[RecordedSpan], recorded: Recorded) -> str:
    call = recorded.detailed[0]
    measured = [span for span in recorded.spans if span.call == call and span.transfer is None]
    legend = list(dict.fromkeys(_kind(span) for span in (*predicted, *measured)))
    rows = []
    for mesh in sorted({span.mesh for span in predicted}):
        for name, spans in (("predicted", predicted), ("measured", measured)):
            blocks = [(s.start_s, s.seconds, legend.index(_kind(s))) for s in spans if s.mesh == mesh]
            rows.append((f"mesh {mesh} {name}", blocks))
    return charts.gantt("measured-pipeline", rows, legend)


def _kind(span: RecordedSpan) -> str:
    return _KINDS.get(span.kind, span.kind.replace("_", " "))


def _devices(recorded: Recorded) -> str:
    """What each device did in the call that was looked into."""
    call = recorded.detailed[0]
    operations = sorted((one for one in recorded.operations if one.call == call), key=lambda one: one.start_s)
    least_s = max(one.end_s for one in operations) / _FINEST
    legend = ["compute", *dict.fromkeys(one.collective for one in recorded.program if one.collective)]
    rows: dict[tuple[int, int], list[charts.Block]] = {}
    for one in operations:
        series = legend.index(recorded.operation(one).collective or "compute")
        row = rows.setdefault((recorded.mesh(one), one.device), [])
        if row and row[-1][2] == series and one.start_s - sum(row[-1][:2]) < least_s:
            row[-1] = (row[-1][0], max(row[-1][1], one.end_s - row[-1][0]), series)
        else:
            row.append((one.start_s, one.seconds, series))
    where = "mesh {} device {}" if recorded.spans else "device {1}"
    return charts.gantt("measured-devices", [(where.format(*place), rows[place]) for place in sorted(rows)], legend)
