"""What ranges of layers cost on submeshes, under several numbers of microbatches.

In: a step, cut into numbers of microbatches as they are asked for, and the machine. Out: a `CostTable` for the dynamic
program. The forward chain is clustered into layers (`stages/layers.py`), and a range of layers costs the sum of its layers, which
are planned or estimated (`known_layers.py`). At first only the submeshes of one node are planned, or the smallest one, under one
number of microbatches; `plan_more` and `plan_others` add to them. What can go wrong: an estimate that keeps too much is not
chosen; `is_divided_otherwise` says where it may be wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autopar.errors import ArgumentError, UnsupportedProgramError
from autopar.inter_op.candidates.layer_figures import LayerFigures
from autopar.inter_op.candidates.sizes import first_across_nodes, first_sizes
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.dynamic_program.problem import ChosenStage, CostTable
from autopar.inter_op.dynamic_program.sends import Sends
from autopar.inter_op.dynamic_program.submeshes import Submesh, size_of
from autopar.inter_op.known_layers import KnownLayers
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
        devices: int | None = None,
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
        self._cluster, self._tuning = request.cluster, tuning
        self._options = frozenset(map(math.prod, options))
        self._devices = devices or max(self._options)
        crossing = [self._chain[place].cut_bytes for place in self._places]
        self._sends = Sends(request.cluster, self._devices, crossing)
        self._known = KnownLayers(examples=max(microbatch_counts(loop.traced)))
        at_first = first_sizes(
            self._options,
            len(self._places) + 1,
            request.cluster,
            devices=self._devices,
            smallest_first=smallest_first,
        )
        self._are_all = not (smallest_first or of_a_kind)
        sizes = at_first | ({self._devices} if of_a_kind else set())
        self._known.begin(count, self._plan_layers(loop), sizes, others_on=max(at_first))
        self._tables: dict[tuple[int, tuple[Submesh, ...], tuple[float, ...], bool], CostTable] = {}
        self._sent_once: dict[int, np.ndarray] = {}
        self.impossible: set[int] = set()

    @property
    def counts(self) -> frozenset[int]:
        """Numbers of microbatches under which something has been planned."""
        return frozenset(self._known.layers)

    def is_planned(self, count: int, submesh: Submesh, *, carried: bool = True) -> bool:
        """Whether layers are planned on as many devices in `count` microbatches, or if `carried` in a number from which that
        carries over."""
        if not carried:
            return size_of(submesh) in self._known.sizes.get(count, ())
        ways = self._known.ways(count, size_of(submesh))
        return any(known >= ways for known in self._planned_ways(submesh))

    def is_divided_otherwise(self, count: int, submesh: Submesh) -> bool:
        """Whether layers are planned on as many devices only in numbers of microbatches whose examples these divide further."""
        ways = self._planned_ways(submesh)
        return bool(ways) and min(ways) > self._known.ways(count, size_of(submesh))

    def _planned_ways(self, submesh: Submesh) -> list[int]:
        """Of each number of microbatches in which layers are planned on as many devices, how far these divide its examples."""
        devices = size_of(submesh)
        return [self._known.ways(m, devices) for m, sizes in self._known.sizes.items() if devices in sizes]

    def of(self, count: int, kind: int | None = None) -> PlannedLayers:
        """The layers under a number of microbatches that has been planned, on nodes of the one `kind` that there is."""
        return self._known.layers[count]

    def plan_more(self, count: int, submeshes: Sequence[Submesh]) -> bool:
        """From now on, plan layers on the smallest of these submeshes that is new, in `count` microbatches; whether there is one.

        The estimate of a larger one is better then. Where one layer repeats, it is planned, and others are by `plan_others`.
        """
        if count not in self.counts:
            layers = self._cut(count)
            if layers is None:
                self.impossible.add(count)
                return True
            self._known.begin(count, layers)
        new = {*map(size_of, submeshes)} - self._known.sizes[count]
        if not new:
            return False
        planned = set[int]().union(*self._known.sizes.values())
        self._known.add(count, first_across_nodes(min(new), planned, self._options, self._cluster), self._options)
        self._tables.clear()
        return True

    def plan_others(self, count: int, stages: Sequence[ChosenStage]) -> bool:
        """From now on, plan the layers of stages that do not repeat on the devices of these; whether there are new ones."""
        layers = [(layer, stage) for stage in stages for layer in range(stage.first_layer, stage.end_layer)]
        return self._add_others(count, [(layer, size_of(stage.submesh)) for layer, stage in layers])

    def plan_all_others(self) -> bool:
        """In one more number of microbatches, plan all layers wherever the one that repeats is planned; whether there is one."""
        layers, sizes = range(len(self._places) + 1), self._known.sizes
        return any(self._add_others(count, itertools.product(layers, sizes[count])) for count in sorted(self.counts))

    def _add_others(self, count: int, places: Iterable[tuple[int, int]]) -> bool:
        if count not in self.counts or not self._known.add_others(count, places):
            return False
        self._tables.clear()
        return True

    def start_with(self, count: int) -> bool:
        """Plan layers in this number of microbatches at first instead, if the step can be cut into it; whether it can."""
        if count in self.counts:
            return True
        layers = self._cut(count)
        if layers is None:
            self.impossible.add(count)
            return False
        (sizes,), (others,) = self._known.sizes.values(), self._known.others.values()
        self._known = KnownLayers(examples=self._known.examples)
        self._known.begin(count, layers, sizes, others_on=max((devices for _, devices in others), default=0))
        self._tables.clear()
        return True

    def _cut(self, count: int) -> PlannedLayers | None:
        """The step in this number of microbatches and the same layers; None if it cannot be cut so."""
        try:
            loop = self._loop_of(count)
        except (ArgumentError, UnsupportedProgramError):
            return None
        return self._plan_layers(loop) if len(forward_chain(loop)) == len(self._chain) else None

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
            self._known.plan(all_sizes)
            cases = [CostCase(count, again, split) for again in repetitions(shares)]
            self._tables[key] = self._stack(cases, options)
        return self._tables[key]

    def table_of_common(
        self, count: int, options: Sequence[Submesh], *, shares: Sequence[float] = (0.0,), split: bool = False
    ) -> CostTable:
        """As `table`, as if the layers that do not repeat cost nothing, and only the one that repeats were planned."""
        (layers,), (sizes,) = self._known.layers.values(), self._known.sizes.values()
        layers.plan(sizes, others=())
        return self._stack([CostCase(count, again, split) for again in repetitions(shares)], options, common_alone=True)

    def _stack(self, cases: Sequence[CostCase], options: Sequence[Submesh], *, common_alone: bool = False) -> CostTable:
        layers = range(len(self._places) + 1)

        @functools.cache
        def figures_on(count: int, devices: int) -> list[LayerFigures | None]:
            """Of each layer; None where it has no plan."""
            return [
                LayerFigures()
                if common_alone and not self._known.is_common(layer)
                else self._known.figures(count, layer, devices)
                for layer in layers
            ]

        costs = [
            self._costs_on(devices, case, options, figures_on(case.count, devices))
            for case in cases
            for devices in map(math.prod, options)
        ]
        return CostTable(**{field.name: np.stack([getattr(one, field.name) for one in costs]) for field in _COSTS})

    @property
    def has_common(self) -> bool:
        """Whether one layer repeats often."""
        return all(layers.has_common for layers in self._known.layers.values())

    @property
    def are_alike(self) -> bool:
        """Whether most forward work is that of the layer that repeats."""
        bounds = itertools.pairwise((0, *self._places, len(self._chain)))
        work = [sum(link.flops for link in self._chain[first:end]) for first, end in bounds]
        repeated = sum(flops for layer, flops in enumerate(work) if self._known.is_common(layer))
        return repeated >= self._tuning.alike * sum(work)

    def _costs_on(
        self, devices: int, case: CostCase, options: Sequence[Submesh], found: Sequence[LayerFigures | None]
    ) -> CostTable:
        """Arrays (first layer, end layer) of the costs on one submesh; `found`: the figures of each layer there.

        Seconds, weights and what is in flight add up over layers. What comes and goes within a task does not: the largest counts.
        A stage is planned as one executable, with one microbatch, and that has to fit as well.
        """
        figures = [one or LayerFigures() for one in found]
        has_plan = (sums([float(one is None) for one in found]) == 0) & (sums([1.0] * len(found)) > 0)
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
            working_bytes=np.where(has_plan, working, 0.0),
            least_bytes=np.where(has_plan, needed, 0.0),
        )

    def _bytes_of_tasks(
        self, figures: Sequence[LayerFigures], case: CostCase, options: Sequence[Submesh]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What each microbatch in flight keeps, and what a task needs beside it."""
        meshes = min(len(figures), self._devices // min(map(math.prod, options)))
        return in_flight_bytes(figures, case, meshes), working_bytes(figures, case.again)

    def _sent_once_s(self, devices: int) -> np.ndarray:
        if devices not in self._sent_once:
            shared_bytes = next(iter(self._known.layers.values())).sent_once_bytes
            self._sent_once[devices] = self._sends.once_s(shared_bytes, devices)
        return self._sent_once[devices]
