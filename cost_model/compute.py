"""Seconds of one operation on one device: the roofline, with the efficiency that a matrix product of that shape reaches.

In: floating-point operations, bytes read and written, the number format, and for products their shape. Out: seconds, the larger
of arithmetic and memory traffic plus the launch of the operation, plus what copying operands into order and drawing random
bits take. What can go wrong: an operation with several launches priced as one.
"""

from __future__ import annotations

import math

from autopar.cost_model.device import Device
from autopar.cost_model.thread_blocks import ROUNDING


def roofline_s(
    device: Device,
    *,
    flops: float,
    moved_bytes: float,
    dtype: str,
    launched: bool,
    sizes: tuple[float, float, float] | None = None,
    convolves: bool = False,
    reordered_bytes: float = 0.0,
    random_bytes: float = 0.0,
) -> float:
    """max(flops / reached, bytes / bandwidth), plus the launch time of an operation that is not fused into another.

    `sizes`: elements of the left operand, the right operand and the result, of an operation that multiplies matrices or
    `convolves`; its efficiency then depends on its shape, and operands of a product may be padded. `reordered_bytes` of its
    operands are copied first, in another order of dimensions; `random_bytes` of its result are drawn.
    """
    arithmetic_s, beside_s = flops / device.flops_per_s_of(dtype), 0.0
    if sizes is not None and flops > 0 and min(sizes) > 0:
        batch, m, n, k = product_shape(flops, *sizes)
        if convolves:
            arithmetic_s = flops / device.product_flops_per_s(dtype, m, batch * n, k, convolution=True)
        elif batch > 1 - ROUNDING:
            arithmetic_s = flops / device.product_flops_per_s(dtype, m, n, k, batch=batch)
            beside_s = device.padding_s(dtype, m, n, k, batch=batch)
        else:  # operands that have fewer elements than those of the product
            arithmetic_s = flops / (device.peak_of(dtype) * device.efficiency_of(dtype).of(m, n, k))
    memory_s = moved_bytes / device.sustained_bytes_per_s
    beside_s += reordered_bytes * device.reorder_s_per_byte + random_bytes * device.random_s_per_byte
    return max(arithmetic_s, memory_s) + beside_s + (device.launch_s if launched else 0.0)


def product_shape(flops: float, left: float, right: float, result: float) -> tuple[float, float, float, float]:
    """(batch, m, n, k) of a batched matrix product from its flops and the elements of its operands and result.

    flops = 2 B m n k, left = B m k, right = B k n, result = B m n, hence B = left right result / (flops/2)^2,
    m = (flops/2) / right, n = (flops/2) / left, k = (flops/2) / result. A convolution is a product whose left operand
    has every element as often as windows cover it, and is given once: its m and k are as above, its n is B n.
    """
    products = flops / 2
    return left * right * result / products**2, products / right, products / left, products / result


def matrix_product_s(
    device: Device, m: float, n: float, k: float, *, dtype: str, itemsize: int, batch: float = 1.0
) -> float:
    """Seconds of `batch` products (m, k) x (k, n): the larger of arithmetic at this shape's efficiency and memory traffic."""
    arithmetic_s = 2 * batch * m * n * k / device.product_flops_per_s(dtype, m, n, k, batch=batch)
    memory_s = batch * itemsize * (m * k + k * n + m * n) / device.sustained_bytes_per_s
    return max(arithmetic_s, memory_s) + device.launch_s


def memory_bound_s(device: Device, moved_bytes: float, *, launches: int = 1) -> float:
    """Seconds of fused pointwise work that reads and writes so many bytes in so many kernels."""
    return (
        moved_bytes / device.sustained_bytes_per_s + launches * device.launch_s
        if math.isfinite(moved_bytes)
        else math.inf
    )
