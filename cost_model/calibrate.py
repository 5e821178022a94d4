"""From measurements to a `Cluster`: the figures of the cost model that explain them best.

In: the samples of `measurements`, and the preset that says what was not measured (tiers, overlap, what the compiler merges). Out:
a `Cluster`, and how far each kind of sample lies from what the cluster says of it. Each fit minimises relative errors, since
samples span four orders of magnitude, and no figure may be negative:

    product      2 m n k / (peak (m/(m+hm)) (n/(n+hn)) (k/(k+hk))) + launch     peak, hm, hn, hk
    reordered    what the products take + r x bytes of operands in another order   r
    transposed   t x bytes                                                      t
    random       bytes / bandwidth + launch + d x bytes                         d
    operation    launch, of operations that do next to nothing                  launch
    pointwise    bytes that the equations of a fused chain write / bandwidth    bandwidth
    collective   a + a1 n + (b + b1 n) x bytes each rank sends                  a, a1, b, b1 for each kind
    dispatch     c + c1 x arrays                                                c, c1
    waiting      w n, beyond the latency of a collective among n ready ranks    w
    merged       m k (latency + waiting) for k all-reduces at once              m

The bandwidth is that of equations, not of copies: the planner prices each equation of a chain by what it writes, fused or not,
and a chain as training steps have it (exponentials, divisions) takes longer than its traffic. `slowed` then makes up for what
whole steps cost beside their parts. What can go wrong: too few group sizes to tell a from a1; the one that explains more is
then kept alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost_model.algorithms import bytes_sent
from autopar.cost_model.compute import matrix_product_s, memory_bound_s
from autopar.cost_model.machine import Cluster, Device, MatrixEfficiency
from autopar.cost_model.measurements import (
    COLLECTIVES,
    REPEATS,
    Case,
    Collective,
    Sample,
    pointwise_equations,
)
from autopar.cost_model.topology import MeasuredCollective, Tier
from autopar.cost_model.waiting import Waited, steady

HALF_LENGTHS = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """The cluster, and for each kind of sample the mean absolute relative error of what it says of them."""

    cluster: Cluster
    errors: Mapping[str, float]


def calibrated_cluster(
    samples: Sequence[Sample], preset: Cluster, *, name: str, device: str, memory_bytes: float, devices: int
) -> Calibrated:
    """The cluster that the samples of `devices` devices speak of; what was not measured is the preset's."""
    by_kind: dict[str, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.case.kind, []).append(sample)
    errors: dict[str, float] = {}
    launch_s = min(sample.seconds / sample.case.sizes[0] for sample in by_kind["operation"])
    s_per_byte, errors["pointwise"] = _pointwise(by_kind["pointwise"])
    curves: dict[str, tuple[float, MatrixEfficiency]] = {}
    for dtype in dict.fromkeys(sample.case.dtype for sample in by_kind["product"]):
        own = [sample for sample in by_kind["product"] if sample.case.dtype == dtype]
        peak, half, errors[f"product {dtype}"] = _products(own, launch_s)
        curves[dtype] = (peak, MatrixEfficiency(1.0, half))
    call_s, call_s_per_array, errors["dispatch"] = _calls(by_kind["dispatch"])
    measured: dict[str, MeasuredCollective] = {}
    for kind in COLLECTIVES:
        if kind in by_kind:
            measured[kind], errors[kind] = _collective(kind, by_kind[kind])
    fitted = Device(
        device,
        {dtype: peak for dtype, (peak, _) in curves.items()},
        memory_bytes,
        1 / s_per_byte,
        {dtype: curve for dtype, (_, curve) in curves.items()},
        launch_s=launch_s,
    )
    reorder_s_per_byte, errors["reordered"] = _beside(
        by_kind["reordered"], [_mixtures_s(fitted, sample.case) for sample in by_kind["reordered"]]
    )
    random_s_per_byte, errors["random"] = _beside(
        by_kind["random"], [_drawn_s(fitted, sample.case) for sample in by_kind["random"]]
    )
    transpose_s_per_byte, errors["transposed"] = _beside(
        by_kind["transposed"], [(0.0, _bytes_of(sample.case)) for sample in by_kind["transposed"]]
    )
    fitted = dataclasses.replace(
        fitted,
        reorder_s_per_byte=reorder_s_per_byte,
        random_s_per_byte=random_s_per_byte,
        transpose_s_per_byte=transpose_s_per_byte,
    )
    first = preset.tiers[0]
    holds_all = first.devices is None or first.devices >= devices
    tiers = (dataclasses.replace(first, measured=measured if holds_all else {}), *preset.tiers[1:])
    cluster = dataclasses.replace(
        preset, name=name, device=fitted, tiers=tiers, call_s=call_s, call_s_per_array=call_s_per_array
    )
    return Calibrated(cluster, errors)


