"""The figures that explain one kind of sample best; each function returns them with the mean absolute relative error.

Each fit minimises relative errors, since samples span four orders of magnitude, and no figure may be negative. The formulas
are those of `fit_cluster.py`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from autopar.cost_model.algorithms import bytes_sent
from autopar.cost_model.calibration.cases import Case, Collective, Sample
from autopar.cost_model.calibration.programs import pointwise_equations
from autopar.cost_model.calibration.tuning import TUNING
from autopar.cost_model.compute import matrix_product_s, memory_bound_s
from autopar.cost_model.device import Device, MatrixEfficiency
from autopar.cost_model.tiers import MeasuredCollective

HALF_LENGTHS = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
Half: TypeAlias = tuple[float, float, float]
ITEM_BYTES = {"float32": 4, "tensorfloat32": 4, "float16": 2, "bfloat16": 2}


def fit_traffic(samples: Sequence[Sample], launch_s: float) -> tuple[float, float]:
    """(seconds per byte, error) where a chain is one kernel, of what it reads and writes.

    Of the longest chain alone: a shorter one stays in caches, and its launches count.
    """
    longest = max(samples, key=lambda sample: sample.case.sizes[0])
    seconds = max(longest.seconds - launch_s, 0.5 * longest.seconds)
    return seconds / (2.0 * longest.case.sizes[0]), 0.0


def fit_pointwise(samples: Sequence[Sample]) -> tuple[float, float]:
    """(seconds per byte, error): each equation of the chain counts the bytes that it writes."""
    written = [float(pointwise_equations() * sample.case.sizes[0]) for sample in samples]
    (s_per_byte,), error = nonnegative_fit([(size,) for size in written], [s.seconds for s in samples])
    return max(s_per_byte, 1e-15), error


def attention_s_and_bytes(device: Device, case: Case) -> tuple[float, float]:
    """(seconds of the products of attention, bytes of the three operands in another order), of one repetition."""
    examples, positions, heads, width = case.sizes
    itemsize = ITEM_BYTES[case.dtype]
    seconds = sum(
        matrix_product_s(device, positions, n, k, dtype=case.dtype, itemsize=itemsize, batch=examples * heads)
        for n, k in ((positions, width), (width, positions))
    )
    return seconds, 3.0 * itemsize * math.prod(case.sizes)


def transposed_bytes(case: Case) -> float:
    """Bytes of the operand of a transposed copy."""
    return float(ITEM_BYTES[case.dtype] * math.prod(case.sizes))


def random_s_and_bytes(device: Device, case: Case) -> tuple[float, float]:
    """(seconds of writing random bits, their bytes), of one repetition."""
    written = float(case.sizes[0])
    return memory_bound_s(device, written), written


def fit_beside(samples: Sequence[Sample], known: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds per byte beside what is known, error): the median over the samples. `known`: seconds and bytes of each."""
    measured = [sample.seconds / TUNING.repeats for sample in samples]
    found = [(wanted - seconds) / size for wanted, (seconds, size) in zip(measured, known, strict=True)]
    s_per_byte = max(0.0, statistics.median(found))
    errors = [
        abs((seconds + s_per_byte * size) / wanted - 1) for wanted, (seconds, size) in zip(measured, known, strict=True)
    ]
    return s_per_byte, statistics.fmean(errors)


def fit_calls(samples: Sequence[Sample]) -> tuple[float, float, float, float]:
    """(seconds of a call, seconds of each array, seconds of each byte that it reads or writes, error).

    Bytes are told by the samples that state them, and 0 without any.
    """
    rows = []
    for sample in samples:
        arrays, *size = sample.case.sizes
        rows.append((1.0, float(arrays), 2.0 * arrays * sum(size)))
    (call_s, per_array_s, per_byte_s), error = nonnegative_fit(rows, [s.seconds for s in samples])
    return call_s, per_array_s, per_byte_s, error


def fit_transfers(samples: Sequence[Sample], devices: int) -> tuple[float, float, float, float]:
    """(seconds of a transfer, of each array, of each byte that a device carries, error) between halves of so many devices.

    Of the median round: the host's threads wait for their turn on cores that compute, which the least one did not.
    """
    rows = []
    for sample in samples:
        arrays, size = sample.case.sizes
        rows.append((1.0, float(arrays), arrays * size / (devices // 2)))
    (latency_s, per_array_s, per_byte_s), error = nonnegative_fit(rows, [s.seconds * s.spread for s in samples])
    return latency_s, per_array_s, per_byte_s, error


def fit_collective(kind: Collective, samples: Sequence[Sample]) -> tuple[MeasuredCollective, float]:
    """(figures, error) of one kind of collective."""
    rows = []
    for sample in samples:
        n, size = sample.case.sizes
        sent = bytes_sent(kind, n) * size
        rows.append((1.0, float(n), sent, n * sent))
    (a, a1, b, b1), error = nonnegative_fit(rows, [s.seconds for s in samples])
    figures = MeasuredCollective(latency_s=a, s_per_byte=b, latency_s_per_rank=a1, s_per_byte_per_rank=b1)
    return figures, error


def fit_products(samples: Sequence[Sample], launch_s: float, usual: Half) -> tuple[float, Half, float]:
    """(peak, half lengths, error). A sample is (m, k) x (k, n), and the gradients of both operands.

    For given half lengths the best peak is the median of what each sample asks for; the half lengths are tried one by one. Fewer
    samples than figures tell the peak alone, the one with the most work; the half lengths are then the `usual` ones.
    """
    is_told = len(samples) > len(usual)
    samples = samples if is_told else [max(samples, key=lambda sample: math.prod(sample.case.sizes))]
    shapes = [sample.case.sizes for sample in samples]
    seconds = np.array([max(sample.seconds - 3 * launch_s, 0.5 * sample.seconds) for sample in samples])

    def error_of(half: Half) -> tuple[float, float]:
        work = np.array([sum(_work_at_peak(shape, half) for shape in with_gradients(sizes)) for sizes in shapes])
        peak = float(np.median(work / seconds))
        return float(np.mean(np.abs(np.log(work / peak / seconds)))), peak

    tried = list(itertools.product(HALF_LENGTHS, HALF_LENGTHS, HALF_LENGTHS)) if is_told else [usual]
    best = min(tried, key=lambda half: (error_of(half)[0], half))
    error, peak = error_of(best)
    return peak, best, math.expm1(error)


def with_gradients(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(m, n, k) of a product and of the gradients of both operands."""
    m, n, k = sizes
    yield from ((m, n, k), (m, k, n), (k, n, m))


def _work_at_peak(shape: tuple[int, int, int], half: Half) -> float:
    """FLOPs of a product over the efficiency of its shape."""
    m, n, k = shape
    return 2.0 * m * n * k / MatrixEfficiency(1.0, half).of(m, n, k)


def nonnegative_fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Find coefficients >= 0 with the least squared relative error of rows @ coefficients; returns the mean absolute error too.

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
