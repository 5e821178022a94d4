"""The four overlap ratios of a plan on a cluster: which part of each kind of communication its compute can hide.

In: a `Plan` or a `PipelinePlan`, a cluster. Out: `Communication` by kind, in all and exposed, per step, all stages together. A
collective over the axes that split the examples is a reduction of gradients or a gather of new parameters (data parallel) where
its operand has the shape of a state leaf, and a ZeRO-3 gather where that leaf is itself split over those axes; one over
other axes is tensor parallel; a transfer of a pipeline is that. What stands beside each: reductions the backward of the last
microbatch, two thirds of its compute; gathers of new parameters the next forward; ZeRO-3 gathers all compute; tensor-parallel
collectives the gradients of weights, a third; transfers the compute of their stage. The part that hides is the cluster's. What
can go wrong: a plan's seconds count communication in full, so what hides is a gain over the plan's own step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from autopar.cost_model.hardware import PRESETS, Cluster
from autopar.cost_model.machine import Hidden
from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.plan import CollectivePlan, Plan
from autopar.simulate.closed_forms.overlap import Communication, Kind, alone, beside, overlap_ratio, sum_by_kind
from autopar.simulate.reprice import collective_s, reprice

SHOWN: Mapping[Hidden, str] = {
    "data_parallel": "data parallel",
    "zero3": "ZeRO-3",
    "tensor": "tensor parallel",
    "pipeline": "pipeline",
}
_SUMS = ("all-reduce", "reduce-scatter")


def overlap_of(
    plan: Plan | PipelinePlan, cluster: Cluster, *, planned_for: Cluster | None = None
) -> dict[Kind, Communication]:
    """Communication by kind. Raises ValueError as `reprice` does."""
    if isinstance(plan, Plan):
        return sum_by_kind(_of_one_mesh(plan, cluster, planned_for))
    parts = [part for stage in plan.stages for part in _of_one_mesh(stage.plan, cluster, planned_for)]
    return sum_by_kind([*parts, *(_of_transfer(item, plan, cluster, planned_for) for item in plan.transfers)])


def overlap_rows(found: Mapping[Kind, Communication]) -> list[dict[str, object]]:
    """One JSON object per kind; a ratio is None where there is no such communication."""
    return [
        {
            "kind": kind,
            "seconds": found[kind].total_s,
            "exposed_s": found[kind].exposed_s,
            "overlap_ratio": overlap_ratio(found[kind]),
        }
        for kind in SHOWN
    ]


def overlap_table(found: Mapping[Kind, Communication]) -> Table:
    """The same as a table."""
    table = Table(
        title="Overlap with compute",
        title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    table.add_column("communication")
    for column in ("seconds", "waited for", "overlap"):
        table.add_column(column, justify="right")
    for kind, name in SHOWN.items():
        ratio = overlap_ratio(found[kind])
        times = (seconds_text(found[kind].total_s), seconds_text(found[kind].exposed_s))
        table.add_row(name, *times, "-" if ratio is None else f"{ratio:.0%}")
    return table


def own_cluster(plan: Plan | PipelinePlan) -> Cluster | None:
    """The preset that a plan names, None if it was made for a cluster of a file."""
    return PRESETS.get(plan.cluster)


def _of_one_mesh(plan: Plan, cluster: Cluster, planned_for: Cluster | None) -> Iterator[Communication]:
    compute_s = reprice(plan, cluster, planned_for=planned_for).compute_s
    costs = cluster.mesh_costs(plan.mesh_shape)
    examples = {name for value in plan.inputs if value.role == "batch" and value.spec for name in value.spec[0]}
    totals: dict[tuple[Kind, float], float] = {}
    for item in plan.collectives:
        kind, share = _kind_of(item, plan, examples)
        seconds = item.count * collective_s(item, plan.axis_names, costs)
        totals[kind, share] = totals.get((kind, share), 0.0) + seconds
    for (kind, share), seconds in totals.items():
        window_s = compute_s * share
        yield beside(cluster.overlap, kind, comm_s=seconds, compute_s=window_s) if share else alone(kind, seconds)


def _kind_of(item: CollectivePlan, plan: Plan, examples: set[str]) -> tuple[Kind, float]:
    """The kind of a collective, and the part of the step's compute that stands beside all of that kind; 0: it is waited for.

    A heuristic: a plan names the type of a collective's operand, such as float32[64,256], and not the leaf behind it. An
    activation with the type of a state leaf counts as that leaf's gradient or copy, so its share of hidden seconds is too
    large; of two leaves of one type the last says whether they are held in parts.
    """
    if not examples & set(item.axes):
        return "tensor", 1 / 3
    if item.kind == "all-to-all":
        return "expert", 0.0
    spread = {
        f"{value.dtype}[{','.join(map(str, value.shape))}]": value.spec
        for value in plan.inputs
        if value.role == "state"
    }
    if item.operand not in spread:  # sums over examples of something else, such as the loss or batch statistics
        return "data_parallel", 0.0
    if item.kind in _SUMS:
        return "data_parallel", 2 / 3 / plan.num_microbatches
    held_in_parts = bool(examples & {name for names in spread[item.operand] for name in names})
    return ("zero3", 1.0) if held_in_parts else ("data_parallel", 1 / 3 / plan.num_microbatches)


def _of_transfer(
    item: TransferPlan, plan: PipelinePlan, cluster: Cluster, planned_for: Cluster | None
) -> Communication:
    sender: StagePlan = plan.stages[item.source]
    seconds = item.count * plan.transfer_s(item, cluster)
    if item.what not in ("forward", "backward"):
        return alone("pipeline", seconds)
    compute_s = reprice(sender.plan, cluster, planned_for=planned_for).compute_s
    share = (1 / 3 if item.what == "forward" else 2 / 3) / max(1, _siblings(item, plan))
    return beside(cluster.overlap, "pipeline", comm_s=seconds, compute_s=compute_s * share)


def _siblings(item: TransferPlan, plan: PipelinePlan) -> int:
    """How many transfers of the same kind a stage sends: they share what stands beside them."""
    return sum(other.source == item.source and other.what == item.what for other in plan.transfers)
