"""In what XLA's compilers differ, as far as it decides what a device keeps in memory.

In: a device. Out: a `Compiler`. Facts of JAX 0.10 to 0.12, as the compilers' own accounts show: that for CPUs on virtual
devices, that for GPUs without any device (`benchmarks/memory_error.py --compiler a100`). What can go wrong: TPUs pad arrays to
tiles, which nobody counts here; nor does anybody count the workspace of cuBLAS, 4 MiB or 32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from autopar.compat import COPIES_BRANCHES, WRITES_TURNED
from autopar.cost_model.device import Device

Platform = Literal["cpu", "gpu"]
"""Whose compiler it is; that of GPUs stands for every one that fuses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """What a compiler does, or does not.

    Attributes:
        platform: whose it is.
        has_library: large reductions are left to a library, which reads buffers only.
        turns_operands: what a product reads in another order of dimensions is written in that order first.
        draws_bits_apart: random bits are made by themselves, in two halves.
        keeps_costly: what is dear to compute is kept for its readers, and not computed again in each.
        merges: kinds of collectives that become one if they do not wait for each other, and so end together.
        merged_bytes: of their results, at most so many in one; infinite if there is no limit.
        adds_into_products: a library multiplies matrices and adds to the product: see `product_sums`.
        operations_per_byte: float32 operations that the device makes while it moves a byte; where these are few, what is dear is
            kept and not computed again. Infinite if the compiler does not ask.
        keeps_order: operations run in the program's order; else each as soon as its operands are there, breadth first.
        writes_turned: one of several results that is in another order of dimensions is written in that order before it is copied.
        copies_branches: what branches write over is copied first, except where the first of two hands it on.
    """

    platform: Platform
    has_library: bool
    turns_operands: bool
    draws_bits_apart: bool
    keeps_costly: bool
    merges: frozenset[str]
    merged_bytes: float
    adds_into_products: bool
    operations_per_byte: float
    keeps_order: bool
    writes_turned: bool
    copies_branches: bool = COPIES_BRANCHES


XLA_CPU = Compiler(
    platform="cpu",
    has_library=True,
    turns_operands=True,
    draws_bits_apart=True,
    keeps_costly=True,
    merges=frozenset({"all-reduce"}),
    merged_bytes=math.inf,
    adds_into_products=False,
    operations_per_byte=math.inf,
    keeps_order=False,
    writes_turned=WRITES_TURNED,
)
XLA_GPU = Compiler(
    platform="gpu",
    has_library=False,
    turns_operands=False,
    draws_bits_apart=False,
    keeps_costly=False,
    merges=frozenset({"all-gather", "all-reduce", "reduce-scatter"}),
    merged_bytes=30 * 2**20,
    adds_into_products=True,
    operations_per_byte=9.6,  # of an A100
    keeps_order=True,
    writes_turned=False,
)


def compiler_of(device: Device) -> Compiler:
    """The compiler for a device: that of GPUs where chains of operations are one kernel."""
    if not device.fuses:
        return XLA_CPU
    return dataclasses.replace(XLA_GPU, operations_per_byte=device.peak_of("float32") / device.memory_bytes_per_s)
