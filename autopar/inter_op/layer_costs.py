"""What ranges of layers cost on submeshes, under several numbers of microbatches.

In: a step, cut into numbers of microbatches as they are asked for, and the machine. Out: a `CostTable` for the dynamic
program. The forward chain is clustered into layers (`stages/layers.py`), which are planned (`inter_op/planned_layers.py`),
and a range of layers costs the sum of its layers. Planned at first are the submeshes of one node, or the smallest, under
one number of microbatches, and more when asked (`plan_more`). Of what is not planned there is a figure all the same: a
larger submesh costs what perfect division of a smaller one gives, another number of microbatches what
`inter_op/timetables.py` carries over. What can go wrong: a figure that is no bound; whoever chooses by one has it planned
and chooses again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.errors import ArgumentError, UnsupportedProgramError
from autopar.inter_op.planned_layers import LayerFigures, PlannedLayers
from autopar.inter_op.problem import CostTable
from autopar.inter_op.submeshes import Submesh
from autopar.inter_op.timetables import latency_share, seconds_at
from autopar.intra_op.memory.model import TEMPORARIES_MARGIN
from autopar.intra_op.planner import PlanRequest
from autopar.microbatches.counts import microbatch_counts
from autopar.microbatches.loop import TimeLoop
from autopar.stages.chain import ForwardEquation, forward_chain
from autopar.stages.even_cuts import boundaries
from autopar.stages.layers import cluster
from autopar.stages.tasks.stage_memory import split_in_flight

LAYER_COUNTS = (64, 48, 40, 32, 24, 16, 12, 8, 4, 2)
"""Numbers of layers into which a step may be clustered: the one whose cuts send the least, the most layers among equals."""


def _clustered(chain: tuple[ForwardEquation, ...]) -> tuple[int, ...]:
    """Where layers begin: at the ends of blocks, if the model is made of blocks."""
    best: tuple[int, ...] = ()
    least = math.inf
    for count in LAYER_COUNTS:
        if count < len(chain):
            places = cluster(chain, max_layers=count, slack=1.0)
            sent = max((chain[place].cut_bytes for place in places), default=math.inf)
            if sent < least:
                best, least = places, sent
    return best


def _ranges(values: Sequence[float]) -> np.ndarray:
    """[i, j]: the sum of values i to j - 1; 0 where there are none."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return np.triu(before[None, :] - before[:-1, None], 1)


