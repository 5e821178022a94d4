"""What the arguments of `parallelize` mean together: from them and a traced step to a plan.

In: a frozen `Settings`, the arguments that `arguments.py` checked. Out: the plan of a traced step, on one mesh or in pipeline
stages: this module decides which of these to plan, on which devices and meshes, within which memory. What can go wrong: wishes
that exclude each other; each error names the argument and what it may be.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from autopar.arguments import Leader
from autopar.cost_model.hardware import Cluster, preset, preset_for_device_kind
from autopar.errors import ArgumentError
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline, compile_pipeline
from autopar.inter_op.compare_timetables import best_pipeline
from autopar.inter_op.one_mesh import OneMeshStep, plan_on_one_mesh
from autopar.inter_op.one_or_stages import one_or_stages
from autopar.inter_op.plan_pipeline import PipelineWishes, restore_pipeline
from autopar.inter_op.stage_seconds import Staged
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.planner import PlanRequest, logical_meshes, restore
from autopar.layouts.constraints import Constraints, Rule
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import in_microbatches, microbatch_counts
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.program.call import CallSignature
from autopar.program.step import TracedStep, require_examples
from autopar.schedules.schedules import Open, Recompute
from autopar.shared_plan import agreed, is_needed
from autopar.stages.dependence import takes_gradients
from autopar.stages.follow import Following
from autopar.stages.recompute_layers import recomputed_step


@dataclasses.dataclass(frozen=True, eq=False)
class OnOneMesh:
    """A step planned for one mesh."""

    traced: TracedStep
    plan: Plan
    assignment: Assignment

    def compiled(self, signature: CallSignature, devices: Sequence[jax.Device]) -> CompiledStep:
        """The step on devices."""
        return CompiledStep(signature, self.traced, self.assignment, self.plan, devices)


@dataclasses.dataclass(frozen=True, eq=False)
class InStages:
    """A step planned as a pipeline."""

    traced: TracedStep
    plan: PipelinePlan
    staged: Staged

    def compiled(self, signature: CallSignature, devices: Sequence[jax.Device]) -> CompiledPipeline:
        """The step on devices."""
        return compile_pipeline(signature, self.traced, self.staged, self.plan, devices)


Planned = OnOneMesh | InStages


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of `parallelize`, checked. `meshes` has one shape per stage if the user gave several."""

    devices: tuple[jax.Device, ...] | int | None
    meshes: Literal["auto"] | tuple[LogicalMesh, ...]
    memory_limit_bytes: int | None
    constraints: Constraints
    cluster: Literal["auto"] | Cluster
    options: PlannerOptions
    plan: Plan | PipelinePlan | None
    follow: Leader | None
    num_microbatches: Open
    num_stages: Open
    schedule: str
    virtual_stages: Open
    recompute: Recompute = "auto"
    processes: int = 1

    def planned(self, traced: TracedStep) -> Planned:
        """The plan for a step: the given one, a pipeline if stages were asked for, else one mesh."""
        if isinstance(self.plan, PipelinePlan):
            return InStages(traced, self.plan, restore_pipeline(traced, self.plan, self._request(())))
        leader = self._leader_in_stages()
        if self.plan is None:
            self._require_a_batch(traced, 1 if leader is None else leader.num_stages)
        if self.plan is None and leader is not None:
            wishes = self._wishes_after(leader, traced)
            return InStages(traced, *best_pipeline(traced, wishes, self._request(()), devices=self._count()))
        stages = self._stages()
        wishes = PipelineWishes(
            stages,
            self.num_microbatches,
            self.schedule,
            self.virtual_stages,
            self._stage_meshes(stages),
            self.recompute,
        )
        if self.plan is None and stages > 1:
            return InStages(traced, *best_pipeline(traced, wishes, self._request(()), devices=self._count()))
        if self.plan is None:
            self._refuse_what_is_for_stages()
        if self.plan is None and self._may_search(traced):
            return self._best_of(traced, wishes)
        return self._on_one_mesh(traced, self._request(self._one_mesh()))

    def planned_by_all(self, traced: TracedStep, name: str) -> Planned:
        """The same on every process that has devices of the step: the first one plans, the others take over its plan."""
        if not is_needed(self.jax_devices):
            return self.planned(traced)
        own: list[Planned] = []

        def plan() -> str:
            own.append(self.planned(traced))
            return own[0].plan.to_json()

        text = agreed(self._question(traced, name), self.jax_devices(), plan)
        return own[0] if own else dataclasses.replace(self, plan=plan_from_json(text)).planned(traced)

    def _question(self, traced: TracedStep, name: str) -> str:
        """What is planned, in words that are the same on every process if the step and the options are.

        The cluster is left out: each process may have measured its own machine, and the first one's plan is for all.
        """
        batch = ", ".join(
            f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in traced.inputs if leaf.role == "batch"
        )
        meshes = self.meshes if self.meshes == "auto" else [mesh.shape for mesh in self.meshes]
        given = "" if self.plan is None else f", plan={_digest(self.plan.to_json())}"
        rules = "" if not self.constraints.rules else f", constraints={_digest(repr(self.constraints.rules))}"
        kinds = "" if self.options.kinds == PlannerOptions().kinds else f", collectives={sorted(self.options.kinds)}"
        redundant = ", allow_redundant_compute=True" if self.options.allow_redundant_compute else ""
        return (
            f"{name} (program {traced.fingerprint}; {batch}; {self._count()} devices, mesh_shape={meshes}, "
            f"memory_limit_bytes={self.memory_limit_bytes}, num_microbatches={self.num_microbatches}, "
            f"num_stages={self.num_stages}, schedule={self.schedule!r}, virtual_stages={self.virtual_stages}, "
            f"recompute={self.recompute!r}{rules}{kinds}{redundant}{given})"
        )

    def _leader_in_stages(self) -> PipelinePlan | None:
        """The plan of the step that this one follows, if that runs in stages."""
        plan = None if self.follow is None else self.follow.last_plan()
        return plan if isinstance(plan, PipelinePlan) else None

    def _require_a_batch(self, traced: TracedStep, led: int) -> None:
        """Raise ArgumentError for stages or microbatches of a step without examples. `led`: the stages of the step to follow."""
        stages = max(led, self._stages())
        if stages > 1:
            wish = f"num_stages={stages}" if self.num_stages != "auto" else f"a step in {stages} stages"
            require_examples(traced, wish, at_least=2)
        elif self.num_microbatches not in ("auto", 1):
            require_examples(traced, f"num_microbatches={self.num_microbatches}", at_least=1)

    def _wishes_after(self, leader: PipelinePlan, traced: TracedStep) -> PipelineWishes:
        """A pipeline on the stages of another one; forward only, if the step takes no gradients."""
        if self.meshes != "auto" or self.num_stages != "auto" or self.virtual_stages not in ("auto", 1):
            raise ArgumentError(
                f"follow= takes over the stages of the step that it follows, {leader.num_stages} of them: leave out num_stages, "
                "virtual_stages and mesh_shape, or plan the step without follow= and bring the state with step.gather(state)"
            )
        following = Following.of(leader)
        following.check(traced)
        schedule = "inference" if self.schedule == "auto" and not takes_gradients(traced) else self.schedule
        return PipelineWishes(
            len(following.meshes),
            self.num_microbatches,
            schedule,
            following.virtual_stages,
            following.meshes,
            self.recompute,
            following,
        )

    def _refuse_what_is_for_stages(self) -> None:
        """Raise ArgumentError for wishes that one mesh cannot meet."""
        if self.virtual_stages not in ("auto", 1):
            raise ArgumentError(
                f"virtual_stages={self.virtual_stages} are stages of each mesh of a pipeline: give num_stages, the number of "
                "meshes"
            )
        if self.schedule != "auto" and (self.num_stages == 1 or self.meshes != "auto"):
            raise ArgumentError(
                f"schedule={self.schedule!r} is for pipeline stages: give num_stages=2 or more, or one mesh shape per stage"
            )

    def _may_search(self, traced: TracedStep) -> bool:
        """Whether stages are left open, and the step has a batch to cut and the devices are several."""
        is_open = self.num_stages == "auto" and self.meshes == "auto" and self.follow is None
        return is_open and self._count() > 1 and max(microbatch_counts(traced)) > 1

    def _best_of(self, traced: TracedStep, wishes: PipelineWishes) -> Planned:
        """One mesh or stages, whichever is faster by prediction."""
        best = one_or_stages(traced, wishes, self._request(self._one_mesh()), devices=self._count())
        if isinstance(best, OneMeshStep):
            return OnOneMesh(best.traced, best.plan, best.assignment)
        return InStages(traced, best.plan, best.staged)

    def _stages(self) -> int:
        """The number of meshes: what was asked for, or one for each shape; one otherwise."""
        shapes = 1 if self.meshes == "auto" else len(self.meshes)
        if self.num_stages == "auto":
            return shapes
        if shapes not in (1, self.num_stages):
            raise ArgumentError(
                f"mesh_shape has {shapes} shapes, num_stages is {self.num_stages}; give one shape per stage, or one for all"
            )
        return self.num_stages

    def _stage_meshes(self, stages: int) -> tuple[LogicalMesh, ...] | None:
        if self.meshes == "auto":
            return None
        return self.meshes * stages if len(self.meshes) == 1 else self.meshes

    def _on_one_mesh(self, traced: TracedStep, request: PlanRequest) -> OnOneMesh:
        """By the given plan, or in as many microbatches and with the recomputation that were asked for or that are best."""
        if isinstance(self.plan, Plan):
            step = recomputed_step(traced) if self.plan.recompute else traced
            cut = in_microbatches(step, self.plan.num_microbatches)
            return OnOneMesh(cut, self.plan, restore(cut, self.plan, request).assignment)
        found = plan_on_one_mesh(
            traced,
            request,
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            devices=self._count(),
        )
        return OnOneMesh(found.traced, found.plan, found.assignment)

    def jax_devices(self) -> list[jax.Device]:
        """The devices to run on."""
        if self.devices is None and self.follow is not None:
            return self.follow.jax_devices()
        if isinstance(self.devices, int):
            return jax.devices()[: self.devices]
        return list(self.devices) if self.devices is not None else jax.devices()

    def _request(self, meshes: tuple[LogicalMesh, ...]) -> PlanRequest:
        """What the planner is asked; touches devices only to count them and to learn their kind."""
        cluster = self.chosen_cluster()
        limit = self.memory_limit_bytes
        if limit is None and np.isfinite(cluster.usable_memory_bytes):
            limit = int(cluster.usable_memory_bytes)
        return PlanRequest(meshes, cluster, limit, self._constraints(), self.options, processes=self.processes)

    def _one_mesh(self) -> tuple[LogicalMesh, ...]:
        if self.follow is not None:
            plan = self._followed()
            return (LogicalMesh(plan.mesh_shape, plan.axis_names),)
        if self.meshes != "auto":
            self._check_size(self.meshes[0])
            return self.meshes
        return logical_meshes(self._count())

    def _followed(self) -> Plan:
        """The plan of the step that this one follows on one mesh."""
        assert self.follow is not None
        plan = self.follow.last_plan()
        assert isinstance(plan, Plan)
        return plan

    def _count(self) -> int:
        return self.devices if isinstance(self.devices, int) else len(self.jax_devices())

    def _check_size(self, mesh: LogicalMesh) -> None:
        if self.devices is not None and mesh.size > self._count():
            raise ArgumentError(
                f"mesh_shape={mesh.shape} needs {mesh.size} devices, there are {self._count()}; use a smaller mesh_shape, or "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} to try it on virtual CPU devices"
            )

    def chosen_cluster(self) -> Cluster:
        """What the machine can do, looked up by its devices' kind if the user did not say."""
        if isinstance(self.cluster, Cluster):
            return self.cluster
        if self.follow is not None:
            return self.follow.cluster()
        if isinstance(self.devices, int):
            return preset("cpu")
        device = self.jax_devices()[0]
        return preset_for_device_kind(device.platform, device.device_kind)

    def _constraints(self) -> Constraints:
        if self.follow is None or self._leader_in_stages() is not None:
            return self.constraints
        plan = self._followed()
        layouts = tuple(Rule(v.path, v.partition_spec, must_match=False) for v in plan.inputs if v.role == "state")
        return Constraints((*layouts, *self.constraints.rules))


def _digest(text: str) -> str:
    """A few characters that tell two texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