def with_waiting(cluster: Cluster, samples: Sequence[Waited]) -> Cluster:
    """The cluster whose collectives also wait for ranks that share cores, as these samples did.

    C(n, k) is the mean over the grains of what k all-reduces at once add among n ranks; with the latency a + a1 n of an
    all-reduce among ready ranks, w = sum_n n (C(n, 1) - a - a1 n) / sum_n n^2, the least squares of a line through zero, and
    m = C(n, k) / (k C(n, 1)) for all ranks and the k that was merged. Without samples, or if other programs ran beside them, the
    cluster is returned as it is.
    """
    if not steady(samples):
        return cluster
    latency = cluster.tiers[0].measured["all-reduce"]
    of: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        of.setdefault((sample.ranks, sample.merged), []).append(sample.seconds)
    mean = {key: statistics.fmean(seconds) for key, seconds in of.items()}
    beyond = {n: seconds - latency.before_first_byte_s(n) for (n, merged), seconds in mean.items() if merged == 1}
    waiting_s = max(0.0, sum(n * seconds for n, seconds in beyond.items()) / sum(n * n for n in beyond))
    ranks, merged = max(mean, key=lambda key: key[1])
    part = mean[ranks, merged] / (merged * mean[ranks, 1])
    return _waiting(dataclasses.replace(cluster, all_reduce_latency=min(1.0, max(0.0, part))), waiting_s)


def without_waiting(cluster: Cluster) -> Cluster:
    """The cluster as a clock of processor seconds sees it: ranks that wait use no core."""
    return _waiting(cluster, 0.0)


def _waiting(cluster: Cluster, waiting_s_per_rank: float) -> Cluster:
    def changed(tier: Tier) -> Tier:
        measured = {
            kind: dataclasses.replace(figures, waiting_s_per_rank=waiting_s_per_rank)
            for kind, figures in tier.measured.items()
        }
        return dataclasses.replace(tier, measured=measured)

    return dataclasses.replace(cluster, tiers=tuple(map(changed, cluster.tiers)))


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with a device that takes `factor` times as long for everything that it computes."""
    device = cluster.device
    return dataclasses.replace(
        cluster,
        device=dataclasses.replace(
            device,
            peak_flops_per_s={dtype: peak / factor for dtype, peak in device.peak_flops_per_s.items()},
            memory_bytes_per_s=device.memory_bytes_per_s / factor,
            launch_s=device.launch_s * factor,
            reorder_s_per_byte=device.reorder_s_per_byte * factor,
            random_s_per_byte=device.random_s_per_byte * factor,
            transpose_s_per_byte=device.transpose_s_per_byte * factor,
        ),
    )


def _pointwise(samples: Sequence[Sample]) -> tuple[float, float]:
    """(seconds per byte, error): each equation of the chain counts what it writes."""
    written = [float(pointwise_equations() * sample.case.sizes[0]) for sample in samples]
    (s_per_byte,), error = nonnegative_fit([(size,) for size in written], [s.seconds for s in samples])
    return max(s_per_byte, 1e-15), error


def _mixtures_s(device: Device, case: Case) -> tuple[float, float]:
    """(seconds of the products of attention, bytes of the three operands in another order), of one repetition."""
    examples, positions, heads, width = case.sizes
    itemsize = ITEM_BYTES[case.dtype]
    seconds = sum(
        matrix_product_s(device, positions, n, k, dtype=case.dtype, itemsize=itemsize, batch=examples * heads)
        for n, k in ((positions, width), (width, positions))
    )
    return seconds, 3.0 * itemsize * math.prod(case.sizes)


def _bytes_of(case: Case) -> float:
    """Bytes of the operand of a transposed copy."""
    return float(ITEM_BYTES[case.dtype] * math.prod(case.sizes))


def _drawn_s(device: Device, case: Case) -> tuple[float, float]:
    """(seconds of writing random bits, their bytes), of one repetition."""
    written = float(case.sizes[0])
    return memory_bound_s(device, written), written


def _beside(samples: Sequence[Sample], known: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds per byte beside what is known, error): the median over the samples; `known`: seconds and bytes of each."""
    measured = [sample.seconds / REPEATS for sample in samples]
    found = [(wanted - seconds) / size for wanted, (seconds, size) in zip(measured, known, strict=True)]
    s_per_byte = max(0.0, statistics.median(found))
    errors = [
        abs((seconds + s_per_byte * size) / wanted - 1) for wanted, (seconds, size) in zip(measured, known, strict=True)
    ]
    return s_per_byte, statistics.fmean(errors)


