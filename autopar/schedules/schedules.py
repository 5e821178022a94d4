"""The named schedules: what each is called, in which order its meshes work, and what the planner has to know of it.

A new schedule is one entry of `NAMED_SCHEDULES`, its name in `ScheduleName`, in `autopar/files/plan.schema.json` and in the
docstring of `autopar.parallelize`, and a function that yields the tasks of one mesh in order. Everything else asks the entry:
whether the schedule trains, whether a search compares it, how many chunks it may have. `tests/schedules/test_schedules.py` draws
it into `tests/golden/schedules.txt` and checks that it is complete and free of deadlock, and that the entry's facts are those
that counting gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np

from autopar.errors import ScheduleError
from autopar.schedules.tasks import Schedule, Task

ScheduleName = Literal["1f1b", "eager-1f1b", "gpipe", "inference", "interleaved", "zb-h1"]
Open: TypeAlias = Literal["auto"] | int
"""A number that the user gave, or "auto" where the planner chooses."""
Recompute: TypeAlias = Literal["auto", "none", "layer", "named"]
"""What the backward pass recomputes: what the planner decides, nothing, or the forward work of each layer or stage.

"named": all of that but the values that `jax.ad_checkpoint.checkpoint_name` names.
"""


@dataclass(frozen=True)
class _Shape:
    """p meshes, m microbatches, v chunks per mesh."""

    p: int
    m: int
    v: int


@dataclass(frozen=True, kw_only=True)
class NamedSchedule:
    """What is known of a schedule by its name.

    Attributes:
        row: Yields the tasks of one mesh in the order in which the mesh runs them.
        in_flight: For each stage, the most microbatches of which it keeps residuals at once: what
            `autopar.schedules.in_flight.microbatches_in_flight` counts, without the tasks.
        together: For each mesh, the most of which its stages keep residuals at once, if that is fewer than they add up to.
        is_split: The backward is in two tasks, the input gradient and the weight gradient.
        chunks: How many chunks a mesh may have: only one, two or more, or any number.
        trains: It has a backward.
        is_compared: A search for the fastest schedule compares it.
        keeps_least: No other schedule of as many stages keeps residuals of fewer microbatches. A stage that is too large for
            the memory does not fit under another one either.
    """

    row: Callable[[_Shape, int], Iterator[Task]]
    in_flight: Callable[[_Shape], Sequence[int]]
    together: Callable[[_Shape], Sequence[int]] | None = None
    is_split: bool = False
    chunks: Literal["one", "several", "any"] = "one"
    trains: bool = True
    is_compared: bool = True
    keeps_least: bool = False

    @property
    def fewest_chunks(self) -> int:
        """The least number of chunks that a mesh may have."""
        return 2 if self.interleaves else 1

    @property
    def interleaves(self) -> bool:
        """Whether microbatches go round the meshes in groups of as many as there are meshes, once for each chunk."""
        return self.chunks == "several"


def make_schedule(name: str, *, num_meshes: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Make the named schedule.

    Args:
        name: "gpipe": all forwards, then all backwards. "1f1b": backwards as early as possible, at most p microbatches in
            flight. "interleaved": 1F1B over v chunks per mesh, whose bubble is v times smaller. "zb-h1": 1F1B whose backward
            is split, so that weight gradients fill the bubble (Qi et al., Zero Bubble Pipeline Parallelism, 2023).
            "eager-1f1b": 1F1B with twice the forwards before the first backward, so that transfers hide behind compute; at most
            2p - 1 microbatches in flight (Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023).
            "inference": forwards only.
        num_meshes: p.
        num_microbatches: m.
        virtual_stages: v, the chunks per mesh.

    Raises:
        ScheduleError: Everything that is wrong with the arguments, in one message.
    """
    _check_arguments(name, num_meshes=num_meshes, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    row, shape = _find(name).row, _Shape(num_meshes, num_microbatches, virtual_stages)
    return Schedule(
        name=name,
        num_meshes=num_meshes,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        rows=tuple(tuple(row(shape, mesh)) for mesh in range(num_meshes)),
    )


def most_in_flight(
    name: ScheduleName, *, num_meshes: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """For each stage of the named schedule, the most microbatches of which it keeps residuals at once."""
    return tuple(NAMED_SCHEDULES[name].in_flight(_Shape(num_meshes, num_microbatches, virtual_stages)))


def most_together(
    name: ScheduleName, *, num_meshes: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """For each mesh of the named schedule, the most microbatches of which all its stages keep residuals at once.

    One that two stages of the mesh keep counts twice.
    """
    shape, known = _Shape(num_meshes, num_microbatches, virtual_stages), NAMED_SCHEDULES[name]
    if known.together is not None:
        return tuple(known.together(shape))
    counts = known.in_flight(shape)
    return tuple(sum(counts[mesh::num_meshes]) for mesh in range(num_meshes))


def _gpipe(shape: _Shape, mesh: int) -> Iterator[Task]:
    stages = range(mesh, shape.p * shape.v, shape.p)
    for stage in stages:
        yield from (Task("forward", stage, k) for k in range(shape.m))
    for stage in reversed(stages):
        yield from (Task("backward", stage, k) for k in range(shape.m))


def _inference(shape: _Shape, mesh: int) -> Iterator[Task]:
    """A mesh takes p microbatches through all its chunks, then the next p, so that it keeps few activations."""
    for first in range(0, shape.m, shape.p):
        for stage in range(mesh, shape.p * shape.v, shape.p):
            yield from (Task("forward", stage, k) for k in range(first, min(first + shape.p, shape.m)))


def _one_f_one_b(shape: _Shape, mesh: int) -> Iterator[Task]:
    """Mesh i starts with as many forwards as there are meshes behind it, then alternates, then drains."""
    return _alternate(shape, mesh, warm_up=shape.p - 1 - mesh)


def _eager_one_f_one_b(shape: _Shape, mesh: int) -> Iterator[Task]:
    """1F1B that starts with two forwards, not one, for each mesh behind it.

    From a forward to the backward of the same microbatch a mesh then has a task more to run for each mesh behind it, and
    between two of these lies a transfer there and one back. They are hidden while the two together take no longer than a
    forward and a backward.
    """
    return _alternate(shape, mesh, warm_up=2 * (shape.p - 1 - mesh))


def _alternate(shape: _Shape, mesh: int, *, warm_up: int) -> Iterator[Task]:
    """So many forwards, then a forward and a backward by turns, then the backwards that are left."""
    warm_up = min(warm_up, shape.m)
    yield from (Task("forward", mesh, k) for k in range(warm_up))
    for k in range(shape.m):
        if k + warm_up < shape.m:
            yield Task("forward", mesh, k + warm_up)
        yield Task("backward", mesh, k)


def _zb_h1(shape: _Shape, mesh: int) -> Iterator[Task]:
    """1F1B whose mesh i delays weight gradients by i microbatches.

    Cotangents then reach the first meshes earlier, and the delayed work fills the time at the end in which 1F1B waits.
    No mesh keeps more than p microbatches, as many as the first mesh of 1F1B.
    With m >= p the bubble is (p - 1)(tF + tB - min(tF, tB, tW)); the paper gives it for the usual case, tW the shortest.
    """
    warm_up = min(shape.p - 1 - mesh, shape.m)
    yield from (Task("forward", mesh, k) for k in range(warm_up))
    for k in range(shape.m):
        if k + warm_up < shape.m:
            yield Task("forward", mesh, k + warm_up)
        yield Task("input_gradient", mesh, k)
        if k >= mesh:
            yield Task("weight_gradient", mesh, k - mesh)
    yield from (Task("weight_gradient", mesh, k) for k in range(max(0, shape.m - mesh), shape.m))


def _interleaved(shape: _Shape, mesh: int) -> Iterator[Task]:
    """1F1B over chunks: p microbatches go through chunk 0 of all meshes, then the same through chunk 1, and so on.

    Warm-up of mesh i: 2 (p - 1 - i) + (v - 1) p forwards (Narayanan et al., Efficient Large-Scale Language Model
    Training, 2021).
    """
    total, warm_up = shape.m * shape.v, _warm_up(shape, mesh)
    yield from (Task("forward", *_chunk(shape, mesh, number=n)) for n in range(warm_up))
    for n in range(total):
        if n + warm_up < total:
            yield Task("forward", *_chunk(shape, mesh, number=n + warm_up))
        stage, k = _chunk(shape, mesh, number=n)
        yield Task("backward", 2 * mesh + (shape.v - 1) * shape.p - stage, k)


def _warm_up(shape: _Shape, mesh: int) -> int:
    """Forwards of a mesh before its first backward and the forward that goes with that, under interleaving."""
    return min(shape.m * shape.v, 2 * (shape.p - 1 - mesh) + (shape.v - 1) * shape.p)


def _chunk(shape: _Shape, mesh: int, *, number: int) -> tuple[int, int]:
    """Stage and microbatch of a mesh's `number`-th forward under interleaving."""
    round_, within = divmod(number, shape.p * shape.v)
    chunk, k = divmod(within, shape.p)
    return chunk * shape.p + mesh, round_ * shape.p + k


def _interleaved_in_flight(shape: _Shape) -> list[int]:
    """Counts the forwards that a mesh has begun and the backwards that it has ended, turn by turn, for each of its chunks."""
    total = shape.m * shape.v
    chunk_of = np.arange(total) % (shape.p * shape.v) // shape.p
    kept = np.zeros((shape.v, shape.p), int)
    for mesh in range(shape.p):
        begun_by = np.minimum(np.arange(total) + _warm_up(shape, mesh) + 1, total)
        for chunk in range(shape.v):
            begun = np.concatenate([[0], np.cumsum(chunk_of == chunk)])
            ended = np.concatenate([[0], np.cumsum(chunk_of == shape.v - 1 - chunk)])
            kept[chunk, mesh] = np.max(begun[begun_by] - ended[:total])
    return [int(count) for count in kept.ravel()]


def _interleaved_together(shape: _Shape) -> list[int]:
    return [min(shape.m * shape.v, _warm_up(shape, mesh) + 1) for mesh in range(shape.p)]


NAMED_SCHEDULES: Mapping[ScheduleName, NamedSchedule] = {
    "1f1b": NamedSchedule(
        row=_one_f_one_b, in_flight=lambda s: [min(s.m, s.p - mesh) for mesh in range(s.p)], keeps_least=True
    ),
    "eager-1f1b": NamedSchedule(
        row=_eager_one_f_one_b, in_flight=lambda s: [min(s.m, 2 * (s.p - mesh) - 1) for mesh in range(s.p)]
    ),
    "gpipe": NamedSchedule(row=_gpipe, in_flight=lambda s: [s.m] * s.p * s.v, chunks="any", is_compared=False),
    "inference": NamedSchedule(
        row=_inference,
        in_flight=lambda s: [1] * s.p * s.v,
        together=lambda s: [1] * s.p,
        chunks="any",
        trains=False,
        keeps_least=True,
    ),
    "interleaved": NamedSchedule(
        row=_interleaved, in_flight=_interleaved_in_flight, together=_interleaved_together, chunks="several"
    ),
    "zb-h1": NamedSchedule(row=_zb_h1, in_flight=lambda s: [min(s.p, s.m)] * s.p, is_split=True),
}
SCHEDULES: tuple[ScheduleName, ...] = tuple(NAMED_SCHEDULES)
"""The names that `make_schedule` knows."""
TRAINING: tuple[ScheduleName, ...] = tuple(name for name, known in NAMED_SCHEDULES.items() if known.trains)
"""Those with a backward."""


def interleaves(name: str) -> bool:
    """Whether the schedule of this name interleaves the chunks of a mesh; False for "auto", which leaves it open."""
    known = NAMED_SCHEDULES.get(cast(ScheduleName, name))
    return known is not None and known.interleaves


def keeps_least(name: str) -> bool:
    """Whether no other schedule of as many stages keeps residuals of fewer microbatches than the one of this name."""
    known = NAMED_SCHEDULES.get(cast(ScheduleName, name))
    return known is not None and known.keeps_least


def _find(name: str) -> NamedSchedule:
    return next(known for key, known in NAMED_SCHEDULES.items() if key == name)


def _check_arguments(name: str, *, num_meshes: int, num_microbatches: int, virtual_stages: int) -> None:
    counts = {"num_meshes": num_meshes, "num_microbatches": num_microbatches, "virtual_stages": virtual_stages}
    wrong = [f"{argument}={count}: must be at least 1" for argument, count in counts.items() if count < 1]
    if name not in SCHEDULES:
        wrong.append(f"schedule {name!r} is unknown; there are {', '.join(map(repr, sorted(SCHEDULES)))}")
    elif _find(name).chunks == "one" and virtual_stages > 1:
        wrong.append(
            f"schedule {name!r} runs one stage per mesh: virtual_stages={virtual_stages} is for 'interleaved'; use that, or "
            "virtual_stages=1"
        )
    elif interleaves(name) and virtual_stages == 1:
        wrong.append(f"schedule {name!r} with virtual_stages=1 has nothing to interleave; use '1f1b', or two or more")
    if interleaves(name) and num_meshes > 0 and num_microbatches % num_meshes:
        below = num_microbatches // num_meshes * num_meshes
        either = f"{below} or {below + num_meshes}" if below else f"{num_meshes}"
        wrong.append(
            f"schedule {name!r} sends microbatches round {num_meshes} meshes in groups of {num_meshes}, and "
            f"num_microbatches={num_microbatches} does not divide; use {either} microbatches, or '1f1b' with any number"
        )
    if wrong:
        raise ScheduleError("This pipeline schedule does not exist:\n" + "\n".join(f"  - {line}" for line in wrong))