def _largest(values: Sequence[float]) -> np.ndarray:
    """[i, j]: the largest of values i to j - 1."""
    largest = np.zeros((len(values), len(values) + 1))
    for i in range(len(values)):
        largest[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return largest


class LayerCosts:
    """Costs of layers on submeshes under numbers of microbatches: of what has been planned, and estimates from it of the rest.

    `impossible`: numbers of microbatches in which the step cannot be cut, or not into the same layers. `smallest_first`: begin
    with the smallest submesh; where a search may end early, all that is not planned is time saved.
    """

    def __init__(
        self,
        loop_of: Callable[[int], TimeLoop],
        count: int,
        request: PlanRequest,
        options: Sequence[Submesh],
        *,
        smallest_first: bool = False,
    ) -> None:
        self._loop_of, self._request = loop_of, request
        loop = loop_of(count)
        self._chain = forward_chain(loop)
        self._places = boundaries(self._chain) or _clustered(self._chain)
        self._layers = {count: PlannedLayers(loop, self._places, request)}
        self._devices = max(map(math.prod, options))
        self._examples = max(microbatch_counts(loop.traced))
        sizes, per_node = {*map(math.prod, options)}, request.cluster.devices_per_node or math.inf
        at_first = {min(sizes)} if smallest_first else {size for size in sizes if size <= per_node}
        self._sizes = {count: at_first}
        self._tables: dict[tuple[int, bool, bool], CostTable] = {}
        self._sent_once: dict[int, np.ndarray] = {}
        self.impossible: set[int] = set()

    @property
    def counts(self) -> frozenset[int]:
        """Numbers of microbatches under which something has been planned."""
        return frozenset(self._layers)

    def of(self, count: int) -> PlannedLayers:
        """The layers under a number of microbatches that has been planned."""
        return self._layers[count]

    def plan_more(self, count: int, submeshes: Sequence[Submesh]) -> bool:
        """Plan layers on the smallest of these submeshes that is new, under so many microbatches, from now on; whether one is.

        What a larger one costs at least is known better then.
        """
        if count not in self._layers and not self._cut(count):
            self.impossible.add(count)
            return True
        known = self._sizes.setdefault(count, set())
        new = {math.prod(submesh) for submesh in submeshes} - known
        if not new:
            return False
        known.add(min(new))
        self._tables.clear()
        return True

    def _cut(self, count: int) -> bool:
        """Cut the step into so many microbatches and the same layers, if that can be done."""
        try:
            loop = self._loop_of(count)
        except (ArgumentError, UnsupportedProgramError):
            return False
        if len(forward_chain(loop)) != len(self._chain):
            return False
        self._layers[count] = PlannedLayers(loop, self._places, self._request)
        return True

    def table(self, count: int, options: Sequence[Submesh], *, recompute: bool, split: bool = False) -> CostTable:
        """Costs of all ranges of layers on all submeshes, from those of the layers; `split`: with a split backward."""
        key = count, recompute, split
        if key not in self._tables:
            self._tables[key] = self._table(count, options, recompute=recompute, split=split)
        return self._tables[key]

    def _table(self, count: int, options: Sequence[Submesh], *, recompute: bool, split: bool) -> CostTable:
        """As `table`.

        Temporaries count with the margin that a limit must leave for them. Seconds, weights and what is in flight add up; what
        comes and goes within a task does not, the largest counts. With `recompute` a microbatch in flight keeps what the first
        layer received, and backward, which takes a forward more, makes the rest again.
        """
        all_sizes = {*map(math.prod, options)}
        for planned, sizes in self._sizes.items():
            self._layers[planned].plan(sizes & all_sizes, perhaps=min(all_sizes - sizes, default=None))
        layers = len(self._places) + 1
        meshes = min(layers, self._devices // min(map(math.prod, options)))
        arrays = [np.zeros((len(options), layers, layers + 1)) for _ in range(5)]
        later = _ranges([1.0] * layers) > 0
        for z, submesh in enumerate(options):
            devices = math.prod(submesh)
            figures = [self._figures(count, layer, devices) for layer in range(layers)]
            can = (_ranges([float(f is None) for f in figures]) == 0) & later
            known = [f or LayerFigures() for f in figures]
            forward, backward, once, kept, residual, late, cotangents = (
                _ranges([getattr(f, name) for f in known])
                for name in (
                    "forward_s",
                    "backward_s",
                    "once_s",
                    "kept_bytes",
                    "residual_bytes",
                    "late_residual_bytes",
                    "cotangent_bytes",
                )
            )
            received = np.array([f.received_bytes for f in known])[:, None]
            passing = _largest([f.passing_bytes for f in known]) / TEMPORARIES_MARGIN
            first = residual / TEMPORARIES_MARGIN - (0.0 if recompute else residual)
            weights = kept + passing + first
            arrays[0][z] = np.where(can, (1.0 + recompute) * forward + backward, np.inf)
            arrays[1][z] = np.where(can, once + self._sent_once_s(devices), 0.0)
            arrays[2][z] = np.where(can, self._transfer_s(count, devices)[None, :], 0.0)
            arrays[3][z] = np.where(can, weights, 0.0)
            if split and recompute:
                in_flight = received + late + cotangents
            elif split:
                in_flight = split_in_flight(residual - late, late, cotangents, is_full=count >= meshes)
            else:
                in_flight = received if recompute else residual
            arrays[4][z] = np.where(can, in_flight, 0.0)
        return CostTable(*arrays)

    def _transfer_s(self, count: int, devices: int) -> np.ndarray:
        """Seconds to send what crosses after each layer, and its gradient back."""
        sent = [0.0, *(self._chain[place].cut_bytes / count for place in self._places), 0.0]
        return np.array([2 * self._send_s(size, devices) for size in sent])

    def _sent_once_s(self, devices: int) -> np.ndarray:
        """[i, j]: seconds to exchange tied weights, their gradients, norms and the like with other stages."""
        if devices not in self._sent_once:
            sizes, place = np.unique(next(iter(self._layers.values())).sent_once_bytes, return_inverse=True)
            each_s = [self._send_s(size, devices) for size in sizes]
            self._sent_once[devices] = np.array(each_s)[place].reshape(len(self._places) + 1, -1)
        return self._sent_once[devices]

    def _send_s(self, size: float, devices: int) -> float:
        meshes = self._devices // devices
        return self._request.cluster.transfer_s(size, meshes=meshes, devices=devices) if size else 0.0

    def _figures(self, count: int, layer: int, devices: int) -> LayerFigures | None:
        """What a layer costs on so many devices under so many microbatches, None if there is no plan.

        Where only other numbers of microbatches are planned, whose examples the devices can divide as well: carried over from
        them. Where no such number is: the least that it can cost, as if work, state and all else of a smaller submesh were
        divided evenly among more devices.
        """
        known = {m: self._layers[m].figures(layer, devices) for m, sizes in self._sizes.items() if devices in sizes}
        if count in known:
            return known[count]
        planned = {m: figures for m, figures in known.items() if figures is not None}
        if known and not planned:
            return None
        ways = self._ways(count, devices)
        planned = {m: figures for m, figures in planned.items() if self._ways(m, devices) >= ways}
        if planned:
            return _carried(planned, count, share=self._share(layer))
        smaller = {size for sizes in self._sizes.values() for size in sizes if size < devices}
        each = {size: self._figures(count, layer, size) for size in smaller}
        divided = [
            [size / devices * figure for figure in dataclasses.astuple(figures)]
            for size, figures in each.items()
            if figures is not None
        ]
        return LayerFigures(*(max(one) for one in zip(*divided, strict=True))) if divided else LayerFigures()

    def _ways(self, count: int, devices: int) -> int:
        """Among how many devices the examples of a microbatch can be divided evenly."""
        return math.gcd(max(1, self._examples // count), devices)

    def _share(self, layer: int) -> np.ndarray | float:
        """What part of a layer's forward and backward is latency, from submeshes planned under several counts."""
        shares = []
        for devices in set[int]().union(*self._sizes.values()):
            counts = [m for m, sizes in self._sizes.items() if devices in sizes]
            known = {m: f for m in counts if (f := self._layers[m].figures(layer, devices)) is not None}
            if len(known) > 1:
                share = latency_share({m: _task_seconds(f) for m, f in known.items()}, next(iter(known)))
                shares += [] if share is None else [share]
        return np.asarray(np.mean(shares, axis=0)) if shares else 0.0


def _task_seconds(figures: LayerFigures) -> np.ndarray:
    return np.array([figures.forward_s, figures.backward_s])


def _carried(planned: Mapping[int, LayerFigures], count: int, *, share: np.ndarray | float) -> LayerFigures:
    """Figures under another number of microbatches: seconds by their latency, what a microbatch keeps by its size."""
    nearest = min(planned, key=lambda m: abs(math.log(m / count)))
    near, smaller = planned[nearest], nearest / count
    forward_s, backward_s = seconds_at({m: _task_seconds(f) for m, f in planned.items()}, count, share=share)
    return dataclasses.replace(
        near,
        forward_s=float(forward_s),
        backward_s=float(backward_s),
        passing_bytes=smaller * near.passing_bytes,
        residual_bytes=smaller * near.residual_bytes,
        received_bytes=smaller * near.received_bytes,
        late_residual_bytes=smaller * near.late_residual_bytes,
        cotangent_bytes=smaller * near.cotangent_bytes,
    )
