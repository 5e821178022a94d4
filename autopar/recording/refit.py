"""A cluster refitted from recorded runs: what can be told from them, and what cannot, in words.

In: recordings of one kind of device, and the cluster that they were planned for. Out: that cluster with figures that explain what
was measured:

    products        peak FLOP/s / r         r: measured over predicted seconds of the products, at the rate of large ones
    other compute   bandwidth / r, launch r  r: the same of what is left of the compute
    collectives     a + b x bytes that a rank sends, by least relative squares, for each kind

A device whose products have a curve of their sizes has one r for all its compute, as products are then not told apart in a plan;
so do runs with kernels that could not be led back to operations, as these may be products. In stages products are predicted by
their operations at the pace of the whole step, as a plan does not say what they take in each stage.
Collectives count from when their last rank came: waiting for it is no property of a link. What can go wrong: runs that tell too
little, such as collectives of one size, from which latency and bandwidth cannot be told apart. Such figures stay as they were.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from autopar.cost_model.algorithms import bytes_sent
from autopar.cost_model.calibration.cases import COLLECTIVES
from autopar.cost_model.calibration.fit_cluster import slow_down
from autopar.cost_model.calibration.fits import nonnegative_fit
from autopar.cost_model.device import Device
from autopar.cost_model.machine import Cluster
from autopar.cost_model.tiers import MeasuredCollective
from autopar.errors import ArgumentError
from autopar.explain.units import seconds_text
from autopar.plan import Plan
from autopar.recording.device_times import collective_runs, device_times
from autopar.recording.recorded import KERNEL, ProgramOperation, Recorded

APART = 2.0
"""Collectives whose largest size is this many times the smallest tell latency from bandwidth."""


@dataclasses.dataclass(frozen=True)
class Refitted:
    """The cluster, and sentences on what was fitted and what stayed as it was."""

    cluster: Cluster
    fitted: tuple[str, ...]
    kept: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Compute:
    """Seconds of a device in one call of a run: of its products and of all its compute, predicted and measured."""

    predicted_products_s: float
    predicted_s: float
    products_s: float
    total_s: float


def refit(cluster: Cluster, runs: Sequence[Recorded]) -> Refitted:
    """The cluster that explains recorded runs. Raises ArgumentError if they are of unlike devices, or tell of no operations."""
    kinds = sorted({run.device_kind for run in runs})
    if len(kinds) != 1:
        raise ArgumentError(f"the recordings are of unlike devices ({', '.join(kinds)}): refit from those of one kind")
    told = [run for run in runs if run.operations]
    if not told:
        raise ArgumentError(
            "the recordings tell of no operations: call the step twice in the block, with JAX's profiler free"
        )
    if not cluster.tiers:
        raise ArgumentError(
            f"cluster {cluster.name!r} states the links of its axes outright: there are no tiers to refit"
        )
    fitted: list[str] = []
    kept: list[str] = []
    kept += [
        f"recording {n} of {len(runs)}: it tells of no operations" for n, run in enumerate(runs, 1) if run not in told
    ]
    is_told = not any(one.opcode == KERNEL and not one.collective for run in told for one in run.program)
    found = _fit_compute(cluster, [_compute_of(run, cluster.device) for run in told], fitted, kept, apart=is_told)
    found = _fit_links(found, told, fitted, kept)
    kept.append("memory, overlap, calls, and the links of outer tiers: a recording does not tell them")
    return Refitted(found, tuple(fitted), tuple(kept))


def _compute_of(run: Recorded, device: Device) -> _Compute:
    plan = run.plan
    devices = [one for call in run.detailed for one in device_times(run, call)]
    product_s = sum(one.seconds for one in run.operations if run.operation(one).flops)
    if isinstance(plan, Plan):
        at_peak_s, predicted_s = plan.at_peak_s, plan.compute_s
    else:
        flops = sum(run.operation(one).flops for one in run.operations if not one.goes_on) / len(devices)
        at_peak_s = plan.at_peak_s * plan.num_devices * flops / plan.flops if plan.flops else 0.0
        compute_s = [sum(stage.plan.compute_s for stage in plan.stages if stage.mesh == one.mesh) for one in devices]
        predicted_s = statistics.fmean(compute_s)
    return _Compute(
        predicted_products_s=at_peak_s / device.efficiency_of("float32").best,
        predicted_s=predicted_s,
        products_s=product_s / len(devices),
        total_s=statistics.fmean(one.compute_s for one in devices),
    )


def _fit_compute(
    cluster: Cluster, seen: Sequence[_Compute], fitted: list[str], kept: list[str], *, apart: bool
) -> Cluster:
    """One factor for products and one for the rest, where runs (`apart`) and plan tell them apart; else one for all."""
    device = cluster.device
    if not apart or any(any(curve.half) for curve in device.matrix_efficiency.values()):
        factor = _mean_ratio([(one.total_s, one.predicted_s) for one in seen])
        if factor is None:
            kept.append("compute: none was predicted, or none was measured")
            return cluster
        fitted.append(f"all compute takes {factor:.2f} times what was predicted: peak, bandwidth and launches")
        return slow_down(cluster, factor)
    products = _mean_ratio([(one.products_s, one.predicted_products_s) for one in seen])
    rest = _mean_ratio([(one.total_s - one.products_s, one.predicted_s - one.predicted_products_s) for one in seen])
    changes: dict[str, object] = {}
    if products is None:
        kept.append("peak FLOP/s: the runs have no products, or the plans do not say what they take")
    else:
        fitted.append(f"products take {products:.2f} times what was predicted: peak FLOP/s")
        changes["peak_flops_per_s"] = {dtype: peak / products for dtype, peak in device.peak_flops_per_s.items()}
    if rest is None:
        kept.append("bandwidth of memory and launches: nothing but products was predicted, or measured")
    else:
        fitted.append(f"other compute takes {rest:.2f} times what was predicted: bandwidth of memory, and launches")
        changes |= {"memory_bytes_per_s": device.memory_bytes_per_s / rest, "launch_s": device.launch_s * rest}
    return dataclasses.replace(cluster, device=dataclasses.replace(device, **changes))  # type: ignore[arg-type]


def _mean_ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The geometric mean of measured over predicted, of those pairs in which both are something; None without any."""
    logarithms = [math.log(measured / predicted) for measured, predicted in pairs if measured > 0 and predicted > 0]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def _fit_links(cluster: Cluster, runs: Sequence[Recorded], fitted: list[str], kept: list[str]) -> Cluster:
    """Latency and inverse bandwidth of each kind of collective within the first tier."""
    first, measured = cluster.tiers[0], dict(cluster.tiers[0].measured)
    for kind in COLLECTIVES:
        known = {key: seconds for run in runs for key, seconds in _exchanges(run, kind, first.devices).items()}
        samples = [(sent, seconds) for (_, sent), seconds in known.items() if seconds > 0]
        sizes = [sent for sent, _ in samples]
        if not samples:
            kept.append(f"{kind}: none ran within {first.name}")
        elif max(sizes) < APART * min(sizes):
            kept.append(f"{kind}: all of about one size, from which latency and bandwidth cannot be told apart")
        else:
            (latency_s, s_per_byte), error = nonnegative_fit([(1.0, sent) for sent in sizes], [s for _, s in samples])
            before = measured.get(kind)
            measured[kind] = MeasuredCollective(
                latency_s=latency_s,
                s_per_byte=s_per_byte,
                waiting_s_per_rank=before.waiting_s_per_rank if before else 0.0,
            )
            rate = f"{1e-9 / s_per_byte:.3g} GB/s" if s_per_byte else "no time for its bytes"
            fitted.append(
                f"{kind}: {seconds_text(latency_s)} and {rate}, of {len(samples)} sizes, {error:.0%} off on average"
            )
    return dataclasses.replace(cluster, tiers=(dataclasses.replace(first, measured=measured), *cluster.tiers[1:]))


