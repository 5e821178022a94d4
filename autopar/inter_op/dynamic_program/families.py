"""Choices of stages that follow equal rules.

In: a `StageProblem` and what the user has decided. Out: its `Family`s, each with the numbers of stages that are left, what
a stage keeps in flight at each place, and the letters a and b of `choose_stages.py`. What can go wrong: a family in which
layers fit at the place that keeps least (`least_step_s` is finite) need have no choice that fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType

import numpy as np

from autopar.inter_op.dynamic_program.problem import CostTable, Manual, StageProblem
from autopar.inter_op.dynamic_program.recursion import TIE, Devices, Stages, quick
from autopar.inter_op.dynamic_program.submeshes import Submesh
from autopar.schedules.schedules import NAMED_SCHEDULES, most_in_flight, most_together


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Choices of equal rules: `counts` are the S in it, `slowest` their b(S), `fill` is a.

    `in_flight[S][r - 1]`: what the r-th stage from the end keeps. A mesh has `chunks`, each of which may have that part of the
    memory, and counts that part of the microbatches that all have in flight together. Stages that take more than `longest_s`
    per microbatch are left out.
    """

    problem: StageProblem
    manual: Manual
    counts: tuple[int, ...]
    in_flight: Mapping[int, tuple[float, ...]]
    fill: float
    slowest: tuple[float, ...]
    chunks: int = 1
    longest_s: float = math.inf

    @functools.cached_property
    def devices(self) -> Devices:
        """Of each option and of all; where all meshes are equal, 1 per chunk, and options of another size never fit."""
        if self.chunks == 1:
            return Devices(self.problem.sizes, self.problem.devices, self.problem.reach)
        chunks = self.counts[0]
        mesh_size = self.problem.devices // (chunks // self.chunks)
        sizes = tuple(1 if size == mesh_size else chunks + 1 for size in self.problem.sizes)
        return Devices(sizes, chunks, ((0, chunks),) * len(sizes))

    @property
    def is_possible(self) -> bool:
        """Whether there is a choice, memory aside."""
        is_open = np.stack([self.open_places(z).any(axis=2) for z in range(len(self.problem.options))])
        return math.isfinite(quick(np.where(is_open, self.problem.costs.seconds, np.inf), self.devices, np.add))

    @functools.cached_property
    def least_step_s(self) -> float:
        """Seconds that no choice takes less than; infinite if layers fit the memory in no stages at all.

        As if each stage were at the place that keeps least, and none waited for its microbatches to come back.
        """
        if math.isinf(self.least_sum_s):
            return math.inf
        slowest_s = quick(np.where(self._may_fit, self.problem.costs.seconds, np.inf), self.devices, np.maximum)
        return self.least_sum_s + min(self.slowest) * slowest_s

    @functools.cached_property
    def least_sum_s(self) -> float:
        """The part a sum t + sum c of that."""
        costs_s = self.fill * self.problem.costs.seconds + self.transfer_s
        return quick(np.where(self._may_fit, costs_s, np.inf), self.devices, np.add)

    @functools.cached_property
    def _may_fit(self) -> np.ndarray:
        """Booleans (option, k, j): whether a stage is quick enough, and fits the memory at the place that keeps least."""
        least = self._bytes((...,), min(self.least_in_flight()))
        seconds = self.problem.costs.seconds
        is_quick = np.isfinite(seconds) & (seconds <= self.longest_s)
        return np.asarray(is_quick & (least <= self.problem.memory_bytes) & self._spans.any(axis=2))

    def within(self, step_s: float) -> Family:
        """The same without stages that take longer than they may in a step of so many seconds."""
        b = min(self.slowest)
        if b <= 0 or math.isinf(step_s):
            return self
        longest_s = (step_s - (self.least_sum_s if self.longest_s < math.inf else 0.0)) / b * (1 + TIE)
        return dataclasses.replace(self, longest_s=longest_s)

    def least_in_flight(self) -> tuple[float, ...]:
        """What a stage keeps at least, r-th from the end of a choice of any S."""
        return tuple(
            min(self.in_flight[count][r] for count in self.counts if count > r) for r in range(max(self.counts))
        )

    @functools.cached_property
    def _spans(self) -> np.ndarray:
        """Booleans (k, j, r - 1): the layers that the r-th stage from the end may have, by the user's decisions."""
        layers, places = self.problem.layers, max(self.counts)
        spans = np.zeros((layers, layers + 1, places), bool)
        spans[:, layers, 0] = True
        spans[:, 1:layers, 1:] = True
        spans[0, :, [r for r in range(places) if r + 1 not in self.counts]] = False
        spans[1:, :, places - 1] = False
        if self.manual.cuts is not None:
            bounds = [0, *self.manual.cuts, layers]
            wanted = np.zeros((layers, layers + 1, 1), bool)
            wanted[bounds[:-1], bounds[1:]] = True
            spans &= wanted
        return spans & np.triu(np.ones((layers, layers + 1), bool), 1)[..., None]

    def open_places(self, option: int) -> np.ndarray:
        """Booleans (k, j, r - 1): whether there is a plan, and whether the user's decisions leave it."""
        return np.asarray(self._places_of(option) & np.isfinite(self.problem.costs.seconds[option])[..., None])

    def _places_of(self, option: int) -> np.ndarray:
        """The same if there are plans of all stages."""
        if self.manual.submeshes is None:
            return self._spans
        chosen = (self.manual.submeshes * self.chunks)[::-1]
        return np.asarray(self._spans & np.array([self.problem.options[option] == submesh for submesh in chosen]))

    def bytes(self, option: int, in_flight: Sequence[float]) -> np.ndarray:
        """Peak bytes per device (k, j, r - 1), as if all chunks of the mesh were like this one."""
        return self._bytes((option, ..., None), np.array(in_flight))

    def _bytes(self, where: tuple[int | list[int] | EllipsisType | None, ...], kept: np.ndarray | float) -> np.ndarray:
        costs = self.problem.costs
        working = costs.working_bytes[where] / self.chunks
        each = costs.weight_bytes[where] + costs.activation_bytes[where] * kept + working
        return np.asarray(np.maximum(each * self.chunks, costs.least_bytes[where]))

    @functools.cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Options of one submesh that differ in their seconds and bytes alone, such as with and without recomputation.

        Of those of a group that fit, the fastest is at least as good as the others.
        """
        costs, groups = self.problem.costs, dict[tuple[Submesh, bytes, bytes], list[int]]()
        for z, option in enumerate(self.problem.options):
            groups.setdefault((option, costs.once_s[z].tobytes(), costs.transfer_s[z].tobytes()), []).append(z)
        least_s = np.where(self._may_fit, costs.seconds, np.inf).min(axis=(1, 2), initial=np.inf)
        return tuple(tuple(group) for group in groups.values() if least_s[group].min() <= self.longest_s)

    @functools.cached_property
    def merged(self) -> Family:
        """The family as if each group of `alike` were the first of its options."""
        firsts = [group[0] for group in self.alike]
        costs = {field.name: getattr(self.problem.costs, field.name)[firsts] for field in dataclasses.fields(CostTable)}
        options = tuple(self.problem.options[z] for z in firsts)
        return dataclasses.replace(
            self, problem=dataclasses.replace(self.problem, options=options, costs=CostTable(**costs))
        )

    def least_s(self, in_flight: Sequence[float]) -> np.ndarray:
        """t (group of `alike`, k, j, r - 1) with this many microbatches in flight; infinite where nothing fits."""
        layers, seconds = self.problem.layers, self.problem.costs.seconds
        kept, rank = np.unique(np.array(in_flight), return_inverse=True)
        found = np.full((len(self.alike), layers, layers + 1, len(in_flight)), np.inf)
        for least, group in zip(found, self.alike, strict=True):
            fitting = dict(zip(group, self._count_fitting(group, kept), strict=True))
            for at, z in enumerate(group):
                if not any(self._is_better(other, z, fitting) for other in group[:at]):
                    here = np.where(rank < fitting[z][..., None], seconds[z][..., None], np.inf)
                    np.minimum(least, here, out=least)
            least[~self._places_of(group[0])[..., : len(in_flight)]] = np.inf
        return found

    def _is_better(self, one: int, other: int, fitting: Mapping[int, np.ndarray]) -> bool:
        """Whether all stages of one option take no more time than those of another, and fit wherever these do."""
        is_faster = self.problem.costs.seconds[one] <= self.problem.costs.seconds[other]
        return bool(np.all((fitting[other] == 0) | (is_faster & (fitting[one] >= fitting[other]))))

    def _count_fitting(self, options: Sequence[int], kept: np.ndarray) -> np.ndarray:
        """With how many of these numbers of microbatches in flight, ascending, a stage fits (option, k, j)."""
        where = (list(options),)
        fewest = np.zeros(self.problem.costs.seconds[where].shape, int)
        most = np.where(np.isfinite(self.problem.costs.seconds[where]), len(kept), 0)
        while (fewest < most).any():
            middle = (fewest + most) // 2
            fits = self._bytes(where, kept[np.minimum(middle, len(kept) - 1)]) <= self.problem.memory_bytes
            fewest, most = np.where(fits & (fewest < most), middle + 1, fewest), np.where(fits, most, middle)
        return fewest

    def options_of(self, stages: Stages, in_flight: Sequence[float]) -> Stages:
        """Stages of groups of `alike`, each with the first option of its group that fits its place and is fastest."""
        seconds, limit = self.problem.costs.seconds, self.problem.memory_bytes
        found = []
        for kept, (i, j, group) in zip(reversed(in_flight[: len(stages)]), stages, strict=True):
            left = [z for z in self.alike[group] if self._bytes((z, i, j), kept) <= limit]
            found.append((i, j, min(left, key=lambda z: float(seconds[z, i, j]))))
        return tuple(found)

    def periods(self, stage_s: np.ndarray, sent_s: np.ndarray, in_flight: Sequence[float]) -> np.ndarray:
        """u, seconds from one microbatch to the next, of t and c; see `choose_stages.py`. The last axis is r - 1."""
        if self.chunks > 1 or not NAMED_SCHEDULES[self.problem.schedule].trains:
            return stage_s
        place, is_split = np.arange(1, len(in_flight) + 1), NAMED_SCHEDULES[self.problem.schedule].is_split
        work, flying = ((2 * place + 1) / 3, place) if is_split else (place, np.array(in_flight))
        round_trip_s = (work * stage_s + (place - 1) * sent_s) / flying
        return np.asarray(np.where(flying < self.problem.microbatches, np.maximum(stage_s, round_trip_s), stage_s))

    @property
    def transfer_s(self) -> np.ndarray:
        """c (option, k, j); the last stage sends nothing."""
        return np.where(np.arange(self.problem.layers + 1) < self.problem.layers, self.problem.costs.transfer_s, 0)


def families_of(problem: StageProblem, manual: Manual) -> Iterator[Family]:
    """All families that the user's decisions leave; one stage first. Interleaved meshes are equal: unlike nodes have none."""
    family = functools.partial(Family, problem=problem, manual=manual)
    batches, chunks = problem.microbatches, problem.virtual_stages
    most = min(problem.layers, problem.devices // min(problem.sizes))

    def is_left(meshes: int, stages: int) -> bool:
        return (
            stages <= most * chunks
            and stages <= problem.layers
            and manual.num_stages in (None, meshes)
            and (manual.cuts is None or len(manual.cuts) + 1 == stages)
            and (manual.submeshes is None or len(manual.submeshes) == meshes)
        )

    if is_left(1, 1):
        yield family(counts=(1,), in_flight={1: (1,)}, fill=1.0, slowest=(batches - 1.0,))
    counts = tuple(p for p in range(2, most + 1) if is_left(p, p * chunks))
    schedule = NAMED_SCHEDULES[problem.schedule]

    def in_flight_of(meshes: int) -> tuple[float, ...]:
        sizes = {"num_meshes": meshes, "num_microbatches": batches, "virtual_stages": chunks}
        if chunks == 1:
            return most_in_flight(problem.schedule, **sizes)[::-1]
        return tuple(count / chunks for count in most_together(problem.schedule, **sizes))[::-1] * chunks

    if schedule.interleaves:
        for p in counts if not problem.parts else ():
            if problem.devices % p == 0 and batches % p == 0:
                yield family(
                    counts=(p * chunks,),
                    in_flight={p * chunks: in_flight_of(p)},
                    fill=1 / chunks,
                    slowest=(chunks * batches - 1.0,),
                    chunks=chunks,
                )
    elif counts:
        split = schedule.is_split
        yield family(
            counts=counts,
            in_flight={p: in_flight_of(p) for p in counts},
            fill=1 / 3 if split else 1.0,
            slowest=tuple(batches - 1 / 3 + max(0, p - batches) / 3 if split else batches - 1.0 for p in counts),
        )
