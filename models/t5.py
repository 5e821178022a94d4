"""An encoder and a decoder (T5): RMSNorm, ReLU, no biases, relative positions as a bias on the scores, shared by layers.

The encoder reads "sources", the decoder writes "targets" from the tokens before them and from what the encoder made.
Each of the two stacks has one table of biases (buckets, N) that all its layers add to their scores: the first half of
the buckets is for distances one by one, the second for longer ones by their logarithm up to `furthest`; in the encoder
one half of all buckets is for positions before, the other for positions after. Scores are not scaled: the
initialisation does that. With tied embeddings one table serves sources, tokens and, scaled by 1/sqrt(H), logits. No
position looks at padding; the loss is the weighted sum over the batch divided by the sum of weights. `layers` counts
those of one stack. Letters in shapes are those of `transformer`, T is `target_seq`, and F = ffn_factor * H.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.models.data import PAD
from autopar.models.dropout import dropout, subkey
from autopar.models.objective import Objective, supervised
from autopar.models.sizes import T5Config
from autopar.models.transformer import TokenEmbedding, apply_blocks, causal_mask, look_up_few, mix, scores

EPSILON = 1e-6


def relative_buckets(length: int, *, buckets: int, furthest: int, both_ways: bool) -> NDArray[np.int32]:
    """The bucket of each pair of positions (query, key): int32 (length, length).

    From numpy, and so a constant of the program: a logarithm at the edge of a bucket must not depend on the device.
    """
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    first = np.zeros_like(distance)
    if both_ways:
        buckets //= 2
        first, distance = np.where(distance < 0, buckets, 0), np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = buckets // 2
    beyond = np.log(np.maximum(distance, exact) / exact) / np.log(furthest / exact)
    far = np.minimum(exact + (beyond * (buckets - exact)).astype(np.int64), buckets - 1)
    return np.asarray(first + np.where(distance < exact, distance, far), np.int32)


class RelativeBias(nn.Module):
    """One bias for each bucket and head."""

    config: T5Config

    @nn.compact
    def __call__(self, length: int, *, both_ways: bool) -> jax.Array:
        """Return the biases of all pairs of positions: (N, length, length)."""
        config = self.config
        table = self.param("table", nn.initializers.normal(config.hidden**-0.5), (config.buckets, config.heads))
        chosen = relative_buckets(length, buckets=config.buckets, furthest=config.furthest, both_ways=both_ways)
        return jnp.transpose(look_up_few(table, chosen), (2, 0, 1))


class T5Attention(nn.Module):
    """Attention of x to a memory, with a bias on the scores and dropout on the attention weights."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        key: jax.Array | None,
        *,
        allowed: jax.Array,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Map x (B, Q, H), memory (B, K, H) and a bias (N, Q, K) to (B, Q, H); `allowed` as for `mix`."""
        config = self.config
        size, width = (config.heads, config.head_depth), config.hidden**-0.5
        inits = {"query": width * config.head_depth**-0.5, "key": width, "value": width}
        query, keys, values = (
            nn.DenseGeneral(size, use_bias=False, kernel_init=nn.initializers.normal(inits[name]), name=name)(source)
            for name, source in (("query", x), ("key", memory), ("value", memory))
        )
        biased = scores(query, keys) if bias is None else scores(query, keys) + bias
        mixed = mix(biased, values, allowed=allowed, rate=config.dropout, key=key)
        init = nn.initializers.normal(width)
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), use_bias=False, kernel_init=init, name="out")(mixed)


class T5FeedForward(nn.Module):
    """Dense to F, ReLU, dropout, Dense to H."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        hidden, wide = self.config.hidden, self.config.ffn_factor * self.config.hidden
        up = nn.Dense(wide, use_bias=False, kernel_init=nn.initializers.normal(hidden**-0.5), name="up")
        down = nn.Dense(hidden, use_bias=False, kernel_init=nn.initializers.normal(wide**-0.5), name="down")
        return down(dropout(nn.relu(up(x)), self.config.dropout, key))


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, allowed: jax.Array, bias: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        rate = self.config.dropout
        normed = nn.RMSNorm(epsilon=EPSILON, name="attention_norm")(x)
        attention = T5Attention(self.config, name="attention")
        x = x + dropout(attention(normed, normed, subkey(key, 0), allowed=allowed, bias=bias), rate, subkey(key, 1))
        fed = T5FeedForward(self.config, name="ffn")(nn.RMSNorm(epsilon=EPSILON, name="ffn_norm")(x), subkey(key, 2))
        return x + dropout(fed, rate, subkey(key, 3))


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), x + attention(norm(x) to the memory), x + feed-forward(norm(x)), one after another."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None,
        bias: jax.Array,
        memory: jax.Array,
        memory_allowed: jax.Array,
    ) -> jax.Array:
        """Map (B, T, H) to (B, T, H), looking at the memory (B, S, H)."""
        rate = self.config.dropout
        normed = nn.RMSNorm(epsilon=EPSILON, name="attention_norm")(x)
        attention, causal = T5Attention(self.config, name="attention"), causal_mask(x.shape[1])
        x = x + dropout(attention(normed, normed, subkey(key, 0), allowed=causal, bias=bias), rate, subkey(key, 1))
        normed = nn.RMSNorm(epsilon=EPSILON, name="cross_norm")(x)
        cross = T5Attention(self.config, name="cross")
        x = x + dropout(cross(normed, memory, subkey(key, 4), allowed=memory_allowed), rate, subkey(key, 5))
        fed = T5FeedForward(self.config, name="ffn")(nn.RMSNorm(epsilon=EPSILON, name="ffn_norm")(x), subkey(key, 2))
        return x + dropout(fed, rate, subkey(key, 3))


