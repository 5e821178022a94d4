"""In what XLA's compilers differ, as far as it decides what a device keeps in memory.

In: a device. Out: a `Compiler`. Facts of JAX 0.10, as the compilers' own accounts show: that for CPUs on virtual devices, that
for GPUs without any device (`benchmarks/memory_error.py --compiler a100`). What can go wrong: TPUs pad arrays to tiles, which
nobody counts here; nor does anybody count the workspace of cuBLAS, 4 MiB or 32.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

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
        merges_reductions: all-reduces that do not wait for each other become one, and so end together.
        keeps_order: operations run in the program's order; else each as soon as its operands are there, breadth first.
    """

    platform: Platform
    has_library: bool
    turns_operands: bool
    draws_bits_apart: bool
    keeps_costly: bool
    merges_reductions: bool
    keeps_order: bool


XLA_CPU = Compiler(
    platform="cpu",
    has_library=True,
    turns_operands=True,
    draws_bits_apart=True,
    keeps_costly=True,
    merges_reductions=True,
    keeps_order=False,
)
XLA_GPU = Compiler(
    platform="gpu",
    has_library=False,
    turns_operands=False,
    draws_bits_apart=False,
    keeps_costly=False,
    merges_reductions=False,
    keeps_order=True,
)


def compiler_of(device: Device) -> Compiler:
    """The compiler for a device: that of GPUs where chains of operations are one kernel."""
    return XLA_GPU if device.fuses else XLA_CPU
