"""A decoder-only transformer in the manner of LLaMA: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

Rotary positions turn each pair (x_i, x_{i + D/2}) of a query or key at position t by the angle t * theta^(-2i/D), so
that scores depend on the distance of two positions alone. Each of the `kv_heads` keys and values serves N / kv_heads
neighbouring query heads. Letters in shapes are those of `transformer`, G = kv_heads, and F = ffn.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.attention.primitive import dot_product_attention
from autopar.models.dropout import dropout, subkey
from autopar.models.gpt import batch_shape
from autopar.models.objective import Objective, supervised
from autopar.models.sizes import LlamaConfig
from autopar.models.transformer import INIT, TokenEmbedding, apply_blocks, causal_mask, mix, scores

EPSILON = 1e-5


def rotary_angles(length: int, depth: int, theta: float) -> jax.Array:
    """The angle of each position and pair: float32 (S, D/2)."""
    frequencies = theta ** (-jnp.arange(0, depth, 2, dtype=jnp.float32) / depth)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turn the pairs of x (B, S, heads, D) by angles (S, D/2), float32."""
    cosine, sine = (turn(angles)[:, None, :].astype(x.dtype) for turn in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


class LlamaAttention(nn.Module):
    """Causal self-attention with N query heads and G heads of keys and values."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, angles: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        config = self.config
        query = rotate(self._heads(x, "query", config.heads), angles)
        keys = rotate(self._heads(x, "key", config.kv_heads), angles)
        values = self._heads(x, "value", config.kv_heads)
        if config.fused_attention:
            is_balanced = config.balanced_attention
            mixed = dot_product_attention(query, keys, values, is_causal=True, is_balanced=is_balanced)
        else:
            keys, values = (jnp.repeat(given, config.heads // config.kv_heads, axis=2) for given in (keys, values))
            scaled = scores(query, keys) / config.head_depth**0.5
            mixed = mix(scaled, values, allowed=causal_mask(x.shape[1]), rate=config.dropout, key=key)
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), use_bias=False, kernel_init=INIT, name="out")(mixed)

    def _heads(self, x: jax.Array, name: str, heads: int) -> jax.Array:
        return nn.DenseGeneral((heads, self.config.head_depth), use_bias=False, kernel_init=INIT, name=name)(x)


class SwiGLU(nn.Module):
    """silu(x W_gate) * (x W_up), then W_down."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        gate, up = (
            nn.Dense(self.config.ffn, use_bias=False, kernel_init=INIT, name=name)(x) for name in ("gate", "up")
        )
        return nn.Dense(self.config.hidden, use_bias=False, kernel_init=INIT, name="down")(nn.silu(gate) * up)


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, angles: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        rate = self.config.dropout
        normed = nn.RMSNorm(epsilon=EPSILON, name="attention_norm")(x)
        attended = LlamaAttention(self.config, name="attention")(normed, subkey(key, 0), angles)
        x = x + dropout(attended, rate, subkey(key, 1))
        fed = SwiGLU(self.config, name="ffn")(nn.RMSNorm(epsilon=EPSILON, name="ffn_norm")(x))
        return x + dropout(fed, rate, subkey(key, 2))


class Llama(nn.Module):
    """Embedding, blocks, final norm, logits."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map tokens (B, S) to logits (B, S, V)."""
        config = self.config
        embedding = TokenEmbedding(config, name="embedding")
        x = dropout(embedding(tokens), config.dropout, subkey(key, config.layers))
        x = apply_blocks(LlamaBlock, config, x, key, rotary_angles(tokens.shape[1], config.head_depth, config.theta))
        return embedding.logits(nn.RMSNorm(epsilon=EPSILON, name="final_norm")(x))


def objective(config: LlamaConfig) -> Objective:
    """Mean cross-entropy of the next byte."""
    return supervised(Llama(config), config, batch_shape(config))