class Encoder(nn.Module):
    """Blocks that share one table of biases, and a final norm."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, allowed: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        config = self.config
        bias = RelativeBias(config, name="relative_bias")(x.shape[1], both_ways=True)
        x = dropout(x, config.dropout, subkey(key, config.layers))
        x = apply_blocks(EncoderBlock, config, x, key, allowed, bias)
        x = nn.RMSNorm(epsilon=EPSILON, name="final_norm")(x)
        return dropout(x, config.dropout, subkey(key, config.layers + 1))


class Decoder(nn.Module):
    """Blocks that share one table of biases, all looking at the same memory, and a final norm."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, memory: jax.Array, memory_allowed: jax.Array) -> jax.Array:
        """Map (B, T, H) to (B, T, H), looking at the memory (B, S, H)."""
        config = self.config
        bias = RelativeBias(config, name="relative_bias")(x.shape[1], both_ways=False)
        x = dropout(x, config.dropout, subkey(key, config.layers))
        x = apply_blocks(DecoderBlock, config, x, key, bias, memory, memory_allowed)
        x = nn.RMSNorm(epsilon=EPSILON, name="final_norm")(x)
        return dropout(x, config.dropout, subkey(key, config.layers + 1))


class T5(nn.Module):
    """Embedding, encoder, decoder, logits."""

    config: T5Config

    @nn.compact
    def __call__(self, sources: jax.Array, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map sources (B, S) and tokens (B, T) to logits (B, T, V)."""
        config = self.config
        embedding = TokenEmbedding(config, nn.initializers.normal(1.0), name="embedding")
        allowed = (sources != PAD)[:, None, None, :]
        memory = Encoder(config, name="encoder")(embedding(sources), subkey(key, 0), allowed)
        x = Decoder(config, name="decoder")(embedding(tokens), subkey(key, 1), memory, allowed)
        return embedding.logits(x * config.hidden**-0.5 if config.tied_embeddings else x)


def batch_shape(config: T5Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.continued_batches`."""
    written = (config.batch, config.target_seq)
    return {
        "sources": jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32),
        "tokens": jax.ShapeDtypeStruct(written, jnp.int32),
        "targets": jax.ShapeDtypeStruct(written, jnp.int32),
        "weights": jax.ShapeDtypeStruct(written, jnp.float32),
    }


def objective(config: T5Config) -> Objective:
    """Weighted mean of the cross-entropy of the targets."""
    return supervised(T5(config), config, batch_shape(config), inputs=("sources", "tokens"))
