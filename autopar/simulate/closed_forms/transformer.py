"""A transformer's layers, embedding and head as operations of one device, from the plan's parameters.

Letters: s sequence, b microbatch (samples), h hidden, a heads, g key-value heads, f feed-forward width, V vocabulary,
t tensor-parallel ranks, c context-parallel ranks, e bytes of an element, x = s b h / c. Without sequence parallelism layer
norms, dropouts and residual sums are repeated on all t ranks (r = 1); with it each rank has r = 1/t of the tokens. A block is
attention, in T5's decoder twice, and a feed-forward; an expert block has a mixture of experts in its place. Context-parallel
ranks have s/c tokens each in all of this; attention alone needs those of the others. Narrow products are those of the linear
layers in blocks, experts among them; scores, the gate and the head are not.

Tensor parallelism: QKV and the first feed-forward product are split by column, the others by row; one all-reduce of e x
per sublayer and direction, or with sequence parallelism a reduce-scatter and an all-gather, and in backward one more
all-gather (the saved input is a shard). Those in backward that a weight gradient does not wait for are `behind` it.
"""

from __future__ import annotations

import dataclasses

from autopar.simulate.closed_forms.attention import attention_pass, context_buffer_bytes
from autopar.simulate.closed_forms.layer_split import (
    LayerSplit,
    Pass,
    Recompute,
    count_elements,
    count_tokens,
    gather,
    join,
    linear,
    linear_backward,
    token_share,
    weight_gradient,
)
from autopar.simulate.closed_forms.memory import ActivationShape, layer_activation_bytes
from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct, Operation, Work
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

# Bytes per logit that a cross-entropy in float32 moves: forward reads the half-precision logits and writes float32 (6),
# then the maximum (4), shifted exponentials (8), their sum (4), the target and the division (8); backward one pass (8).
_LOSS_BYTES_PER_LOGIT = 38.0
# Elements that gating with one-hot tensors moves per entry of (token, expert, place): one-hot of both choices, their
# sum, the comparison, forward and backward.
_ROUTING_PASSES = 6.0


def block_work(shape: TransformerShape, split: LayerSplit, kind: str = "plain") -> Work:
    """One block for one microbatch on one device."""
    passes = [attention_pass(shape, split)]
    if kind == "decoder":
        passes.append(attention_pass(shape, split, causal=False))
    passes.append(_experts(shape, split) if kind == "expert" else _feed_forward(shape, split, shape_m=None))
    forward = tuple(op for sublayer in passes for op in sublayer.forward)
    backward = tuple(op for sublayer in reversed(passes) for op in sublayer.backward)
    recomputed = {
        "none": (),
        "selective": tuple(op for p in passes for op in p.selective),
        "dots": tuple(op for p in passes for op in p.dots),
        "full": forward,
    }
    whole = layer_activation_bytes(_activation_shape(shape, split, kind, recompute=_inner_recompute(split)))
    kept = layer_activation_bytes(_activation_shape(shape, split, kind, recompute=split.recompute))
    total = shape.block_parameters(kind)
    expert = (shape.experts * _feed_forward_parameters(shape)) if kind == "expert" else 0.0
    expert_here = expert / split.expert_ranks / split.tensor_ranks
    return Work(
        forward=forward,
        backward=backward,
        recomputed=recomputed[split.recompute],
        parameters=(total - expert) / split.tensor_ranks + expert_here,
        expert_parameters=expert_here,
        kept_bytes=kept,
        transient_bytes=whole - kept + context_buffer_bytes(shape, split),
        boundary_bytes=split.element_bytes * count_elements(shape, split),
    )


