"""The layers of a step in one number of microbatches, each planned like a stage of its own.

In: a step cut in time, where its layers begin, the machine. Out: `PlannedLayers`: what each layer takes and keeps on so many
devices, and the mesh that is best for it. Equal layers are planned once, side by side on several cores, those of devices that
divide none of a layer's dimensions not at all. What can go wrong: a layer that fits no memory by itself; it has no figures.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from autopar.avals import bytes_of
from autopar.compat import Var
from autopar.cost_model.hardware import Cluster
from autopar.errors import AutoparError, OutOfMemoryError
from autopar.inter_op.forked_jobs import side_by_side
from autopar.inter_op.plan_stages import measured_stage
from autopar.inter_op.problem import ChosenStage
from autopar.inter_op.stage_seconds import StagedStage
from autopar.inter_op.submeshes import machine_shape
from autopar.intra_op.memory.model import TEMPORARIES_MARGIN
from autopar.intra_op.planner import PlanRequest, logical_meshes
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.loop import TimeLoop
from autopar.program.program import Program
from autopar.stages.cut import cut_stages
from autopar.stages.identical import identical
from autopar.stages.tasks.stage_program import StageProgram, stage_program

LAYER_AXES = 2
"""Layers, and so stages, are planned on logical meshes of up to so many axes."""
SAME_MESHES = 1.1
"""Where many layers are alike, the others are planned on the meshes that are best for those, or this near to it: a stage has one
mesh for all its layers."""


def layer_meshes(devices: int, machine: Cluster) -> tuple[LogicalMesh, ...]:
    """The meshes on which layers are planned: up to `LAYER_AXES` axes, where nodes are several the last within a node."""
    if devices == 1:
        return (LogicalMesh.of((1,)),)
    nodes, per_node = machine_shape(machine, devices)
    meshes = (mesh for mesh in logical_meshes(devices) if len(mesh.shape) <= LAYER_AXES)
    return tuple(mesh for mesh in meshes if nodes == 1 or len(mesh.shape) == 1 or per_node % mesh.shape[-1] == 0)


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """What a layer costs on some devices: seconds per microbatch, of the update per step, and bytes as in `StageMemory`."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    passing_bytes: float = 0.0
    residual_bytes: float = 0.0
    received_bytes: float = 0.0
    late_residual_bytes: float = 0.0
    cotangent_bytes: float = 0.0

    @classmethod
    def of(cls, stage: StagedStage) -> LayerFigures:
        """Of a layer planned as a stage."""
        memory = stage.memory
        return cls(
            stage.forward_s,
            stage.backward_s,
            stage.once_s,
            memory.kept_bytes + memory.accumulator_bytes / TEMPORARIES_MARGIN,
            memory.passing_bytes,
            memory.residual_bytes,
            memory.received_bytes,
            memory.late_residual_bytes,
            memory.cotangent_bytes,
        )


@dataclasses.dataclass(frozen=True)
class _PlannedLayer:
    """What is known of a layer on some devices: its figures, the best mesh and its time, and the least time on each mesh."""

    figures: LayerFigures
    mesh: LogicalMesh
    step_s: float
    times: Mapping[tuple[int, ...], float | None]

    @classmethod
    def of(cls, stage: StagedStage) -> _PlannedLayer:
        """Of a layer planned as a stage."""
        times = {c.mesh_shape: c.at_least_s if c.step_s is None else c.step_s for c in stage.plan.candidates}
        return cls(LayerFigures.of(stage), stage.assignment.mesh, stage.plan.step_s, times)


def _lengths(program: Program) -> frozenset[int]:
    """The lengths of all dimensions of a program's values."""
    found: set[int] = set()
    for eqn in program.equations:
        found.update(length for v in (*eqn.invars, *eqn.outvars) for length in v.aval.shape)
        found.update(*(_lengths(region) for region in eqn.regions))
    return frozenset(found) - {0}


