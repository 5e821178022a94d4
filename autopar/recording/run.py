"""What a user holds of a recording: it is printed, compared with the plan, and saved.

In: what was recorded. Out: tables as text, and files. What can go wrong: the block that is recorded has not ended; ArgumentError
says so.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType

from autopar.errors import ArgumentError
from autopar.recording.compare import Comparison, compare
from autopar.recording.recorded import Recorded
from autopar.recording.stragglers import MORE_THAN, Straggler, find_stragglers
from autopar.recording.trace_file import read_run, write_run


class RecordedRun:
    """A recording. `recorded` is its data; None until the block ends, or if no call was made, as `why_not` says. Print it."""

    def __init__(self, recorded: Recorded | None = None) -> None:
        self.recorded = recorded
        self.why_not = "the recording is not over: look at it behind its `with autopar.record(...)` block"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecordedRun:
        """A recording from the file that `save` wrote. Raises ArgumentError if it is none."""
        return cls(read_run(path))

    @property
    def data(self) -> Recorded:
        """What was recorded. Raises ArgumentError before the block ends, or if nothing was."""
        if self.recorded is None:
            raise ArgumentError(self.why_not)
        return self.recorded

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to `path` as a Chrome trace, which https://ui.perfetto.dev shows.

        `load` and `autopar calibrate --from` read it.

        Raises:
            ArgumentError: the file cannot be written.
        """
        write_run(self.data, path)

    def compare(self) -> Comparison:
        """Each part of the step, predicted and measured."""
        return compare(self.data)

    def stragglers(self, *, more_than: float = MORE_THAN) -> Sequence[Straggler]:
        """Devices, meshes and tasks that take longer than their equals, the worst first.

        Args:
            more_than: by which share of their equals' median.
        """
        return find_stragglers(self.data, more_than=more_than)

    def __str__(self) -> str:
        """Measured beside predicted, and who is slow, in at most 40 lines."""
        return self.why_not if self.recorded is None else str(_page().page(self.recorded))

    def __repr__(self) -> str:
        """One line."""
        if self.recorded is None:
            return "RecordedRun(nothing)"
        return f"RecordedRun({self.recorded.step}, {len(self.recorded.calls)} calls)"


def _page() -> ModuleType:
    return importlib.import_module("autopar.recording.page")
