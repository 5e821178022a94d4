"""The name of a task: one kind of work of one pipeline stage.

A name is a value. Its text, such as `forward 2` or `update 0.1`, names executables and messages and is never read back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from autopar.schedules.tasks import TaskKind

WorkKind = TaskKind | Literal["prologue", "update"]
"""What a task does: work on one microbatch, or work that is done once per step, before the microbatches or after them."""
WORK_KINDS: tuple[WorkKind, ...] = ("prologue", "forward", "backward", "input_gradient", "weight_gradient", "update")
"""In the order in which a step does them."""


@functools.total_ordering
@dataclasses.dataclass(frozen=True)
class TaskName:
    """A kind of work of a stage; `level` orders the updates of all stages. Names are ordered as a step runs the tasks."""

    kind: WorkKind
    stage: int
    level: int = 0

    @property
    def loop_kind(self) -> TaskKind | None:
        """The kind of a task that runs for every microbatch; None for one that runs once per step."""
        return None if self.kind == "prologue" or self.kind == "update" else self.kind

    @property
    def in_loop(self) -> bool:
        """Whether the task runs for every microbatch."""
        return self.loop_kind is not None

    def __lt__(self, other: TaskName) -> bool:
        return self._place < other._place

    def __str__(self) -> str:
        """Such as `forward 2`; the level of an update follows a dot."""
        return f"{self.kind} {self.stage}" + (f".{self.level}" if self.kind == "update" else "")

    @property
    def _place(self) -> tuple[int, int, int]:
        return WORK_KINDS.index(self.kind), self.level, self.stage