def _exchanges(run: Recorded, kind: str, most: int | None) -> Mapping[tuple[int, float], float]:
    """Median seconds, from when the last rank came, by (ranks, bytes that each sends), of groups within so many devices."""
    found: dict[tuple[int, float], list[float]] = {}
    for operation, first, exchange_s in _collectives(run, kind):
        ranks = max(map(len, operation.groups))
        places = [[first + device for device in group] for group in operation.groups]
        apart = any(max(group) // most != min(group) // most for group in places) if most else False
        if ranks > 1 and not apart:
            sent = bytes_sent(operation.collective, ranks) * operation.bytes  # type: ignore[arg-type]
            found.setdefault((ranks, sent), []).append(exchange_s)
    return {key: statistics.median(values) for key, values in found.items()}


def _collectives(run: Recorded, kind: str) -> Iterator[tuple[ProgramOperation, int, float]]:
    """The executions of a kind, each with the place of its mesh's first device among the step's."""
    plan = run.plan
    for call in run.detailed:
        for stage in (None,) if isinstance(plan, Plan) else range(plan.num_stages):
            first = plan.first_device if isinstance(plan, Plan) else plan.stages[stage or 0].first_device
            for one in collective_runs(run, call, stage=stage):
                if one.operation.collective == kind:
                    yield one.operation, first, one.exchange_s
