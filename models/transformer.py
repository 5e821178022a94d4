"""What the transformers share: the token table, attention, blocks one after another.

The blocks are written out one by one, or, with `scan_layers`, one block is scanned over parameters stacked along a
first axis of length `layers`; both compute the same function, dropout included, because a block's dropout key depends
only on the step's key and the layer's number. `remat` recomputes each block in the backward pass instead of keeping
its values. Letters in shapes: B batch, S sequence, H hidden, N heads, D = H/N, V vocabulary; Q and K are the lengths
of the sequence that attends and of the one attended to.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.models.dropout import dropout, subkey
from autopar.models.objective import PyTree
from autopar.models.sizes import TransformerConfig

INIT = nn.initializers.normal(stddev=0.02)


def scores(query: jax.Array, keys: jax.Array) -> jax.Array:
    """Products of query (B, Q, N, D) and keys (B, K, N, D): (B, N, Q, K)."""
    return jnp.einsum("bqnd,bknd->bnqk", query, keys)


def mix(scores: jax.Array, values: jax.Array, *, allowed: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Means of values (B, K, N, D) by the softmax of scores (B, N, Q, K), with dropout on it: (B, Q, N, D).

    `allowed` is bool and broadcasts against the scores: only where it is true is a value looked at. The softmax is float32.
    """
    weights = nn.softmax(jnp.where(allowed, scores.astype(jnp.float32), -1e9)).astype(values.dtype)
    weights = dropout(weights, rate, key)
    return jnp.einsum("bnqk,bknd->bqnd", weights, values)


def causal_mask(length: int) -> jax.Array:
    """True on and below the diagonal: (length, length)."""
    return jnp.tril(jnp.ones((length, length), bool))


def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows (...) of a table (R, H), in its type: (..., H). The gradients of rows that are taken often add up in float32.

    In 16 bits a sum over a batch loses what is small beside it, and GPUs, which have no such addition in memory, take ten times
    as long for it.
    """
    return jnp.take(table.astype(jnp.float32), rows, axis=0).astype(table.dtype)


def look_up_few(table: jax.Array, rows: jax.Array | NDArray[np.int32]) -> jax.Array:
    """Rows (...) of a table (R, H) of few rows, as a product: (..., H). So is its gradient, whose sums need not wait in line."""
    chosen = jax.nn.one_hot(rows, table.shape[0], dtype=table.dtype)
    return jnp.matmul(chosen, table, precision=jax.lax.Precision.HIGHEST)


class TokenEmbedding(nn.Module):
    """The token table (V, H) for the inputs, and the logits: from the same table, or from a head of their own."""

    config: TransformerConfig
    table_init: Callable[..., jax.Array] = INIT

    def setup(self) -> None:
        """Make the table, and the head unless it is tied."""
        self.tokens = nn.Embed(self.config.vocab, self.config.hidden, embedding_init=self.table_init)
        if not self.config.tied_embeddings:
            self.head = nn.Dense(self.config.vocab, use_bias=False, kernel_init=INIT)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens (B, S) to (B, S, H)."""
        return look_up(self.tokens.embedding, tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map (B, S, H) to (B, S, V)."""
        return self.tokens.attend(x) if self.config.tied_embeddings else self.head(x)


def apply_blocks(
    block: type[nn.Module], config: TransformerConfig, x: jax.Array, key: jax.Array | None, *shared: jax.Array
) -> jax.Array:
    """Apply `config.layers` blocks to x (B, S, H), each as block(x, key of the layer, *shared); call it in a module.

    Their parameters are "block_0", "block_1", ... or, scanned, "blocks".
    """
    if config.scan_layers:
        return _scanned(block, config, x, key, *shared)
    block = nn.remat(block) if config.remat else block
    for layer in range(config.layers):
        x = block(config, name=f"block_{layer}")(x, subkey(key, layer), *shared)
    return x


def _scanned(
    block: type[nn.Module], config: TransformerConfig, x: jax.Array, key: jax.Array | None, *shared: jax.Array
) -> jax.Array:
    # Inside a scan the loop itself keeps the recomputation apart, so remat needs no barrier against CSE.
    block = nn.remat(block, prevent_cse=False) if config.remat else block
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(config.layers))
    over_layers: Any = nn.scan(
        lambda module, carried, layer_key, *shared: (module(carried, layer_key, *shared), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, *(nn.broadcast for _ in shared)),
        length=config.layers,
    )
    x, _ = over_layers(block(config, name="blocks"), x, keys, *shared)
    return x


def stack_blocks(params: PyTree, layers: int) -> PyTree:
    """Parameters of the unrolled model -> those of the scanned one: block_0, block_1, ... stacked as "blocks"."""
    names = [f"block_{layer}" for layer in range(layers)]
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in names))}
