"""A step on a mixed cluster: stages on nodes of unlike kinds, against one kind alone and all devices as the slowest.

In: a step, what is left open of a pipeline, a request for a cluster with kinds of node. Out: the fastest of these plans:

- the step on the nodes of one kind, on one mesh or in stages; the others idle;
- for every choice of several kinds and every order of these: stages on all of their nodes. A stage has devices of one kind, and
  as many layers as make it take as long as the others;
- all devices as the slowest of each figure, on one mesh or in stages, as for a cluster whose nodes are alike.

What is bounded to be slower than the best plan so far is not planned. The costs of layers on a kind of node are the same in all
searches, and are planned once. The first candidate is planned however long that takes, so it is the one that promises most: all
kinds together if they divide the work so that it takes far less than on the fastest alone. That one is then planned however late
it is if the sum of its layers is less than the best plan. What can go wrong: a pipeline that comes back to a kind, or leaves
nodes out, is no candidate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from autopar.cost_model.device import fastest_device
from autopar.cost_model.hardware import Cluster
from autopar.errors import ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.costs_by_kind import KindsInOrder, KnownCosts
from autopar.inter_op.describe_pipeline import PlannedPipeline, bound_stages
from autopar.inter_op.dynamic_program.kinds import KindOfNodes, devices_of, kinds_of
from autopar.inter_op.dynamic_program.submeshes import submeshes
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.inter_op.search_pipeline import SearchedPipeline, search_pipeline
from autopar.intra_op.request import PlannedStep, PlanRequest, logical_meshes
from autopar.program.step import TracedStep
from autopar.solver.budget import LateError

Planned: TypeAlias = PlannedStep | PlannedPipeline


def has_kinds(request: PlanRequest, wishes: PipelineWishes, devices: int) -> bool:
    """Whether a step may have stages on unlike nodes: all devices of a mixed cluster are its, and nobody gave its meshes."""
    is_open = wishes.stage_meshes is None and wishes.following is None
    return is_open and len(request.cluster.node_kinds) > 1 and devices_of(kinds_of(request)) == devices


def plan_on_kinds(
    traced: TracedStep,
    wishes: PipelineWishes,
    request: PlanRequest,
    plan_alike: Callable[[PlanRequest, int], Planned],
    *,
    num_stages: int | None = None,
    tuning: Tuning = TUNING,
) -> Planned:
    """The fastest plan on a mixed cluster.

    Args:
        traced: the step.
        wishes: what is fixed and left open of a pipeline.
        request: the machine, with its kinds of node.
        plan_alike: plans the step for a number of devices that are alike.
        num_stages: the number of meshes, if it is given.
        tuning: how long to look.

    Raises:
        OutOfMemoryError: nothing fits; and what `plan_alike` raises on all devices, if there is no other plan.
    """
    return _OnKinds(traced, wishes, request, plan_alike, num_stages, tuning).run()


class _OnKinds:
    """The candidates one after the other, and the best so far."""

    def __init__(
        self,
        traced: TracedStep,
        wishes: PipelineWishes,
        request: PlanRequest,
        plan_alike: Callable[[PlanRequest, int], Planned],
        num_stages: int | None,
        tuning: Tuning,
    ) -> None:
        self._traced, self._wishes, self._request = traced, wishes, request
        self._plan_alike, self._num_stages, self._tuning = plan_alike, num_stages, tuning
        kinds = kinds_of(request)
        self._least_s = {kind.number: bound_stages(traced, kind.request, devices_of([kind])) for kind in kinds}
        self._kinds = sorted(kinds, key=lambda kind: self._least_s[kind.number])
        self._known: KnownCosts = {}
        self._best: Planned | None = None
        self._left: list[str] = []

    def run(self) -> Planned:
        """The fastest plan."""
        fastest, *others = self._kinds
        orders = [
            order for count in range(len(self._kinds), 1, -1) for order in itertools.permutations(self._kinds, count)
        ]
        first = [([fastest], self._tuning.alone), (orders[0], self._tuning.order)]
        if self._together_s() <= self._tuning.together * self._least_s[fastest.number]:
            first.reverse()
        for kinds, share in first:
            self._try(kinds, share)
        for order in orders[1:]:
            self._try(order, self._tuning.order)
        for kind in others:
            self._try([kind], self._tuning.alone)
        devices = devices_of(self._kinds)
        if self._best is None:
            return self._plan_alike(self._request, devices)
        self._plan_late(fastest, self._best)
        if self._may_win(bound_stages(self._traced, self._request, devices), "all devices as the slowest"):
            try:
                self._offer(self._plan_alike(dataclasses.replace(self._request, has_fallback=True), devices))
            except (ConstraintError, OutOfMemoryError, UnsupportedProgramError, LateError):
                self._left.append("all devices as the slowest")
        return self._described(self._best, devices)

    def _together_s(self) -> float:
        """Seconds that no plan on all kinds takes less than, each with its part of the work."""
        rates = [1 / seconds if seconds else math.inf for seconds in self._least_s.values()]
        return 1 / sum(rates)

    def _plan_late(self, kind: KindOfNodes, best: Planned) -> None:
        """Plan one kind alone if there was no time for it, and one stage of its layers takes less than the best plan."""
        name = _name_of([kind])
        if name in self._left and self._by_layers_s(kind) * (1 + self._tuning.worth) < best.plan.step_s:
            self._left.remove(name)
            self._offer(self._plan_alone(kind, has_fallback=False))

    def _by_layers_s(self, kind: KindOfNodes) -> float:
        """Seconds of a step in one stage on all nodes of a kind, as the sum of its layers; infinite if these are not planned."""
        costs, whole = self._known.get(kind.number), submeshes(*kind.part[:2])[-1]
        counts = [] if costs is None else [count for count in costs.counts if costs.is_planned(count, whole)]
        found = [math.inf]
        for count in counts:
            table = self._known[kind.number].table(count, [whole])
            found.append(float(count * table.seconds[0, 0, -1] + table.once_s[0, 0, -1]))
        return min(found)

    def _step_s(self) -> float | None:
        return None if self._best is None else self._best.plan.step_s

    def _may_win(self, bound_s: float, name: str) -> bool:
        """Whether to plan what takes at least so long; what there is no time for is noted."""
        if self._best is None:
            return True
        if bound_s >= self._best.plan.step_s:
            return False
        if self._request.budget.is_over:
            self._left.append(name)
            return False
        return True

    def _try(self, kinds: Sequence[KindOfNodes], share: float) -> None:
        """Plan on these kinds of node, in so much of the time that is left, if that may be the fastest."""
        name = _name_of(kinds)
        if not self._may_win(self._least_s[kinds[0].number] if len(kinds) == 1 else 0.0, name):
            return
        budget = self._request.budget.part(share)
        own = [dataclasses.replace(kind, request=dataclasses.replace(kind.request, budget=budget)) for kind in kinds]
        try:
            self._offer(
                self._plan_alone(own[0], has_fallback=self._best is not None) if len(own) == 1 else self._search(own)
            )
        except (ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError):
            return
        except LateError:
            self._left.append(name)

    def _plan_alone(self, kind: KindOfNodes, *, has_fallback: bool) -> Planned:
        """The plan on the nodes of one kind, whose devices are where the cluster has them."""
        devices = devices_of([kind])
        own = dataclasses.replace(kind.request, meshes=logical_meshes(devices) if self._request.meshes else ())
        planned = self._plan_alike(dataclasses.replace(own, has_fallback=has_fallback), devices)
        name = self._request.cluster.name
        if isinstance(planned, PlannedStep):
            plan = dataclasses.replace(planned.plan, cluster=name, first_device=kind.first_device, node_kind=kind.name)
            return dataclasses.replace(planned, plan=plan)
        stages = tuple(
            dataclasses.replace(stage, first_device=kind.first_device + stage.first_device, node_kind=kind.name)
            for stage in planned.plan.stages
        )
        return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, cluster=name, stages=stages))

    def _search(self, kinds: Sequence[KindOfNodes]) -> Planned | None:
        """The best stages on these kinds of node in this order, if they are faster than the best plan so far."""
        found = search_pipeline(
            self._traced,
            self._wishes,
            dataclasses.replace(self._request, budget=kinds[0].request.budget),
            devices=devices_of(kinds),
            num_stages=self._num_stages,
            beat_s=self._step_s(),
            tuning=self._tuning,
            kinds=KindsInOrder(tuple(kinds), self._known),
        )
        return found.pipeline if isinstance(found, SearchedPipeline) else None

    def _offer(self, planned: Planned | None) -> None:
        if planned is not None and (self._best is None or planned.plan.step_s < self._best.plan.step_s):
            self._best = planned

    def _described(self, best: Planned, devices: int) -> Planned:
        """The best plan with a bound over all candidates, and what there was no time for."""
        bound_s = bound_stages(self._traced, dataclasses.replace(self._request, cluster=self._fastest()), devices)
        left = (*best.plan.not_compared, *self._left)
        if isinstance(best, PlannedStep):
            plan = dataclasses.replace(
                best.plan, lower_bound_s=bound_s, one_mesh_bound_s=0.0, not_compared=left, ended_early=bool(left)
            )
            return dataclasses.replace(best, plan=plan)
        in_stages = dataclasses.replace(best.plan, lower_bound_s=bound_s, not_compared=left, ended_early=bool(left))
        return dataclasses.replace(best, plan=in_stages)

    def _fastest(self) -> Cluster:
        """A cluster of devices that do nothing slower than any of these."""
        cluster = self._request.cluster
        device = fastest_device([kind.device for kind in cluster.node_kinds])
        return dataclasses.replace(cluster, name=f"{cluster.name}/fastest", device=device, node_kinds=())


def _name_of(kinds: Sequence[KindOfNodes]) -> str:
    """What a plan that was left out is called."""
    return f"stages on {', then '.join(kind.name for kind in kinds)}"
