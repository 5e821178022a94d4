"""What was measured of a step, on its plan's page: the predicted step and the measured one in one picture, to one scale.

In: what was recorded. Out: `Section`s. What can go wrong: more operations than a picture has room for; those of one kind that
follow each other closely are drawn as one, and so are short ones of all kinds that begin in the same moment, as the kind that
took longest of them.
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
"""Moments of a step in the picture: operations that are shorter, or less apart, than one are drawn as one."""
_MOST_OPERATIONS = 100
"""Rows of the table of operations."""
_KINDS = {"input_gradient": "backward", "prologue": "once per step", "epilogue": "once per step"}


def measured_sections(recorded: Recorded) -> Iterator[Section]:
    """The sections of a recorded run."""
    comparison = compare(recorded)
    drawn, of_call = [_parts(comparison, recorded)], list[str]()
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
        folded=(("The operations that took longest", cells_of(operations_table(recorded, most=_MOST_OPERATIONS))),)
        if recorded.operations
        else (),
    )


def _parts(comparison: Comparison, recorded: Recorded) -> str:
    """The parts that add up to the step, and to the call that was looked into, beside each other."""
    parts = parts_of_step(comparison)
    rows = [
        ("predicted", [part.predicted_s or 0.0 for part in parts]),
        (
            f"measured, call {recorded.detailed[0]}" if recorded.detailed else "measured",
            [part.measured_s or 0.0 for part in parts],
        ),
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
    moment_s = max(one.end_s for one in operations) / _FINEST
    legend = ["compute", *dict.fromkeys(one.collective for one in recorded.program if one.collective)]
    blocks: dict[tuple[int, int], list[charts.Block]] = {}
    for one in operations:
        series = legend.index(recorded.operation(one).collective or "compute")
        blocks.setdefault((recorded.mesh(one), one.device), []).append((one.start_s, one.seconds, series))
    rows = {place: _joined(_pooled(found, moment_s), moment_s) for place, found in blocks.items()}
    where = "mesh {} device {}" if recorded.spans else "device {1}"
    return charts.gantt("measured-devices", [(where.format(*place), rows[place]) for place in sorted(rows)], legend)


def _pooled(blocks: Sequence[charts.Block], moment_s: float) -> list[charts.Block]:
    """Blocks by their starts; those shorter than a moment that begin in the same one as one, of the series that took longest."""
    short: dict[int, list[charts.Block]] = {}
    for block in blocks:
        if block[1] < moment_s:
            short.setdefault(int(block[0] / moment_s), []).append(block)
    pools = []
    for group in short.values():
        seconds: dict[int, float] = {}
        for _, length, series in group:
            seconds[series] = seconds.get(series, 0.0) + length
        start, end = group[0][0], max(begun + length for begun, length, _ in group)
        pools.append((start, end - start, max(seconds, key=lambda series: seconds[series])))
    return sorted([*(block for block in blocks if block[1] >= moment_s), *pools])


def _joined(blocks: Sequence[charts.Block], moment_s: float) -> list[charts.Block]:
    """Neighbours of one series that are less than a moment apart as one block."""
    row: list[charts.Block] = []
    for start, length, series in blocks:
        if row and row[-1][2] == series and start - sum(row[-1][:2]) < moment_s:
            row[-1] = (row[-1][0], max(row[-1][1], start + length - row[-1][0]), series)
        else:
            row.append((start, length, series))
    return row