def embedding_work(shape: TransformerShape, split: LayerSplit) -> Work:
    """Token embedding, split by vocabulary: rows looked up, their partial sums joined, dropout."""
    x, e, r = count_elements(shape, split), split.element_bytes, token_share(split)
    table = shape.vocab * shape.hidden / split.tensor_ranks
    forward: list[Operation] = [FusedGroup(2 * e * x), *join(split, e * x), FusedGroup((2 * e + 1) * x * r)]
    # The gradient of the table is made dense, then added to the accumulated one.
    backward: list[Operation] = [FusedGroup((2 * e + 1) * x * r), *gather(split, e * x)]
    backward.append(FusedGroup(2 * e * x + table * (e + 2 * split.gradient_bytes) / split.gradient_owners))
    return Work(
        forward=tuple(forward), backward=tuple(backward), parameters=table, kept_bytes=x * r, boundary_bytes=e * x
    )


def head_work(shape: TransformerShape, split: LayerSplit) -> Work:
    """Last norm, logits split by vocabulary, cross-entropy in float32; the matrix is the embedding's if tied."""
    x, e, r, t = count_elements(shape, split), split.element_bytes, token_share(split), split.tensor_ranks
    tokens, vocab = count_tokens(shape, split), shape.vocab / t
    logits = MatrixProduct(m=tokens, n=vocab, k=shape.hidden)
    forward: list[Operation] = [FusedGroup(2 * e * x * r), *gather(split, e * x), logits]
    forward.append(FusedGroup((_LOSS_BYTES_PER_LOGIT - 8.0) * tokens * vocab))
    backward: list[Operation] = [
        FusedGroup(8.0 * tokens * vocab),
        MatrixProduct(m=tokens, n=shape.hidden, k=vocab),
        *join(split, e * x, behind=True),
        weight_gradient(split, shape.hidden, vocab, tokens),
        FusedGroup(5 * e * x * r),
    ]
    kept = 2 * e * x * r + 4.0 * tokens * vocab
    return Work(forward=tuple(forward), backward=tuple(backward), parameters=shape.hidden * vocab, kept_bytes=kept)


def _feed_forward(shape: TransformerShape, split: LayerSplit, *, shape_m: tuple[float, float] | None) -> Pass:
    """The dense feed-forward; `shape_m` = (rows, experts here) makes its products batched and leaves out what joins them."""
    x, e, r, t = count_elements(shape, split), split.element_bytes, token_share(split), split.tensor_ranks
    h, f, wide = shape.hidden, shape.ffn_hidden / t, 2 if shape.gated else 1
    rows, count = shape_m or (count_tokens(shape, split), 1.0)
    size = e * h * rows * count
    before = () if shape_m else (FusedGroup(2 * e * x * r),)
    after = () if shape_m else (FusedGroup((3 * e + 1) * x * r),)
    up, down = linear(split, rows, wide * f, h, count), linear(split, rows, h, f, count)
    activation = FusedGroup((wide + 1) * e * rows * f * count)  # with the bias
    forward = (*before, *gather(split, size), *up, activation, *down, *join(split, size), *after)
    again = (*before, *up[:-1], activation, *down[:-1])  # without the products; no backward pass reads what comes after
    backward: tuple[Operation, ...] = (
        *after,
        *gather(split, size),
        *linear_backward(split, rows, f, h, count),
        weight_gradient(split, f, h, rows, count, narrow=split.narrow_products),
        FusedGroup((2 * wide + 2) * e * rows * f * count),  # activation, gradient of the bias
        *gather(split, size, behind=True),
        *linear_backward(split, rows, h, wide * f, count),
        *join(split, size, behind=True),
        weight_gradient(split, h, wide * f, rows, count, narrow=split.narrow_products),
        *(() if shape_m else (FusedGroup(8 * e * x * r),)),
    )
    return Pass(forward, backward, dots=again)


