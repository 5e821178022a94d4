"""A GPT whose every second feed-forward is a mixture of experts with GShard's top-2 gating.

Tokens are cut into G groups of T. In each group every expert has room for C = ceil(2 T capacity_factor / E) tokens.
With gates p = softmax(x W) over the E experts, a token goes to its best expert e1 and its second best e2 with the
weights p1/(p1+p2) and p2/(p1+p2); places are given in the order of the tokens, first choices before second ones; a
choice that finds its expert full is dropped. The result is two one-hot tensors over (G, T, E, C):

    combine[g,t,e,c]  = weight of token t's choice e if it holds place c of expert e, else 0
    dispatch[g,t,e,c] = 1 where combine > 0

    y = einsum("gtec,egch->gth", combine, experts(einsum("gtec,gth->egch", dispatch, x)))

The balancing loss is E * mean over groups of sum_e (share of tokens whose first choice is e) * (mean of p over tokens
at e), which is 1 when perfectly balanced. From Lepikhin et al., GShard (2020), algorithm 1, but the second choice is
never dropped at random. Other letters: B batch, S sequence, H hidden, F = ffn_factor * H.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.models.dropout import dropout, subkey
from autopar.models.gpt import GPTAttention, GPTBlock, GPTEmbedding, batch_shape
from autopar.models.objective import Batch, Objective, Outcome, PyTree, cross_entropy
from autopar.models.sizes import MoEConfig
from autopar.models.transformer import INIT


class Routing(NamedTuple):
    """Where each token goes: float32 (G, T, E, C) twice, and the balancing loss, a scalar."""

    combine: jax.Array
    dispatch: jax.Array
    balance_loss: jax.Array


def top2_routing(gates: jax.Array, capacity: int) -> Routing:
    """Route tokens with `gates` (G, T, E), each a softmax over E, to places in experts as the module says."""
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), experts)
    balance_loss = experts * jnp.mean(jnp.sum(first.mean(axis=1) * gates.mean(axis=1), axis=-1))

    weight_first = jnp.sum(gates * first, axis=-1)
    weight_second = jnp.sum(gates * second, axis=-1)
    total = weight_first + weight_second

    place_first = _earlier(first)
    place_second = _earlier(second) + first.sum(axis=1, keepdims=True)
    combine = _place(weight_first / total, first, place_first, capacity)
    combine += _place(weight_second / total, second, place_second, capacity)
    return Routing(combine, (combine > 0).astype(combine.dtype), balance_loss)


def _earlier(chosen: jax.Array) -> jax.Array:
    """For each token, how many earlier tokens of its group chose the same expert: an exclusive sum along T."""
    return jnp.cumsum(chosen, axis=1) - chosen


def _place(weight: jax.Array, chosen: jax.Array, place: jax.Array, capacity: int) -> jax.Array:
    """The weight (G, T) of each token at its expert and place: (G, T, E, C), zero where the expert is full."""
    place_of_token = jnp.sum(place * chosen, axis=-1).astype(jnp.int32)
    slot = jax.nn.one_hot(place_of_token, capacity)
    return weight[..., None, None] * chosen[..., None] * slot[..., None, :]


class MixtureOfExperts(nn.Module):
    """Gate, dispatch, experts without biases, combine."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map (B, S, H) to (B, S, H), and return the balancing loss."""
        config = self.config
        experts, hidden, wide = config.experts, config.hidden, config.ffn_factor * config.hidden
        up = self.param("up", INIT, (experts, hidden, wide))
        down = self.param("down", INIT, (experts, wide, hidden))
        tokens = x.reshape(-1, config.group, hidden)
        logits = nn.Dense(experts, use_bias=False, kernel_init=INIT, name="gate")(tokens)
        gates = nn.softmax(logits.astype(jnp.float32))  # places are counted, which needs 24 bits
        routing = top2_routing(gates, config.capacity)
        arrived = jnp.einsum("gtec,gth->egch", routing.dispatch.astype(x.dtype), tokens)
        computed = jnp.einsum("egcf,efh->egch", nn.gelu(jnp.einsum("egch,ehf->egcf", arrived, up)), down)
        mixed = jnp.einsum("gtec,egch->gth", routing.combine.astype(x.dtype), computed)
        return mixed.reshape(x.shape), routing.balance_loss


class MoEBlock(nn.Module):
    """A GPT block with a mixture of experts in place of the feed-forward."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Map (B, S, H) to (B, S, H), and return the balancing loss."""
        rate = self.config.dropout
        attended = GPTAttention(self.config, name="attention")(nn.LayerNorm(name="attention_norm")(x), subkey(key, 0))
        x = x + dropout(attended, rate, subkey(key, 1))
        mixed, balance_loss = MixtureOfExperts(self.config, name="moe")(nn.LayerNorm(name="ffn_norm")(x))
        return x + dropout(mixed, rate, subkey(key, 2)), balance_loss


class MoEGPT(nn.Module):
    """A GPT whose layers 1, 3, 5, ... are mixtures of experts."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Map tokens (B, S) to logits (B, S, V), and return the mean balancing loss."""
        block, moe_block = (nn.remat(GPTBlock), nn.remat(MoEBlock)) if self.config.remat else (GPTBlock, MoEBlock)
        embedding = GPTEmbedding(self.config, name="embedding")
        x = dropout(embedding(tokens), self.config.dropout, subkey(key, self.config.layers))
        balance_losses = []
        for layer in range(self.config.layers):
            if layer % 2:
                x, balance_loss = moe_block(self.config, name=f"block_{layer}")(x, subkey(key, layer))
                balance_losses.append(balance_loss)
            else:
                x = block(self.config, name=f"block_{layer}")(x, subkey(key, layer))
        logits = embedding.logits(nn.LayerNorm(name="final_norm")(x))
        return logits, jnp.mean(jnp.stack(balance_losses))


def objective(config: MoEConfig) -> Objective:
    """Mean cross-entropy of the next byte + balance_weight * balancing loss; the latter is reported too."""
    model = MoEGPT(config)

    def loss(
        params: PyTree, batch_stats: PyTree, batch: Batch, *, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Outcome]:
        key = dropout_key if config.dropout else None
        result: Any = model.apply({"params": params}, batch["tokens"], key)
        logits, balance_loss = result
        text_loss, metrics = cross_entropy(config, logits, batch["targets"], evaluating=dropout_key is None)
        total = text_loss + config.balance_weight * balance_loss
        return total, Outcome({"balance_loss": balance_loss, **metrics}, batch_stats)

    tokens = batch_shape(config)["tokens"]
    return Objective(init=lambda key: model.init(key, jnp.zeros(tokens.shape, tokens.dtype), None), loss=loss)
