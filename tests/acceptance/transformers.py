"""Transformers of the acceptance cases: BERT, attention alone, and a mixture of experts.

Letters: B batch, S sequence, H hidden, E experts.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from tests.acceptance.models import Problem, create_state, first_variables, noise, regression


class SelfAttention(nn.Module):
    """Multi-head attention with one kernel for queries, keys and values: (B, S, H) -> (B, S, H)."""

    heads: int

    @nn.compact
    def __call__(self, x, mask):
        batch, seq, hidden = x.shape
        size = hidden // self.heads
        qkv = nn.Dense(3 * hidden, name="qkv")(x).reshape(batch, seq, self.heads, 3, size)
        query, key, value = (qkv[..., i, :] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(size)
        weights = nn.softmax(jnp.where(mask[:, None, None, :] > 0, scores, -1e10))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.Dense(hidden, name="out")(mixed.reshape(batch, seq, hidden))


class BertLayer(nn.Module):
    """Attention, add and norm, feed-forward, add and norm; dropout if a key is given."""

    heads: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask, key=None):
        x = nn.LayerNorm(name="attention_norm")(
            x + self._drop(SelfAttention(self.heads, name="attention")(x, mask), key, 0)
        )
        hidden = x.shape[-1]
        y = nn.Dense(hidden, name="ffn2")(nn.gelu(nn.Dense(4 * hidden, name="ffn1")(x)))
        return nn.LayerNorm(name="ffn_norm")(x + self._drop(y, key, 1))

    def _drop(self, x, key, number):
        if key is None:
            return x
        return nn.Dropout(self.dropout, deterministic=False)(x, rng=jax.random.fold_in(key, number))


class BertLayers(nn.Module):
    """A stack of layers on given hidden states; with `remat` each layer is recomputed in the backward pass."""

    layers: int
    heads: int
    remat: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask, key=None):
        layer = nn.remat(BertLayer) if self.remat else BertLayer
        for i in range(self.layers):
            layer_key = None if key is None else jax.random.fold_in(key, i)
            x = layer(self.heads, self.dropout, name=f"layer_{i}")(x, mask, layer_key)
        return x


def bert(batch, seq, hidden, heads=8, layers=2, *, remat=False, dropout=0.0, tx=None):
    """BERT layers on hidden states (B, S, H), all tokens unmasked."""
    inputs = (noise(batch, seq, hidden), jnp.ones((batch, seq), jnp.int32))
    inputs += (jax.random.key(5),) if dropout else ()
    return regression(BertLayers(layers, heads, remat, dropout), inputs, (batch, seq, hidden), tx)


class BertMaskedLM(nn.Module):
    """Embeddings, layers, transform, and the transposed embedding as the output layer."""

    layers: int
    heads: int
    hidden: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens, mask):
        embed = nn.Embed(self.vocabulary, self.hidden, name="tokens")
        positions = nn.Embed(tokens.shape[1], self.hidden, name="positions")(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(name="embedding_norm")(embed(tokens) + positions)
        x = BertLayers(self.layers, self.heads, name="layers")(x, mask)
        x = nn.LayerNorm(name="transform_norm")(nn.gelu(nn.Dense(self.hidden, name="transform")(x)))
        return embed.attend(x) + self.param("bias", nn.initializers.zeros, (self.vocabulary,))


def bert_masked_lm(batch, seq, hidden, vocabulary, heads=4, layers=2, tx=None):
    """Masked language modelling: cross-entropy over the labels above 0, averaged over them."""
    model = BertMaskedLM(layers, heads, hidden, vocabulary)
    tokens, labels = jax.device_put([*np.random.default_rng(1).integers(0, vocabulary, (2, batch, seq), np.int32)])
    data = {"tokens": tokens, "mask": jnp.ones((batch, seq), jnp.int32), "labels": labels}
    params = first_variables(model, tokens, data["mask"])["params"]

    def step(state, batch):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], batch["mask"])
            counted = jnp.where(batch["labels"] > 0, 1.0, 0.0)
            picked = jax.nn.one_hot(batch["labels"], vocabulary) * nn.log_softmax(logits)
            return -(counted * picked.sum(-1)).sum() / counted.sum()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Problem(step, create_state(train_state.TrainState, model, params, tx or optax.adam(1e-2)), data)


def attention_forward(batch, seq, hidden, heads):
    """Attention without training; the state carries the output, so its layout can be asked for."""
    model = SelfAttention(heads)
    x, mask = noise(batch, seq, hidden), jnp.ones((batch, seq), jnp.int32)
    params = first_variables(model, x, mask)["params"]

    def step(state, batch):
        out = model.apply({"params": state["params"]}, batch["x"], batch["mask"])
        return {"params": state["params"], "out": jnp.exp(out)}

    return Problem(step, {"params": params, "out": jnp.zeros_like(x)}, {"x": x, "mask": mask})


# --- mixture of experts -----------------------------------------------------------------------------------------------


def top2_gating(gates, capacity):
    """GShard's top-2 gating of (G, T, E): weights to combine (G, T, E, capacity), and where they are above zero.

    Places in an expert are given in the order of the tokens, first choices before second ones; no random dropping.
    """
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), experts)
    place_first = jnp.cumsum(first, 1) - first
    place_second = jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)
    weight_first, weight_second = (gates * first).sum(-1), (gates * second).sum(-1)
    total = weight_first + weight_second

    def placed(weight, chosen, place):
        slot = jax.nn.one_hot((place * chosen).sum(-1).astype(jnp.int32), capacity)
        return jnp.einsum("gt,gte,gtc->gtec", weight / total, chosen, slot)

    combine = placed(weight_first, first, place_first) + placed(weight_second, second, place_second)
    return combine, (combine > 0).astype(gates.dtype)


class Experts(nn.Module):
    """Gate, dispatch to experts by einsum, two layers per expert, combine: (B, S, H) -> (B, S, H)."""

    experts: int
    group: int

    @nn.compact
    def __call__(self, x):
        hidden = x.shape[-1]
        gate = self.param("wg", nn.initializers.lecun_normal(), (hidden, self.experts))
        up = self.param("wi", nn.initializers.lecun_normal(), (self.experts, hidden, 4 * hidden))
        down = self.param("wo", nn.initializers.lecun_normal(), (self.experts, 4 * hidden, hidden))
        tokens = x.reshape(-1, self.group, hidden)
        combine, dispatch = top2_gating(
            nn.softmax(jnp.einsum("gth,he->gte", tokens, gate)), 2 * self.group // self.experts
        )
        arrived = jnp.einsum("gtec,gth->egch", dispatch, tokens)
        done = jnp.einsum("egcf,efh->egch", nn.relu(jnp.einsum("egch,ehf->egcf", arrived, up)), down)
        return jnp.einsum("gtec,egch->gth", combine, done).reshape(x.shape)


class MoELayer(nn.Module):
    """Attention, add and norm, experts, add and norm."""

    heads: int
    experts: int
    group: int

    @nn.compact
    def __call__(self, x, mask):
        x = nn.LayerNorm(name="attention_norm")(x + SelfAttention(self.heads, name="attention")(x, mask))
        return nn.LayerNorm(name="moe_norm")(x + Experts(self.experts, self.group, name="moe")(x))


def moe(batch, seq, hidden, heads, group, experts, tx=None):
    """One mixture-of-experts layer on hidden states."""
    inputs = (noise(batch, seq, hidden), jnp.ones((batch, seq), jnp.int32))
    return regression(MoELayer(heads, experts, group), inputs, (batch, seq, hidden), tx)