def _experts(shape: TransformerShape, split: LayerSplit) -> Pass:
    """Gate, dispatch, all-to-all, experts, all-to-all, combine; k choices per token, no place left empty.

    One-hot dispatch of T tokens to their k T places is a product (k T, T) x (T, h); its transpose combines.
    """
    x, e, r, k = count_elements(shape, split), split.element_bytes, token_share(split), shape.experts_per_token
    tokens, h = count_tokens(shape, split), shape.hidden
    group = shape.expert_group
    rows = k * tokens * split.expert_ranks / shape.experts
    expert = _feed_forward(shape, split, shape_m=(rows, shape.experts / split.expert_ranks))
    shared = _shared_experts(shape, split)
    size = e * k * x
    swap: tuple[Operation, ...] = (
        (Exchange(kind="all-to-all", group="expert", full_bytes=size),) if split.expert_ranks > 1 else ()
    )
    gate = MatrixProduct(m=tokens, n=shape.experts, k=h)
    if group:
        routing: tuple[Operation, ...] = (FusedGroup(_ROUTING_PASSES * e * tokens * k * group / 2),)
        dispatch: tuple[Operation, ...] = (MatrixProduct(m=k * group, n=h, k=group, batch=tokens / group),)
        combine: tuple[Operation, ...] = (MatrixProduct(m=group, n=h, k=k * group, batch=tokens / group),)
        # Each transposed product again, and for the weights of `combine` one more.
        extra: tuple[Operation, ...] = (MatrixProduct(m=group, n=k * group, k=h, batch=tokens / group),)
    else:
        routing, extra = (), ()
        dispatch = combine = (FusedGroup(2 * size),)
    norm: tuple[Operation, ...] = (FusedGroup(2 * e * x * r),)
    ending: tuple[Operation, ...] = (FusedGroup((3 * e + 1) * x * r),)
    forward = (*norm, gate, *routing, *dispatch, *swap, *expert.forward, *swap, *combine, *shared.forward, *ending)
    backward = (
        *ending, *shared.backward, *combine, *extra, *swap, *expert.backward, *swap, *dispatch, *routing, gate, gate,
        FusedGroup(8 * e * x * r),
    )  # fmt: skip
    return Pass(forward, backward)


def _shared_experts(shape: TransformerShape, split: LayerSplit) -> Pass:
    """Those that every token passes: one feed-forward as wide as all of them, its sum added to what the others give."""
    if not shape.shared_experts:
        return Pass((), ())
    wide = dataclasses.replace(shape, ffn_hidden=shape.shared_experts * shape.ffn_hidden)
    tokens = count_tokens(shape, split)
    own, added = (
        _feed_forward(wide, split, shape_m=(tokens, 1.0)),
        FusedGroup(3 * split.element_bytes * count_elements(shape, split)),
    )
    return Pass((*own.forward, added), own.backward)


def _feed_forward_parameters(shape: TransformerShape) -> float:
    return (3 if shape.gated else 2) * shape.hidden * shape.ffn_hidden + shape.ffn_hidden + shape.hidden


def _inner_recompute(split: LayerSplit) -> Recompute:
    """What is alive while one layer runs backward: everything, or everything but scores that never exist."""
    return "selective" if split.fused_attention else "none"


def _activation_shape(
    shape: TransformerShape, split: LayerSplit, kind: str, *, recompute: Recompute
) -> ActivationShape:
    if split.fused_attention and recompute == "none":
        recompute = "selective"
    return ActivationShape(
        seq_len=shape.seq_len,
        samples=split.samples,
        hidden=shape.hidden,
        attention_width=shape.attention_width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn_hidden=shape.ffn_hidden,
        gated=shape.gated,
        attentions=2 if kind == "decoder" else 1,
        feed_forwards=shape.experts_per_token + shape.shared_experts if kind == "expert" else 1,
        dispatch_places=shape.experts_per_token * shape.expert_group if kind == "expert" else 0,
        tensor_ranks=split.tensor_ranks,
        context_ranks=split.context_ranks,
        sequence_parallel=split.sequence_parallel,
        recompute=recompute,
        element_bytes=split.element_bytes,
    )
