"""What ranges of layers cost on submeshes, under several numbers of microbatches.

In: a step, cut into numbers of microbatches as they are asked for, and the machine. Out: a `CostTable` for the dynamic
program. The forward chain is clustered into layers (`stages/layers.py`), which are planned (`inter_op/planned_layers.py`),
and a range of layers costs the sum of its layers. At first only the submeshes of one node are planned, or the smallest one,
under one number of microbatches; `plan_more` adds to them. Everything else is estimated: a larger submesh costs what perfect
division of a smaller one gives, a smaller one what a larger one gives without its communication, and
`candidates/timetables.py` carries figures over to another number of microbatches. What can go wrong: an estimate need not be a
bound, so a caller that chooses by an estimate has that planned and chooses again. One that keeps too much is not chosen;
`is_divided_otherwise` says where it may be wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.errors import ArgumentError, UnsupportedProgramError
from autopar.inter_op.candidates.layer_figures import LayerFigures, carry_over, nearest_of, task_seconds
from autopar.inter_op.candidates.sizes import first_across_nodes, first_sizes
from autopar.inter_op.candidates.timetables import latency_share
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.dynamic_program.problem import CostTable
from autopar.inter_op.dynamic_program.sends import Sends
from autopar.inter_op.dynamic_program.submeshes import Submesh
from autopar.inter_op.layer_sums import (
    CostCase,
    executable_bytes,
    in_flight_bytes,
    microbatch_seconds,
    repetitions,
    standing_bytes,
    sums,
    working_bytes,
)
from autopar.inter_op.plan_stage import Planner, plan_program
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.intra_op.request import PlanRequest
from autopar.microbatches.counts import microbatch_counts
from autopar.microbatches.loop import TimeLoop
from autopar.stages.chain import forward_chain
from autopar.stages.layers import find_layers

_COSTS = dataclasses.fields(CostTable)


class LayerCosts:
    """Costs of layers on submeshes under numbers of microbatches: figures of what is planned, and estimates of the rest.

    `impossible`: numbers of microbatches into which the step cannot be cut, or not with the same layers. `smallest_first`: begin
    with the smallest submesh, for a search that may end early; one stage on all devices is no option then. `of_a_kind`: there are
    nodes of other kinds, so that all of these devices may be one of several stages, and often are: begin with them as well.
    `fewest_layers`: see `find_layers`.
    """

    def __init__(
        self,
        loop_of: Callable[[int], TimeLoop],
        count: int,
        request: PlanRequest,
        options: Sequence[Submesh],
        *,
        smallest_first: bool = False,
        of_a_kind: bool = False,
        fewest_layers: int = 1,
        tuning: Tuning = TUNING,
        planner: Planner = plan_program,
    ) -> None:
        self._loop_of = loop_of
        loop = loop_of(count)
        self._chain = forward_chain(loop)
        self._places = find_layers(self._chain, tuning.layer_counts, fewest=fewest_layers)
        self._plan_layers = functools.partial(
            PlannedLayers, places=self._places, request=request, tuning=tuning, planner=planner
        )
        self._cluster = request.cluster
        self._layers = {count: self._plan_layers(loop)}
        self._options = frozenset(map(math.prod, options))
        self._devices = max(self._options)
        crossing = [self._chain[place].cut_bytes for place in self._places]
        self._sends = Sends(request.cluster, self._devices, crossing)
        self._examples = max(microbatch_counts(loop.traced))
        at_first = first_sizes(
            {*map(math.prod, options)}, len(self._places) + 1, request.cluster, smallest_first=smallest_first
        )
        at_first |= {self._devices} if of_a_kind else set()
        self._are_all = not (smallest_first or of_a_kind)
        self._sizes = {count: at_first}
        self._tables: dict[tuple[int, tuple[Submesh, ...], tuple[float, ...], bool], CostTable] = {}
        self._known: dict[tuple[int, int, int], LayerFigures | None] = {}
        self._sent_once: dict[int, np.ndarray] = {}
        self.impossible: set[int] = set()

    @property
    def counts(self) -> frozenset[int]:
        """Numbers of microbatches under which something has been planned."""
        return frozenset(self._layers)

    def is_planned(self, count: int, submesh: Submesh) -> bool:
        """Whether layers are planned on as many devices in `count` microbatches, or in a number from which that carries over."""
        devices = math.prod(submesh)
        ways = self._ways(count, devices)
        return any(devices in sizes and self._ways(m, devices) >= ways for m, sizes in self._sizes.items())

    def is_divided_otherwise(self, count: int, submesh: Submesh) -> bool:
        """Whether layers are planned on as many devices only in numbers of microbatches whose examples these divide further."""
        devices = math.prod(submesh)
        ways = [self._ways(m, devices) for m, sizes in self._sizes.items() if devices in sizes]
        return bool(ways) and min(ways) > self._ways(count, devices)

    def of(self, count: int) -> PlannedLayers:
        """The layers under a number of microbatches that has been planned."""
        return self._layers[count]

    def plan_more(self, count: int, submeshes: Sequence[Submesh]) -> bool:
        """From now on, plan layers on the smallest of these submeshes that is new, in `count` microbatches; whether there is one.

        The estimate of a larger one is better then.
        """
        if count not in self._layers and not self._cut(count):
            self.impossible.add(count)
            return True
        known = self._sizes.setdefault(count, set())
        new = {math.prod(submesh) for submesh in submeshes} - known
        if not new:
            return False
        planned = set[int]().union(*self._sizes.values())
        known.add(first_across_nodes(min(new), planned, self._options, self._cluster))
        self._tables.clear()
        self._known.clear()
        return True

    def start_with(self, count: int) -> bool:
        """Plan layers in this number of microbatches at first instead, if the step can be cut into it; whether it can."""
        (first,) = self._sizes
        if count == first:
            return True
        if not self._cut(count):
            self.impossible.add(count)
            return False
        self._sizes[count] = self._sizes.pop(first)
        del self._layers[first]
        self._tables.clear()
        self._known.clear()
        return True

    def _cut(self, count: int) -> bool:
        """Cut the step into this number of microbatches and the same layers; whether that can be done."""
        try:
            loop = self._loop_of(count)
        except (ArgumentError, UnsupportedProgramError):
            return False
        if len(forward_chain(loop)) != len(self._chain):
            return False
        self._layers[count] = self._plan_layers(loop)
        return True

    def table(
        self, count: int, options: Sequence[Submesh], *, shares: Sequence[float] = (0.0,), split: bool = False
    ) -> CostTable:
        """Costs of all ranges of layers on all submeshes, from those of the layers.

        `shares`: for each of them, in order, all submeshes are options; backward takes this part of a forward more, and makes
        again as much of what forward made. `split`: backward is split in two.
        """
        key = (count, tuple(options), tuple(shares), split)
        if key not in self._tables:
            all_sizes = {*map(math.prod, options)}
            for planned, sizes in self._sizes.items():
                self._layers[planned].plan(sizes & all_sizes, perhaps=min(all_sizes - sizes, default=None))
            cases = [CostCase(count, again, split) for again in repetitions(shares)]
            self._tables[key] = self._stack(cases, options)
        return self._tables[key]

    def table_of_common(
        self, count: int, options: Sequence[Submesh], *, shares: Sequence[float] = (0.0,), split: bool = False
    ) -> CostTable:
        """As `table`, as if the layers that do not repeat cost nothing, and only the one that repeats were planned."""
        (layers,) = self._layers.values()
        (sizes,) = self._sizes.values()
        layers.plan(sizes, common_alone=True)
        return self._stack([CostCase(count, again, split) for again in repetitions(shares)], options, common_alone=True)

    def _stack(self, cases: Sequence[CostCase], options: Sequence[Submesh], *, common_alone: bool = False) -> CostTable:
        costs = [
            self._costs_on(math.prod(submesh), case, options, common_alone=common_alone)
            for case in cases
            for submesh in options
        ]
        return CostTable(**{field.name: np.stack([getattr(one, field.name) for one in costs]) for field in _COSTS})

    @property
    def has_common(self) -> bool:
        """Whether one layer repeats often."""
        return all(layers.has_common for layers in self._layers.values())

    def _costs_on(
        self, devices: int, case: CostCase, options: Sequence[Submesh], *, common_alone: bool = False
    ) -> CostTable:
        """Arrays (first layer, end layer) of the costs on one submesh.

        Seconds, weights and what is in flight add up over layers. What comes and goes within a task does not: the largest counts.
        """
        layers = len(self._places) + 1
        found = [
            LayerFigures() if common_alone and not self._is_common(layer) else self._figures(case.count, layer, devices)
            for layer in range(layers)
        ]
        figures = [one or LayerFigures() for one in found]
        has_plan = (sums([float(one is None) for one in found]) == 0) & (sums([1.0] * layers) > 0)
        once_s = sums([one.once_s for one in figures])
        flying, working = self._bytes_of_tasks(figures, case, options)
        standing, needed = standing_bytes(figures), executable_bytes(figures, case.again)
        if self._are_all and devices == self._devices:  # one stage is one executable, whatever tasks would need
            flying, working = np.zeros_like(flying), np.zeros_like(working)
        work_s, sent_s = self._sends.each_s(case.count, devices)
        return CostTable(
            seconds=np.where(has_plan, microbatch_seconds(figures, case.again) + work_s, np.inf),
            once_s=np.where(has_plan, once_s + self._sent_once_s(devices), 0.0),
            transfer_s=np.where(has_plan, sent_s, 0.0),
            weight_bytes=np.where(has_plan, standing, 0.0),
            activation_bytes=np.where(has_plan, flying, 0.0),
            working_bytes=np.where(has_plan, np.maximum(working, needed - standing - flying), 0.0),
        )

    def _bytes_of_tasks(
        self, figures: Sequence[LayerFigures], case: CostCase, options: Sequence[Submesh]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What each microbatch in flight keeps, and what a task needs beside it."""
        meshes = min(len(figures), self._devices // min(map(math.prod, options)))
        return in_flight_bytes(figures, case, meshes), working_bytes(figures, case.again)

    def _sent_once_s(self, devices: int) -> np.ndarray:
        if devices not in self._sent_once:
            shared_bytes = next(iter(self._layers.values())).sent_once_bytes
            self._sent_once[devices] = self._sends.once_s(shared_bytes, devices)
        return self._sent_once[devices]

    def _figures(self, count: int, layer: int, devices: int) -> LayerFigures | None:
        """What a layer costs on these devices in this number of microbatches, planned or estimated; None if there is no plan.

        If other numbers of microbatches are planned, whose examples the devices divide as well, it is carried over from them.
        If none is, work, state and all else of a smaller submesh are divided evenly among more devices, but for the time in which
        it waits for communication: what devices send each other in a larger submesh is seldom less, and its links are no better.
        """
        key = (count, self._kind(layer), devices)
        if key not in self._known:
            self._known[key] = self._find_figures(count, layer, devices)
        return self._known[key]

    def _is_common(self, layer: int) -> bool:
        return all(layers.first_alike(layer) == layers.common for layers in self._layers.values())

    def _kind(self, layer: int) -> int:
        """The first of the layers that equal a layer in all numbers of microbatches that are planned."""
        return max(layers.first_alike(layer) for layers in self._layers.values())

    def _find_figures(self, count: int, layer: int, devices: int) -> LayerFigures | None:
        planned_in = (m for m in self._sizes if self._is_planned_in(m, layer, devices))
        known = {m: self._layers[m].figures(layer, devices) for m in planned_in}
        if count in known:
            return known[count]
        planned = {m: figures for m, figures in known.items() if figures is not None}
        if known and not planned:
            return None
        ways = self._ways(count, devices)
        carried = {m: figures for m, figures in planned.items() if self._ways(m, devices) >= ways}
        if carried:
            alike = self._divided_alike(carried, devices, nearest=nearest_of(carried, count))
            return carry_over(alike, count, share=self._share(layer))
        if planned:
            return self._at_best(layer, devices, planned, count)
        smaller = {size for sizes in self._sizes.values() for size in sizes if size < devices}
        divided = [
            {name: size / devices * figure for name, figure in dataclasses.asdict(figures).items()}
            for size in smaller
            if (figures := self._figures(count, layer, size)) is not None
        ]
        if not divided:
            return self._undivided(count, layer, devices)
        found = LayerFigures(**{name: max(one[name] for one in divided) for name in divided[0]})
        return found.slower(self._slowdown(count, layer, devices))

    def _is_planned_in(self, count: int, layer: int, devices: int) -> bool:
        """Whether a layer is planned on as many devices in this number of microbatches, or on all of them that it can use."""
        sizes, layers = self._sizes[count], self._layers[count]
        if devices in sizes:
            return True
        useful = layers.useful_devices(layer, devices)
        return useful < devices and any(layers.useful_devices(layer, size) == useful for size in sizes)

    def _undivided(self, count: int, layer: int, devices: int) -> LayerFigures:
        """What a layer takes at best where it is planned on more devices alone. Nothing is known of its memory."""
        larger = min((size for sizes in self._sizes.values() for size in sizes if size > devices), default=None)
        if larger is None:
            return LayerFigures()
        planned = {m: self._layers[m].figures(layer, larger) for m, sizes in self._sizes.items() if larger in sizes}
        known = {m: figures for m, figures in planned.items() if figures is not None}
        if not known:
            return LayerFigures()
        least = self._at_best(layer, larger, known, count)
        task_s = least.forward_s + least.backward_s
        launches_s = min(task_s, self._layers[next(iter(known))].launches_s(layer))
        times = (launches_s + (task_s - launches_s) * larger / devices) / task_s if task_s else 1.0
        seconds = LayerFigures(forward_s=least.forward_s, again_s=least.again_s, backward_s=least.backward_s)
        return seconds.slower(times)

    def _at_best(self, layer: int, devices: int, planned: Mapping[int, LayerFigures], count: int) -> LayerFigures:
        """Figures on these devices without what a layer waits there, or does on several at once.

        Of `count` microbatches, from `planned` numbers of these, whose examples the devices divide less far.
        """
        nearest = nearest_of(planned, count)
        task_s, layers = planned[nearest].forward_s + planned[nearest].backward_s, self._layers[nearest]
        launches = min(1.0, layers.launches_s(layer) / task_s) if task_s else 0.0
        figures = carry_over(planned, count, share=np.maximum(launches, self._share(layer)))
        part = max(launches, layers.divided(layer, devices))
        return figures.slower(part)

    def _slowdown(self, count: int, layer: int, devices: int) -> float:
        """How many times longer a layer takes on these devices than if all of its time on fewer of them were divided evenly."""
        for known in (count, *self._layers):
            fewer = [size for size in self._sizes.get(known, ()) if size < devices]
            if fewer:
                waiting = self._layers[known].waiting(layer, max(fewer))
                return 1 - waiting + waiting * devices / max(fewer)
        return 1.0

    def _ways(self, count: int, devices: int) -> int:
        """The number of devices among which the examples of a microbatch can be divided evenly."""
        return math.gcd(max(1, self._examples // count), devices)

    def _divided_alike(
        self, planned: Mapping[int, LayerFigures], devices: int, *, nearest: int
    ) -> dict[int, LayerFigures]:
        """Of planned numbers of microbatches those whose examples the devices divide as far as those of the nearest one.

        Where they divide fewer, a microbatch takes longer for another reason than latency.
        """
        ways = self._ways(nearest, devices)
        return {m: figures for m, figures in planned.items() if self._ways(m, devices) == ways}

    def _share(self, layer: int) -> np.ndarray | float:
        """The part of a layer's (forward, backward) seconds that is latency, from submeshes planned under several counts."""
        shares = []
        for devices in set[int]().union(*self._sizes.values()):
            counts = [m for m, sizes in self._sizes.items() if devices in sizes]
            known = {m: f for m in counts if (f := self._layers[m].figures(layer, devices)) is not None}
            known = self._divided_alike(known, devices, nearest=next(iter(known), 1))
            if len(known) > 1:
                share = latency_share({m: task_seconds(f) for m, f in known.items()}, next(iter(known)))
                shares += [] if share is None else [share]
        return np.asarray(np.mean(shares, axis=0)) if shares else 0.0
