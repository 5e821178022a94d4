"""How many stages, of which layers, on which devices: the inter-operator pass over planned layers.

In: a traced step, the number of devices, the machine, the microbatches and the schedule. Out: a `StageRequest` with cuts and
meshes for `staging.plan_stages`. The forward chain is clustered into layers (`layers.py`); every distinct layer is planned like a
stage of its own on every submesh size that may matter, a range of layers costs the sum of its layers, and the dynamic program
(`inter_op.py`) chooses. Submeshes of several nodes begin with a bound, which perfect division of a smaller one gives; those that
are chosen at their bound are planned, until none is. What can go wrong: the sum leaves out what layers share, such as a relayout
at a boundary saved or an activation freed early; so the chosen stages are planned again as wholes, and their own figures are
the plan's.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar.chain_cuts import boundaries
from autopar.cost_model.hardware import Cluster
from autopar.errors import OutOfMemoryError
from autopar.inter_op import (
    ChosenStage,
    CostTable,
    Manual,
    ScheduleName,
    StageChoice,
    StageProblem,
    Submesh,
    choose_stages,
    submeshes,
)
from autopar.layers import cluster, identical
from autopar.memory import TEMPORARIES_MARGIN
from autopar.mesh import LogicalMesh
from autopar.microbatch import TimeLoop
from autopar.options import Constraints
from autopar.planner import PlanRequest, logical_meshes
from autopar.stage_program import StageProgram, stage_program
from autopar.stages import ForwardEquation, cut_stages, forward_chain
from autopar.staging import StagedStage, measured_stage

TOLERANCE = 1e-3
"""Relative gain below which the search over stages lets go; layers' costs are less exact."""
ROOM = 0.92
"""Part of the memory that stages may take by the sum of their layers, so that they fit as wholes."""
LAYER_AXES = 2
"""Layers, and so stages, are planned on logical meshes of up to so many axes."""
LAYER_COUNTS = (64, 48, 40, 32, 24, 16, 12, 8, 4, 2)
"""Numbers of layers into which a step may be clustered: the one whose cuts send the least, the most layers among equals."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the search chose: places of the cuts in the forward chain, the devices of each stage, and their logical meshes.

    A stage's meshes are those that are best for one of its layers. `recompute`: backward does forward's work again.
    `one_stage_s`: the least time of one stage on all devices, infinite if that does not fit.
    """

    cuts: tuple[int, ...]
    sizes: tuple[int, ...]
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    choice: StageChoice
    recompute: bool
    one_stage_s: float


