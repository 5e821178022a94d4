"""How many stages, of which layers, on which devices: the inter-operator pass over planned layers.

In: a traced step, the number of devices, the machine, the microbatches and the schedule. Out: a `StageRequest` with cuts and
meshes for `staging.plan_stages`. The forward chain is clustered into layers (`layers.py`); every distinct layer is planned like a
stage of its own on every submesh size, a range of layers costs the sum of its layers, and the dynamic program (`inter_op.py`)
chooses. What can go wrong: the sum leaves out what layers share, such as a relayout at a boundary saved or an activation freed
early; so the chosen stages are planned again as wholes, and their own figures are the plan's.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.cost_model.hardware import Cluster
from autopar.errors import OutOfMemoryError
from autopar.inter_op import (
    CostTable,
    Manual,
    ScheduleName,
    StageChoice,
    StageCost,
    StageProblem,
    choose_stages,
    submeshes,
)
from autopar.layers import cluster, identical
from autopar.mesh import LogicalMesh
from autopar.microbatch import TimeLoop
from autopar.options import Constraints
from autopar.planner import PlanRequest, logical_meshes
from autopar.stage_program import StageProgram, stage_program
from autopar.stages import ForwardEquation, cut_stages, forward_chain
from autopar.staging import StagedStage, boundaries, measured_stage

LAYER_AXES = 2
"""Layers are priced on logical meshes of up to so many axes; the stages that are chosen are planned on all."""
MOST_LAYERS = 16
"""Into how many layers a step is clustered at the most; a deeper model has more than one block in a layer."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the search chose: places of the cuts in the forward chain, and the devices of each stage."""

    cuts: tuple[int, ...]
    sizes: tuple[int, ...]
    choice: StageChoice


def machine_shape(machine: Cluster, devices: int) -> tuple[int, int]:
    """(nodes, devices per node) that so many devices of a machine take."""
    per_node = machine.devices_per_node
    if per_node is None or devices <= per_node or devices % per_node:
        return (1, devices)
    return (devices // per_node, per_node)


def search_stages(
    loop: TimeLoop, request: PlanRequest, *, devices: int, schedule: ScheduleName, num_stages: int | None = None
) -> Found:
    """The best stages for so many microbatches. Raises OutOfMemoryError, ArgumentError."""
    chain = forward_chain(loop)
    marked = boundaries(chain)
    places = marked or cluster(chain, max_layers=min(MOST_LAYERS, len(chain)))
    shape = machine_shape(request.cluster, devices)
    options = submeshes(*shape)
    layers = _Layers(loop, places, chain, request)
    table = CostTable.of(len(places) + 1, len(options), lambda i, j, z: layers.cost(i, j, math.prod(options[z])))
    limit = request.memory_limit_bytes
    problem = StageProblem(
        table,
        options,
        shape,
        loop.plan.microbatches,
        schedule,
        memory_bytes=math.inf if limit is None else float(limit),
    )
    choice = choose_stages(problem, manual=Manual(num_stages=num_stages))
    cuts = tuple(places[stage.first_layer - 1] for stage in choice.stages[1:])
    return Found(cuts, tuple(math.prod(stage.submesh) for stage in choice.stages), choice)


class _Layers:
    """Costs of layers on submeshes; equal layers are planned once."""

    def __init__(
        self, loop: TimeLoop, places: tuple[int, ...], chain: tuple[ForwardEquation, ...], request: PlanRequest
    ) -> None:
        self._cut = cut_stages(loop, places)
        self._first = identical(loop, places)
        rules = tuple(dataclasses.replace(rule, must_match=False) for rule in request.constraints.rules)
        self._request = dataclasses.replace(request, constraints=Constraints(rules), memory_limit_bytes=None)
        self._boundary_bytes = [0.0, *(chain[place].cut_bytes / loop.plan.microbatches for place in places), 0.0]
        self._programs: dict[int, StageProgram] = {}
        self._planned: dict[tuple[int, int], StagedStage | None] = {}

    def cost(self, first: int, end: int, devices: int) -> StageCost | None:
        """Layers `first` to `end` - 1 on so many devices; None if one of them has no plan there."""
        stages = [self._stage(layer, devices) for layer in range(first, end)]
        if any(stage is None for stage in stages):
            return None
        found = [stage for stage in stages if stage is not None]
        link = self._request.cluster.links_of((2, devices))[0]
        sent = self._boundary_bytes[end]
        return StageCost(
            seconds_per_microbatch=sum(s.forward_s + s.backward_s for s in found),
            once_s=sum(s.once_s for s in found),
            transfer_s=2 * (link.alpha_s + sent / devices * link.beta_s_per_byte) if sent else 0.0,
            weight_bytes=float(sum(max(0, s.plan.peak_bytes - s.residual_bytes) for s in found)),
            activation_bytes=float(sum(s.residual_bytes for s in found)),
        )

    def _stage(self, layer: int, devices: int) -> StagedStage | None:
        key = (self._first[layer], devices)
        if key not in self._planned:
            number = key[0]
            if number not in self._programs:
                self._programs[number] = stage_program(self._cut, number)
            meshes = tuple(mesh for mesh in logical_meshes(devices) if len(mesh.shape) <= LAYER_AXES)
            meshes = meshes if devices > 1 else (LogicalMesh.of((1,)),)
            request = dataclasses.replace(self._request, meshes=meshes)
            try:
                self._planned[key] = measured_stage(self._programs[number], request)
            except OutOfMemoryError:
                self._planned[key] = None
        return self._planned[key]
