"""When each instruction ran, in a measured or simulated step, and a picture of it for a trace viewer.

In: spans of time per mesh. Out: a JSON object in Chrome's trace event format, which Perfetto and chrome://tracing open: one
row per mesh, an arrow for each transfer from its send to its receive. Times are seconds here and microseconds in the file.
What can go wrong: a measured step whose work was only queued. The driver therefore waits for each task while it records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from autopar.schedules.instructions import Free, Instruction, Receive, Run, Send

Event: TypeAlias = dict[str, object]
"""One entry of a trace, as JSON."""


@dataclass(frozen=True)
class Span:
    """One instruction and its time since the start of the step."""

    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """All spans of one step, mesh by mesh and in order. `began_s`: when a measured one began, by `time.perf_counter`."""

    num_meshes: int
    spans: tuple[Span, ...]
    began_s: float = 0.0

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end_s for span in self.spans), default=0.0) - min((s.start_s for s in self.spans), default=0.0)

    def busy_s(self, mesh: int) -> float:
        """Seconds that a mesh spends in tasks."""
        runs = (span for span in self.spans if isinstance(span.instruction, Run) and span.instruction.mesh == mesh)
        return sum(span.end_s - span.start_s for span in runs)

    def exposed_s(self, mesh: int) -> float:
        """Seconds in which a mesh waits for transfers that are under way, from their sends on or its own last instruction.

        What it waits before the other mesh sends is the schedule's and not the link's.
        """
        sent = {span.instruction.number: span.end_s for span in self.spans if isinstance(span.instruction, Send)}
        waited, free_s = 0.0, 0.0
        for span in self.spans:
            if span.instruction.mesh != mesh:
                continue
            if isinstance(span.instruction, Receive):
                waited += max(0.0, span.end_s - max(free_s, sent.get(span.instruction.number, span.start_s)))
            free_s = span.end_s
        return waited

    def chrome_trace(self, name: str = "step") -> dict[str, object]:
        """The trace as a JSON object, without the frees."""
        return {"displayTimeUnit": "ms", "traceEvents": list(self._events(name))}

    def trace_text(self, name: str = "step") -> str:
        """The trace as the text of a file."""
        return json.dumps(self.chrome_trace(name), indent=1) + "\n"

    def _events(self, name: str) -> Iterator[Event]:
        yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
        for mesh in range(self.num_meshes):
            yield {"ph": "M", "pid": 0, "tid": mesh, "name": "thread_name", "args": {"name": f"mesh {mesh}"}}
        for span in self.spans:
            if not isinstance(span.instruction, Free):
                yield from _slice(span)


def _slice(span: Span) -> Iterator[Event]:
    instruction = span.instruction
    place = {"pid": 0, "tid": instruction.mesh}
    start_us, end_us = span.start_s * 1e6, span.end_s * 1e6
    if isinstance(instruction, Run):
        at = "" if instruction.microbatch is None else f" {instruction.microbatch}"
        arguments: Event = {"task": instruction.task, "stage": instruction.stage}
        if instruction.microbatch is not None:
            arguments["microbatch"] = instruction.microbatch
        label, category = f"{instruction.kind}{at}", str(instruction.kind)
    else:
        label, category = str(instruction), type(instruction).__name__.lower()
        arguments = {}
    yield {
        "ph": "X",
        "name": label,
        "cat": category,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": arguments,
        **place,
    }
    if isinstance(instruction, Send):
        yield {"ph": "s", "id": instruction.number, "name": "transfer", "cat": "transfer", "ts": start_us, **place}
    if isinstance(instruction, Receive):
        flow = {"ph": "f", "bp": "e", "id": instruction.number, "name": "transfer", "cat": "transfer"}
        yield {**flow, "ts": end_us, **place}
