"""The four overlap ratios of a plan on a cluster: which part of each kind of communication its compute can hide.

In: a `Plan` or a `PipelinePlan`, a cluster. Out: `Communication` by kind, in all and exposed, per step, all stages together. The
plan says of which kind a collective is, and `intra_op/choices/overlap.py` what stands beside it; the part that hides is the
cluster's. Of a pipeline's transfers the step waits for what its schedule does not hide. Both are as in the plan's step.
What can go wrong: a plan written before plans named kinds; nothing of it hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from autopar.cost_model.hardware import PRESETS, Cluster
from autopar.cost_model.overlap import Communication, Kind, overlap_ratio, sum_by_kind
from autopar.explain.figures import KINDS, moved_text
from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.simulate.reprice import communication_of, reprice

SHOWN: Mapping[Kind, str] = {
    "data_parallel": "data parallel",
    "zero3": "ZeRO-3",
    "tensor": "tensor parallel",
    "pipeline": "pipeline",
    "expert": "all-to-all",
}
_ONLY_WHERE_THERE_IS_ANY = ("expert",)


def overlap_of(
    plan: Plan | PipelinePlan, cluster: Cluster, *, planned_for: Cluster | None = None
) -> dict[Kind, Communication]:
    """Communication by kind. Raises ValueError as `reprice` does."""
    if isinstance(plan, Plan):
        return sum_by_kind(_of_one_mesh(plan, cluster, planned_for))
    parts = [part for stage in plan.stages for part in _of_one_mesh(stage.plan, cluster, planned_for)]
    sent_s = sum(item.count * plan.transfer_s(item, cluster) for item in plan.transfers)
    waited_s = reprice(plan, cluster, planned_for=planned_for).waited_s
    return sum_by_kind([*parts, Communication("pipeline", sent_s, min(sent_s, waited_s))])


def _shown(found: Mapping[Kind, Communication]) -> list[Kind]:
    return [kind for kind in SHOWN if kind not in _ONLY_WHERE_THERE_IS_ANY or found[kind].total_s]


def overlap_rows(found: Mapping[Kind, Communication]) -> list[dict[str, object]]:
    """One JSON object per kind; a ratio is None where there is no such communication."""
    return [
        {
            "kind": kind,
            "seconds": found[kind].total_s,
            "exposed_s": found[kind].exposed_s,
            "overlap_ratio": overlap_ratio(found[kind]),
        }
        for kind in _shown(found)
    ]


def overlap_table(found: Mapping[Kind, Communication], plan: Plan | PipelinePlan) -> Table:
    """The same as a table; what `plan` gathers ahead is named by what it is."""
    table = Table(
        title="Overlap with compute",
        title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    table.add_column("communication")
    for column in ("seconds", "waited for", "overlap"):
        table.add_column(column, justify="right")
    for kind in _shown(found):
        name = _name_of_early(plan) if kind == "zero3" else SHOWN[kind]
        ratio = overlap_ratio(found[kind])
        times = (seconds_text(found[kind].total_s), seconds_text(found[kind].exposed_s))
        table.add_row(name, *times, "-" if ratio is None else f"{ratio:.0%}")
    return table


def _name_of_early(plan: Plan | PipelinePlan) -> str:
    """ZeRO-3 if a plan gathers parameters ahead; masks of dropout, which depend on no example either, are random bits."""
    plans = [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]
    early = [item for one in plans for item in one.collectives if item.overlap == "zero3"]
    return moved_text(early).replace(KINDS["zero3"], SHOWN["zero3"]) if early else SHOWN["zero3"]


def own_cluster(plan: Plan | PipelinePlan) -> Cluster | None:
    """The preset that a plan names, None if it was made for a cluster of a file."""
    return PRESETS.get(plan.cluster)


def _of_one_mesh(plan: Plan, cluster: Cluster, planned_for: Cluster | None) -> Iterable[Communication]:
    compute_s = reprice(plan, cluster, planned_for=planned_for).compute_s
    return communication_of(plan, cluster, compute_s=compute_s)
