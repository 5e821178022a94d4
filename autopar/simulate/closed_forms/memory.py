"""Bytes of a training step on one device: model states, activations kept, microbatches in flight.

Letters: s sequence, b microbatch, h hidden, a heads, t tensor-parallel ranks, d data-parallel ranks, p stages, v virtual
stages per device, m microbatches, L layers. For elements of two bytes and a plain block of four times hidden width

    nothing recomputed                     s b h (10 + 24/t + 5 a s/(h t)), for t = 1 s b h (34 + 5 a s/h)
    sequence parallel                      (s b h/t) (34 + 5 a s/h)
    selective: the scores are not kept     the same without 5 a s/h
    dots: the input and products' results  2 s b (h + h + 3 h/t + 4 h/t), the first two divided by t with sequence parallelism
    full: only the layer's input           2 s b h, with sequence parallelism 2 s b h/t
    context parallel                       each of these divided by c: a rank has s/c of the tokens, and scores of s/c by s

in parts: QKV input 2, queries and keys 4, values 2, input of the output product 2, dropout mask 1, both norms 4;
feed-forward input 2, its first result 8 and the activation 8, dropout mask 1 (times s b h); softmax 2, its dropout 2 and
mask 1 (times a s^2 b). Model states in mixed precision with Adam: 2 parameter + 2 gradient + 4 master + 8 moments = 16 B
per parameter, 18 if gradients are accumulated in float32; ZeRO divides optimizer, gradients, parameters in turn by d.

What can go wrong: a framework that keeps an operand which another recomputes; the memory of its allocator is not counted.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationShape:
    """What the bytes that one block keeps depend on; `feed_forwards` is the number of times that a token passes one.

    `attention_width`: of all heads together, hidden unless it is stated. `dispatch_places`: one-hot places per token of a mixture
    of experts, 0 without one-hot dispatch.
    """

    seq_len: float
    samples: float
    hidden: float
    heads: float
    ffn_hidden: float
    kv_heads: float | None = None
    attention_width: float | None = None
    gated: bool = False
    attentions: int = 1
    feed_forwards: int = 1
    dispatch_places: int = 0
    tensor_ranks: int = 1
    context_ranks: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "dots", "full"] = "none"
    element_bytes: int = 2


def layer_activation_bytes(shape: ActivationShape) -> float:
    """Bytes that one block keeps for its backward pass, on one device, for one microbatch."""
    e, h, t = shape.element_bytes, shape.hidden, shape.tensor_ranks
    tokens = shape.seq_len * shape.samples / shape.context_ranks
    if shape.recompute == "full":
        return e * tokens * h / (t if shape.sequence_parallel else 1)
    kv = (shape.kv_heads or shape.heads) / shape.heads
    if shape.recompute == "dots":  # the result of the last product is read by no backward pass
        inner = (
            shape.attentions * (1 + 2 * kv) * (shape.attention_width or h)
            + (2 if shape.gated else 1) * shape.ffn_hidden
        )
        return e * tokens * ((1 + shape.attentions) * h / (t if shape.sequence_parallel else 1) + inner / t)
    # Repeated on every rank unless the tokens are split: both inputs and both norms (e each), and two dropout masks.
    outer = (2 * e + 1) * h * (shape.attentions + 1)
    inner = shape.attentions * (2 + 2 * kv) * (shape.attention_width or h) * e
    inner += shape.feed_forwards * (3 if shape.gated else 2) * shape.ffn_hidden * e
    if shape.dispatch_places:
        outer += 2 * e * shape.dispatch_places + (shape.feed_forwards - 1) * 2 * e * h
    if shape.recompute == "none":
        inner += shape.attentions * (2 * e + 1) * shape.heads * shape.seq_len
    return tokens * (outer / (t if shape.sequence_parallel else 1) + inner / t)


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: in what formats a parameter, its gradient and the optimizer's state are kept.

    Adam in mixed precision: 2, 2 or 4, and 12 (a float32 copy and two moments); Adam in float32: 4, 4, 8; momentum 4.
    """

    parameter: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0

    def per_parameter(self, zero_stage: int, data_ranks: int, *, whole_gradients: bool = False) -> float:
        """Bytes on one of `data_ranks`: ZeRO 1 divides the optimizer's, 2 also gradients, 3 also parameters.

        `whole_gradients`: they are added up on every rank and divided once a step, so ZeRO saves nothing of them.
        """
        d = data_ranks
        return (
            self.parameter / (d if zero_stage >= 3 else 1)
            + self.gradient / (d if zero_stage >= 2 and not whole_gradients else 1)
            + self.optimizer / (d if zero_stage >= 1 else 1)
        )


def states_of(
    precision: str, *, optimizer: Literal["adam", "momentum", "adafactor"] = "adam", accumulate_fp32: bool = False
) -> StateBytes:
    """Formats of states for a precision of the products: "fp16" and "bf16" mixed with float32, or "fp32".

    Adafactor keeps sums of rows and columns in place of moments: next to nothing.
    """
    moments = {"adam": 8.0, "momentum": 4.0, "adafactor": 0.0}[optimizer]
    if precision == "fp32":
        return StateBytes(4.0, 4.0, moments)
    return StateBytes(2.0, 4.0 if accumulate_fp32 else 2.0, 4.0 + moments)


def layers_in_flight(
    layers: float, *, stages: int, virtual_stages: int = 1, microbatches: int = 1, stage: int = 0
) -> float:
    """Layers' worth of activations that a stage holds at its peak, in layers of one microbatch.

    1F1B: stage i of p holds min(m, p - i) microbatches of its L/p layers, so the first one those of L layers.
    Interleaved: L (1 + (p-1)/(p v)) on the first stage; a later one holds two chunks less for each stage before it.
    """
    per_stage = layers / stages
    if virtual_stages == 1:
        return per_stage * min(microbatches, stages - stage)
    chunks = min(stages * virtual_stages + stages - 1 - 2 * stage, microbatches * virtual_stages)
    return per_stage / virtual_stages * max(chunks, 1)
