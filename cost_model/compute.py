"""Seconds of one operation on one device: the roofline.

In: floating-point operations, bytes read and written, the number format. Out: seconds, the larger of arithmetic and
memory traffic plus the launch of the operation.
"""

from __future__ import annotations

from autopar.cost_model.hardware import Cluster


def roofline_s(cluster: Cluster, *, flops: float, moved_bytes: float, dtype: str, launched: bool) -> float:
    """max(flops / peak, bytes / bandwidth), plus the launch time of an operation that is not fused into another."""
    arithmetic_s = flops / cluster.device.flops_per_s_of(dtype)
    memory_s = moved_bytes / cluster.device.memory_bytes_per_s
    return max(arithmetic_s, memory_s) + (cluster.operation_s if launched else 0.0)
