"""The models of the acceptance cases: ordinary flax and optax, no word about devices.

Each function gives a `Problem`: a train step, a state and a batch. The sizes are arguments, because the cases set them
so that another plan is best each time. Letters: B batch, S sequence, H hidden, E experts, C channels.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


@dataclasses.dataclass(frozen=True)
class Problem:
    """`step(state, batch)` -> (new state, loss)."""

    step: Callable[[Any, Any], Any]
    state: Any
    batch: Any

    def leaf_bytes(self):
        """Bytes of each parameter leaf."""
        return [leaf.nbytes for leaf in jax.tree.leaves(self.state.params)]


class StateWithStatistics(train_state.TrainState):
    """A train state that carries the running statistics of batch normalisation."""

    batch_stats: Any


def _variables(model, *inputs):
    """What the model begins with. From numpy: to compile its initialisation takes as long as to compile its step."""
    generator = np.random.default_rng(0)

    def first(path, leaf):
        if leaf.ndim < 2:
            return np.full(leaf.shape, path[-1].key in ("scale", "var"), leaf.dtype)
        deviation = math.sqrt(leaf.shape[-1] / math.prod(leaf.shape))
        return (deviation * generator.standard_normal(leaf.shape)).astype(leaf.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    return jax.device_put(jax.tree_util.tree_map_with_path(first, shapes))


def _created(cls, model, params, tx, **more):
    first = jnp.zeros((), jnp.int32)
    return cls(step=first, apply_fn=model.apply, params=params, tx=tx, opt_state=jax.jit(tx.init)(params), **more)


def regression(model, inputs, outputs_shape, tx=None):
    """Mean squared error of `model(*inputs)` against noise; Adam unless `tx` says otherwise."""
    batch = {"inputs": inputs, "targets": noise(*outputs_shape, seed=2)}
    params = _variables(model, *inputs)["params"]

    def step(state, batch):
        def loss_of(params):
            out = state.apply_fn({"params": params}, *batch["inputs"])
            return jnp.mean((out - batch["targets"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Problem(step, _created(train_state.TrainState, model, params, tx or optax.adam(1e-2)), batch)


def widened(tree):
    """The tree with float64 for float32; to be used where 64 bits are enabled."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf, tree)


def in_float64(problem):
    """The same problem with float64 for float32."""
    return dataclasses.replace(problem, state=widened(problem.state), batch=widened(problem.batch))


def noise(*shape, seed=1):
    """Standard normal float32."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


# --- perceptrons ------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """`layers` x (Dense, bias, relu), without the last relu."""

    layers: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers - 1):
            x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.hidden)(x)


def mlp(batch, hidden, layers=6, tx=None):
    """6 x (Dense + bias + relu) on (B, H)."""
    return regression(MLP(layers, hidden), (noise(batch, hidden),), (batch, hidden), tx)


class DropoutMLP(nn.Module):
    """Dense, dropout, Dense; returns the dropped activations too."""

    hidden: int

    @nn.compact
    def __call__(self, x, key):
        x = nn.Dense(self.hidden, use_bias=False)(x)
        x = nn.Dropout(0.1, deterministic=False)(x, rng=key)
        return nn.Dense(self.hidden, use_bias=False)(x), x


def dropout_mlp(batch=32, seq=32, hidden=16):
    """A step that returns, beside the loss, which activations were dropped."""
    model = DropoutMLP(hidden)
    x, y = noise(batch, seq, hidden), noise(batch, seq, hidden, seed=2)
    params = _variables(model, x, jax.random.key(3))["params"]

    def step(state, batch):
        def loss_of(params):
            out, dropped = state.apply_fn({"params": params}, batch["x"], batch["key"])
            return jnp.mean((out - batch["y"]) ** 2), dropped == 0

        (loss, mask), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), loss, mask

    state = _created(train_state.TrainState, model, params, optax.sgd(1e-2))
    return Problem(step, state, {"x": x, "y": y, "key": jax.random.key(7)})


class GatherMLP(nn.Module):
    """Dense, the first 16 columns by index, Dense."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, use_bias=False)(x)
        return nn.Dense(16, use_bias=False)(x[:, jnp.arange(16)])


