"""Attention as operations of one device: projections, scores, values.

In: a model's sizes, how its layers are divided. Out: a `Pass`, forward and backward. The letters are those of `transformer`;
w is the width of the key heads of one tensor rank, so that a rank's keys and values are u = 2 e (s/c) b w bytes.

Context parallelism: each of c ranks has s/c queries and needs all s keys. A rank's tokens are one of 2 c pieces from the front
and its mirror image from the back, so that under a causal mask all ranks have equally much to do. Two ways to see the keys:

    all-gather   forward c u; backward c u again, and a reduce-scatter of the gradients of c u; each waited for. It is the
                 default: it asks nothing of the kernels and hides nothing (Llama Team 2024, arXiv 2407.21783, section 3.3.2)
    ring         c blocks of s/c keys, each beside the send of the next u; backward sends u and the gradients of u, which
                 need one send more to come home (Liu et al. 2023, arXiv 2310.01889)

Only a rank's own keys and values are kept for backward, as Megatron-Core does. What can go wrong: a kernel that reads or keeps
more than it must; its bytes are not counted.
"""

from __future__ import annotations

import dataclasses

from autopar.simulate.closed_forms.layer_split import (
    LayerSplit,
    Pass,
    count_elements,
    count_tokens,
    gather,
    join,
    linear,
    linear_backward,
    token_share,
    weight_gradient,
)
from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct, Operation
from autopar.simulate.closed_forms.transformer_shape import TransformerShape


def attention_core(shape: TransformerShape, split: LayerSplit) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Scores to values of one attention, forward and backward, by the kernel that the split names."""
    core = _core_attention(shape, split, shape.causal)
    return core.forward, core.backward


def attention_pass(shape: TransformerShape, split: LayerSplit, *, causal: bool | None = None) -> Pass:
    """Norm, QKV product, scores to values, output product, dropout and residual sum. `causal`: as the family, unless stated."""
    x, e, r, t = count_elements(shape, split), split.element_bytes, token_share(split), split.tensor_ranks
    tokens, h, qkv = count_tokens(shape, split), shape.hidden, shape.qkv_width / t
    heads = shape.attention_width / t
    core = _core_attention(shape, split, shape.causal if causal is None else causal)
    norm, to_front = FusedGroup(2 * e * x * r), FusedGroup(2 * e * tokens * qkv)  # the second with the bias
    ending = FusedGroup((3 * e + 1) * x * r)  # bias, dropout, residual sum
    into, out_of = linear(split, tokens, qkv, h), linear(split, tokens, h, heads)
    forward = (norm, *gather(split, e * x), *into, to_front, *core.forward, *out_of, *join(split, e * x), ending)
    again = (
        norm,
        *into[:-1],
        to_front,
        *core.forward,
        *out_of[:-1],
        ending,
    )  # without the products: their results are kept
    backward: tuple[Operation, ...] = (
        FusedGroup((3 * e + 1) * x * r),  # dropout; gradient of the bias
        *gather(split, e * x),
        *linear_backward(split, tokens, heads, h),
        weight_gradient(split, heads, h, tokens, narrow=split.narrow_products),
        *core.backward,
        FusedGroup(3 * e * tokens * qkv),  # heads back, gradient of the bias
        *gather(split, e * x, behind=True),
        *linear_backward(split, tokens, h, qkv),
        *join(split, e * x, behind=True),
        weight_gradient(split, h, qkv, tokens, narrow=split.narrow_products),
        FusedGroup(8 * e * x * r),  # norm, its weights, residual sum
    )
    return Pass(forward, backward, core.selective, again)


def context_buffer_bytes(shape: TransformerShape, split: LayerSplit) -> float:
    """Bytes of other ranks' keys and values, and of their gradients, while one attention runs backward; 0 for one context rank.

    Gathered ones are whole. A ring has two blocks: the one at work and the one that comes.
    """
    if split.context_ranks == 1:
        return 0.0
    blocks = 2 if split.context_exchange == "ring" else split.context_ranks
    return 2.0 * blocks * _keys_bytes(shape, split)


def _keys_bytes(shape: TransformerShape, split: LayerSplit) -> float:
    """u: a rank's own keys and values; fewer key heads than tensor ranks are repeated."""
    width = shape.attention_width / shape.heads * max(shape.kv_heads / split.tensor_ranks, 1.0)
    return 2.0 * split.element_bytes * count_tokens(shape, split) * width


