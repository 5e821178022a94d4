"""The layers of a step in one number of microbatches, each planned like a stage of its own.

In: a step cut in time, where its layers begin, the machine. Out: `PlannedLayers`: what each layer takes and keeps on a number of
devices, and the mesh that is best for it. Equal layers are planned once, and different ones side by side on several cores. A
layer is not planned on devices that divide little of its work. What can go wrong: a layer may not fit the memory by itself;
it has no figures then.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from autopar.avals import bytes_of
from autopar.compat import Var
from autopar.cost_model.machine import Cluster, Overlap
from autopar.errors import AutoparError, OutOfMemoryError
from autopar.forks.jobs import run_side_by_side
from autopar.inter_op.candidates.layer_figures import LayerFigures
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.dynamic_program.problem import ChosenStage
from autopar.inter_op.dynamic_program.submeshes import machine_shape, size_of
from autopar.inter_op.plan_stage import Planner, plan_program
from autopar.inter_op.stage_seconds import StagedStage, price_stage, repeated_part, repeated_s
from autopar.intra_op.choices.catalogue import Catalogue
from autopar.intra_op.choices.least_work import find_seconds_by_lengths, find_work
from autopar.intra_op.request import PlanRequest, logical_meshes
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.progress import enter, planning_parts
from autopar.stages.chain import forward_chain
from autopar.stages.cut import cut_stages
from autopar.stages.identical import find_identical
from autopar.stages.tasks.stage_program import StageProgram, program_of_stage


def layer_meshes(devices: int, machine: Cluster, most_axes: int) -> tuple[LogicalMesh, ...]:
    """The meshes on which layers are planned: up to `most_axes` axes; across nodes, the last axis lies within a node."""
    if devices == 1:
        return (LogicalMesh.of((1,)),)
    nodes, per_node = machine_shape(machine, devices)
    meshes = (mesh for mesh in logical_meshes(devices) if len(mesh.shape) <= most_axes)
    return tuple(mesh for mesh in meshes if nodes == 1 or len(mesh.shape) == 1 or per_node % mesh.shape[-1] == 0)


def figures_of(stage: StagedStage, overlap: Overlap, *, is_piece: bool = False) -> LayerFigures:
    """What a layer costs that is planned as a stage; `is_piece`: of a scan that a stage of several layers has in one."""
    memory = stage.memory
    return LayerFigures(
        forward_s=stage.forward_s,
        again_s=stage.forward_s * repeated_part(stage.program, stage.assignment, overlap),
        backward_s=stage.backward_s,
        once_s=stage.once_s,
        kept_bytes=memory.kept_bytes,
        looped_bytes=memory.looped_bytes,
        beside_bytes=memory.beside_bytes,
        passing_bytes=memory.passing_bytes,
        within_bytes=memory.within_bytes,
        residual_bytes=memory.residual_bytes,
        received_bytes=memory.received_bytes,
        late_residual_bytes=memory.late_residual_bytes,
        cotangent_bytes=memory.cotangent_bytes,
        stacked_bytes=memory.accumulator_bytes if is_piece else 0.0,
        joined_bytes=memory.within_bytes - memory.passing_bytes if is_piece else 0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlannedLayer:
    """A layer on some devices: its figures, the best mesh with its seconds, and at least how many seconds each mesh takes.

    `waiting`: the part of its seconds in which it waits for communication. `divided`: the part of the rest that is not work
    which several devices do.
    """

    figures: LayerFigures
    mesh: LogicalMesh
    step_s: float
    waiting: float
    divided: float
    times: Mapping[tuple[int, ...], float | None]

    @classmethod
    def of(cls, stage: StagedStage, overlap: Overlap, *, is_piece: bool) -> _PlannedLayer:
        """Of a layer planned as a stage; see `figures_of`."""
        times = {c.mesh_shape: c.at_least_s if c.step_s is None else c.step_s for c in stage.plan.candidates}
        plan = stage.plan
        waiting = (plan.comm_s - plan.hidden_s) / plan.step_s if plan.step_s else 0.0
        working_s = plan.step_s * (1 - waiting)
        return cls(
            figures=figures_of(stage, overlap, is_piece=is_piece),
            mesh=stage.mesh,
            step_s=plan.step_s,
            waiting=waiting,
            divided=1 - min(1.0, repeated_s(stage.assignment) / working_s) if working_s else 1.0,
            times=times,
        )


@dataclasses.dataclass(frozen=True)
class _TooLarge:
    """A layer that does not fit the memory on some devices."""


@dataclasses.dataclass(frozen=True)
class _Failed:
    """A layer on devices that nobody has asked for yet, and the error that planning it raised."""

    error: AutoparError


_Key = tuple[int, int]
"""(the first of the layers that are equal to it, the devices that it can use)."""


class PlannedLayers:
    """The layers of the step in one number of microbatches, planned on demand; equal ones once."""

    def __init__(
        self,
        loop: TimeLoop,
        places: tuple[int, ...],
        request: PlanRequest,
        *,
        tuning: Tuning = TUNING,
        planner: Planner = plan_program,
    ) -> None:
        self.loop, self.places = loop, places
        self._tuning, self._planner = tuning, planner
        self._cut = cut_stages(loop, places)
        self._first = find_identical(loop, places)
        rules = tuple(dataclasses.replace(rule, must_match=False) for rule in request.constraints.rules)
        self._request = dataclasses.replace(request, constraints=Constraints(rules), memory_limit_bytes=None)
        self._programs: dict[int, StageProgram] = {}
        self._divided_by: dict[tuple[int, int], bool] = {}
        self._seconds: dict[int, dict[frozenset[int], float]] = {}
        self._planned: dict[_Key, _PlannedLayer | _TooLarge] = {}
        self._launches_s: dict[int, float] = {}
        (self._common, count), *_ = collections.Counter(self._first).most_common(1)
        self._is_usual = 3 * count > len(self._first)

    def __len__(self) -> int:
        return len(self._first)

    @functools.cached_property
    def _of_pieces(self) -> frozenset[int]:
        """The layers that are pieces of a scan, or have some."""
        if not self.loop.pieces:
            return frozenset()
        places = (place for place, link in enumerate(forward_chain(self.loop)) if link.equation in self.loop.pieces)
        return frozenset(bisect.bisect_right(self.places, place) for place in places)

    def first_alike(self, layer: int) -> int:
        """The first of the layers that are equal to a layer."""
        return self._first[layer]

    @property
    def common(self) -> int:
        """The first of the layers that repeat most often."""
        return self._common

    @functools.cached_property
    def sent_once_bytes(self) -> np.ndarray:
        """[i, j]: bytes that a stage of layers i to j - 1 sends to other stages once a step, or receives, whichever is more.

        Sent: leaves that live in the stage and are read in others (tied weights). Received: what the stage's updates read of
        others, such as gradients.
        """
        layers = len(self)
        sent, received = np.zeros((2, layers, layers + 1))
        readers: dict[Var, list[int]] = {}
        for v, layer in self._cut.lent():
            readers.setdefault(v, []).append(layer)
        for v, others in readers.items():
            home = self._cut.homes[v]
            for first, end in itertools.product(range(home + 1), range(home + 1, layers + 1)):
                if min(others) < first or max(others) >= end:
                    sent[first, end] += bytes_of(v)
        for name, segment in self._cut.segments.items():
            made = {
                v: self._cut.made_by[v].stage for v in segment.reads if v in self._cut.made_by and name.kind == "update"
            }
            for v, maker in made.items():
                far = np.add.outer(np.arange(layers) > maker, np.arange(layers + 1) <= maker)
                received[: name.stage + 1, name.stage + 1 :] += (bytes_of(v) * far)[: name.stage + 1, name.stage + 1 :]
        return np.maximum(sent, received)

    def meshes(self, stage: ChosenStage) -> tuple[LogicalMesh, ...]:
        """The logical meshes that are best for the layers of a stage, the most frequent first."""
        devices = size_of(stage.submesh)
        planned = (self._plan_layer(layer, devices) for layer in range(stage.first_layer, stage.end_layer))
        count = collections.Counter(one.mesh for one in planned if isinstance(one, _PlannedLayer))
        return tuple(mesh for mesh, _ in count.most_common())

    def figures(self, layer: int, devices: int) -> LayerFigures | None:
        """What a layer costs on a number of devices, None if it does not fit the memory."""
        planned = self._plan_layer(layer, devices)
        return planned.figures if isinstance(planned, _PlannedLayer) else None

    @property
    def has_common(self) -> bool:
        """Whether a third of all layers are equal."""
        return self._is_usual

    def waiting(self, layer: int, devices: int) -> float:
        """The part of a layer's time on a number of devices in which it waits for communication; 0 if it does not fit."""
        planned = self._plan_layer(layer, devices)
        return planned.waiting if isinstance(planned, _PlannedLayer) else 0.0

    def divided(self, layer: int, devices: int) -> float:
        """The part of a layer's time on a number of devices in which each does work of its own; 0 if it does not fit."""
        planned = self._plan_layer(layer, devices)
        return (1 - planned.waiting) * planned.divided if isinstance(planned, _PlannedLayer) else 0.0

    def launches_s(self, layer: int) -> float:
        """Seconds per microbatch in which a layer's operations start, which no number of devices divides."""
        first = self._first[layer]
        if first not in self._launches_s:
            program = self._program(first)
            step_s = find_work(program.step.program, self._alone).launches_s
            self._launches_s[first] = step_s / program.cut.loop.plan.microbatches
        return self._launches_s[first]

    def plan(
        self, sizes: Collection[int], *, others: Collection[_Key] | None = None, perhaps: int | None = None
    ) -> None:
        """Plan layers on each of these numbers of devices, side by side: all, or the one that repeats and `others`, if given.

        The layer that repeats comes first, as the others take its meshes. `others`: (layer, devices). `perhaps`: a number of
        devices that may be asked for next; the layer that repeats is planned on it if a process is idle meanwhile.
        """
        ordered = sorted(sizes, reverse=True)
        first = [self._common] if self._is_usual or others is not None else []
        if others is None:
            others = [(layer, size) for size in ordered for layer in dict.fromkeys(self._first) if layer not in first]
        for is_first, keys in ((True, itertools.product(first, ordered)), (False, others)):
            new = self._not_planned(self._key(layer, size) for layer, size in keys)
            is_idle = is_first and 0 < len(new) < self._request.processes
            ahead = [key for key in self._ahead(perhaps) if key not in new] if is_idle else []
            self._plan_keys(new, ahead)

    def plan_stages(self, stages: Sequence[ChosenStage]) -> None:
        """Plan the layers of stages on the devices of each, side by side; the layer that repeats first, as in `plan`."""
        sizes = {stage: size_of(stage.submesh) for stage in stages}
        new = self._not_planned(
            self._key(layer, size)
            for stage, size in sizes.items()
            for layer in range(stage.first_layer, stage.end_layer)
        )
        for is_first in (True, False):
            self._plan_keys([key for key in new if (self._is_usual and key[0] == self._common) is is_first], [])

    def _not_planned(self, keys: Iterable[_Key]) -> list[_Key]:
        return [key for key in dict.fromkeys(keys) if key not in self._planned]

    def _plan_keys(self, new: list[_Key], ahead: list[_Key]) -> None:
        """Plan layers side by side, some of them before anybody has asked for them."""
        for layer, _ in new:
            self._program(layer)  # before this process forks, so that every fork has it
        jobs: list[Callable[[], _PlannedLayer | _TooLarge | _Failed]]
        own = self._request.processes if len(new) + len(ahead) == 1 else 1  # forks do not fork
        jobs = [functools.partial(self._plan_key, key, processes=own) for key in new]
        jobs += [functools.partial(self._try_key, key) for key in ahead]
        if jobs:
            enter("planning layers")
        outcomes = run_side_by_side(jobs, processes=self._request.processes)
        for key, outcome in zip([*new, *ahead], outcomes, strict=True):
            if not isinstance(outcome, _Failed):  # whoever asks for it plans it again, and gets the error
                self._planned[key] = outcome

    def _ahead(self, devices: int | None) -> list[_Key]:
        """The layer that repeats on these devices, unless that is planned."""
        keys = [] if devices is None else [self._key(self._common, devices)]
        return [key for key in keys if key not in self._planned]

    def _plan_layer(self, layer: int, devices: int) -> _PlannedLayer | _TooLarge:
        key = self._key(layer, devices)
        if key not in self._planned:
            self._planned[key] = self._plan_key(key)
        return self._planned[key]

    def _plan_key(self, key: _Key, *, processes: int = 1) -> _PlannedLayer | _TooLarge:
        """Plan a layer; `processes` of them look at its meshes."""
        layer, devices = key
        program = self._program(layer)
        meshes = self._meshes_for(layer, devices)
        request = dataclasses.replace(self._request, meshes=meshes, processes=processes)
        try:
            with planning_parts():
                planned = self._planner(program, request)
        except OutOfMemoryError:
            return _TooLarge()
        # Its stage is called, with all layers at once.
        cluster = dataclasses.replace(request.cluster, call_s=0.0, call_s_per_array=0.0)
        staged = price_stage(program, planned.plan, planned.assignment, cluster=cluster)
        return _PlannedLayer.of(staged, cluster.overlap, is_piece=layer in self._of_pieces)

    def _try_key(self, key: _Key) -> _PlannedLayer | _TooLarge | _Failed:
        """Plan a layer that nobody has asked for; an error waits until somebody does."""
        try:
            return self._plan_key(key)
        except AutoparError as error:
            return _Failed(error)

    def _program(self, layer: int) -> StageProgram:
        if layer not in self._programs:
            self._programs[layer] = program_of_stage(self._cut, layer)
        return self._programs[layer]

    def _key(self, layer: int, devices: int) -> _Key:
        return self._first[layer], self.useful_devices(layer, devices)

    def useful_devices(self, layer: int, devices: int) -> int:
        """How many of the devices a layer can use: prime factors that divide too little of its work are left out."""
        rest, prime = devices, 2
        while rest > 1:
            if rest % prime:
                prime += 1
                continue
            rest //= prime
            if not self._is_divided_by(self._first[layer], prime):
                devices //= prime
        return devices

    def _is_divided_by(self, layer: int, prime: int) -> bool:
        """Whether so many devices can divide a good part of a layer's work: some dimension of its operations.

        What they divide of the rest, such as the heads of attention alone, is not worth what is sent for it.
        """
        if (layer, prime) not in self._divided_by:
            if layer not in self._seconds:
                self._seconds[layer] = find_seconds_by_lengths(self._program(layer).step.program, self._alone)
            seconds = self._seconds[layer]
            divided_s = sum(some for lengths, some in seconds.items() if any(one % prime == 0 for one in lengths))
            self._divided_by[layer, prime] = divided_s >= self._tuning.divided * sum(seconds.values())
        return self._divided_by[layer, prime]

    @property
    def _alone(self) -> Catalogue:
        """The catalogue of one device."""
        request = self._request
        return request.catalogues.of(LogicalMesh.of((1,)), request.cluster, request.options)

    def _meshes_for(self, layer: int, devices: int) -> tuple[LogicalMesh, ...]:
        """The meshes to plan a layer on: all, or those that are good for the layer that repeats, if that is a third of all."""
        meshes = layer_meshes(devices, self._request.cluster, self._tuning.layer_axes)
        if layer == self._common or not self._is_usual:
            return meshes
        match self._plan_layer(self._common, devices):
            case _PlannedLayer(mesh=mesh) as usual if mesh.size == devices:
                near = usual.step_s * self._tuning.same_meshes
                good = {shape for shape, seconds in usual.times.items() if seconds is not None and seconds <= near}
                return tuple(one for one in meshes if one.shape in good or one == mesh)
            case _:
                return meshes