def _calls(samples: Sequence[Sample]) -> tuple[float, float, float]:
    rows = [(1.0, float(sample.case.sizes[0])) for sample in samples]
    (call_s, per_array_s), error = nonnegative_fit(rows, [s.seconds for s in samples])
    return call_s, per_array_s, error


def _collective(kind: Collective, samples: Sequence[Sample]) -> tuple[MeasuredCollective, float]:
    rows = []
    for sample in samples:
        n, size = sample.case.sizes
        sent = bytes_sent(kind, n) * size
        rows.append((1.0, float(n), sent, n * sent))
    (a, a1, b, b1), error = nonnegative_fit(rows, [s.seconds for s in samples])
    return MeasuredCollective(a, b, a1, b1), error


def _products(samples: Sequence[Sample], launch_s: float) -> tuple[float, tuple[float, float, float], float]:
    """(peak, half lengths, error). A sample is (m, k) x (k, n), and the gradients of both operands.

    For given half lengths the best peak is the median of what each sample asks for; the half lengths are tried one by one.
    """
    shapes = [sample.case.sizes for sample in samples]
    seconds = np.array([max(sample.seconds - 3 * launch_s, 0.5 * sample.seconds) for sample in samples])

    def error_of(half: tuple[float, float, float]) -> tuple[float, float]:
        work = np.array([_work(m, n, k, half) + _work(m, k, n, half) + _work(k, n, m, half) for m, n, k in shapes])
        peak = float(np.median(work / seconds))
        return float(np.mean(np.abs(np.log(work / peak / seconds)))), peak

    tried = list(itertools.product(HALF_LENGTHS, HALF_LENGTHS, HALF_LENGTHS))
    best = min(tried, key=lambda half: (error_of(half)[0], half))
    error, peak = error_of(best)
    return peak, best, math.expm1(error)


def _work(m: int, n: int, k: int, half: tuple[float, float, float]) -> float:
    """FLOPs of a product, divided by the efficiency of its shape."""
    return 2.0 * m * n * k / MatrixEfficiency(1.0, half).of(m, n, k)


def nonnegative_fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Coefficients >= 0 with the least squared relative error of rows @ coefficients, and the mean absolute one.

    Columns are few, so every subset of them is tried and the best without a negative coefficient kept.
    """
    table, wanted = np.array(rows), np.array(values)
    relative = table / wanted[:, None]
    columns = table.shape[1]
    best, best_error = np.zeros(columns), math.inf
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            found, *_ = np.linalg.lstsq(relative[:, chosen], np.ones(len(wanted)), rcond=None)
            coefficients = np.zeros(columns)
            coefficients[list(chosen)] = found
            error = float(np.sum((relative @ coefficients - 1) ** 2))
            if found.min() >= 0 and error < best_error * (1 - 1e-9):
                best, best_error = coefficients, error
    return tuple(float(c) for c in best), float(np.mean(np.abs(relative @ best - 1)))
