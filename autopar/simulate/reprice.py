"""A saved plan on another cluster: the same layouts and collectives, other devices and links.

In: a `Plan` or a `PipelinePlan`, a cluster. Out: a `RepricedPlan`. Each collective is priced again from its kind, bytes and
axes on the new cluster's links; memory does not change. A plan keeps no operations, only their total seconds, so compute is
scaled by the ratio of the two devices' rates, taken as the slower of arithmetic and memory bandwidth: exact where the plan is
bound by one of them on both, an upper bound of the new time otherwise. The call of a step on one mesh is the new cluster's; those
of stages are scaled with their work. The stages of a pipeline are priced one by one, and its step changes as its schedule does,
task by task. What can go wrong: a plan made for a cluster that has no preset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from autopar.cost_model.hardware import PRESETS, Cluster
from autopar.cost_model.overlap import Communication, Kind
from autopar.inter_op.candidates.pipeline_seconds import predict_step_s, wait_for_transfers_s
from autopar.intra_op.choices.overlap import Moved, hide, window
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import WITHIN, CollectivePlan, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepricedKind:
    """All collectives of one kind: seconds as planned and here, bytes and number per step."""

    kind: str
    planned_s: float
    seconds: float
    bytes: float
    count: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepricedPlan:
    """See the module. Seconds per step, bytes per device.

    `hidden_s`: communication of collectives that hides behind compute; `waited_s`: for how long a pipeline waits for transfers.
    """

    cluster: str
    planned_for: str
    planned_step_s: float
    step_s: float
    planned_compute_s: float
    compute_s: float
    planned_hidden_s: float
    hidden_s: float
    planned_waited_s: float
    waited_s: float
    communication: tuple[RepricedKind, ...]
    peak_bytes: int
    usable_memory_bytes: float
    fits: bool
    basis: str


def reprice(plan: Plan | PipelinePlan, cluster: Cluster, *, planned_for: Cluster | None = None) -> RepricedPlan:
    """Price `plan` on `cluster`; `planned_for` is the cluster it was made for, by default the preset that it names.

    Raises ValueError if its mesh is larger than the cluster, or if it names no preset.
    """
    before = planned_for or _find_preset(plan.cluster)
    if isinstance(plan, PipelinePlan):
        return _pipeline(plan, cluster, before)
    return _one_mesh(plan, _nodes_of(cluster, plan.node_kind), _nodes_of(before, plan.node_kind))


def _find_preset(name: str) -> Cluster:
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(
            f"the plan was made for cluster {name!r}, which is no preset: give its file with --planned-for FILE, as "
            "`calibrate` wrote it, or plan again with --cluster NAME"
        ) from None


def _nodes_of(cluster: Cluster, node_kind: str) -> Cluster:
    """The nodes of a kind, if the cluster has it; else all."""
    is_known = any(kind.name == node_kind for kind in cluster.node_kinds)
    return cluster.of_kind(node_kind) if is_known else cluster


def _one_mesh(plan: Plan, cluster: Cluster, before: Cluster) -> RepricedPlan:
    dtype = _main_dtype(plan)
    scale, bound = _compute_scale(before, cluster, dtype)
    kinds = tuple(_of_kind(kind, plan, cluster) for kind in dict.fromkeys(item.kind for item in plan.collectives))
    # What is local in a change of layout, a slice or a mask, counts as compute.
    planned_compute_s = plan.step_s + plan.hidden_s - sum(kind.planned_s for kind in kinds)
    called = len(plan.inputs)
    compute_s = (planned_compute_s - before.dispatch_s(called)) * scale + cluster.dispatch_s(called)
    hidden_s = sum(item.hidden_s for item in communication_of(plan, cluster, compute_s=compute_s))
    hidden_s += _hidden_within_s(plan, cluster)
    return RepricedPlan(
        cluster=cluster.name,
        planned_for=before.name,
        planned_step_s=plan.step_s,
        step_s=compute_s + sum(kind.seconds for kind in kinds) - hidden_s,
        planned_compute_s=planned_compute_s,
        compute_s=compute_s,
        planned_hidden_s=plan.hidden_s,
        hidden_s=hidden_s,
        planned_waited_s=0.0,
        waited_s=0.0,
        communication=kinds,
        peak_bytes=plan.peak_bytes,
        usable_memory_bytes=cluster.usable_memory_bytes,
        fits=plan.peak_bytes <= cluster.usable_memory_bytes,
        basis=f"compute is scaled by {scale:.3g}: {bound} in {dtype} of {before.device.name} over that of "
        f"{cluster.device.name}, whichever of the two bounds an operation; launches are not counted. For the seconds of this "
        f"step there, plan it: autopar plan ... --cluster {cluster.name}",
    )


def _pipeline(plan: PipelinePlan, cluster: Cluster, before: Cluster) -> RepricedPlan:
    nodes = [_nodes_of(cluster, stage.node_kind) for stage in plan.stages]
    stages = [
        _one_mesh(stage.plan, own, _nodes_of(before, stage.node_kind))
        for stage, own in zip(plan.stages, nodes, strict=True)
    ]
    sends = RepricedKind(
        kind="transfer",
        planned_s=sum(item.count * item.predicted_s for item in plan.transfers),
        seconds=sum(item.count * plan.transfer_s(item, cluster) for item in plan.transfers),
        bytes=sum(item.count * item.bytes for item in plan.transfers),
        count=sum(item.count for item in plan.transfers),
    )
    slower = [
        new.step_s / old.plan.step_s if old.plan.step_s else 1.0 for new, old in zip(stages, plan.stages, strict=True)
    ]
    here = _with_seconds(plan, slower, cluster)
    before_s, after_s = predict_step_s(plan), predict_step_s(here)
    return RepricedPlan(
        cluster=cluster.name,
        planned_for=stages[0].planned_for,
        planned_step_s=plan.step_s,
        step_s=plan.step_s * after_s / before_s if before_s else plan.step_s,
        planned_compute_s=_most_on_a_mesh(plan, [stage.planned_compute_s for stage in stages]),
        compute_s=_most_on_a_mesh(plan, [stage.compute_s for stage in stages]),
        planned_hidden_s=sum(stage.planned_hidden_s for stage in stages),
        hidden_s=sum(stage.hidden_s for stage in stages),
        planned_waited_s=wait_for_transfers_s(plan),
        waited_s=wait_for_transfers_s(here),
        communication=(*_join_kinds(kind for stage in stages for kind in stage.communication), sends),
        peak_bytes=plan.peak_bytes,
        usable_memory_bytes=cluster.usable_memory_bytes,
        fits=all(stage.peak_bytes <= own.usable_memory_bytes for stage, own in zip(plan.stages, nodes, strict=True)),
        basis=f"{len(stages)} stages: compute is that of the slowest {'mesh' if plan.virtual_stages > 1 else 'one'}, "
        f"communication that of all, of which the schedule {plan.schedule} hides transfers beside compute; {stages[0].basis}",
    )


def _most_on_a_mesh(plan: PipelinePlan, seconds: Sequence[float]) -> float:
    """The most that the stages of a mesh take together."""
    sums: dict[int, float] = {}
    for stage, one_s in zip(plan.stages, seconds, strict=True):
        sums[stage.mesh] = sums.get(stage.mesh, 0.0) + one_s
    return max(sums.values())


def _with_seconds(plan: PipelinePlan, slower: Sequence[float], cluster: Cluster) -> PipelinePlan:
    """The plan with every stage so many times slower, and with the transfers of another cluster."""
    stages = [
        dataclasses.replace(
            stage,
            forward_s=factor * stage.forward_s,
            backward_s=factor * stage.backward_s,
            once_s=factor * stage.once_s,
        )
        for stage, factor in zip(plan.stages, slower, strict=True)
    ]
    sent = [
        dataclasses.replace(item, predicted_s=plan.transfer_s(item, cluster), is_work=cluster.shares_host)
        for item in plan.transfers
    ]
    return dataclasses.replace(plan, stages=tuple(stages), transfers=tuple(sent))


def _join_kinds(kinds: Iterable[RepricedKind]) -> tuple[RepricedKind, ...]:
    sums: dict[str, RepricedKind] = {}
    for kind in kinds:
        known = sums.get(kind.kind, RepricedKind(kind=kind.kind, planned_s=0.0, seconds=0.0, bytes=0.0, count=0.0))
        sums[kind.kind] = RepricedKind(
            kind=kind.kind,
            planned_s=known.planned_s + kind.planned_s,
            seconds=known.seconds + kind.seconds,
            bytes=known.bytes + kind.bytes,
            count=known.count + kind.count,
        )
    return tuple(sums.values())


def _main_dtype(plan: Plan) -> str:
    """The number format of most bytes among the floating-point inputs."""
    sizes: dict[str, int] = {"float32": 0}
    for value in plan.inputs:
        if "float" in value.dtype:
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.bytes_per_device
    return max(sizes, key=sizes.__getitem__)


def _compute_scale(before: Cluster, after: Cluster, dtype: str) -> tuple[float, str]:
    arithmetic = before.device.flops_per_s_of(dtype) / after.device.flops_per_s_of(dtype)
    memory = before.device.kernel_bytes_per_s / after.device.kernel_bytes_per_s
    return (arithmetic, "FLOP/s") if arithmetic >= memory else (memory, "memory bandwidth")


def _of_kind(kind: str, plan: Plan, cluster: Cluster) -> RepricedKind:
    items, priced = [item for item in plan.collectives if item.kind == kind], collective_prices(plan, cluster)
    return RepricedKind(
        kind=kind,
        planned_s=sum(item.count * item.predicted_s for item in items),
        seconds=sum(item.count * priced(item) for item in items),
        bytes=sum(item.count * item.bytes for item in items),
        count=sum(item.count for item in items),
    )


def _hidden_within_s(plan: Plan, cluster: Cluster) -> float:
    """Seconds of collectives within operations that hide there: the part that was planned to."""
    priced = collective_prices(plan, cluster)
    within = [item for item in plan.collectives if item.overlap == WITHIN and item.predicted_s]
    return sum(item.count * priced(item) * item.hidden_s / item.predicted_s for item in within)


def communication_of(plan: Plan, cluster: Cluster, *, compute_s: float) -> list[Communication]:
    """Seconds of a plan's collectives on a cluster, and those that its step waits for, beside so many seconds of compute.

    Those within operations are left out: they run beside the operation's own work (`_hidden_within_s`).
    """
    found, priced = [], collective_prices(plan, cluster)
    for item in plan.collectives:
        if item.overlap == WITHIN:
            continue
        kind = cast(Kind, item.overlap)
        part = window(kind, item.kind, times=item.count, microbatches=plan.num_microbatches)
        seconds = item.count * priced(item)
        found.append(Moved(kind, part, seconds, item.count * item.bytes))
    return list(hide(found, compute_s=compute_s, overlap=cluster.overlap).values())


def collective_prices(plan: Plan, cluster: Cluster) -> Callable[[CollectivePlan], float]:
    """A function that gives the seconds of a plan's collective, once, on the links of a cluster.

    They include the copy into another order that goes into some collectives, or comes out of them.
    """
    costs, names = cluster.mesh_costs(plan.mesh_shape), plan.axis_names
    prices = {
        "all-reduce": costs.all_reduce_s,
        "reduce-scatter": costs.reduce_scatter_s,
        "all-gather": costs.all_gather_s,
        "all-to-all": costs.all_to_all_s,
    }

    def price(item: CollectivePlan) -> float:
        seconds = prices.get(item.kind, costs.permute_s)(item.bytes, [names.index(name) for name in item.axes])
        return seconds + (item.bytes * cluster.device.transpose_s_per_byte if item.is_transposed else 0.0)

    return price
