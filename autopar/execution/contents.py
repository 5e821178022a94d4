"""The contents of the runtime's slots, as frozen values. Their texts are the names of the slots.

The runtime knows a slot only by its name, and prints the name in instructions and timelines. No code reads a name back.
"""

from __future__ import annotations

import dataclasses

from autopar.program.task_name import TaskName


@dataclasses.dataclass(frozen=True)
class Made:
    """Arrays that a task of the pipeline makes."""

    task: TaskName

    def __str__(self) -> str:
        """Return the name of the task."""
        return str(self.task)


@dataclasses.dataclass(frozen=True)
class Given:
    """Arrays that the caller passes in once per step, on the mesh of the tasks that read them."""

    def __str__(self) -> str:
        """Return the name of the source."""
        return "given"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays that the caller passes in for every microbatch: its part of the batch, and its number."""

    def __str__(self) -> str:
        """Return the name of the source."""
        return "rows"


@dataclasses.dataclass(frozen=True)
class Lent:
    """Arrays that the caller passes in on the mesh of another stage, where they live."""

    stage: int

    def __str__(self) -> str:
        """Return the stage where they live, in words."""
        return f"lent by {self.stage}"


Source = Made | Given | Rows | Lent
"""The source of arrays."""


@dataclasses.dataclass(frozen=True)
class Passed:
    """Arrays of one source that the same tasks read."""

    source: Source
    readers: tuple[TaskName, ...]

    def __str__(self) -> str:
        """Return the source and the readers, in words."""
        return f"{self.source} > {', '.join(map(str, self.readers))}"


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the microbatches, which a task accumulates."""

    task: TaskName

    def __str__(self) -> str:
        """Return the task whose sums these are, in words."""
        return f"sums of {self.task}"


@dataclasses.dataclass(frozen=True)
class Results:
    """Arrays that a task returns to the caller."""

    task: TaskName

    def __str__(self) -> str:
        """Return the task whose results these are, in words."""
        return f"results of {self.task}"


Content = Passed | Sums | Results
"""The content of a slot."""
