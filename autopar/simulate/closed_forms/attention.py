"""Attention as operations of one device: projections, scores, values.

In: a model's sizes, how its layers are divided. Out: a `Pass`, forward and backward. The letters are those of `transformer`.
What can go wrong: a kernel that reads or keeps more than it must; its bytes are not counted.
"""

from __future__ import annotations

import dataclasses

from autopar.simulate.closed_forms.layer_split import (
    LayerSplit,
    Pass,
    count_elements,
    gather,
    join,
    token_share,
    weight_gradient,
)
from autopar.simulate.closed_forms.operations import FusedGroup, MatrixProduct, Operation
from autopar.simulate.closed_forms.transformer_shape import TransformerShape


def attention_core(shape: TransformerShape, split: LayerSplit) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Scores to values of one attention, forward and backward, by the kernel that the split names."""
    core = _core_attention(shape, split, shape.causal)
    return core.forward, core.backward


def attention_pass(shape: TransformerShape, split: LayerSplit, *, causal: bool | None = None) -> Pass:
    """Norm, QKV product, scores to values, output product, dropout and residual sum. `causal`: as the family, unless stated."""
    x, e, r, t = count_elements(shape, split), split.element_bytes, token_share(split), split.tensor_ranks
    tokens, h, qkv = shape.seq_len * split.samples, shape.hidden, shape.qkv_width / t
    heads = shape.attention_width / t
    core = _core_attention(shape, split, shape.causal if causal is None else causal)
    forward: tuple[Operation, ...] = (
        FusedGroup(2 * e * x * r),  # norm
        *gather(split, e * x),
        MatrixProduct(m=tokens, n=qkv, k=h),
        FusedGroup(2 * e * tokens * qkv),  # bias, heads to the front
        *core.forward,
        MatrixProduct(m=tokens, n=h, k=heads),
        *join(split, e * x),
        FusedGroup((3 * e + 1) * x * r),  # bias, dropout, residual sum
    )
    backward: tuple[Operation, ...] = (
        FusedGroup((3 * e + 1) * x * r),  # dropout; gradient of the bias
        *gather(split, e * x),
        MatrixProduct(m=tokens, n=heads, k=h),
        weight_gradient(split, heads, h, tokens),
        *core.backward,
        FusedGroup(3 * e * tokens * qkv),  # heads back, gradient of the bias
        *gather(split, e * x, behind=True),
        MatrixProduct(m=tokens, n=h, k=qkv),
        *join(split, e * x, behind=True),
        weight_gradient(split, h, qkv, tokens),
        FusedGroup(8 * e * x * r),  # norm, its weights, residual sum
    )
    return Pass(forward, backward, core.selective)


def _core_attention(shape: TransformerShape, split: LayerSplit, causal: bool) -> Pass:
    """Scores, softmax, dropout, values: four kernels that keep (a, s, s), or one that does not."""
    e, t, s, d = split.element_bytes, split.tensor_ranks, shape.seq_len, shape.attention_width / shape.heads
    maps, x = split.samples * shape.heads / t, s * split.samples * shape.attention_width
    if split.fused_attention:
        # A causal kernel skips the tiles above the diagonal; backward has five products where forward has two.
        rows = s / 2 if causal else s
        product = MatrixProduct(m=s, n=rows, k=d, batch=2 * maps, attention="forward")
        return Pass(
            (product, FusedGroup(4 * e * x / t)),
            (dataclasses.replace(product, batch=5 * maps, attention="backward"), FusedGroup(8 * e * x / t)),
        )
    scores = maps * s * s
    core: tuple[Operation, ...] = (
        MatrixProduct(m=s, n=s, k=d, batch=maps),
        FusedGroup(2 * e * scores),  # scale, mask, softmax
        FusedGroup((2 * e + 1) * scores),  # dropout and its mask
        MatrixProduct(m=s, n=d, k=s, batch=maps),
    )
    backward: tuple[Operation, ...] = (
        FusedGroup(2 * e * x / t),
        MatrixProduct(m=s, n=s, k=d, batch=maps),
        MatrixProduct(m=s, n=d, k=s, batch=maps),
        FusedGroup((2 * e + 1) * scores),
        FusedGroup(3 * e * scores),
        MatrixProduct(m=s, n=d, k=s, batch=2 * maps),
    )
    return Pass((*core, FusedGroup(2 * e * x / t)), backward, core)