def gather_mlp(batch=256):
    """x[:, arange(16)] between two layers, so a gather forward and a scatter backward."""
    return regression(GatherMLP(), (noise(batch, 32),), (batch, 16), optax.sgd(1e-2))


# --- transformers -----------------------------------------------------------------------------------------------------


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
    params = _variables(model, tokens, data["mask"])["params"]

    def step(state, batch):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], batch["mask"])
            counted = jnp.where(batch["labels"] > 0, 1.0, 0.0)
            picked = jax.nn.one_hot(batch["labels"], vocabulary) * nn.log_softmax(logits)
            return -(counted * picked.sum(-1)).sum() / counted.sum()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Problem(step, _created(train_state.TrainState, model, params, tx or optax.adam(1e-2)), data)


def attention_forward(batch, seq, hidden, heads):
    """Attention without training; the state carries the output, so its layout can be asked for."""
    model = SelfAttention(heads)
    x, mask = noise(batch, seq, hidden), jnp.ones((batch, seq), jnp.int32)
    params = _variables(model, x, mask)["params"]

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


# --- convolutions -----------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """`layers` x (3x3 convolution with stride 2, BatchNorm, relu, 2x2 max-pool with stride 1)."""

    layers: int
    channels: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Conv(self.channels, (3, 3), strides=(2, 2), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, (2, 2), strides=(1, 1), padding="SAME")
        return x


class DepthwiseNet(nn.Module):
    """C -> 8C channels, depthwise on the 8C, 8C -> C, relu, BatchNorm."""

    channels: int

    @nn.compact
    def __call__(self, x):
        wide = 8 * self.channels
        x = nn.Conv(wide, (3, 3), use_bias=False)(x)
        x = nn.Conv(wide, (3, 3), feature_group_count=wide, use_bias=False)(x)
        x = nn.relu(nn.Conv(self.channels, (3, 3), use_bias=False)(x))
        return nn.BatchNorm(use_running_average=False)(x)


def images(model, x, tx=None):
    """Mean squared error on images, with running statistics; SGD with momentum."""
    variables = _variables(model, x)
    out = jax.eval_shape(lambda v: model.apply(v, x, mutable=["batch_stats"])[0], variables)
    batch = {"x": x, "y": noise(*out.shape, seed=2)}

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updated = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    tx = tx or optax.sgd(0.1, momentum=0.9)
    state = _created(StateWithStatistics, model, variables["params"], tx, batch_stats=variables["batch_stats"])
    return Problem(step, state, batch)


def conv_net(batch, image, channels, layers):
    """Convolutions with BatchNorm on (B, image, image, C)."""
    return images(ConvNet(layers, channels), noise(batch, image, image, channels))


def depthwise_net(batch, image, channels):
    """A depthwise convolution between two ordinary ones on (B, image, image, C)."""
    return images(DepthwiseNet(channels), noise(batch, image, image, channels))


class AlexNetLike(nn.Module):
    """Five convolutions, then three wide fully connected layers."""

    channels: tuple[int, ...]
    wide: int

    @nn.compact
    def __call__(self, x):
        for i, channels in enumerate(self.channels):
            stride = 2 if i in (0, 2) else 1
            x = nn.relu(nn.Conv(channels, (3, 3), strides=(stride, stride), name=f"conv{i}")(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.wide, name="fc0")(x))
        x = nn.relu(nn.Dense(self.wide, name="fc1")(x))
        return nn.Dense(self.wide, name="fc2")(x)


def alexnet_like(batch, image, channels, wide, tx=None):
    """Images (B, image, image, 3) to `wide` outputs."""
    return regression(AlexNetLike(channels, wide), (noise(batch, image, image, 3),), (batch, wide), tx)
