"""`train --timeline`: the first steps recorded beside what the plan says, as a file for a trace viewer.

The second step is looked into, because XLA compiles in the first; a few more are timed. It shows the operations of each device,
of a pipeline the instructions too. What can go wrong: the step that is looked into is slower than the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from autopar.api import ParallelStep
from autopar.commands.arguments.checks import RECORDED_STEP
from autopar.measuring.recorder import OTHER_PLAN, record
from autopar.recording.run import RecordedRun

TIMED_STEPS = 6
"""Steps that are recorded; those behind them run as they would without."""


@dataclasses.dataclass
class Recorder:
    """Records the first calls of a step."""

    step: ParallelStep
    run: RecordedRun = dataclasses.field(default_factory=RecordedRun)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context around the calls."""
        with record(self.step, calls=TIMED_STEPS) as self.run:
            yield

    def write(self, path: Path, console: Console) -> None:
        """Write the trace and print what it says, if the run came so far."""
        if self.run.recorded is None or not self.run.recorded.detailed:
            console.print(f"no timeline: {self._why_not()}", markup=False, highlight=False, soft_wrap=True)
            return
        self.run.save(path)
        console.print(str(self.run), markup=False, highlight=False)
        console.print(
            f"timeline of step {RECORDED_STEP} written to {path}, for https://ui.perfetto.dev or chrome://tracing",
            markup=False,
            highlight=False,
        )

    def _why_not(self) -> str:
        if self.run.recorded is not None and OTHER_PLAN in self.run.recorded.missing:
            return (
                f"step {RECORDED_STEP} got a state of other types than the first one, such as an array that was made of a Python "
                "number, and ran under another plan; make it with a dtype"
            )
        return f"the run was stopped before step {RECORDED_STEP}"
