"""What a slot of the runtime holds, as values; their texts are the names of the slots.

The runtime knows a slot by its name alone, which it prints in instructions and timelines. Names are never read back.
"""

from __future__ import annotations

import dataclasses

from autopar.program.task_name import TaskName


@dataclasses.dataclass(frozen=True)
class Made:
    """A task of the pipeline makes the arrays."""

    task: TaskName

    def __str__(self) -> str:
        """The name of the task."""
        return str(self.task)


@dataclasses.dataclass(frozen=True)
class Given:
    """The caller hands in the arrays, once per step, on the mesh of the tasks that read them."""

    def __str__(self) -> str:
        """One word."""
        return "given"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The caller hands in the arrays of every microbatch: its part of the batch, and its number."""

    def __str__(self) -> str:
        """One word."""
        return "rows"


@dataclasses.dataclass(frozen=True)
class Lent:
    """The caller hands in the arrays on the mesh of another stage, where they live."""

    stage: int

    def __str__(self) -> str:
        """The stage where they live."""
        return f"lent by {self.stage}"


Source = Made | Given | Rows | Lent
"""Where arrays come from."""


@dataclasses.dataclass(frozen=True)
class Passed:
    """Arrays of one source that the same tasks read."""

    source: Source
    readers: tuple[TaskName, ...]

    def __str__(self) -> str:
        """Where they come from and who reads them."""
        return f"{self.source} > {', '.join(map(str, self.readers))}"


@dataclasses.dataclass(frozen=True)
class Sums:
    """What a task adds up over the microbatches."""

    task: TaskName

    def __str__(self) -> str:
        """Whose sums they are."""
        return f"sums of {self.task}"


@dataclasses.dataclass(frozen=True)
class Results:
    """What a task returns to the caller."""

    task: TaskName

    def __str__(self) -> str:
        """Whose results they are."""
        return f"results of {self.task}"


Content = Passed | Sums | Results
"""What a slot holds."""