def _core_attention(shape: TransformerShape, split: LayerSplit, causal: bool) -> Pass:
    """Scores, softmax, dropout, values, and what brings the keys and values of other context ranks."""
    if split.context_ranks > 1 and split.context_exchange == "ring":
        return _ring(shape, split, causal)
    core = _fused_core(shape, split, causal, blocks=1) if split.fused_attention else _unfused_core(shape, split)
    if split.context_ranks == 1:
        return core
    whole = split.context_ranks * _keys_bytes(shape, split)
    gathered = Exchange(kind="all-gather", group="context", full_bytes=whole)
    scattered = Exchange(kind="reduce-scatter", group="context", full_bytes=whole)
    return Pass((gathered, *core.forward), (gathered, *core.backward, scattered), core.selective)


def _fused_core(shape: TransformerShape, split: LayerSplit, causal: bool, *, blocks: int) -> Pass:
    """One kernel that does not keep (a, s, s); for one of `blocks` equal blocks of keys.

    A causal kernel skips the tiles above the diagonal; backward has five products where forward has two.
    """
    e, t, s, d = split.element_bytes, split.tensor_ranks, shape.seq_len, shape.attention_width / shape.heads
    maps, x = split.samples * shape.heads / t, count_tokens(shape, split) * shape.attention_width
    keys = (s / 2 if causal else s) / blocks
    product = MatrixProduct(m=s / split.context_ranks, n=keys, k=d, batch=2 * maps, attention="forward")
    return Pass(
        (product, FusedGroup(4 * e * x / t)),
        (dataclasses.replace(product, batch=5 * maps, attention="backward"), FusedGroup(8 * e * x / t)),
    )


def _ring(shape: TransformerShape, split: LayerSplit, causal: bool) -> Pass:
    """As many blocks as ranks; the result of each is added to the sum of those before it, forward and backward."""
    block = _fused_core(shape, split, causal, blocks=split.context_ranks)
    x, u = count_tokens(shape, split) * shape.attention_width / split.tensor_ranks, _keys_bytes(shape, split)
    added = FusedGroup(3 * split.element_bytes * x)
    send = Exchange(kind="permute", group="context", full_bytes=u, behind="product")
    both = dataclasses.replace(send, full_bytes=2 * u)
    home = dataclasses.replace(send, behind="nothing")
    more = split.context_ranks - 1
    forward = ((send, block.forward[0], added) * more, block.forward)
    backward = ((both, block.backward[0], added) * more, block.backward)
    return Pass(sum(forward, ()), (*sum(backward, ()), home))


def _unfused_core(shape: TransformerShape, split: LayerSplit) -> Pass:
    """Four kernels that keep (a, s/c, s)."""
    e, t, s, d = split.element_bytes, split.tensor_ranks, shape.seq_len, shape.attention_width / shape.heads
    q, maps = s / split.context_ranks, split.samples * shape.heads / t
    x = count_tokens(shape, split) * shape.attention_width
    scores = maps * q * s
    core: tuple[Operation, ...] = (
        MatrixProduct(m=q, n=s, k=d, batch=maps),
        FusedGroup(2 * e * scores),  # scale, mask, softmax
        FusedGroup((2 * e + 1) * scores),  # dropout and its mask
        MatrixProduct(m=q, n=d, k=s, batch=maps),
    )
    backward: tuple[Operation, ...] = (
        FusedGroup(2 * e * x / t),
        MatrixProduct(m=q, n=s, k=d, batch=maps),
        MatrixProduct(m=s, n=d, k=q, batch=maps),
        FusedGroup((2 * e + 1) * scores),
        FusedGroup(3 * e * scores),
        MatrixProduct(m=q, n=d, k=s, batch=2 * maps),
    )
    return Pass((*core, FusedGroup(2 * e * x / t)), backward, core)
