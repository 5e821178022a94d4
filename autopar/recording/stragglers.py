"""Who takes longer than its equals.

In: a recording. Out: `Straggler`s. Equals are

    devices of one mesh    by what they compute in a call: all run one program on shards of one size
    meshes of a pipeline   by the time of their tasks over what the plan says of them
    tasks                  by the other microbatches of the same stage and kind, if these are two or more

and each is held against the median of the others. What can go wrong: shards that are not of one size, such as the last of a
dimension that does not divide; and on devices that share cores, other programs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.device_times import device_times
from autopar.recording.recorded import TASKS, Recorded, RecordedSpan

MORE_THAN = 0.2
"""The share of its equals' median by which something takes longer, from which on it is named."""
_FEWEST_TASKS = 3
"""Of two, nobody knows which is the slow one."""
_SHORTEST_S = 20e-6
"""Differences of fewer seconds than this say nothing: clocks and threads take as long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """Something slow.

    Attributes:
        kind: `device`, `mesh` or `task`.
        what: which, in words.
        seconds: what it takes; of a mesh in a step, of a device in a call.
        equals_s: the median of its equals; of a mesh, what its work would take at the pace of the others.
    """

    kind: str
    what: str
    seconds: float
    equals_s: float

    @property
    def excess(self) -> float:
        """The share of its equals' median by which it takes longer."""
        return self.seconds / self.equals_s - 1

    def __str__(self) -> str:
        """One sentence without a full stop."""
        than = "as much work takes on the others" if self.kind == "mesh" else "the median of its equals"
        took, expected = seconds_text(self.seconds), seconds_text(self.equals_s)
        return f"{self.what} takes {took}, {self.excess:.0%} longer than {than}, {expected}"


def find_stragglers(recorded: Recorded, *, more_than: float = MORE_THAN) -> tuple[Straggler, ...]:
    """Everything that takes longer than its equals by more than a share of their median, the worst first."""
    found = [*_devices(recorded), *_meshes(recorded), *_tasks(recorded)]
    slow = [
        one for one in found if one.equals_s > 0 and one.excess > more_than and one.seconds - one.equals_s > _SHORTEST_S
    ]
    return tuple(sorted(slow, key=lambda one: one.equals_s - one.seconds))


def _devices(recorded: Recorded) -> Iterator[Straggler]:
    total: dict[int, dict[int, list[float]]] = {}
    for call in recorded.detailed:
        for one in device_times(recorded, call):
            total.setdefault(one.mesh, {}).setdefault(one.device, []).append(one.compute_s)
    in_stages = isinstance(recorded.plan, PipelinePlan)
    for mesh, by_device in total.items():
        seconds = {device: statistics.median(values) for device, values in by_device.items()}
        where = f" of mesh {mesh}" if in_stages else ""
        for device, others_s in _each_beside_others(seconds):
            yield Straggler(
                kind="device",
                what=f"the compute of device {device}{where}",
                seconds=seconds[device],
                equals_s=others_s,
            )


def _meshes(recorded: Recorded) -> Iterator[Straggler]:
    """A mesh takes what its tasks take; its equals, what the others would take if they had its work."""
    plan = recorded.plan
    if not isinstance(plan, PipelinePlan) or not recorded.spans:
        return
    m = plan.num_microbatches
    predicted: dict[int, float] = {}
    for stage in plan.stages:
        predicted[stage.mesh] = predicted.get(stage.mesh, 0.0) + m * (stage.forward_s + stage.backward_s)
    tasks = [span for span in recorded.spans if span.kind in TASKS]
    measured = {
        mesh: sum(span.seconds for span in tasks if span.mesh == mesh) / len(recorded.detailed) for mesh in predicted
    }
    ratios = {mesh: measured[mesh] / predicted[mesh] for mesh in predicted if predicted[mesh]}
    for mesh, others in _each_beside_others(ratios):
        yield Straggler(
            kind="mesh",
            what=f"the work of mesh {mesh}",
            seconds=measured[mesh],
            equals_s=predicted[mesh] * others,
        )


def _tasks(recorded: Recorded) -> Iterator[Straggler]:
    alike: dict[tuple[int, int | None, str], list[RecordedSpan]] = {}
    for span in recorded.spans:
        if span.kind in TASKS:
            alike.setdefault((span.call, span.stage, span.kind), []).append(span)
    for spans in alike.values():
        by_number = dict(enumerate(spans))
        seconds = {number: span.seconds for number, span in by_number.items()}
        for number, others_s in _each_beside_others(seconds) if len(seconds) >= _FEWEST_TASKS else ():
            span = by_number[number]
            yield Straggler(
                kind="task",
                what=f"the {span.kind.replace('_', ' ')} of microbatch {span.microbatch} in stage {span.stage}",
                seconds=span.seconds,
                equals_s=others_s,
            )


def _each_beside_others(values: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Each number with the median of the others, if there are any."""
    for number in values:
        others: Sequence[float] = [value for other, value in values.items() if other != number]
        if others:
            yield number, statistics.median(others)
