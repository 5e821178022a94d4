"""The inter-operator dynamic program: layers to stages, stages to submeshes.

In: a `StageProblem`: what layers i..j-1 cost on each submesh that may be used, the cluster, the microbatches, the schedule.
Out: a `StageChoice`: the stages in order, their submeshes, the predicted seconds of a step. Letters: B microbatches, S stages,
t seconds of a stage per microbatch (forward and backward), c of the transfer to the next stage and back (all but the first are
hidden), o its seconds once per step (reduction of gradients, update; all stages do theirs at the same time, so the slowest
counts), n its devices, D all. Then

    T = a sum t + sum c + b(S) max t + max o

              gpipe, 1f1b, inference   a = 1    b = B - 1
              interleaved, v chunks    a = 1/v  b = v B - 1     a "stage" is a chunk, S = p v, all meshes equal, p divides B
              zb-h1                    a = 1/3  b = B - 1/3 + max(0, S - B)/3     the three kinds of task equally long
              one stage                a = 1    b = B - 1       no pipeline: a loop in one executable

which for equal stages gives the bubbles (p - 1)/B, (p - 1)/(v B) and, for zb-h1, a third of the first. A stage fits if
weights + f activations <= memory, f the microbatches in flight of its place in the schedule. Under limits max t <= x, max o <= y

    F(r, k, d; x, y) = min over j > k and submeshes z, t(k, j, z) <= x, o(k, j, z) <= y, which fit as the r-th stage from the end,
                       of a t(k, j, z) + c(k, j, z) + F(r - 1, j, d - n(z); x, y)     F(0, L, 0) = 0
    T = min over y of (y + min over x of min over S of F(S, 0, D; x, y) + b(S) x)

x: bisection over the distinct stage times between the least that any choice reaches and the largest that can still pay; an
interval goes when a F at its upper end plus b times its lower end is worse than the best known. A bound for F that leaves out
r (a stage fits if it fits at any place) is quick; F itself is computed where that bound allows. y: from infinity down; a
choice that attains the minimum under y beats all others that do not have a smaller max o. `tolerance` lets intervals go that
could gain less; `bound_s` then says what no choice beats. Ties: fewer stages, earlier cuts, earlier submeshes in the list.

What can go wrong: submeshes whose sizes add up and which still do not fill the nodes; `submeshes` offers only sizes that do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from autopar.errors import ArgumentError, OutOfMemoryError

Submesh: TypeAlias = tuple[int, int]
"""(nodes, devices per node)."""
ScheduleName = Literal["1f1b", "gpipe", "inference", "interleaved", "zb-h1"]

TIE = 1e-12
"""Relative difference up to which two times are the same."""


def submeshes(nodes: int, devices_per_node: int) -> tuple[Submesh, ...]:
    """The submeshes that may be used: parts of a node, each dividing the next, one node, and two to all nodes.

    Parts: 1, then multiplied by the prime factors of a node in ascending order (8: 1, 2, 4, 8; 6: 1, 2, 6). That each divides
    the next is what `tiles` needs: 3 + 3 and 2 + 2 + 2 would fill nodes of 6, but 15, 10, 10, 6, 6, 6, 6, 1 do not
    fill two nodes of 30.
    """
    parts = [1]
    while parts[-1] < devices_per_node:
        rest = devices_per_node // parts[-1]
        parts.append(parts[-1] * next(f for f in range(2, rest + 1) if rest % f == 0))
    return (*((1, part) for part in parts), *((n, devices_per_node) for n in range(2, nodes + 1)))


def place(choice: Sequence[Submesh], nodes: int, devices_per_node: int) -> tuple[tuple[int, ...], ...] | None:
    """The devices of each submesh, contiguous, numbered row-major; None if they do not fill the cluster.

    Larger ones first, each at the first node with room. Any choice from `submeshes` whose sizes add up to the cluster fits:
    when a part of size s is placed, all placed before it are multiples of s, and so is a node; thus the free devices of each
    node are a multiple of s, and a node that is not full has room. Whole nodes come before parts and find empty nodes.
    """
    free = [devices_per_node] * nodes
    found: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(choice)), key=lambda i: (-choice[i][0] * choice[i][1], i)):
        count, part = choice[i]
        node = next((n for n in range(nodes - count + 1) if min(free[n : n + count]) >= part), None)
        if node is None or (count > 1 and part != devices_per_node):
            return None
        start = (node + 1) * devices_per_node - free[node]
        found[i] = tuple(range(start, start + count * part))
        free[node : node + count] = [f - part for f in free[node : node + count]]
    return None if any(free) else tuple(found[i] for i in range(len(choice)))


def tiles(choice: Sequence[Submesh], nodes: int, devices_per_node: int) -> bool:
    """Whether submeshes together fill the cluster, none straddling a node; see `place` for why equal sums are enough."""
    return place(choice, nodes, devices_per_node) is not None


@dataclasses.dataclass(frozen=True)
class StageCost:
    """What some layers cost on a submesh; bytes are per device.

    `seconds_per_microbatch`: forward and backward. `once_s`: reduction of gradients and update. `transfer_s`: to the next
    stage and back. `weight_bytes`: parameters, optimizer state, accumulators. `activation_bytes`:
    what one microbatch in flight keeps.
    """

    seconds_per_microbatch: float
    once_s: float = 0.0
    transfer_s: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class CostTable:
    """Arrays (option, first layer, end layer) of the figures of `StageCost`; `seconds` is infinite where there is no plan."""

    seconds: np.ndarray
    once_s: np.ndarray
    transfer_s: np.ndarray
    weight_bytes: np.ndarray
    activation_bytes: np.ndarray

    @classmethod
    def of(cls, layers: int, options: int, cost_of: Callable[[int, int, int], StageCost | None]) -> CostTable:
        """From a function of (first layer, end layer, number of the option); None where there is no plan."""
        arrays = np.zeros((5, options, layers, layers + 1))
        arrays[0] = np.inf
        for z in range(options):
            for i in range(layers):
                for j in range(i + 1, layers + 1):
                    cost = cost_of(i, j, z)
                    if cost is not None:
                        arrays[:, z, i, j] = dataclasses.astuple(cost)
        return cls(*arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class StageProblem:
    """See the module's text. `options` may list a submesh several times, for instance with and without recomputation."""

    costs: CostTable
    options: tuple[Submesh, ...]
    cluster: Submesh
    microbatches: int
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    memory_bytes: float = math.inf

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.costs.seconds.shape[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each option."""
        return tuple(nodes * part for nodes, part in self.options)

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return math.prod(self.cluster)


@dataclasses.dataclass(frozen=True)
class Manual:
    """What the user has decided: the number of meshes, the first layers of all stages but the first, each mesh's submesh."""

    num_stages: int | None = None
    cuts: tuple[int, ...] | None = None
    submeshes: tuple[Submesh, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ChosenStage:
    """Layers `first_layer` to `end_layer` - 1 on a mesh; `option` is the number of the option taken."""

    first_layer: int
    end_layer: int
    mesh: int
    option: int
    submesh: Submesh
    stage_s: float
    once_s: float
    in_flight: int
    weight_bytes: float
    activation_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Bytes per device."""
        return self.weight_bytes + self.in_flight * self.activation_bytes


@dataclasses.dataclass(frozen=True)
class RuledOut:
    """How many of all (layers, submesh) did not come into question, each counted once, by the first reason that applies.

    `decided`: the user's decisions or the schedule leave it out. `memory`: it does not fit at any place. `too_slow`: slower than
    the slowest stage chosen.
    """

    considered: int
    no_plan: int
    decided: int
    memory: int
    too_slow: int


@dataclasses.dataclass(frozen=True)
class StageChoice:
    """Stages in order; `bottleneck` is the number of the slowest, `bound_s` a time that no choice beats."""

    stages: tuple[ChosenStage, ...]
    step_s: float
    bound_s: float
    bottleneck: int
    ruled_out: RuledOut
    devices: tuple[tuple[int, ...], ...]
    """Of each mesh."""


def choose_stages(problem: StageProblem, *, manual: Manual | None = None, tolerance: float = 0.0) -> StageChoice:
    """The fastest choice that fits; up to `tolerance` (relative) of the fastest.

    Raises OutOfMemoryError, which names the tightest stage, if nothing fits, and ArgumentError if nothing is left to choose.
    """
    manual = manual or Manual()
    _check(problem, manual)
    families = tuple(_families(problem, manual))
    best = _Best(tolerance)
    for family in families:
        _Search(family, best).run()
    if best.stages is None:
        possible = [family for family in families if family.is_possible]
        raise _out_of_memory(problem, possible) if possible else ArgumentError(_nothing_left(problem, manual))
    return _choice(problem, best, families)


def _check(problem: StageProblem, manual: Manual) -> None:
    wrong = []
    if problem.schedule not in get_args(ScheduleName):
        wrong.append(
            f"schedule {problem.schedule!r} is unknown; there are {', '.join(map(repr, get_args(ScheduleName)))}"
        )
    if (problem.schedule == "interleaved") != (problem.virtual_stages > 1) or problem.virtual_stages < 1:
        wrong.append(
            f"schedule {problem.schedule!r} with virtual_stages={problem.virtual_stages}: 'interleaved' needs two or more, "
            "the others one"
        )
    if problem.microbatches < 1:
        wrong.append(f"num_microbatches={problem.microbatches}: must be at least 1")
    foreign = sorted(set(problem.options) - set(submeshes(*problem.cluster)))
    if foreign and manual.submeshes is None:
        wrong.append(
            f"submeshes {foreign} are not among {submeshes(*problem.cluster)}, so they may not fill the cluster"
        )
    if manual.submeshes is not None and not tiles(manual.submeshes, *problem.cluster):
        wrong.append(f"submeshes {manual.submeshes} do not fill {problem.cluster} (nodes, devices per node)")
    if manual.cuts is not None and list(manual.cuts) != sorted({c for c in manual.cuts if 0 < c < problem.layers}):
        wrong.append(f"cuts {manual.cuts} are not ascending numbers of layers between 1 and {problem.layers - 1}")
    if wrong:
        raise ArgumentError("Stages cannot be chosen like this:\n" + "\n".join(f"  - {line}" for line in wrong))


@dataclasses.dataclass(frozen=True, eq=False)
class _Family:
    """Choices of equal rules: `counts` are the S in it, `slowest` their b(S), `fill` is a.

    `in_flight[S][r - 1]`: what the r-th stage from the end keeps. A mesh has `chunks`, each of which may have that part of the
    memory.
    """

    problem: StageProblem
    manual: Manual
    counts: tuple[int, ...]
    in_flight: Mapping[int, tuple[int, ...]]
    fill: float
    slowest: tuple[float, ...]
    chunks: int = 1

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each option; where all meshes are equal, 1 per chunk, and options of another size never fit."""
        if self.chunks == 1:
            return self.problem.sizes
        return tuple(1 if size == self._mesh_size else self.total + 1 for size in self.problem.sizes)

    @property
    def _mesh_size(self) -> int:
        return self.problem.devices // (self.counts[0] // self.chunks)

    @property
    def total(self) -> int:
        """D: devices, or chunks where all meshes are equal."""
        return self.problem.devices if self.chunks == 1 else self.counts[0]

    @property
    def is_possible(self) -> bool:
        """Whether there is a choice, memory aside."""
        return math.isfinite(_quick(self.stage_s(self.open_places()).min(axis=3), self, np.add))

    def least_in_flight(self) -> tuple[int, ...]:
        """What a stage keeps at least, r-th from the end of a choice of any S."""
        return tuple(
            min(self.in_flight[count][r] for count in self.counts if count > r) for r in range(max(self.counts))
        )

    def open_places(self) -> np.ndarray:
        """Booleans (option, k, j, r - 1): whether there is a plan, and whether the user's decisions leave it."""
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
        allowed = np.ones((len(self.problem.options), places), bool)
        if self.manual.submeshes is not None:
            chosen = self.manual.submeshes * self.chunks
            allowed = np.array([[option == submesh for submesh in chosen[::-1]] for option in self.problem.options])
        has_plan = np.isfinite(self.problem.costs.seconds) & np.triu(np.ones((layers, layers + 1), bool), 1)
        return np.asarray(spans[None] & allowed[:, None, None, :] & has_plan[..., None])

    def bytes(self, in_flight: Sequence[int]) -> np.ndarray:
        """Peak bytes per device (option, k, j, r - 1), as if all chunks of the mesh were like this one."""
        costs = self.problem.costs
        kept = costs.activation_bytes[..., None] * np.array(in_flight)
        return np.asarray((costs.weight_bytes[..., None] + kept) * self.chunks)

    def stage_s(self, places: np.ndarray) -> np.ndarray:
        """t (option, k, j, r - 1), infinite outside `places`."""
        return np.where(places, self.problem.costs.seconds[..., None], np.inf)

    @property
    def transfer_s(self) -> np.ndarray:
        """c (option, k, j); the last stage sends nothing."""
        return np.where(np.arange(self.problem.layers + 1) < self.problem.layers, self.problem.costs.transfer_s, 0)


def _families(problem: StageProblem, manual: Manual) -> Iterator[_Family]:
    """All families that the user's decisions leave; one stage first."""
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
        yield _Family(problem, manual, (1,), {1: (1,)}, 1.0, (batches - 1.0,))
    counts = tuple(p for p in range(2, most + 1) if is_left(p, p * chunks))
    if problem.schedule == "interleaved":
        for p in counts:
            if problem.devices % p == 0 and batches % p == 0:
                in_flight = {p * chunks: interleaved_in_flight(p, microbatches=batches, chunks=chunks)[::-1]}
                yield _Family(problem, manual, (p * chunks,), in_flight, 1 / chunks, (chunks * batches - 1.0,), chunks)
    elif counts:
        in_flight = {p: _in_flight(problem.schedule, p, microbatches=batches) for p in counts}
        split = problem.schedule == "zb-h1"
        slowest = tuple(batches - 1 / 3 + max(0, p - batches) / 3 if split else batches - 1.0 for p in counts)
        yield _Family(problem, manual, counts, in_flight, 1 / 3 if split else 1.0, slowest)


def _in_flight(schedule: ScheduleName, stages: int, *, microbatches: int) -> tuple[int, ...]:
    """The most microbatches that stages keep, the last stage first."""
    kept = {"gpipe": [microbatches] * stages, "inference": [1] * stages, "zb-h1": [stages] * stages}
    return tuple(min(microbatches, k) for k in kept.get(schedule, range(1, stages + 1)))


def interleaved_in_flight(meshes: int, *, microbatches: int, chunks: int) -> tuple[int, ...]:
    """The most microbatches that each of p v chunks keeps under interleaved 1F1B, by counting through each mesh's row."""
    total = microbatches * chunks
    forward = np.arange(total) % (meshes * chunks) // meshes
    kept = np.zeros((chunks, meshes), int)
    for mesh in range(meshes):
        ahead = min(total, 2 * (meshes - 1 - mesh) + (chunks - 1) * meshes)
        for chunk in range(chunks):
            started = np.concatenate([[0], np.cumsum(forward == chunk)])
            finished = np.concatenate([[0], np.cumsum(forward == chunks - 1 - chunk)])
            done = np.minimum(np.arange(total) + ahead + 1, total)
            kept[chunk, mesh] = np.max(started[done] - finished[:total])
    return tuple(int(f) for f in kept.ravel())


def _quick(table: np.ndarray, family: _Family, combine: np.ufunc) -> float:
    """F(any, 0, D) of a table (option, k, j): stages may stand at any place. With `np.maximum`: the least largest value."""
    options, layers, _ = table.shape
    total = family.total
    rest = np.full((options, layers + 1, total + 1), np.inf)

    def put(k: int, best: np.ndarray) -> None:
        for z, size in enumerate(family.sizes):
            if size <= total:
                rest[z, k, size:] = best[: total + 1 - size]

    best = np.where(np.arange(total + 1) == 0, 0.0, np.inf)
    for k in range(layers, 0, -1):
        put(k, best)
        best = combine(table[:, k - 1, k:, None], rest[:, k:, :]).min(axis=(0, 1))
    return float(best[total])


def _exact(table: np.ndarray, family: _Family, combine: np.ufunc) -> np.ndarray:
    """F[k, r, d] of a table (option, k, j, r - 1)."""
    _, layers, ends, places = table.shape
    total = family.total
    best = np.full((layers + 1, places + 1, total + 1), np.inf)
    best[layers, 0, 0] = 0.0
    usable = np.isfinite(table).any(axis=3)
    for k in range(layers - 1, -1, -1):
        most = min(places, layers - k)
        for z, size in enumerate(family.sizes):
            if size > total or not usable[z, k].any():
                continue
            low, high = int(usable[z, k].argmax()), ends - int(usable[z, k, ::-1].argmax())
            behind = best[low:high, :most, : total + 1 - size]
            here = best[k, 1 : most + 1, size:]
            np.minimum(here, combine(table[z, k, low:high, :most, None], behind).min(axis=0), out=here)
    return best


Stages: TypeAlias = tuple[tuple[int, int, int], ...]
"""(first layer, end layer, option) of each."""


def _stages_of(best: np.ndarray, table: np.ndarray, *, family: _Family, count: int, combine: np.ufunc) -> Stages:
    """The stages that attain F(count, 0, D): the earliest cut at each turn, then the earliest option."""
    layers, k, d, found = table.shape[1], 0, family.total, []
    for r in range(count, 0, -1):
        options = [z for z, size in enumerate(family.sizes) if size <= d]
        behind = np.stack([best[:, r - 1, d - family.sizes[z]] for z in options])
        values = combine(table[options, k, :, r - 1], behind)
        j, place_ = np.argwhere(best[k, r, d] * (1 + TIE) >= values.T)[0]
        found.append((k, int(j), options[place_]))
        k, d = int(j), d - family.sizes[options[place_]]
    assert (k, d) == (layers, 0)
    return tuple(found)


class _Best:
    """The best choice so far over all families."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.step_s = math.inf
        self.stages: Stages | None = None
        self.family: _Family | None = None

    @property
    def worth_s(self) -> float:
        """What a choice must not exceed to matter."""
        return self.step_s * (1 - self.tolerance) * (1 + TIE) if self.stages else math.inf

    def offer(self, step_s: float, stages: Stages, family: _Family) -> None:
        if self.stages is None or _is_better(step_s, stages, than_s=self.step_s, than=self.stages):
            self.step_s, self.stages, self.family = step_s, stages, family


def _is_better(value: float, stages: Stages, *, than_s: float, than: Stages) -> bool:
    if abs(value - than_s) > TIE * than_s:
        return value < than_s
    return _rank(stages) < _rank(than)


def _rank(stages: Stages) -> tuple[int, list[int], list[int]]:
    return len(stages), [i for i, _, _ in stages], [z for _, _, z in stages]


class _Search:
    """The least T of one family; the module's text says how."""

    def __init__(self, family: _Family, best: _Best) -> None:
        self.family, self.best = family, best
        self.table = self.strict_table(family.least_in_flight())
        self.quick = self.table.min(axis=3)
        self.once = family.problem.costs.once_s * family.chunks
        self.transfer = family.transfer_s
        self.least_b = min(family.slowest)
        self.least_once = _quick(np.where(np.isfinite(self.quick), self.once, np.inf), family, np.maximum)

    def run(self) -> None:
        """Offer the best choices of the family to `best`."""
        least = _quick(self.quick, self.family, np.maximum)
        if not math.isfinite(least):
            return
        self.times = np.unique(self.quick[np.isfinite(self.quick) & (self.quick >= least)])
        once_s = math.inf
        while once_s >= self.least_once:
            found = _Round(self, once_s).run()
            if found is None:
                return
            once_s = float(np.nextafter(self.max_once(found), -math.inf))

    def strict_table(self, in_flight: Sequence[int]) -> np.ndarray:
        """t (option, k, j, r - 1) of what fits with so many microbatches in flight."""
        fits = self.family.bytes(in_flight) <= self.family.problem.memory_bytes
        return self.family.stage_s(self.family.open_places()[..., : len(in_flight)] & fits)

    def fits(self, stages: Stages) -> bool:
        """Whether the memory is enough."""
        return all(
            stage.peak_bytes * self.family.chunks <= self.family.problem.memory_bytes
            for stage in _chosen(stages, self.family)
        )

    def max_once(self, stages: Stages) -> float:
        """max o."""
        return max(float(self.once[z, i, j]) for i, j, z in stages)

    def pipeline_s(self, stages: Stages) -> float:
        """T without max o."""
        count = len(stages)
        times = [float(self.table[z, i, j, count - 1 - s]) for s, (i, j, z) in enumerate(stages)]
        sent = sum(float(self.transfer[z, i, j]) for i, j, z in stages)
        return self.family.fill * sum(times) + sent + self._b(count) * max(times)

    def _b(self, count: int) -> float:
        return self.family.slowest[self.family.counts.index(count)]

    def limited(self, table: np.ndarray, *, stage_s: float, once_s: float) -> np.ndarray:
        """a t + c of a table of t, with what exceeds the limits taken out."""
        once, transfer = (one if table.ndim == 3 else one[..., None] for one in (self.once, self.transfer))
        return np.where((table <= stage_s) & (once <= once_s), self.family.fill * table + transfer, np.inf)


class _Round:
    """min over x for one y: the choice that attains it, or None if no choice with max o <= y can still matter."""

    def __init__(self, search: _Search, once_s: float) -> None:
        self.search, self.once_s = search, once_s
        self.family = search.family
        self.value = math.inf
        self.stages: Stages | None = None

    @property
    def _worth(self) -> float:
        """What a sum + b x must not exceed to matter."""
        return min(self.value * (1 + TIE), self.search.best.worth_s - self.search.least_once)

    def run(self) -> Stages | None:
        times, b = self.search.times, self.search.least_b
        floor = self._floor(float(times[-1]))
        if b > 0:
            self._try(float(times[0]))
            self._bisect(floor)
        else:
            self._try(float(times[-1]))
        return self.stages

    def _bisect(self, floor: float) -> None:
        """`floor`, of an interval of times without its ends: what F is at least there."""
        times, b = self.search.times, self.search.least_b
        waiting = [(0, len(times), floor)]
        while waiting:
            low, high, floor = waiting.pop()
            if not math.isfinite(floor):
                continue
            high = min(high, int(np.searchsorted(times, (self._worth - floor) / b, side="right")))
            if high - low < 2:
                continue
            middle = (low + high) // 2
            here = self._try(float(times[middle]))
            waiting += [(middle, high, floor), (low, middle, max(here, floor))]

    def _floor(self, stage_s: float) -> float:
        return _quick(self._limited(self.search.quick, stage_s), self.family, np.add)

    def _try(self, stage_s: float) -> float:
        """Offer the best choices under a limit of t; what F is at least under it."""
        floor = self._floor(stage_s)
        if not math.isfinite(floor) or floor + self.search.least_b * stage_s > self._worth:
            return floor
        table = self._limited(self.search.table, stage_s)
        best = _exact(table, self.family, np.add)
        counts, slowest = self.family.counts, np.array(self.family.slowest)
        sums = best[0, list(counts), self.family.total].copy()
        alone: dict[int, Stages] = {}
        while (values := sums + slowest * stage_s).min() <= self._worth and math.isfinite(values.min()):
            at = int(np.argmax(values <= values.min() * (1 + TIE)))
            stages = alone.get(at) or _stages_of(best, table, family=self.family, count=counts[at], combine=np.add)
            if at in alone or self.search.fits(stages):
                self._offer(stages)
                break
            # This many stages keep more than fewer or more of them do: ask again for this number alone.
            sums[at], alone[at] = self._alone(counts[at], stage_s)
        return float(sums.min())

    def _alone(self, count: int, stage_s: float) -> tuple[float, Stages]:
        """F of one S with its own microbatches in flight, and the stages."""
        table = self._limited(self.search.strict_table(self.family.in_flight[count]), stage_s)
        best = _exact(table, self.family, np.add)
        value = float(best[0, count, self.family.total])
        if not math.isfinite(value):
            return value, ()
        return value, _stages_of(best, table, family=self.family, count=count, combine=np.add)

    def _limited(self, table: np.ndarray, stage_s: float) -> np.ndarray:
        return self.search.limited(table, stage_s=stage_s, once_s=self.once_s)

    def _offer(self, stages: Stages) -> None:
        value = self.search.pipeline_s(stages)
        if self.stages is None or _is_better(value, stages, than_s=self.value, than=self.stages):
            self.value, self.stages = value, stages
        self.search.best.offer(value + self.search.max_once(stages), stages, self.family)


def _choice(problem: StageProblem, best: _Best, families: Sequence[_Family]) -> StageChoice:
    assert best.stages is not None
    assert best.family is not None
    stages = _chosen(best.stages, best.family)
    meshes = len(stages) // best.family.chunks
    slowest = max(range(len(stages)), key=lambda s: stages[s].stage_s)
    devices = place([s.submesh for s in stages[:meshes]], *problem.cluster)
    assert devices is not None
    ruled_out = _ruled_out(families, stages[slowest].stage_s)
    bound_s = best.step_s * (1 - best.tolerance)
    return StageChoice(stages, best.step_s, bound_s, slowest, ruled_out, devices)


def _chosen(stages: Stages, family: _Family) -> tuple[ChosenStage, ...]:
    problem, count = family.problem, len(stages)
    costs = problem.costs
    return tuple(
        ChosenStage(
            first_layer=i,
            end_layer=j,
            mesh=s % (count // family.chunks),
            option=z,
            submesh=problem.options[z],
            stage_s=float(costs.seconds[z, i, j]),
            once_s=float(costs.once_s[z, i, j]),
            in_flight=family.in_flight[count][count - 1 - s],
            weight_bytes=float(costs.weight_bytes[z, i, j]),
            activation_bytes=float(costs.activation_bytes[z, i, j]),
        )
        for s, (i, j, z) in enumerate(stages)
    )


def _ruled_out(families: Sequence[_Family], slowest_s: float) -> RuledOut:
    problem = families[0].problem
    spans = np.broadcast_to(
        np.triu(np.ones((problem.layers, problem.layers + 1), bool), 1), problem.costs.seconds.shape
    )
    planned = np.isfinite(problem.costs.seconds) & spans
    open_, fits, fast = (np.zeros_like(planned) for _ in range(3))
    for family in families:
        places = family.open_places()
        within = places & (family.bytes(family.least_in_flight()) <= problem.memory_bytes)
        open_ |= places.any(axis=3)
        fits |= within.any(axis=3)
        fast |= (family.stage_s(within) <= slowest_s * (1 + TIE)).any(axis=3)
    nested = [spans, planned, open_, fits, fast]
    counts = [int(part.sum()) for part in nested]
    return RuledOut(counts[0], *(more - fewer for more, fewer in itertools.pairwise(counts)))


def _nothing_left(problem: StageProblem, manual: Manual) -> str:
    decided = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(manual).items() if v is not None) or "nothing"
    return (
        f"No choice of stages is left: {problem.layers} layers on {problem.cluster[0]} nodes x {problem.cluster[1]} devices, "
        f"schedule {problem.schedule!r} with {problem.microbatches} microbatches, decided by hand: {decided}. A stage needs a "
        "layer and a submesh with a plan, and the stages must use all devices; 'interleaved' also needs a number of meshes that "
        "divides devices and microbatches. Decide less by hand, or allow more layers."
    )


def _out_of_memory(problem: StageProblem, families: Sequence[_Family]) -> OutOfMemoryError:
    """Names the tightest stage of the choice whose tightest stage needs least."""
    least, needed = math.inf, None
    for family in families:
        for count in family.counts:
            kept = family.in_flight[count]
            table = np.where(family.open_places()[..., :count], family.bytes(kept), np.inf)
            if _quick(table.min(axis=3), family, np.maximum) < least:
                best = _exact(table, family, np.maximum)
                if best[0, count, family.total] < least:
                    least = float(best[0, count, family.total])
                    stages = _chosen(_stages_of(best, table, family=family, count=count, combine=np.maximum), family)
                    needed = max(stages, key=lambda stage: stage.peak_bytes), stages.index, count, family.chunks
    assert needed is not None
    stage, number_of, count, chunks = needed
    shared = f", and a device holds {chunks} chunks" if chunks > 1 else ""
    return OutOfMemoryError(
        f"No choice of stages fits into {problem.memory_bytes:,.0f} bytes per device. The one that comes closest has {count} "
        f"stage{'s' if count > 1 else ''}; its stage {number_of(stage)}, layers {stage.first_layer} to {stage.end_layer - 1} on "
        f"a submesh of {stage.submesh[0]} x {stage.submesh[1]} devices, needs {stage.peak_bytes:,.0f} bytes per device"
        f"{shared}: {stage.weight_bytes:,.0f} of parameters, optimizer state and gradients, and {stage.in_flight} x "
        f"{stage.activation_bytes:,.0f} of activations, one for each microbatch in flight. More microbatches (now "
        f"{problem.microbatches}), recompute='layer', schedule='1f1b' (now {problem.schedule!r}) or more devices need less."
    )
