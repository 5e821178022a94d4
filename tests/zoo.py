"""Six small train steps in plain JAX, one per family of models: the corpus of the property tests.

Each `build_xxx()` returns (step, state, batch) with `step(state, batch) -> (state, loss)`: a pure function, float32,
int32 and bool arrays, no chance beyond fixed seeds; the same ones each time, so that `jax.jit` compiles a step once.
Sizes are a few kilobytes per tensor; batch and widths are multiples of 8 (and some of 3), so that meshes of 2, 3, 4 and 8
devices find something to split. The programs are well conditioned, so that a bar of 1e-5 of a result's scale is fair: routing
decisions and rectifiers keep clear of ties, attention has no key bias, and Adam divides by a root with a visible epsilon.
tests/models/test_zoo.py checks all this.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo_parts import (
    BATCH,
    HEADS,
    HIDDEN,
    SEQ,
    VOCAB,
    WIDE,
    Draw,
    Example,
    Tree,
    adam_state,
    adam_step,
    attend,
    causal_bias,
    dense,
    layer_norm,
    sgd_step,
    token_losses,
)


def transformer_block(p: Tree, x: jax.Array, bias: jax.Array | float) -> jax.Array:
    """Pre-norm attention, then pre-norm GELU feed-forward."""
    normed = layer_norm(p["norm_1"], x)
    x = x + attend(p["attention"], normed, normed, bias)
    return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm_2"], x))))


def draw_block(draw: Draw) -> Tree:
    """Parameters of `transformer_block`."""
    return {
        "norm_1": draw.norm(HIDDEN),
        "attention": draw.attention(),
        "norm_2": draw.norm(HIDDEN),
        "up": draw.dense(HIDDEN, WIDE),
        "down": draw.dense(WIDE, HIDDEN),
    }


@functools.cache
def build_gpt() -> Example:
    """Two layers, learned positions, tied embedding, causal mask, mean cross-entropy of the next token; SGD."""
    draw = Draw(1)
    params = {
        "tokens": draw.weight(VOCAB, HIDDEN, fan_in=HIDDEN),
        "positions": draw.weight(SEQ, HIDDEN),
        "blocks": [draw_block(draw) for _ in range(2)],
        "norm": draw.norm(HIDDEN),
    }

    def loss_of(params: Tree, batch: Tree) -> jax.Array:
        x = params["tokens"][batch["tokens"]] + params["positions"]
        for block in params["blocks"]:
            x = transformer_block(block, x, causal_bias(SEQ))
        logits = layer_norm(params["norm"], x) @ params["tokens"].T
        return token_losses(logits, batch["targets"]).mean()

    text = draw.integers(VOCAB, BATCH, SEQ + 1)
    return sgd_step(loss_of), {"params": params}, {"tokens": text[:, :-1], "targets": text[:, 1:]}


@functools.cache
def build_bert() -> Example:
    """An encoder layer over padded sentences; the loss is the mean over the masked-out tokens only; Adam."""
    draw = Draw(2)
    params = {
        "tokens": draw.weight(VOCAB, HIDDEN, fan_in=HIDDEN),
        "positions": draw.weight(SEQ, HIDDEN),
        "segments": draw.weight(2, HIDDEN),
        "block": draw_block(draw),
        "norm": draw.norm(HIDDEN),
        "head": draw.dense(HIDDEN, VOCAB),
    }

    def loss_of(params: Tree, batch: Tree) -> jax.Array:
        x = params["tokens"][batch["tokens"]] + params["positions"] + params["segments"][batch["segments"]]
        bias = jnp.where(batch["is_token"], 0.0, -1e9)[:, None, None, :]
        x = layer_norm(params["norm"], transformer_block(params["block"], x, bias))
        losses = token_losses(dense(params["head"], x), batch["targets"])
        weight = batch["is_masked"].astype(jnp.float32)
        return jnp.sum(losses * weight) / jnp.sum(weight)

    lengths = 4 + draw.integers(SEQ - 3, BATCH)
    is_token = jnp.arange(SEQ) < lengths[:, None]
    is_masked = (draw.integers(3, BATCH, SEQ) == 0) & is_token
    targets = draw.integers(VOCAB - 1, BATCH, SEQ) + 1
    batch = {
        "tokens": jnp.where(is_masked, 0, targets),
        "segments": (jnp.arange(SEQ) >= lengths[:, None] // 2).astype(jnp.int32),
        "targets": targets,
        "is_token": is_token,
        "is_masked": is_masked,
    }
    return adam_step(loss_of), adam_state(params), batch


@functools.cache
def build_moe() -> Example:
    """A mixture of 8 experts, GShard's top-2 gating with capacity in 8 groups, and the balancing loss; Adam."""
    draw = Draw(3)
    experts, capacity = 8, 3
    params = {
        "gate": 2 * draw.weight(HIDDEN, experts),
        "up": draw.weight(experts, HIDDEN, WIDE, fan_in=HIDDEN),
        "down": draw.weight(experts, WIDE, HIDDEN, fan_in=WIDE),
        "norm": draw.norm(HIDDEN),
    }

    def combine_weights(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
        second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), experts)
        both = jnp.sum(gates * (first + second), axis=-1, keepdims=True)
        place_first = jnp.cumsum(first, axis=1) - first
        place_second = jnp.cumsum(second, axis=1) - second + first.sum(axis=1, keepdims=True)
        places = jnp.arange(capacity)
        combine = sum(
            (gates / both * chosen)[..., None] * (place[..., None] == places)
            for chosen, place in ((first, place_first), (second, place_second))
        )
        balance = experts * jnp.mean(jnp.sum(first.mean(axis=1) * gates.mean(axis=1), axis=-1))
        return jnp.asarray(combine), balance

    def loss_of(params: Tree, batch: Tree) -> jax.Array:
        x = layer_norm(params["norm"], batch["x"])
        combine, balance = combine_weights(jax.nn.softmax(x @ params["gate"]))
        dispatch = (combine > 0).astype(jnp.float32)
        arrived = jnp.einsum("gtec,gth->egch", dispatch, x)
        wide = jax.nn.gelu(jnp.einsum("egch,ehf->egcf", arrived, params["up"]))
        mixed = jnp.einsum("gtec,egch->gth", combine, jnp.einsum("egcf,efh->egch", wide, params["down"]))
        return jnp.mean((batch["x"] + mixed - batch["y"]) ** 2) + 0.01 * balance

    batch = {name: draw.weight(BATCH, SEQ, HIDDEN, fan_in=1) for name in ("x", "y")}
    return adam_step(loss_of), adam_state(params), batch


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """2-D convolution, NHWC by HWIO, output size = input size / stride."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions)


@functools.cache
def build_resnet_block() -> Example:
    """A stride-2 bottleneck with BatchNorm, running statistics in the state, after a max pool; SGD with momentum."""
    draw = Draw(4)
    channels, narrow, classes = 16, 8, 8
    shapes = {"in": (1, channels, narrow), "mid": (3, narrow, narrow), "out": (1, narrow, 2 * channels)}
    shapes["skip"] = (1, channels, 2 * channels)
    params = {
        "kernels": {name: draw.weight(k, k, i, o, fan_in=k * k * i) for name, (k, i, o) in shapes.items()},
        "norms": {name: draw.norm(o) for name, (_, _, o) in shapes.items()},
        "head": draw.dense(2 * channels, classes),
    }
    stats = {name: {"mean": jnp.zeros(o), "var": jnp.ones(o)} for name, (_, _, o) in shapes.items()}

    def loss_of(params: Tree, stats: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        new_stats = {}

        def conv_norm(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
            y = conv(x, params["kernels"][name], stride)
            mean, var = y.mean(axis=(0, 1, 2)), y.var(axis=(0, 1, 2))
            moved = {"mean": 0.9 * stats[name]["mean"] + 0.1 * mean, "var": 0.9 * stats[name]["var"] + 0.1 * var}
            new_stats[name] = moved
            norm = params["norms"][name]
            return (y - mean) * jax.lax.rsqrt(var + 1e-5) * norm["scale"] + norm["bias"]

        x = jax.lax.reduce_window(batch["images"], -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        y = jax.nn.relu(conv_norm("in", x))
        y = jax.nn.relu(conv_norm("mid", y, stride=2))
        y = jax.nn.relu(conv_norm("out", y) + conv_norm("skip", x, stride=2))
        return token_losses(dense(params["head"], y.mean(axis=(1, 2))), batch["labels"]).mean(), new_stats

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, new_stats), gradients = gradient_of(state["params"], state["stats"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "stats": new_stats}, loss

    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "stats": stats}
    batch = {"images": draw.weight(BATCH, 16, 16, channels, fan_in=1), "labels": draw.integers(classes, BATCH)}
    return step, state, batch


def relative_buckets(length: int, *, buckets: int, furthest: int, both_ways: bool) -> np.ndarray:
    """T5's bucket of key position - query position, int32 (length, length): exact when near, logarithmic when far.

    A constant of the program, from numpy: a logarithm at the edge of a bucket must not depend on how it is split.
    """
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    offset = np.zeros_like(distance)
    if both_ways:
        buckets //= 2
        offset = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(furthest / exact) * (buckets - exact)
    return (offset + np.where(distance < exact, distance, np.minimum(far.astype(int), buckets - 1))).astype(np.int32)


@functools.cache
def build_t5() -> Example:
    """Encoder (2 layers) and decoder (1 layer, cross-attention); one table of relative biases shared by all; SGD."""
    draw = Draw(5)
    buckets = 8

    def layer(*attentions: str) -> Tree:
        drawn = {name: {"norm": 1 + 0.1 * draw.weight(HIDDEN), "weights": draw.attention()} for name in attentions}
        ffn = {
            "norm": 1 + 0.1 * draw.weight(HIDDEN),
            "up": draw.weight(HIDDEN, WIDE),
            "down": draw.weight(WIDE, HIDDEN),
        }
        return drawn | {"ffn": ffn}

    params = {
        "tokens": draw.weight(VOCAB, HIDDEN, fan_in=HIDDEN),
        "relative_bias": draw.weight(buckets, HEADS, fan_in=1),
        "encoder": [layer("self"), layer("self")],
        "decoder": [layer("self", "cross")],
    }

    def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def self_attention(p: Tree, x: jax.Array, bias: jax.Array) -> jax.Array:
        normed = rms_norm(p["norm"], x)
        return x + attend(p["weights"], normed, normed, bias)

    def feed_forward(p: Tree, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(rms_norm(p["norm"], x) @ p["up"]) @ p["down"]

    def position_bias(table: jax.Array, both_ways: bool) -> jax.Array:
        chosen = relative_buckets(SEQ, buckets=buckets, furthest=16, both_ways=both_ways)
        return jnp.transpose(table[chosen], (2, 0, 1))

    def loss_of(params: Tree, batch: Tree) -> jax.Array:
        encoder_bias = position_bias(params["relative_bias"], both_ways=True)
        memory = params["tokens"][batch["sources"]]
        for p in params["encoder"]:
            memory = feed_forward(p["ffn"], self_attention(p["self"], memory, encoder_bias))
        decoder_bias = position_bias(params["relative_bias"], both_ways=False) + causal_bias(SEQ)
        x = params["tokens"][batch["tokens"]]
        for p in params["decoder"]:
            x = self_attention(p["self"], x, decoder_bias)
            x = x + attend(p["cross"]["weights"], rms_norm(p["cross"]["norm"], x), memory, 0.0)
            x = feed_forward(p["ffn"], x)
        logits = (x / math.sqrt(HIDDEN)) @ params["tokens"].T
        return token_losses(logits, batch["targets"]).mean()

    text = draw.integers(VOCAB, BATCH, SEQ + 1)
    batch = {"sources": draw.integers(VOCAB, BATCH, SEQ), "tokens": text[:, :-1], "targets": text[:, 1:]}
    return sgd_step(loss_of), {"params": params}, batch


@functools.cache
def build_unet() -> Example:
    """Down by strided convolution and max pool, up by transposed convolution and nearest pixels, two skips; SGD."""
    draw = Draw(6)
    shapes = {
        "in": (3, 8, 8),
        "down": (3, 8, 16),
        "bottom": (3, 16, 24),
        "up": (2, 24, 16),
        "mid": (3, 32, 16),
        "last": (3, 24, 8),
        "out": (1, 8, 8),
    }
    params = {
        "kernels": {name: draw.weight(k, k, i, o, fan_in=k * k * i) for name, (k, i, o) in shapes.items()},
        "biases": {name: 0.1 * draw.weight(o) for name, (_, _, o) in shapes.items()},
    }

    def loss_of(params: Tree, batch: Tree) -> jax.Array:
        kernels, biases = params["kernels"], params["biases"]

        def layer(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
            return jax.nn.silu(conv(x, kernels[name], stride) + biases[name])

        high = layer("in", batch["noisy"])
        middle = layer("down", high, stride=2)
        pooled = jax.lax.reduce_window(middle, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        low = layer("bottom", pooled)
        dimensions = ("NHWC", "HWIO", "NHWC")
        up = jax.lax.conv_transpose(low, kernels["up"], (2, 2), "SAME", dimension_numbers=dimensions) + biases["up"]
        joined = layer("mid", jnp.concatenate([up, middle], axis=-1))
        nearest = jnp.repeat(jnp.repeat(joined, 2, axis=1), 2, axis=2)
        last = layer("last", jnp.concatenate([nearest, high], axis=-1))
        return jnp.mean((conv(last, kernels["out"]) + biases["out"] - batch["clean"]) ** 2)

    clean = draw.weight(BATCH, 8, 8, 8, fan_in=1)
    batch = {"noisy": clean + 0.5 * draw.weight(BATCH, 8, 8, 8, fan_in=1), "clean": clean}
    return sgd_step(loss_of), {"params": params}, batch


ZOO: Mapping[str, Callable[[], Example]] = MappingProxyType(
    {
        "bert": build_bert,
        "gpt": build_gpt,
        "moe": build_moe,
        "resnet_block": build_resnet_block,
        "t5": build_t5,
        "unet": build_unet,
    }
)
