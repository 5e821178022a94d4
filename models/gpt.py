"""A decoder-only transformer (GPT): pre-LayerNorm blocks, learned positions, tied embedding, GELU, dropout.

The blocks are written out one by one, or, with `scan_layers`, one block is scanned over parameters stacked along a
first axis of length `layers`; both compute the same function, dropout included, because a block's dropout key depends
only on the step's key and the layer's number. `remat` recomputes each block in the backward pass instead of keeping
its values. Letters in shapes: B batch, S sequence, H hidden, N heads, D = H/N, F = ffn_factor * H, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.config import ModelConfig
from autopar.models.data import BYTE_VALUES
from autopar.models.train_steps import Batch, Objective, Outcome, PyTree, accuracy, cross_entropy

INIT = nn.initializers.normal(stddev=0.02)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Sizes of the transformer; `vocab` has room for every byte, and may be larger."""

    batch: int = 16
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 64
    vocab: int = 256
    ffn_factor: int = 4
    dropout: float = 0.1
    scan_layers: bool = False
    remat: bool = False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("layers", "hidden", "heads", "seq", "ffn_factor")
        yield from self._not_a_rate("dropout")
        if self.heads > 0 and self.hidden % self.heads:
            yield f"hidden is {self.hidden} and heads is {self.heads}, but heads must divide hidden"
        if self.vocab < BYTE_VALUES:
            yield f"vocab is {self.vocab}, but the text is bytes and needs at least {BYTE_VALUES}"


@dataclass(frozen=True, kw_only=True)
class GPTScanConfig(GPTConfig):
    """The same sizes, with one scanned block for all layers."""

    scan_layers: bool = True


def subkey(key: jax.Array | None, number: int) -> jax.Array | None:
    """The `number`-th key derived from `key`; None, which turns dropout off, stays None."""
    return None if key is None else jax.random.fold_in(key, number)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each value with probability `rate` and scale the others by 1/(1 - rate); the identity without a key."""
    dropped: Any = nn.Dropout(rate, parent=None).apply({}, x, deterministic=key is None, rng=key)
    return cast(jax.Array, dropped)


class Attention(nn.Module):
    """Causal self-attention with dropout on the attention weights."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        heads, depth = self.config.heads, self.config.hidden // self.config.heads
        qkv = nn.DenseGeneral((3, heads, depth), kernel_init=INIT, name="qkv")(x)
        query, key_vectors, value = (qkv[:, :, which] for which in range(3))
        scores = jnp.einsum("bqnd,bknd->bnqk", query, key_vectors) / depth**0.5
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = nn.softmax(jnp.where(causal, scores, -1e9))
        weights = dropout(weights, self.config.dropout, key)
        mixed = jnp.einsum("bnqk,bknd->bqnd", weights, value)
        return nn.DenseGeneral(self.config.hidden, axis=(-2, -1), kernel_init=INIT, name="out")(mixed)


class FeedForward(nn.Module):
    """Dense to F, GELU, Dense to H."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        wide = nn.Dense(self.config.ffn_factor * self.config.hidden, kernel_init=INIT, name="up")(x)
        return nn.Dense(self.config.hidden, kernel_init=INIT, name="down")(nn.gelu(wide))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map (B, S, H) to (B, S, H)."""
        rate = self.config.dropout
        attended = Attention(self.config, name="attention")(nn.LayerNorm(name="attention_norm")(x), subkey(key, 0))
        x = x + dropout(attended, rate, subkey(key, 1))
        fed = FeedForward(self.config, name="ffn")(nn.LayerNorm(name="ffn_norm")(x))
        return x + dropout(fed, rate, subkey(key, 2))


class TiedEmbedding(nn.Module):
    """The token table (V, H), for the inputs and again, transposed, for the logits, and the positions (S, H)."""

    config: GPTConfig

    def setup(self) -> None:
        """Make both tables."""
        self.tokens = nn.Embed(self.config.vocab, self.config.hidden, embedding_init=INIT)
        self.positions = self.param("positions", INIT, (self.config.seq, self.config.hidden))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens (B, S) to (B, S, H)."""
        return self.tokens(tokens) + self.positions

    def logits(self, x: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, V)."""
        return self.tokens.attend(x)


class GPT(nn.Module):
    """Embedding, blocks, final norm, logits from the tied table."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        """Map tokens (B, S) to logits (B, S, V)."""
        embedding = TiedEmbedding(self.config, name="embedding")
        x = dropout(embedding(tokens), self.config.dropout, subkey(key, self.config.layers))
        x = self._scanned(x, key) if self.config.scan_layers else self._unrolled(x, key)
        return embedding.logits(nn.LayerNorm(name="final_norm")(x))

    def _unrolled(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        block = nn.remat(Block) if self.config.remat else Block
        for layer in range(self.config.layers):
            x = block(self.config, name=f"block_{layer}")(x, subkey(key, layer))
        return x

    def _scanned(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        # Inside a scan the loop itself keeps the recomputation apart, so remat needs no barrier against CSE.
        block = nn.remat(Block, prevent_cse=False) if self.config.remat else Block
        layers = jnp.arange(self.config.layers)
        keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(layers)
        over_layers: Any = nn.scan(
            lambda module, carried, layer_key: (module(carried, layer_key), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.layers,
        )
        x, _ = over_layers(block(self.config, name="blocks"), x, keys)
        return x


def stack_blocks(params: PyTree, layers: int) -> PyTree:
    """Parameters of the unrolled model -> those of the scanned one: block_0, block_1, ... stacked as "blocks"."""
    names = [f"block_{layer}" for layer in range(layers)]
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in names))}


def batch_shape(config: GPTConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one batch of `data.text_batches`."""
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def objective(config: GPTConfig) -> Objective:
    """Mean cross-entropy of the next byte."""
    model = GPT(config)

    def loss(
        params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        key = dropout_key if config.dropout else None
        logits: Any = model.apply({"params": params}, batch["tokens"], key)
        metrics = {"accuracy": accuracy(logits, batch["targets"])} if dropout_key is None else {}
        return cross_entropy(logits, batch["targets"]), Outcome(metrics, batch_stats)

    return Objective(
        init=lambda key: model.init(key, jnp.zeros((config.batch, config.seq), jnp.int32), None),
        loss=loss,
    )
