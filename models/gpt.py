"""A decoder-only transformer (GPT): pre-LayerNorm blocks, learned positions, GELU, dropout.

The logits come from the token table, or, without `tied_embeddings`, from a table of their own. Letters in shapes are
those of `transformer`, and F = ffn_factor * H.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.dropout import dropout, subkey
from autopar.models.objective import Objective, supervised
from autopar.models.sizes import GPTConfig, TransformerConfig
from autopar.models.transformer import INIT, TokenEmbedding, apply_blocks, causal_mask, mix, scores


class GPTAttention(nn.Module):
    """Causal self-attention with dropout on the attention weights."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        config = self.config
        qkv = nn.DenseGeneral((3, config.heads, config.head_depth), kernel_init=INIT, name="qkv")(x)
        query, key_vectors, value = (qkv[:, :, which] for which in range(3))
        scaled = scores(query, key_vectors) / config.head_depth**0.5
        mixed = mix(scaled, value, allowed=causal_mask(x.shape[1]), rate=config.dropout, key=key)
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), kernel_init=INIT, name="out")(mixed)


class GPTFeedForward(nn.Module):
    """Dense to F, GELU, Dense to H."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        wide = nn.Dense(self.config.ffn_factor * self.config.hidden, kernel_init=INIT, name="up")(x)
        return nn.Dense(self.config.hidden, kernel_init=INIT, name="down")(nn.gelu(wide))


class GPTBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        rate = self.config.dropout
        attended = GPTAttention(self.config, name="attention")(nn.LayerNorm(name="attention_norm")(x), subkey(key, 0))
        x = x + dropout(attended, rate, subkey(key, 1))
        fed = GPTFeedForward(self.config, name="ffn")(nn.LayerNorm(name="ffn_norm")(x))
        return x + dropout(fed, rate, subkey(key, 2))


class GPTEmbedding(TokenEmbedding):
    """The token table, and the positions (S, H)."""

    def setup(self) -> None:
        """Make all tables."""
        super().setup()
        self.positions = self.param("positions", INIT, (self.config.seq, self.config.hidden))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens (B, S) to (B, S, H)."""
        return super().__call__(tokens) + self.positions


class GPT(nn.Module):
    """Embedding, blocks, final norm, logits."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map tokens (B, S) to logits (B, S, V)."""
        embedding = GPTEmbedding(self.config, name="embedding")
        x = dropout(embedding(tokens), self.config.dropout, subkey(key, self.config.layers))
        x = apply_blocks(GPTBlock, self.config, x, key)
        return embedding.logits(nn.LayerNorm(name="final_norm")(x))


def batch_shape(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.text_batches`."""
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def objective(config: GPTConfig) -> Objective:
    """Mean cross-entropy of the next byte."""
    return supervised(GPT(config), config, batch_shape(config))
