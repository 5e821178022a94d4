"""`train --timeline`: one step of a pipeline recorded instruction by instruction, as a file for a trace viewer.

In: the compiled pipeline and the file's name. Out: a step to be called as usual, and the trace of its second call, the first
being the one in which XLA compiles. What can go wrong is to take the recorded step for a usual one: while it records, the
driver waits for each task, so that step is slower.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from autopar.errors import ArgumentError
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.explain.units import percent_text, seconds_text
from autopar.schedules.timeline import Timeline

RECORDED_STEP = 2


@dataclasses.dataclass
class Recorder:
    """A pipeline that records its call number `recorded`; `calls` counts them."""

    pipeline: CompiledPipeline
    recorded: int
    calls: int = 0

    @classmethod
    def of(cls, compiled: CompiledStep | CompiledPipeline, path: Path, *, steps: int) -> Recorder:
        """A recorder for a run of so many steps; ArgumentError if there is no pipeline, or no folder for the file."""
        if not isinstance(compiled, CompiledPipeline):
            raise ArgumentError(
                "--timeline shows the instructions of a pipeline, and this plan has one mesh: ask for two or more --stages"
            )
        if not path.absolute().parent.is_dir():
            raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}")
        return cls(compiled, min(RECORDED_STEP, steps))

    def __call__(self, state: Any, batch: Any) -> Any:
        """One step."""
        self.calls += 1
        return self.pipeline.run(jax.tree.leaves((state, batch)), record=self.calls == self.recorded)

    def write(self, path: Path, console: Console) -> None:
        """Write the trace, if the run came so far."""
        if self.calls < self.recorded:
            console.print(f"no timeline: the run was stopped before step {self.recorded}")
            return
        timeline: Timeline = self.pipeline.timeline()
        try:
            timeline.save(path, f"step {self.recorded}")
        except OSError as error:
            raise ArgumentError(f"cannot write {path}: {error.strerror}") from None
        console.print(
            f"timeline of step {self.recorded} written to {path}, for https://ui.perfetto.dev or chrome://tracing: "
            f"{seconds_text(timeline.makespan_s)} from first to last instruction, {_busy_text(timeline)}",
            markup=False,
            highlight=False,
        )


def _busy_text(timeline: Timeline) -> str:
    shares = (percent_text(timeline.busy_s(mesh), timeline.makespan_s) for mesh in range(timeline.num_meshes))
    return "busy: " + ", ".join(f"mesh {mesh} {share}" for mesh, share in enumerate(shares))
