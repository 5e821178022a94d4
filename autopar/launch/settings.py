"""What `autopar launch` is asked for, as data, and the size of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """How many workers run on this machine, and how many devices each of them has; None: what it finds."""

    processes: int
    devices: int | None = None

    def __str__(self) -> str:
        """In words: 4 workers with 2 devices each."""
        workers = f"{self.processes} worker{'s' if self.processes != 1 else ''}"
        if self.devices is None:
            return workers
        return f"{workers} with {self.devices} device{'s' if self.devices != 1 else ''} each"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a job, each with a supervisor of its own.

    Attributes:
        count: How many.
        rank: Which of them this is.
        coordinator: HOST:PORT of the first worker of the first machine; None: a free port of this machine's loopback.
    """

    count: int = 1
    rank: int = 0
    coordinator: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """A job.

    Attributes:
        command: What each worker runs, after `python -m autopar.launch.worker`: a script's path, or `-m` and a module, and
            its arguments.
        size: Of the first attempt.
        size_file: A file whose content is the size that the job is to have from now on; it is looked at all the time.
        min_processes: Down to how many workers the job goes on if workers are lost again and again; None: as many as before.
        max_restarts: How often a job that failed is started again.
        restart_pause_s: Seconds between a failure and the next start.
        grace_s: Seconds that workers have to save and end when the job is to stop or to change its size.
        silence_s: Seconds without a sign of a worker after which it counts as lost.
        stall_s: Seconds after which a step that stands still is named, and the job started again; None: it is waited for.
        metrics: The file of each worker's metrics; `{rank}` in its name stands for the worker.
        faults: What is to go wrong, in the notation of `autopar.testing.faults`.
        nodes: The machines of the job.
    """

    command: tuple[str, ...]
    size: Size
    size_file: Path | None = None
    min_processes: int | None = None
    max_restarts: int = 10
    restart_pause_s: float = 1.0
    grace_s: float = 30.0
    silence_s: float = 30.0
    stall_s: float | None = None
    metrics: str | None = None
    faults: tuple[str, ...] = ()
    nodes: Nodes = field(default_factory=Nodes)
