"""How a layer is divided among ranks, and what joins its parts.

In: a model's sizes, a `LayerSplit`. Out: elements and tokens on one device, the collectives that divide and join them, weight
gradients. The letters are those of `transformer`. What can go wrong: parts that do not divide; `training_job` refuses them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct, Operation
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

Recompute = Literal["none", "selective", "dots", "full"]
"""What runs again before backward: nothing; attention's scores (Korthikanti et al. 2022); all but linear products, whose results
are kept, as under `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`; everything."""
ContextExchange = Literal["all-gather", "ring"]
"""How ranks that divide the sequence see each other's keys and values; see `attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """How a stage runs a layer: b samples per device, t ranks, and what is kept.

    `gradient_bytes`: of the buffer that weight gradients are added to, per parameter; `gradient_owners`: the data ranks that
    share it, under ZeRO 2 and 3. `fused_attention`: scores never leave the chip, and backward computes them again inside the
    kernel. `context_ranks`: among which the sequence is divided, c in the letters.
    `narrow_products`: those of linear layers have operands of 8 bits.
    """

    samples: float
    tensor_ranks: int = 1
    expert_ranks: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    fused_attention: bool = False
    element_bytes: int = 2
    gradient_bytes: int = 4
    gradient_owners: int = 1
    context_ranks: int = 1
    context_exchange: ContextExchange = "all-gather"
    narrow_products: bool = False


@dataclasses.dataclass(frozen=True)
class Pass:
    """Operations of a sublayer, forward and backward, and the part that recomputation repeats: of scores, of all but products."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    selective: tuple[Operation, ...] = ()
    dots: tuple[Operation, ...] = ()


def count_tokens(shape: TransformerShape, split: LayerSplit) -> float:
    """Tokens of one microbatch on one device, s b / c."""
    return shape.seq_len * split.samples / split.context_ranks


def count_elements(shape: TransformerShape, split: LayerSplit) -> float:
    """Elements of the hidden states of one microbatch on one device, x = s b h / c."""
    return count_tokens(shape, split) * shape.hidden


def token_share(split: LayerSplit) -> float:
    """The part r of these tokens whose norms, dropouts and residual sums one tensor rank computes."""
    return 1 / split.tensor_ranks if split.sequence_parallel else 1.0


def join(split: LayerSplit, full_bytes: float, *, behind: bool = False) -> tuple[Operation, ...]:
    """Partial sums to a result: whole on every rank, or a shard of the tokens."""
    if split.tensor_ranks == 1:
        return ()
    kind: Literal["reduce-scatter", "all-reduce"] = "reduce-scatter" if split.sequence_parallel else "all-reduce"
    return (Exchange(kind=kind, group="tensor", full_bytes=full_bytes, behind="product" if behind else "nothing"),)


def gather(split: LayerSplit, full_bytes: float, *, behind: bool = False) -> tuple[Operation, ...]:
    """A shard of the tokens to all of them: nothing to do without sequence parallelism."""
    if split.tensor_ranks == 1 or not split.sequence_parallel:
        return ()
    return (
        Exchange(kind="all-gather", group="tensor", full_bytes=full_bytes, behind="product" if behind else "nothing"),
    )


def weight_gradient(
    split: LayerSplit, m: float, n: float, k: float, batch: float = 1.0, *, narrow: bool = False
) -> MatrixProduct:
    """x^T dy, added to the accumulated gradient: that is read and written in its own format, or each rank's share of it.

    `narrow`: both operands have been cast for other products.
    """
    extra = batch * m * n * (2 * split.gradient_bytes - split.element_bytes)
    if split.gradient_owners > 1:  # the product's own result is written, and its share of the sum over ranks read
        extra = batch * m * n * (2 * split.gradient_bytes + split.element_bytes) / split.gradient_owners
    return MatrixProduct(m=m, n=n, k=k, batch=batch, extra_bytes=extra, narrow=narrow)


def linear(split: LayerSplit, m: float, n: float, k: float, batch: float = 1.0) -> tuple[Operation, ...]:
    """x w with x (m, k) and w (k, n), both cast before if products are narrow."""
    casts = (*_cast(split, batch * m * k), *_cast(split, batch * k * n)) if split.narrow_products else ()
    return (*casts, MatrixProduct(m=m, n=n, k=k, batch=batch, narrow=split.narrow_products))


def linear_backward(split: LayerSplit, m: float, n: float, k: float, batch: float = 1.0) -> tuple[Operation, ...]:
    """dy w^T with dy (m, k); dy is cast before if products are narrow, w and x have been in forward."""
    casts = _cast(split, batch * m * k) if split.narrow_products else ()
    return (*casts, MatrixProduct(m=m, n=n, k=k, batch=batch, narrow=split.narrow_products))


def _cast(split: LayerSplit, elements: float) -> tuple[Operation, ...]:
    """Two kernels: the largest magnitude, for the scale; then the cast, in rows and in columns.

    So Transformer Engine does with current scaling (its user guide, "FP8 Current Scaling": two reads for each quantization), as
    tensor cores of Hopper contract 8-bit operands along rows alone. Micikevicius et al. 2022 (arXiv 2209.05433) has the formats.
    """
    return FusedGroup(split.element_bytes * elements), FusedGroup((split.element_bytes + 2.0) * elements)
