"""The settings of `autopar launch` as data, and the size of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """The number of workers on this machine, and of devices of each; None takes the devices that there are."""

    processes: int
    devices: int | None = None

    def __str__(self) -> str:
        """Return the size in words: 4 workers with 2 devices each."""
        workers = f"{self.processes} worker{'s' if self.processes != 1 else ''}"
        if self.devices is None:
            return workers
        return f"{workers} with {self.devices} device{'s' if self.devices != 1 else ''} each"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a job, each with a supervisor of its own.

    Attributes:
        count: The number of machines.
        rank: The number of this machine.
        coordinator: HOST:PORT of the first worker of the first machine; None takes a free port of the loopback.
    """

    count: int = 1
    rank: int = 0
    coordinator: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The settings of a job.

    Attributes:
        command: The script of each worker and its arguments, as they follow `python -m autopar.launch.worker`: a path, or
            `-m` and a module.
        size: The size of the first attempt.
        size_file: A file with the size that the job has from now on. The supervisor reads it again and again.
        min_processes: The fewest workers with which the job goes on if workers are lost again and again; None: as many as before.
        max_restarts: The number of times that a failed job is started again.
        restart_pause_s: Seconds between a failure and the next start.
        grace_s: Seconds that workers have to save and end when the job is to stop or to change its size.
        silence_s: Seconds without a sign of a worker after which it counts as lost.
        stall_s: Seconds after which a step that stands still is named, and the job started again; None sets no limit.
        metrics: The file of each worker's metrics; `{rank}` in its name stands for the worker.
        faults: The faults to cause, in the notation of `autopar.testing.faults`.
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