class PlannedLayers:
    """Layers of the step in one number of microbatches, planned on demand; equal ones once."""

    def __init__(self, loop: TimeLoop, places: tuple[int, ...], request: PlanRequest) -> None:
        self.loop, self.places = loop, places
        self._cut = cut_stages(loop, places)
        self._first = identical(loop, places)
        rules = tuple(dataclasses.replace(rule, must_match=False) for rule in request.constraints.rules)
        self._request = dataclasses.replace(request, constraints=Constraints(rules), memory_limit_bytes=None)
        self._programs: dict[int, StageProgram] = {}
        self._lengths: dict[int, frozenset[int]] = {}
        self._planned: dict[tuple[int, int], _PlannedLayer | None] = {}
        (self._common, count), *_ = collections.Counter(self._first).most_common(1)
        self._is_usual = 3 * count > len(self._first)

    def __len__(self) -> int:
        return len(self._first)

    @functools.cached_property
    def sent_once_bytes(self) -> np.ndarray:
        """[i, j]: what a stage of layers i to j - 1 sends to other stages once a step, or receives from them, if that is more.

        Sent are leaves that live here and are read elsewhere (tied weights) and what updates elsewhere read, their gradients.
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
        for name, piece in self._cut.pieces.items():
            made = {
                v: self._cut.made_by[v].stage for v in piece.reads if v in self._cut.made_by and name.kind == "update"
            }
            for v, maker in made.items():
                far = np.add.outer(np.arange(layers) > maker, np.arange(layers + 1) <= maker)
                received[: name.stage + 1, name.stage + 1 :] += (bytes_of(v) * far)[: name.stage + 1, name.stage + 1 :]
        return np.maximum(sent, received)

    def meshes(self, stage: ChosenStage) -> tuple[LogicalMesh, ...]:
        """The logical meshes that the layers of a stage were planned on, the most frequent first."""
        devices = math.prod(stage.submesh)
        planned = (self._layer(layer, devices) for layer in range(stage.first_layer, stage.end_layer))
        count = collections.Counter(one.mesh for one in planned if one is not None)
        return tuple(mesh for mesh, _ in count.most_common())

    def figures(self, layer: int, devices: int) -> LayerFigures | None:
        """What a layer costs on so many devices, None if there is no plan."""
        planned = self._layer(layer, devices)
        return None if planned is None else planned.figures

    def plan(self, sizes: Collection[int], *, perhaps: int | None = None) -> None:
        """Plan all layers on so many devices each, side by side: first the layer that repeats, whose meshes the others take.

        `perhaps`: devices that may be asked for next. The layer that repeats is planned on them if a process is idle meanwhile.
        """
        kinds = dict.fromkeys(self._first)
        first = [self._common] if self._is_usual else []
        for layers in (first, [layer for layer in kinds if layer not in first]):
            keys = dict.fromkeys((n, self._useful(n, size)) for size in sorted(sizes, reverse=True) for n in layers)
            new = [key for key in keys if key not in self._planned]
            for number, _ in new:
                self._program(number)
            jobs: list[Callable[[], _PlannedLayer | AutoparError | None]]
            jobs = [functools.partial(self._plan, key) for key in new]
            is_idle = layers is first and 0 < len(new) < self._request.processes
            ahead = [key for key in self._ahead(perhaps) if is_idle and key not in new]
            jobs += [functools.partial(self._plan_ahead, key) for key in ahead]
            found = zip([*new, *ahead], side_by_side(jobs, processes=self._request.processes), strict=True)
            self._planned |= {key: one for key, one in found if not isinstance(one, AutoparError)}

    def _ahead(self, devices: int | None) -> list[tuple[int, int]]:
        """The layer that repeats on these devices, unless that is planned."""
        keys = [] if devices is None else [(self._common, self._useful(self._common, devices))]
        return [key for key in keys if key not in self._planned]

    def _plan_ahead(self, key: tuple[int, int]) -> _PlannedLayer | AutoparError | None:
        """An error is nobody's who did not ask."""
        try:
            return self._plan(key)
        except AutoparError as error:
            return error

    def _layer(self, layer: int, devices: int) -> _PlannedLayer | None:
        number = self._first[layer]
        key = (number, self._useful(number, devices))
        if key not in self._planned:
            self._planned[key] = self._plan(key)
        return self._planned[key]

    def _plan(self, key: tuple[int, int]) -> _PlannedLayer | None:
        request = dataclasses.replace(self._request, meshes=self._meshes_for(*key))
        try:
            return _PlannedLayer.of(measured_stage(self._program(key[0]), request))
        except OutOfMemoryError:
            return None

    def _program(self, layer: int) -> StageProgram:
        if layer not in self._programs:
            self._programs[layer] = stage_program(self._cut, layer)
        return self._programs[layer]

    def _useful(self, layer: int, devices: int) -> int:
        """How many of the devices a layer can use: without the prime factors that divide no dimension of its values."""
        if layer not in self._lengths:
            self._lengths[layer] = _lengths(self._program(layer).step.program)
        rest, prime = devices, 2
        while rest > 1:
            if rest % prime:
                prime += 1
                continue
            rest //= prime
            if all(length % prime for length in self._lengths[layer]):
                devices //= prime
        return devices

    def _meshes_for(self, layer: int, devices: int) -> tuple[LogicalMesh, ...]:
        """The meshes to plan a layer on: all, unless more than a third of the layers are of another kind."""
        meshes = layer_meshes(devices, self._request.cluster)
        usual = self._layer(self._common, devices) if layer != self._common and self._is_usual else None
        if usual is None or usual.mesh.size != devices:
            return meshes
        near = usual.step_s * SAME_MESHES
        good = {shape for shape, seconds in usual.times.items() if seconds is not None and seconds <= near}
        return tuple(mesh for mesh in meshes if mesh.shape in good or mesh == usual.mesh)
