"""What a device is asked to do in a training step, as numbers without a model's names.

A `MatrixProduct` is priced by its shape, a `FusedGroup` (a chain of pointwise operations or a reduction that a compiler
makes one kernel) by the bytes that it moves, an `Exchange` by its kind, bytes and group of devices. `Work` is a list of
them for one layer and one microbatch: forward, backward, and what is computed a second time before the backward pass.
Everything is per device: shapes are already divided by the plan. What can go wrong: counting an operation that a
framework fuses into its neighbour; each group's docstring or comment says what it reads and writes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

ExchangeKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "permute"]
Group = Literal["tensor", "context", "data", "expert"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """`batch` products (m, k) x (k, n); `extra_bytes` are moved beyond its operands and result.

    `convolution`: m positions, n channels and k = window x channels of one, in whatever order its pass contracts them.
    `attention`: these are the products of a fused attention kernel, its forward or its backward one: m queries of width k, of
    which each sees n keys in the mean. `narrow`: its operands are of 8 bits, its result is not.
    """

    m: float
    n: float
    k: float
    batch: float = 1.0
    extra_bytes: float = 0.0
    convolution: bool = False
    attention: Literal["", "forward", "backward"] = ""
    narrow: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class FusedGroup:
    """One memory-bound kernel that reads and writes `moved_bytes` in all."""

    moved_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective of a group; `full_bytes` is the larger side on one device.

    `behind`: the work that does not wait for it ("product": an independent matrix product of the same layer, the next one).
    `seconds`, where somebody else, such as a plan, has priced it.
    """

    kind: ExchangeKind
    group: Group
    full_bytes: float
    behind: Literal["nothing", "product"] = "nothing"
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Timed:
    """Compute whose seconds are known already, from a plan or a measurement."""

    seconds: float


Operation = MatrixProduct | FusedGroup | Exchange | Timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The operations of one layer for one microbatch on one device.

    Attributes:
        forward, backward: as they run.
        recomputed: run again before the backward pass.
        parameters: held by this device, whole over data-parallel ranks.
        expert_parameters: the part of `parameters` that belongs to experts: reduced over data ranks / expert ranks.
        kept_bytes: activations kept from forward to backward.
        transient_bytes: alive only while this layer runs backward (what recomputation brings back).
        boundary_bytes: the result that the next layer, or the next pipeline stage, takes.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    recomputed: tuple[Operation, ...] = ()
    parameters: float = 0.0
    expert_parameters: float = 0.0
    kept_bytes: float = 0.0
    transient_bytes: float = 0.0
    boundary_bytes: float = 0.0
