"""From measurements to a `Cluster`: the figures of the cost model that explain them best.

In: the samples of `measure`, and the preset that says what was not measured (tiers, overlap, what the compiler merges). Out:
a `Cluster`, and how far each kind of sample lies from what the cluster says of it.

    product      2 m n k / (peak (m/(m+hm)) (n/(n+hn)) (k/(k+hk))) + launch     peak, hm, hn, hk
    reordered    what the products take + r x bytes of operands in another order   r
    transposed   t x bytes                                                      t
    random       bytes / bandwidth + launch + d x bytes                         d
    operation    launch, of operations that do next to nothing                  launch
    pointwise    bytes that the equations of a fused chain write / bandwidth    bandwidth
                 on a device that fuses, bytes that the chain reads and writes / bandwidth + launch
    collective   a + a1 n + (b + b1 n) x bytes each rank sends                  a, a1, b, b1 for each kind
    dispatch     c + c1 x arrays + c2 x bytes in and out                        c, c1, c2
    transfer     a + s x arrays + bytes that each device carries / bandwidth    a and bandwidth of the first tier, s

The bandwidth is that of equations, not of copies, where the planner prices each equation of a chain by what it writes: a chain
as training steps have it (exponentials, divisions) takes longer than its traffic there. Whether the compiler makes one kernel of
a chain (`Device.fuses`), and how its libraries cut products into tiles, is the preset's. `slow_down` then makes up for what whole
steps cost beside their parts. What can go wrong: too few group sizes to tell a from a1. The one that explains more is then kept
alone. Too few products to tell their half lengths, which are then the preset's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.cost_model.calibration.cases import COLLECTIVES, Sample
from autopar.cost_model.calibration.fits import (
    attention_s_and_bytes,
    fit_beside,
    fit_calls,
    fit_collective,
    fit_pointwise,
    fit_products,
    fit_traffic,
    fit_transfers,
    random_s_and_bytes,
    transposed_bytes,
)
from autopar.cost_model.device import Device, MatrixEfficiency
from autopar.cost_model.machine import Cluster
from autopar.cost_model.tiers import MeasuredCollective


@dataclasses.dataclass(frozen=True)
class MeasuredDevices:
    """The devices that were measured: how many of which kind, and bytes of memory of each."""

    kind: str
    count: int
    memory_bytes: float


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """The cluster, and for each kind of sample the mean absolute relative error of what it says of them."""

    cluster: Cluster
    errors: Mapping[str, float]


_LEAST_S_PER_BYTE = 1e-13
"""Of transfers whose bytes take no time that could be measured: 10 TB/s, more than any memory has."""
Samples = Mapping[str, Sequence[Sample]]
"""Samples by kind."""


def fit_cluster(samples: Sequence[Sample], preset: Cluster, devices: MeasuredDevices, *, name: str) -> Calibrated:
    """Find the cluster that the samples speak of; what was not measured is the preset's."""
    by_kind: dict[str, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.case.kind, []).append(sample)
    errors: dict[str, float] = {}
    device = _fit_device(by_kind, preset.device, devices, errors)
    device = _fit_copies(by_kind, device, errors)
    call_s, call_s_per_array, call_s_per_byte, errors["dispatch"] = fit_calls(by_kind["dispatch"])
    measured: dict[str, MeasuredCollective] = {}
    for kind in COLLECTIVES:
        if kind in by_kind:
            measured[kind], errors[kind] = fit_collective(kind, by_kind[kind])
    first = preset.tiers[0]
    holds_all = first.devices is None or first.devices >= devices.count
    sent_s_per_array = preset.sent_s_per_array
    if "transfer" in by_kind and holds_all:
        latency_s, sent_s_per_array, s_per_byte, errors["transfer"] = fit_transfers(by_kind["transfer"], devices.count)
        first = dataclasses.replace(
            first, latency_s=latency_s, bytes_per_s=1 / max(s_per_byte, _LEAST_S_PER_BYTE), efficiency=1.0
        )
    cluster = dataclasses.replace(
        preset,
        name=name,
        device=device,
        tiers=(dataclasses.replace(first, measured=measured if holds_all else {}), *preset.tiers[1:]),
        call_s=call_s,
        call_s_per_array=call_s_per_array,
        call_s_per_byte=call_s_per_byte,
        sent_s_per_array=sent_s_per_array,
    )
    return Calibrated(cluster, errors)


def _fit_device(samples: Samples, known: Device, devices: MeasuredDevices, errors: dict[str, float]) -> Device:
    """Products, pointwise work and launches; adds to `errors`. How programs are compiled for it is as for the `known` device."""
    launch_s = min(sample.seconds / sample.case.sizes[0] for sample in samples["operation"])
    pointwise = samples["pointwise"]
    s_per_byte, errors["pointwise"] = fit_traffic(pointwise, launch_s) if known.fuses else fit_pointwise(pointwise)
    peaks: dict[str, float] = {}
    curves: dict[str, MatrixEfficiency] = {}
    for dtype in dict.fromkeys(sample.case.dtype for sample in samples["product"]):
        own = [sample for sample in samples["product"] if sample.case.dtype == dtype]
        peaks[dtype], half, errors[f"product {dtype}"] = fit_products(own, launch_s, known.efficiency_of(dtype).half)
        curves[dtype] = MatrixEfficiency(1.0, half)
    return Device(
        name=devices.kind,
        peak_flops_per_s=peaks,
        memory_bytes=devices.memory_bytes,
        memory_bytes_per_s=1 / s_per_byte,
        matrix_efficiency=curves,
        launch_s=launch_s,
        fuses=known.fuses,
        thread_blocks=known.thread_blocks,
        kernel_efficiency=known.kernel_efficiency,
    )


def _fit_copies(samples: Samples, device: Device, errors: dict[str, float]) -> Device:
    """What copies and random bits add to what `device` says of the products and writes beside them; adds to `errors`."""
    known = {
        "reordered": [attention_s_and_bytes(device, sample.case) for sample in samples["reordered"]],
        "random": [random_s_and_bytes(device, sample.case) for sample in samples["random"]],
        "transposed": [(0.0, transposed_bytes(sample.case)) for sample in samples["transposed"]],
    }
    found: dict[str, float] = {}
    for kind, seconds_and_bytes in known.items():
        found[kind], errors[kind] = fit_beside(samples[kind], seconds_and_bytes)
    return dataclasses.replace(
        device,
        reorder_s_per_byte=found["reordered"],
        random_s_per_byte=found["random"],
        transpose_s_per_byte=found["transposed"],
    )


def slow_down(cluster: Cluster, factor: float, *, launches: float | None = None) -> Cluster:
    """The cluster with a device that takes `factor` times as long for all that it computes, and `launches` times for launches."""
    device = cluster.device
    return dataclasses.replace(
        cluster,
        device=dataclasses.replace(
            device,
            peak_flops_per_s={dtype: peak / factor for dtype, peak in device.peak_flops_per_s.items()},
            memory_bytes_per_s=device.memory_bytes_per_s / factor,
            launch_s=device.launch_s * (factor if launches is None else launches),
            reorder_s_per_byte=device.reorder_s_per_byte * factor,
            random_s_per_byte=device.random_s_per_byte * factor,
            transpose_s_per_byte=device.transpose_s_per_byte * factor,
        ),
    )
