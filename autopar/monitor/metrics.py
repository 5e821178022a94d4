"""The metrics of a step, and where they go: a callback, a file of JSON lines, TensorBoard.

What can go wrong: the file cannot be written any more. That ends no training (`autopar/files/line_log.py`).
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
    """What one call of a step took, in seconds and bytes.

    Attributes:
        name: the step's.
        call: which call of any step of this process it was, from 1.
        step_s: from its beginning, or from the end of the call before it if that was later, until its results were there.
        call_s: how long the call itself took, which goes on before the results are there.
        predicted_s: what the plan predicts for `step_s`.
        exposed_comm_s: communication that compute does not hide. On one mesh what the plan predicts, a part of `predicted_s`. In
            stages what was measured, if this call was: the longest that a mesh waited for transfers under way.
        device_bytes: in use on the fullest device of this process; None where the device does not say, as on CPUs.
        device_peak_bytes: the most that has been in use on it.
        host_bytes: resident memory of this process; None without `/proc`.
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
    """The metrics of a call that has just ended."""
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
    """Resident memory of this process."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class JsonLines:
    """A file with a line for each step; lines are added to those that are there."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ArgumentError if that cannot be done."""
        self._log = LineLog(path)

    def __call__(self, metrics: StepMetrics) -> None:
        """Add a line, with the time of day."""
        known = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        self._log.add(json.dumps({"time": round(time.time(), 3), **known}))

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """A number of a step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """A folder for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Begin to write. Raises ArgumentError without a package that writes for TensorBoard."""
        self._writer = _find_writer(folder)

    def __call__(self, metrics: StepMetrics) -> None:
        """Add a step's numbers."""
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
