"""The metrics of a step, and their destinations: a callback, a file of JSON lines, TensorBoard.

What can go wrong: the file can no longer be written. Training goes on (`autopar/files/line_log.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import jax

from autopar.errors import ArgumentError
from autopar.events import StepRun
from autopar.files.line_log import LineLog
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.schedules.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The time and the memory of one call of a step, in seconds and bytes.

    Attributes:
        name: the name of the step.
        call: the number of the call among all calls of steps in this process, from 1.
        step_s: seconds from the start of the call, or from the end of the call before if that is later, until the results exist.
        call_s: seconds until the call returned, which may be before its results exist.
        predicted_s: the plan's prediction of `step_s`.
        exposed_comm_s: seconds of communication that compute does not hide. On one mesh this is the plan's prediction, a part of
            `predicted_s`. In stages it is measured: the longest time that a mesh waited for transfers. None if this call was
            not measured.
        device_bytes: bytes in use on the fullest device of this process; None if the device does not report them, as on CPUs.
        device_peak_bytes: the most bytes that have been in use on that device.
        host_bytes: bytes of resident memory of this process; None without `/proc`.
    """

    name: str
    call: int
    step_s: float
    call_s: float
    predicted_s: float | None
    exposed_comm_s: float | None
    device_bytes: int | None
    device_peak_bytes: int | None
    host_bytes: int | None


Sink: TypeAlias = Callable[[StepMetrics], None]


def measure(run: StepRun, *, call: int, step_s: float, call_s: float) -> StepMetrics:
    """Measure a call that has just ended."""
    plan = run.plan
    stats = [found for device in jax.local_devices() if (found := device.memory_stats()) is not None]
    return StepMetrics(
        name=run.name,
        call=call,
        step_s=step_s,
        call_s=call_s,
        predicted_s=plan.step_s if isinstance(plan, Plan | PipelinePlan) else None,
        exposed_comm_s=_exposed_comm_s(run),
        device_bytes=max((one.get("bytes_in_use", 0) for one in stats), default=None),
        device_peak_bytes=max((one.get("peak_bytes_in_use", 0) for one in stats), default=None),
        host_bytes=host_bytes(),
    )


def _exposed_comm_s(run: StepRun) -> float | None:
    if isinstance(run.plan, Plan):
        return run.plan.comm_s - run.plan.hidden_s
    if isinstance(run.timeline, Timeline):
        return max(run.timeline.exposed_s(mesh) for mesh in range(run.timeline.num_meshes))
    return None


def host_bytes() -> int | None:
    """Return the bytes of resident memory of this process; None without `/proc`."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class JsonLines:
    """A file with a line of JSON for each step. New lines are appended."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ArgumentError if it cannot be opened."""
        self._log = LineLog(path)

    def __call__(self, metrics: StepMetrics) -> None:
        """Append a line with the time of day."""
        known = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        self._log.add(json.dumps({"time": round(time.time(), 3), **known}))

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number of a step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """A folder that TensorBoard reads."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises ArgumentError if no package that writes for TensorBoard is installed."""
        self._writer = _find_writer(folder)

    def __call__(self, metrics: StepMetrics) -> None:
        """Write the numbers of a step."""
        for name, value in dataclasses.asdict(metrics).items():
            if isinstance(value, float | int) and name != "call":
                self._writer.add_scalar(f"{metrics.name}/{name}", value, metrics.call)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _find_writer(folder: Path) -> _Writer:
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            writer: _Writer = importlib.import_module(module).SummaryWriter(str(folder))
        except ImportError:
            continue
        return writer
    raise ArgumentError("tensorboard= needs a package that writes for it: `pip install tensorboardX`, or PyTorch")
