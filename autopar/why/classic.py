"""The classic plans beside the one that was found: data parallel, ZeRO, tensor parallel, a pipeline, each the best of its kind.

In: the settings and the step of a plan. Out: a `PricedPlan` for each. On one mesh axis over all devices data parallelism, ZeRO 2
and ZeRO 3 are presets. Tensor parallelism is Megatron's idea without its names: no device has other examples than its neighbours
in a group of at most a node, so weights and activations are what they split; groups are data parallel. The pipeline has a stage
for each node, or on one node for each device, under 1F1B. Microbatches and recomputation stay as the user left them. What
can go wrong: a kind that the step cannot be run in; its row says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rich.table import Table

from autopar.layouts.constraints import Constraints, Rule, SplitBatch, data_parallel, zero2, zero3
from autopar.layouts.mesh import LogicalMesh
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.settings import Settings, choose_cluster, count_devices
from autopar.why.priced import PricedPlan, asked_of, price_each, priced_table, table_text

_THE_SAME_EXAMPLES = Rule(glob="*", layout=SplitBatch(()), role="batch")


@dataclasses.dataclass(frozen=True)
class Classic:
    """The classic plans beside one; prints as a table."""

    plan: Plan | PipelinePlan
    rows: tuple[PricedPlan, ...]

    @property
    def table(self) -> Table | str:
        """The table, or why there is none."""
        if not self.rows:
            return "One device: there is nothing to compare with."
        return priced_table(
            "The classic plans, each planned on as many devices", self.plan, self.rows, this="this plan"
        )

    def __str__(self) -> str:
        """The table as text."""
        return self.table if isinstance(self.table, str) else table_text(self.table)

    def __repr__(self) -> str:
        """The same, for interactive use."""
        return str(self)


def classic(plan: Plan | PipelinePlan, asked: tuple[object, object] | None) -> Classic:
    """Plan the classic plans of a plan's step. Raises PlanError if the plan knows no step."""
    settings, traced = asked_of(asked)
    return Classic(plan, price_each(classic_ways(settings), traced))


def classic_ways(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Names of the classic plans, with the settings that fix them; none for one device."""
    devices = count_devices(settings)
    if devices == 1:
        return
    free = dataclasses.replace(
        settings, constraints=Constraints(), meshes="auto", num_stages="auto", schedule="auto", virtual_stages="auto"
    )
    one_axis = dataclasses.replace(free, meshes=(LogicalMesh((devices,), ("data",)),))
    for name, preset in (("data parallel", data_parallel()), ("ZeRO-2", zero2()), ("ZeRO-3", zero3())):
        yield name, dataclasses.replace(one_axis, constraints=preset)
    per_node = choose_cluster(settings).devices_per_node or devices
    group = next(size for size in range(min(per_node, devices), 0, -1) if devices % size == 0)
    if group > 1:
        yield f"tensor parallel, {group} ways", _tensor_parallel(free, devices, group)
    stages = devices // group if 1 < group < devices else devices
    fixed = {"num_stages": stages, "virtual_stages": 1, "schedule": "1f1b"}
    yield f"pipeline of {stages} stages", dataclasses.replace(free, **fixed)  # type: ignore[arg-type]


def _tensor_parallel(free: Settings, devices: int, group: int) -> Settings:
    """Groups of neighbours that have the same examples; the groups are data parallel."""
    mesh, rules = LogicalMesh((devices // group, group), ("data", "model")), data_parallel("data")
    if group == devices:
        mesh, rules = LogicalMesh((group,), ("model",)), Constraints((_THE_SAME_EXAMPLES,))
    return dataclasses.replace(free, meshes=(mesh,), constraints=rules)