def machine_shape(machine: Cluster, devices: int) -> tuple[int, int]:
    """(nodes, devices per node) that so many devices of a machine take."""
    per_node = machine.devices_per_node
    if per_node is None or devices <= per_node or devices % per_node:
        return (1, devices)
    return (devices // per_node, per_node)


def layer_meshes(devices: int, machine: Cluster) -> tuple[LogicalMesh, ...]:
    """The meshes on which layers are planned: up to `LAYER_AXES` axes, where nodes are several the last within a node."""
    if devices == 1:
        return (LogicalMesh.of((1,)),)
    nodes, per_node = machine_shape(machine, devices)
    meshes = (mesh for mesh in logical_meshes(devices) if len(mesh.shape) <= LAYER_AXES)
    return tuple(mesh for mesh in meshes if nodes == 1 or len(mesh.shape) == 1 or per_node % mesh.shape[-1] == 0)


def search_stages(
    loop: TimeLoop,
    request: PlanRequest,
    *,
    devices: int,
    schedule: ScheduleName,
    num_stages: int | None = None,
    recompute: Sequence[bool] = (False,),
) -> Found:
    """The best stages for so many microbatches, with or without recomputation. Raises OutOfMemoryError, ArgumentError."""
    chain = forward_chain(loop)
    places = boundaries(chain) or _clustered(chain)
    shape = machine_shape(request.cluster, devices)
    options = submeshes(*shape)
    layers = _Layers(loop, places, chain, request, options)
    limit = math.inf if request.memory_limit_bytes is None else ROOM * request.memory_limit_bytes
    while True:
        problems = {
            again: StageProblem(
                layers.table(options, recompute=again),
                options,
                shape,
                loop.plan.microbatches,
                schedule,
                memory_bytes=limit,
            )
            for again in recompute
        }
        chosen = {again: _chosen(problem, num_stages) for again, problem in problems.items()}
        choices = {again: choice for again, choice in chosen.items() if isinstance(choice, StageChoice)}
        if not choices and not layers.plan_more(options):
            raise next(error for error in list(chosen.values())[::-1] if isinstance(error, OutOfMemoryError))
        if choices:
            again = min(choices, key=lambda a: choices[a].step_s)
            choice = choices[again]
            if not layers.plan_more([stage.submesh for stage in choice.stages]):
                break
    alone = [one.step_s for p in problems.values() if isinstance(one := _chosen(p, 1), StageChoice)]
    return Found(
        tuple(places[stage.first_layer - 1] for stage in choice.stages[1:]),
        tuple(math.prod(stage.submesh) for stage in choice.stages),
        tuple(map(layers.meshes, choice.stages)),
        choice,
        again,
        min(alone, default=math.inf),
    )


def _chosen(problem: StageProblem, num_stages: int | None) -> StageChoice | OutOfMemoryError:
    try:
        return choose_stages(problem, manual=Manual(num_stages=num_stages), tolerance=TOLERANCE)
    except OutOfMemoryError as error:
        return error


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


@dataclasses.dataclass(frozen=True)
class _LayerFigures:
    """What a layer costs on some devices: seconds per microbatch, of the update per step, and bytes as in `StageMemory`."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    passing_bytes: float = 0.0
    residual_bytes: float = 0.0
    received_bytes: float = 0.0


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


class _Layers:
    """Costs of layers on submeshes; equal layers are planned once."""

    def __init__(
        self,
        loop: TimeLoop,
        places: tuple[int, ...],
        chain: tuple[ForwardEquation, ...],
        request: PlanRequest,
        options: Sequence[Submesh],
    ) -> None:
        self._cut = cut_stages(loop, places)
        self._first = identical(loop, places)
        rules = tuple(dataclasses.replace(rule, must_match=False) for rule in request.constraints.rules)
        self._request = dataclasses.replace(request, constraints=Constraints(rules), memory_limit_bytes=None)
        self._boundary_bytes = [0.0, *(chain[place].cut_bytes / loop.plan.microbatches for place in places), 0.0]
        self._programs: dict[int, StageProgram] = {}
        self._planned: dict[tuple[int, int], StagedStage | None] = {}
        per_node = request.cluster.devices_per_node or math.inf
        self._sizes = {size for size in map(math.prod, options) if size <= per_node}

    def table(self, options: Sequence[Submesh], *, recompute: bool) -> CostTable:
        """Costs of all ranges of layers on all submeshes, from those of the layers.

        Temporaries count with the margin that a limit must leave for them. Seconds, weights and what is in flight add up; what
        comes and goes within a task does not, the largest counts. With `recompute` a microbatch in flight keeps what the first
        layer received, and backward, which takes a forward more, makes the rest again.
        """
        count = len(self._first)
        arrays = [np.zeros((len(options), count, count + 1)) for _ in range(5)]
        later = _ranges([1.0] * count) > 0
        for z, submesh in enumerate(options):
            devices = math.prod(submesh)
            figures = [self._figures(layer, devices) for layer in range(count)]
            can = (_ranges([float(f is None) for f in figures]) == 0) & later
            known = [f or _LayerFigures() for f in figures]
            forward, backward, once, kept, residual = (
                _ranges([getattr(f, name) for f in known])
                for name in ("forward_s", "backward_s", "once_s", "kept_bytes", "residual_bytes")
            )
            received = np.array([f.received_bytes for f in known])[:, None]
            passing = _largest([f.passing_bytes for f in known]) / TEMPORARIES_MARGIN
            first = residual / TEMPORARIES_MARGIN - (0.0 if recompute else residual)
            weights = kept + passing + first
            arrays[0][z] = np.where(can, (1.0 + recompute) * forward + backward, np.inf)
            arrays[1][z] = np.where(can, once, 0.0)
            arrays[2][z] = np.where(can, self._transfer_s(devices)[None, :], 0.0)
            arrays[3][z] = np.where(can, weights, 0.0)
            arrays[4][z] = np.where(can, received if recompute else residual, 0.0)
        return CostTable(*arrays)

    def meshes(self, stage: ChosenStage) -> tuple[LogicalMesh, ...]:
        """The logical meshes that the layers of a stage were planned on, the most frequent first."""
        devices = math.prod(stage.submesh)
        planned = (self._stage(layer, devices) for layer in range(stage.first_layer, stage.end_layer))
        count = collections.Counter(one.assignment.mesh for one in planned if one is not None)
        return tuple(mesh for mesh, _ in count.most_common())

    def _transfer_s(self, devices: int) -> np.ndarray:
        """Seconds to send what crosses after each layer, and its gradient back."""
        link = self._request.cluster.links_of((2, devices))[0]
        sent = np.array(self._boundary_bytes)
        return np.where(sent > 0, 2 * (link.alpha_s + sent / devices * link.beta_s_per_byte), 0.0)

    def plan_more(self, submeshes: Sequence[Submesh]) -> bool:
        """Plan layers on these submeshes from now on; whether one of them is new."""
        new = {math.prod(submesh) for submesh in submeshes} - self._sizes
        self._sizes |= new
        return bool(new)

    def _figures(self, layer: int, devices: int) -> _LayerFigures | None:
        """What a layer costs on so many devices, None if there is no plan.

        On a submesh that is not planned yet, the least that it can cost: as if work, state and all else of a smaller one were
        divided evenly among more devices.
        """
        if devices in self._sizes:
            return self._planned_figures(layer, devices)
        smaller = [size for size in self._sizes if size < devices]
        known = {size: self._planned_figures(layer, size) for size in smaller}
        divided = [
            [size / devices * figure for figure in dataclasses.astuple(figures)]
            for size, figures in known.items()
            if figures is not None
        ]
        return _LayerFigures(*(max(one) for one in zip(*divided, strict=True))) if divided else _LayerFigures()

    def _planned_figures(self, layer: int, devices: int) -> _LayerFigures | None:
        stage = self._stage(layer, devices)
        if stage is None:
            return None
        memory = stage.memory
        return _LayerFigures(
            stage.forward_s,
            stage.backward_s,
            stage.once_s,
            memory.kept_bytes + memory.accumulator_bytes / TEMPORARIES_MARGIN,
            memory.passing_bytes,
            memory.residual_bytes,
            memory.received_bytes,
        )

    def _stage(self, layer: int, devices: int) -> StagedStage | None:
        key = (self._first[layer], devices)
        if key not in self._planned:
            number = key[0]
            if number not in self._programs:
                self._programs[number] = stage_program(self._cut, number)
            meshes = layer_meshes(devices, self._request.cluster)
            request = dataclasses.replace(self._request, meshes=meshes)
            try:
                self._planned[key] = measured_stage(self._programs[number], request)
            except OutOfMemoryError:
                self._planned[key] = None
        return self._planned[key]
