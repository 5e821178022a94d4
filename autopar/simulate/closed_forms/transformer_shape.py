"""Sizes of a transformer: its blocks, its parameters and its FLOPs.

In: the sizes of a row. Out: the kinds of its blocks in order, parameters by block, FLOPs of a forward pass in the convention
of the published tables (attention counted whole, no recomputation). Families differ in few ways: LLaMA has a gated
feed-forward, grouped key-value heads and a head of its own; T5 has two stacks, and its decoder attends twice; a mixture of
experts has experts in every second block, and may have shared ones that every token passes (Dai et al. 2024, DeepSeekMoE). What
can go wrong: biases and norms of a family that has none are counted.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Family = Literal["gpt", "bert", "llama", "t5", "moe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer.

    `ffn_hidden` is the width of one feed-forward matrix; `gated` has two of them before the activation (SwiGLU), as LLaMA unless
    it is stated. `head_width`: of one head, where it is not hidden / heads.
    `experts` > 1: every `expert_every`-th block is a mixture; `expert_group` tokens are dispatched together by one-hot
    products (GShard), 0 means that tokens are permuted. `shared_experts`, each as wide as the others, are passed by every token.
    `layers` of a T5 are those of the encoder, and of the decoder unless `decoder_layers` says otherwise.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq_len: int
    experts: int = 1
    experts_per_token: int = 2
    expert_every: int = 2
    expert_group: int = 0
    shared_experts: int = 0
    head_width: int | None = None
    gating: bool | None = None
    decoder_layers: int | None = None

    @property
    def gated(self) -> bool:
        """Whether the feed-forward is gated."""
        return self.family == "llama" if self.gating is None else self.gating

    @property
    def causal(self) -> bool:
        """Whether a token attends only to earlier ones."""
        return self.family in ("gpt", "llama", "moe")

    @property
    def qkv_width(self) -> float:
        """Columns of the QKV product: d (a + 2 g), d the width of a head; h (1 + 2 g/a) where that is h/a."""
        return self.attention_width * (1 + 2 * self.kv_heads / self.heads)

    @property
    def attention_width(self) -> float:
        """Width of all heads together: hidden, unless heads have a width of their own."""
        return self.hidden if self.head_width is None else self.heads * self.head_width

    @property
    def blocks(self) -> tuple[str, ...]:
        """Kind of every block in order: "plain", "expert" or "decoder" (with attention to an encoder)."""
        if self.family == "t5":
            return ("plain",) * self.layers + ("decoder",) * (self.decoder_layers or self.layers)
        if self.experts > 1:
            return tuple(
                "expert" if i % self.expert_every == self.expert_every - 1 else "plain" for i in range(self.layers)
            )
        return ("plain",) * self.layers

    def block_parameters(self, kind: str) -> float:
        """Parameters of one block, with biases and norms."""
        h, f = self.hidden, self.ffn_hidden
        attention = h * self.qkv_width + self.attention_width * h + self.qkv_width + h
        feed_forward = (3 if self.gated else 2) * h * f + f + h
        norms = 4 * h
        if kind == "decoder":
            return 2 * attention + feed_forward + norms + 2 * h
        if kind == "expert":
            return attention + (self.experts + self.shared_experts) * feed_forward + h * self.experts + norms
        return attention + feed_forward + norms

    @property
    def untied(self) -> bool:
        """Whether the head has a matrix of its own."""
        return self.family == "llama"

    @property
    def parameters(self) -> float:
        """Parameters in all: blocks, embedding, head."""
        embedding = self.vocab * self.hidden * (2 if self.untied else 1)
        return sum(self.block_parameters(kind) for kind in self.blocks) + embedding

    def forward_flops(self, samples: float) -> float:
        """FLOPs of the products of one forward pass over `samples`, attention counted whole, no recomputation."""
        tokens, s, h, f = samples * self.seq_len, self.seq_len, self.hidden, self.ffn_hidden
        attention = 2 * tokens * h * (self.qkv_width + self.attention_width) + 4 * tokens * s * self.attention_width
        feed_forward = (6 if self.gated else 4) * tokens * h * f
        per_kind = {"plain": attention + feed_forward, "decoder": 2 * attention + feed_forward}
        passed = self.experts_per_token + self.shared_experts
        per_kind["expert"] = attention + passed * feed_forward + 2 * tokens * h * self.experts
        return sum(per_kind[kind] for kind in self.blocks) + 2 * tokens * h * self.vocab
