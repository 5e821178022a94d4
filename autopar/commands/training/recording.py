"""`train --timeline`: one step of a pipeline recorded instruction by instruction, as a file for a trace viewer.

The second call is recorded, because XLA compiles in the first. While it records, the driver waits for each task, so the
recorded step is slower than the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import jax
from rich.console import Console

from autopar.errors import ArgumentError
from autopar.events import Moment, StepRun, observing
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.explain.units import percent_text, seconds_text
from autopar.files.whole_file import save
from autopar.schedules.timeline import Timeline

RECORDED_STEP = 2


@dataclasses.dataclass
class Recorder:
    """Has a pipeline record its call number `recorded`; `calls` counts them."""

    pipeline: CompiledPipeline
    recorded: int
    calls: int = 0

    @classmethod
    def of(cls, compiled: CompiledStep | CompiledPipeline, path: Path, *, steps: int) -> Recorder:
        """Make a recorder for a run of so many steps; ArgumentError without a pipeline, or without a folder for the file."""
        if not isinstance(compiled, CompiledPipeline):
            raise ArgumentError(
                "--timeline shows the instructions of a pipeline, and this plan has one mesh: ask for two or more --stages"
            )
        if not path.absolute().parent.is_dir():
            raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}")
        return cls(compiled, min(RECORDED_STEP, steps))

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """A context around the calls."""
        return observing(self._on_moment)

    def _on_moment(self, moment: Moment) -> None:
        if moment.kind != "step" or not isinstance(moment.about, StepRun):
            return
        self.calls += 1
        if self.calls == self.recorded:
            jax.block_until_ready(list(moment.values or ()))  # what the call before still computes is none of its own
            moment.about.wants_timeline = True

    def write(self, path: Path, console: Console) -> None:
        """Write the trace, if the run came so far."""
        if self.calls < self.recorded:
            console.print(f"no timeline: the run was stopped before step {self.recorded}")
            return
        timeline: Timeline = self.pipeline.timeline()
        save(path, timeline.trace_text(f"step {self.recorded}"))
        console.print(
            f"timeline of step {self.recorded} written to {path}, for https://ui.perfetto.dev or chrome://tracing: "
            f"{seconds_text(timeline.makespan_s)} from first to last instruction, {_describe_load(timeline)}",
            markup=False,
            highlight=False,
        )


def _describe_load(timeline: Timeline) -> str:
    shares = (percent_text(timeline.busy_s(mesh), timeline.makespan_s) for mesh in range(timeline.num_meshes))
    return "busy: " + ", ".join(f"mesh {mesh} {share}" for mesh, share in enumerate(shares))
