"""An encoder that fills in masked bytes (BERT): post-LayerNorm blocks, segments, padding, logits with an output bias.

Embeddings of tokens, positions and segments are added and normed; each block is norm(x + attention(x)), then
norm(x + feed-forward(x)); a dense layer, GELU and a norm lead to the logits, which come from the token table, or,
without `tied_embeddings`, from a table of their own, plus a bias per token. No position looks at padding. The loss is
the mean over the masked bytes of the batch alone: their sum over their number, so an example with few of them counts
for little. Letters in shapes are those of `transformer`, and F = ffn_factor * H.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.data import PAD
from autopar.models.dropout import dropout, subkey
from autopar.models.objective import Objective, supervised
from autopar.models.sizes import BertConfig
from autopar.models.transformer import INIT, TokenEmbedding, apply_blocks, look_up, mix, scores

SEGMENTS = 2
EPSILON = 1e-12


class BertEmbedding(TokenEmbedding):
    """The tables of tokens, positions (S, H) and segments (2, H), and a bias (V,) of the logits."""

    def setup(self) -> None:
        """Make all tables, the norm and the bias."""
        super().setup()
        self.positions = self.param("positions", INIT, (self.config.seq, self.config.hidden))
        self.segments = nn.Embed(SEGMENTS, self.config.hidden, embedding_init=INIT)
        self.norm = nn.LayerNorm(epsilon=EPSILON)
        self.output_bias = self.param("output_bias", nn.initializers.zeros, (self.config.vocab,))

    def embed(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        """Map tokens and segments (B, S) to (B, S, H)."""
        of_segments = look_up(self.segments.embedding, segments)
        normed: jax.Array = self.norm(self(tokens) + self.positions + of_segments)
        return normed

    def logits(self, x: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, V)."""
        return super().logits(x) + self.output_bias


class BertAttention(nn.Module):
    """Self-attention in both directions with dropout on the attention weights."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, allowed: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H); only positions that are `allowed`, bool (B, 1, 1, S), are looked at."""
        config = self.config
        query, keys, values = (
            nn.DenseGeneral((config.heads, config.head_depth), kernel_init=INIT, name=name)(x)
            for name in ("query", "key", "value")
        )
        scaled = scores(query, keys) / config.head_depth**0.5
        mixed = mix(scaled, values, allowed=allowed, rate=config.dropout, key=key)
        return nn.DenseGeneral(config.hidden, axis=(-2, -1), kernel_init=INIT, name="out")(mixed)


class BertBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feed-forward(x)) with GELU."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, allowed: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        config = self.config
        attended = BertAttention(config, name="attention")(x, subkey(key, 0), allowed)
        x = x + dropout(attended, config.dropout, subkey(key, 1))
        x = nn.LayerNorm(epsilon=EPSILON, name="attention_norm")(x)
        wide = nn.gelu(nn.Dense(config.ffn_factor * config.hidden, kernel_init=INIT, name="up")(x), approximate=False)
        fed = nn.Dense(config.hidden, kernel_init=INIT, name="down")(wide)
        x = x + dropout(fed, config.dropout, subkey(key, 2))
        normed: jax.Array = nn.LayerNorm(epsilon=EPSILON, name="ffn_norm")(x)
        return normed


class Bert(nn.Module):
    """Embedding, blocks, dense head, logits."""

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, segments: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map tokens and segments (B, S) to logits (B, S, V)."""
        config = self.config
        embedding = BertEmbedding(config, name="embedding")
        x = dropout(embedding.embed(tokens, segments), config.dropout, subkey(key, config.layers))
        x = apply_blocks(BertBlock, config, x, key, (tokens != PAD)[:, None, None, :])
        x = nn.gelu(nn.Dense(config.hidden, kernel_init=INIT, name="head")(x), approximate=False)
        return embedding.logits(nn.LayerNorm(epsilon=EPSILON, name="head_norm")(x))


def batch_shape(config: BertConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.masked_batches`."""
    shape = (config.batch, config.seq)
    whole = dict.fromkeys(("tokens", "segments", "targets"), jax.ShapeDtypeStruct(shape, jnp.int32))
    return whole | {"weights": jax.ShapeDtypeStruct(shape, jnp.float32)}


def objective(config: BertConfig) -> Objective:
    """Mean cross-entropy of the masked bytes."""
    return supervised(Bert(config), config, batch_shape(config), inputs=("tokens", "segments"))
