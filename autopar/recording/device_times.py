"""How one device spends a call: computing, in collectives that nothing hides, waiting.

In: the executions of operations on each device. Out: `DeviceTimes`, whose parts add up to the call. At each moment a device

    computes        if an operation of compute runs on it
    communicates    if none does and a collective runs
    is idle         otherwise

What ranks of a group do in one collective comes apart into waiting, until the last of them has come, and exchanging, from then
on. What can go wrong: ranks that other processes have are not seen; such a collective is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence

from autopar.recording.recorded import ProgramOperation, Recorded, RecordedOperation

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """Seconds of one device in one call, from the first operation of any device to the last.

    `mesh` is the number of its mesh, and `device` its place there.
    """

    mesh: int
    device: int
    compute_s: float
    exposed_s: float
    hidden_s: float
    idle_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRun:
    """One execution of a collective in one group of devices.

    Attributes:
        operation: which.
        devices: of the group.
        seconds: the mean over the devices.
        exchange_s: from when the last device came until the last one left.
        waited_s: how long each device waited for the last one.
    """

    operation: ProgramOperation
    devices: tuple[int, ...]
    seconds: float
    exchange_s: float
    waited_s: tuple[float, ...]


def device_times(recorded: Recorded, call: int, *, stage: int | None = None) -> list[DeviceTimes]:
    """The times of every device in a call, by its mesh and place; of one stage alone if it is given."""
    operations = [
        one for one in recorded.operations if one.call == call and (stage is None or recorded.stage(one) == stage)
    ]
    if not operations:
        return []
    first, last = min(one.start_s for one in operations), max(one.end_s for one in operations)
    by_device: dict[tuple[int, int], list[RecordedOperation]] = {}
    for one in operations:
        by_device.setdefault((recorded.mesh(one), one.device), []).append(one)
    found = []
    for (mesh, device), own in sorted(by_device.items()):
        compute = _union(_intervals(own, recorded, is_collective=False))
        communication = _union(_intervals(own, recorded, is_collective=True))
        both_s = _length(_union([*compute, *communication]))
        compute_s, communication_s = _length(compute), _length(communication)
        found.append(
            DeviceTimes(
                mesh=mesh,
                device=device,
                compute_s=compute_s,
                exposed_s=both_s - compute_s,
                hidden_s=compute_s + communication_s - both_s,
                idle_s=last - first - both_s,
            )
        )
    return found


def collective_runs(recorded: Recorded, call: int, *, stage: int | None = None) -> list[CollectiveRun]:
    """Every execution of a collective in a call, group by group; of one stage alone if it is given."""
    executions: dict[tuple[str, int | None, str], dict[int, list[RecordedOperation]]] = {}
    for one in sorted(recorded.operations, key=lambda one: one.start_s):
        if one.call != call or (stage is not None and recorded.stage(one) != stage):
            continue
        if recorded.operation(one).collective:
            by_device = executions.setdefault((one.task, one.microbatch, one.name), {})
            by_device.setdefault(one.device, []).append(one)
    found = []
    for by_device in executions.values():
        operation = recorded.operation(next(iter(by_device.values()))[0])
        for group in operation.groups:
            rows = [by_device.get(device, []) for device in group]
            found += [_run(operation, group, ranks) for ranks in zip(*rows, strict=False)]
    return found


def _run(operation: ProgramOperation, group: Sequence[int], ranks: Sequence[RecordedOperation]) -> CollectiveRun:
    came = max(one.start_s for one in ranks)
    return CollectiveRun(
        operation=operation,
        devices=tuple(group),
        seconds=statistics.fmean(one.seconds for one in ranks),
        exchange_s=max(0.0, max(one.end_s for one in ranks) - came),
        waited_s=tuple(min(came, one.end_s) - one.start_s for one in ranks),
    )


def _intervals(operations: Sequence[RecordedOperation], recorded: Recorded, *, is_collective: bool) -> list[Interval]:
    return [(one.start_s, one.end_s) for one in operations if bool(recorded.operation(one).collective) == is_collective]


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same moments in intervals that do not touch."""
    return list(_merged(sorted(intervals)))


def _merged(intervals: Sequence[Interval]) -> Iterator[Interval]:
    if not intervals:
        return
    start, end = intervals[0]
    for begin, stop in itertools.islice(intervals, 1, None):
        if begin > end:
            yield start, end
            start, end = begin, stop
        end = max(end, stop)
    yield start, end


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)
