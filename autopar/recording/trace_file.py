"""A recording as a file: a Chrome trace with all that was recorded beside it.

In: `Recorded`. Out: JSON in Chrome's trace event format, which Perfetto and chrome://tracing open: a process for each call that
was looked into, with a row for each mesh of a pipeline and two for each device; for a pipeline another process with the step as
it was predicted. What was recorded stands under `otherData`, which viewers leave alone, so that the file can be read back; there
each execution of an operation is a row of figures, whose first is the operation's place in the program. What can go wrong:
another file; ArgumentError says what this is not.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from autopar.errors import ArgumentError
from autopar.files.json_form import build
from autopar.files.whole_file import save
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.predicted import predicted_spans
from autopar.recording.recorded import Recorded, RecordedOperation, RecordedSpan

Event: TypeAlias = dict[str, object]
Row: TypeAlias = tuple[int, int, int, float, float, int, int | None]
FORMAT = "autopar-recording-2"
_WITH_OBJECTS = "autopar-recording-1"
"""The format in which each execution of an operation was an object; it is read."""
_DIGITS = 3
"""Of microseconds: clocks tell no less than a nanosecond."""
_PREDICTED = 0
"""The number of the process that shows the predicted step; those of calls are their numbers."""


def write_run(recorded: Recorded, path: str | os.PathLike[str]) -> None:
    """Write the file. Raises ArgumentError if that cannot be done."""
    beside = {
        "format": FORMAT,
        "recorded": dataclasses.asdict(_without_operations(recorded)),
        "operations": _rows_of(recorded),
    }
    events = ",\n".join(map(_text, trace_events(recorded)))
    save(Path(path), f'{{"displayTimeUnit": "ms",\n"traceEvents": [\n{events}\n],\n"otherData": {_text(beside)}}}\n')


def read_run(path: str | os.PathLike[str]) -> Recorded:
    """What a file of `write_run` holds. Raises ArgumentError if it is no such file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        beside = content["otherData"]
        version = beside["format"]
        found = build(Recorded, beside["recorded"]) if version in (FORMAT, _WITH_OBJECTS) else None
        if found is not None and version == FORMAT:
            found = _with_operations(found, beside["operations"])
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise ArgumentError(
            f"{path} is no recording of autopar: run.save(FILE) of `with autopar.record(step) as run`, or `autopar train "
            "--timeline FILE`, writes one"
        ) from None
    if found is None:
        raise ArgumentError(f"{path} is a recording in the format {version!r}; this version reads {FORMAT!r}")
    return found


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _without_operations(recorded: Recorded) -> Recorded:
    return dataclasses.replace(recorded, operations=())


def _rows_of(recorded: Recorded) -> list[Row]:
    """A row for each execution: the place of its operation in the program, call, device, start, end, and what is rare."""
    places = {(one.task, one.name): place for place, one in enumerate(recorded.program)}
    return [
        (
            places[one.task, one.name],
            one.call,
            one.device,
            one.start_s,
            one.end_s,
            int(one.goes_on),
            one.microbatch,
        )
        for one in recorded.operations
    ]


def _with_operations(recorded: Recorded, rows: Sequence[Row]) -> Recorded:
    operations = tuple(
        RecordedOperation(
            call=call,
            name=recorded.program[place].name,
            device=device,
            start_s=start_s,
            end_s=end_s,
            goes_on=bool(goes_on),
            task=recorded.program[place].task,
            microbatch=microbatch,
        )
        for place, call, device, start_s, end_s, goes_on, microbatch in rows
    )
    return dataclasses.replace(recorded, operations=operations)


def trace_events(recorded: Recorded) -> Iterator[Event]:
    """The events of the trace, in microseconds."""
    plan = recorded.plan
    if isinstance(plan, PipelinePlan):
        yield from _process(_PREDICTED, f"{recorded.step}, predicted")
        yield from _of_spans(predicted_spans(plan), _PREDICTED)
    for call in recorded.detailed:
        yield from _process(call, f"{recorded.step}, call {call}")
        yield from _of_spans([span for span in recorded.spans if span.call == call], call)
        yield from _of_operations(recorded, call)
    for one in recorded.calls:
        if not one.is_detailed:
            yield from _process(one.number, f"{recorded.step}, call {one.number}")
            yield {"ph": "X", "pid": one.number, "tid": 0, "name": "call", "ts": 0.0, "dur": one.wall_s * 1e6}


def _process(number: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}


def _row(process: int, number: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": name}}


def _of_spans(spans: Sequence[RecordedSpan], process: int) -> Iterator[Event]:
    """A row for each mesh, with arrows from sends to their receives."""
    for mesh in sorted({span.mesh for span in spans}):
        yield _row(process, mesh, f"mesh {mesh}")
    for span in spans:
        at: Event = {"pid": process, "tid": span.mesh}
        place = "" if span.microbatch is None else f" {span.microbatch}"
        is_task = span.transfer is None
        known = {"task": span.name, "stage": span.stage, "microbatch": span.microbatch}
        arguments = (
            {name: value for name, value in known.items() if value is not None} if is_task else {"value": span.name}
        )
        yield {
            "ph": "X",
            "name": f"{span.kind.replace('_', ' ')}{place}" if is_task else f"{span.kind} {span.name}",
            "cat": span.kind,
            "ts": span.start_s * 1e6,
            "dur": span.seconds * 1e6,
            "args": arguments,
            **at,
        }
        if span.transfer is not None:
            arrow: Event = {"id": f"{process}.{span.transfer}", "name": "transfer", "cat": "transfer", **at}
            begins = span.kind == "send"
            yield (
                {**arrow, "ph": "s", "ts": span.start_s * 1e6}
                if begins
                else {**arrow, "ph": "f", "bp": "e", "ts": span.end_s * 1e6}
            )


def _of_operations(recorded: Recorded, call: int) -> Iterator[Event]:
    """Two rows for each device, behind those of meshes: its compute, and its collectives."""
    operations = [one for one in recorded.operations if one.call == call]
    devices = sorted({(recorded.mesh(one), one.device) for one in operations})
    first = 1 + max((span.mesh for span in recorded.spans), default=-1)
    rows = {place: first + 2 * number for number, place in enumerate(devices)}
    for (mesh, device), row in rows.items():
        name = f"mesh {mesh}, device {device}" if recorded.spans else f"device {device}"
        yield _row(call, row, name)
        yield _row(call, row + 1, f"{name}, collectives")
    for one in operations:
        known = recorded.operation(one)
        arguments: Event = {"opcode": known.opcode, "bytes": known.bytes}
        arguments |= {"axes": ", ".join(known.axes)} if known.collective else {}
        arguments |= {"flops": known.flops} if known.flops else {}
        arguments |= {"scope": known.scope} if known.scope else {}
        arguments |= {"task": one.task} if one.task else {}
        arguments |= {} if one.microbatch is None else {"microbatch": one.microbatch}
        yield {
            "ph": "X",
            "pid": call,
            "tid": rows[recorded.mesh(one), one.device] + bool(known.collective),
            "name": one.name,
            "cat": known.collective or "compute",
            "ts": round(one.start_s * 1e6, _DIGITS),
            "dur": round(one.seconds * 1e6, _DIGITS),
            "args": arguments,
        }
