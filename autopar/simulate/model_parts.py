"""One part of a real model as a step of its own, built abstractly, with a row's plan stated as constraints.

In: a `Part` of a training job (a block, the embedding or the head), the ZeRO stage, the number format. Out: a `PartStep`: a
function of a state, its shapes, the logical mesh, the `Constraints`. The step runs the part forward and backward once on all
data ranks' samples and adds the gradients to accumulators:

    state   params, grads, taken (what the part takes), given (the gradient of what it gives), ids (tokens or targets)
    result  the same with the gradient of what it took in the place of that, and what it gave in the place of its gradient

so that values and their gradients enter and leave in one layout, as between the layers of a stack. The plan is stated on the
leaves: samples split over the data (and expert) axes, tokens over the tensor axis under sequence parallelism, matrices as in
Megatron, experts over theirs; with ZeRO 2 and more gradients, with ZeRO 3 parameters too, over the data axis. Nothing inside the
part is stated.
What can go wrong: a size that `models/` cannot take; the error names the column.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.layouts.constraints import Constraints, Rule, SplitBatch
from autopar.models import bert, gpt, llama, moe, objective, sizes, t5, transformer, wide_resnet
from autopar.program.call import PyTree
from autopar.simulate.closed_forms.job_prediction import Part
from autopar.simulate.closed_forms.residual_network import BlockSplit
from autopar.simulate.closed_forms.transformer import LayerSplit
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

Arrays = Mapping[str, jax.Array]
Shapes = Mapping[str, tuple[int, ...]]
Parameters = Mapping[str, Any]
"""Nested mappings, at whose ends are arrays."""


class Beside(TypedDict):
    """What has no gradient: tokens and targets, and the dropout's key."""

    ids: Arrays
    key: jax.Array


class _State(Beside):
    params: Parameters
    grads: Parameters
    taken: Arrays
    given: Arrays


Apply = Callable[[Parameters, Arrays, Beside], jax.Array]
"""(parameters, what the part takes, what has no gradient) -> what it gives: hidden states, or the loss."""

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32}
# How Megatron splits each matrix, and `residual_network` each convolution, by its place in the model; what is not listed is
# whole on every tensor rank.
_SPLIT: Mapping[str, tuple[str | None, ...]] = {
    "*/qkv/kernel": (None, None, TENSOR, None),
    "*/qkv/bias": (None, TENSOR, None),
    "*/query/kernel": (None, TENSOR, None),
    "*/query/bias": (TENSOR, None),
    "*/key/kernel": (None, TENSOR, None),
    "*/key/bias": (TENSOR, None),
    "*/value/kernel": (None, TENSOR, None),
    "*/value/bias": (TENSOR, None),
    "*/out/kernel": (TENSOR, None, None),
    "*/up/kernel": (None, TENSOR),
    "*/up/bias": (TENSOR,),
    "*/ffn/gate/kernel": (None, TENSOR),
    "*/down/kernel": (TENSOR, None),
    "*/moe/up": (EXPERT, None, TENSOR),
    "*/moe/down": (EXPERT, TENSOR, None),
    "*/tokens/embedding": (TENSOR, None),
    "*/output_bias": (TENSOR,),
    "*/vocabulary/kernel": (None, TENSOR),
    "*/conv_in/kernel": (None, None, TENSOR, None),
    "*/conv_mid/kernel": (None, None, None, TENSOR),
    "*/norm_mid/*": (TENSOR,),
    "*/conv_out/kernel": (None, None, TENSOR, None),
    "*/conv_skip/kernel": (None, None, TENSOR, None),
}


class UnbuildablePart(ValueError):
    """`models/` has no such part; the text names the column and what it takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartStep:
    """See the module's text; `axes` are the sizes of the mesh's axes."""

    run: Callable[..., PyTree]
    state: Mapping[str, PyTree]
    axes: Mapping[str, int]
    constraints: Constraints


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
    """A part of a model: how to make its parameters and apply it, and the shapes of what it takes and gives; None is a loss."""

    init: Callable[[jax.Array], Parameters]
    apply: Apply
    takes: Shapes
    gives: tuple[int, ...] | None
    ids: Shapes = dataclasses.field(default_factory=dict)


def part_step(part: Part, *, zero_stage: int, precision: str) -> PartStep:
    """The step of a part. Raises UnbuildablePart."""
    split = part.split
    model = _model(part, part.shape, split) if isinstance(part.shape, TransformerShape) else _residual(part)
    recomputed = split.recompute == "full" if isinstance(split, LayerSplit) else split.recompute
    dtype = _DTYPES[precision]
    shapes = jax.eval_shape(model.init, jax.ShapeDtypeStruct((2,), jnp.uint32))
    gradient = dtype if isinstance(split, LayerSplit) and split.gradient_bytes == 2 else jnp.float32
    state = {
        "params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes),
        "grads": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, gradient), shapes),
        "taken": {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in model.takes.items()},
        "given": {} if model.gives is None else {"x": jax.ShapeDtypeStruct(model.gives, dtype)},
        "ids": {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in model.ids.items()},
        "key": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }
    axes = _axes(part)
    twice = bool(recomputed and model.takes and model.gives)
    return PartStep(_step(model.apply, twice=twice), state, axes, _constraints(part, state, axes, zero_stage))


def _step(apply: Apply, *, twice: bool) -> Callable[[_State], tuple[Mapping[str, PyTree], Arrays]]:
    """Forward, and backward from the given gradient, or from the loss. `twice`: forward again before backward, all of it."""

    def step(state: _State) -> tuple[Mapping[str, PyTree], Arrays]:
        beside: Beside = {"ids": state["ids"], "key": state["key"]}
        taken = (state["params"], state["taken"], beside)
        first = [apply(*taken)] if twice else []
        params, inputs, again = jax.lax.optimization_barrier(taken) if twice else taken
        y, backward = jax.vjp(lambda params, inputs: apply(params, inputs, again), params, inputs)
        grads, d_taken = backward(state["given"]["x"] if state["given"] else jnp.ones_like(y))
        given = {"x": (*first, y)[0]} if state["given"] else {}
        new = {"params": state["params"], "grads": _accumulate(state["grads"], grads), "taken": d_taken, **beside}
        return new | {"given": given}, {"recomputed": y} if twice else {} if given else {"loss": y}

    return step


def _accumulate(sums: Parameters, grads: Parameters) -> PyTree:
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)


def _batch(part: Part) -> int:
    return round(part.split.samples * part.data_ranks)


def _axes(part: Part) -> dict[str, int]:
    """The mesh axes longer than 1, the outermost first."""
    experts = part.split.expert_ranks if isinstance(part.split, LayerSplit) else 1
    lengths = {DATA: part.data_ranks // experts, EXPERT: experts, TENSOR: part.split.tensor_ranks}
    return {name: length for name, length in lengths.items() if length > 1} or {DATA: 1}


def _model(part: Part, shape: TransformerShape, split: LayerSplit | BlockSplit) -> _Model:
    config = _config(part, shape, split)
    x = (config.batch, config.seq, config.hidden)
    if part.kind == "embedding":
        return _embedding(config)
    if part.kind == "head":
        return _head(config)
    assert isinstance(part.kind, str)
    block, arguments = _block(part.kind, config)
    takes = {"x": x, "memory": x} if part.kind == "decoder" else {"x": x}

    def apply(params: Parameters, given: Arrays, beside: Beside) -> jax.Array:
        result = block.apply({"params": params}, given["x"], beside["key"], *arguments(given))
        y: jax.Array = result[0] if isinstance(result, tuple) else result
        return y

    def init(key: jax.Array) -> Parameters:
        zeros = {name: jnp.zeros(size) for name, size in takes.items()}
        params: Parameters = block.init(key, zeros["x"], None, *arguments(zeros))["params"]
        return params

    return _Model(init=init, apply=apply, takes=takes, gives=x)


def _residual(part: Part) -> _Model:
    """A bottleneck of a residual network; its running statistics are neither read nor kept."""
    block, images = part.kind, _batch(part)
    if isinstance(block, str):
        raise UnbuildablePart(f"a residual network's {block} has a closed form only")
    module = wide_resnet.Bottleneck(block.channels, block.width, block.stride, entry=block.channels)
    taken = (images, block.size, block.size, block.incoming)
    given = (images, block.size // block.stride, block.size // block.stride, block.outgoing)

    def variables(key: jax.Array) -> Parameters:
        return module.init(key, jnp.zeros((1, *taken[1:])), True)

    statistics = jax.eval_shape(variables, jax.ShapeDtypeStruct((2,), jnp.uint32))["batch_stats"]

    def apply(params: Parameters, taken: Arrays, beside: Beside) -> jax.Array:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), statistics)
        result = module.apply({"params": params, "batch_stats": zeros}, taken["x"], True, mutable=["batch_stats"])
        y: jax.Array = result[0]
        return y

    return _Model(init=lambda key: variables(key)["params"], apply=apply, takes={"x": taken}, gives=given)


Arguments = Callable[[Arrays], Sequence[jax.Array]]


def _block(kind: str, config: sizes.TransformerConfig) -> tuple[nn.Module, Arguments]:
    """The module of a block, and its arguments beside the hidden states and the dropout key."""
    everything = jnp.ones((1, 1, 1, config.seq), bool)
    match config:
        case sizes.MoEConfig() if kind == "expert":
            return moe.MoEBlock(config), lambda given: ()
        case sizes.GPTConfig():
            return gpt.GPTBlock(config), lambda given: ()
        case sizes.LlamaConfig():
            angles = llama.rotary_angles(config.seq, config.head_depth, config.theta)
            return llama.LlamaBlock(config), lambda given: (angles.astype(given["x"].dtype),)
        case sizes.BertConfig():
            return bert.BertBlock(config), lambda given: (everything,)
    assert isinstance(config, sizes.T5Config)
    if kind == "decoder":
        return t5.DecoderBlock(config), lambda given: (_no_bias(config, given), given["memory"], everything)
    return t5.EncoderBlock(config), lambda given: (everything, _no_bias(config, given))


def _no_bias(config: sizes.TransformerConfig, given: Arrays) -> jax.Array:
    return jnp.zeros((config.heads, config.seq, config.seq), given["x"].dtype)


def _tables(config: sizes.TransformerConfig) -> transformer.TokenEmbedding:
    """The module that holds the token table and makes the logits."""
    if isinstance(config, sizes.BertConfig):
        return bert.BertEmbedding(config)
    return (gpt.GPTEmbedding if isinstance(config, sizes.GPTConfig) else transformer.TokenEmbedding)(config)


def _embedding(config: sizes.TransformerConfig) -> _Model:
    tables, tokens = _tables(config), (config.batch, config.seq)

    def embed(module: transformer.TokenEmbedding, numbers: jax.Array) -> jax.Array:
        return module.embed(numbers, numbers) if isinstance(module, bert.BertEmbedding) else module(numbers)

    def apply(params: Parameters, given: Arrays, beside: Beside) -> jax.Array:
        y = tables.apply({"params": params}, beside["ids"]["tokens"], method=embed)
        assert isinstance(y, jax.Array)
        return y

    def init(key: jax.Array) -> Parameters:
        params: Parameters = tables.init(key, jnp.zeros(tokens, jnp.int32), method=embed)["params"]
        return params

    return _Model(init=init, apply=apply, takes={}, gives=(*tokens, config.hidden), ids={"tokens": tokens})


def _head(config: sizes.TransformerConfig) -> _Model:
    """The product with the token table, or the head's own, and the loss; the last norm is left to the closed form's rounding."""
    x = (config.batch, config.seq, config.hidden)

    def apply(params: Parameters, given: Arrays, beside: Beside) -> jax.Array:
        logits = given["x"] @ params["vocabulary"]["kernel"]
        loss, _ = objective.cross_entropy(
            config, logits.astype(jnp.float32), beside["ids"]["targets"], evaluating=False
        )
        return loss

    def init(key: jax.Array) -> Parameters:
        return {"vocabulary": {"kernel": jnp.zeros((config.hidden, config.vocab))}}

    return _Model(init=init, apply=apply, takes={"x": x}, gives=None, ids={"targets": (config.batch, config.seq)})


def _config(part: Part, shape: TransformerShape, split: LayerSplit | BlockSplit) -> sizes.TransformerConfig:
    """The sizes as `models/` takes them; a vocabulary is padded to a multiple of the tensor ranks, as Megatron does."""
    vocab = math.ceil(shape.vocab / split.tensor_ranks) * split.tensor_ranks
    common: dict[str, Any] = {
        "batch": _batch(part),
        "layers": 2,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "seq": shape.seq_len,
        "vocab": vocab,
        "dropout": 0.1,
    }
    if shape.family == "llama":
        return sizes.LlamaConfig(**common, kv_heads=shape.kv_heads, ffn=shape.ffn_hidden)
    if shape.ffn_hidden % shape.hidden:
        raise UnbuildablePart(
            f"column 'ffn_hidden' is {shape.ffn_hidden}: models/ builds a {shape.family} whose feed-forward is a multiple of "
            f"hidden = {shape.hidden}"
        )
    if shape.kv_heads != shape.heads:
        raise UnbuildablePart(
            f"column 'kv_heads' is {shape.kv_heads}: models/ builds a {shape.family} with as many as heads = {shape.heads}"
        )
    common["ffn_factor"] = shape.ffn_hidden // shape.hidden
    if shape.family == "moe" and shape.experts_per_token != 2:
        raise UnbuildablePart(
            f"column 'experts_per_token' is {shape.experts_per_token}: models/ builds a moe with 2 for each token"
        )
    if shape.family == "moe":
        group = shape.expert_group or shape.seq_len
        return sizes.MoEConfig(**common, experts=shape.experts, group=group, capacity_factor=1.0)
    if shape.family == "t5":
        return sizes.T5Config(**common, target_seq=shape.seq_len)
    return sizes.BertConfig(**common) if shape.family == "bert" else sizes.GPTConfig(**common)


def _constraints(part: Part, state: Mapping[str, PyTree], axes: Mapping[str, int], zero_stage: int) -> Constraints:
    """The row's plan, leaf by leaf."""
    samples = tuple(name for name in (DATA, EXPERT) if axes.get(name, 1) > 1)
    spread = TENSOR if part.split.sequence_parallel and TENSOR in axes else None
    images = not isinstance(part.shape, TransformerShape)  # of which channels are spread, as tokens of texts are
    rest = (None, None, spread) if images else (spread, None)
    # Between the ranks of a mixture samples change places, so only what enters and leaves it is split by them.
    moved = part.kind == "expert" and EXPERT in samples
    between = PartitionSpec(samples, *rest) if moved else SplitBatch(samples, PartitionSpec(*rest))
    rules = [Rule(glob=f"state/{place}/*", layout=between, must_match=False) for place in ("taken", "given")]
    rules.append(Rule(glob="state/ids/*", layout=SplitBatch(samples), must_match=False))
    for place, since in (("params", 3), ("grads", 2)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(state[place])[0]:
            name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
            matrix = _matrix_spec(name, leaf.shape, axes)
            spec = _over_data(matrix, leaf.shape, axes) if zero_stage >= since else matrix
            rules.append(Rule(glob=f"state/{place}/{name}", layout=PartitionSpec(*spec)))
    return Constraints(tuple(rules))


def _matrix_spec(name: str, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[str | None, ...]:
    """Where Megatron splits a leaf, as far as its sizes allow: fewer key-value heads than tensor ranks stay whole."""
    found = next((spec for glob, spec in _SPLIT.items() if fnmatch.fnmatchcase(f"/{name}", glob)), (None,) * len(shape))
    lengths = [axes.get(axis, 1) if axis else 1 for axis in found]
    return tuple(
        axis if length > 1 and size % length == 0 else None
        for axis, length, size in zip(found, lengths, shape, strict=True)
    )


def _over_data(
    spec: Sequence[str | None], shape: Sequence[int], axes: Mapping[str, int]
) -> tuple[str | tuple[str, ...] | None, ...]:
    """The same with the first dimension that divides split over the data ranks as well; a leaf without one stays."""
    free = tuple(name for name in (DATA, EXPERT) if axes.get(name, 1) > 1 and name not in spec)
    ways = math.prod(axes[name] for name in free)
    result: list[str | tuple[str, ...] | None] = list(spec)
    for dim, (axis, size) in enumerate(zip(spec, shape, strict=True)):
        if free and size % (ways * (axes[axis] if axis else 1)) == 0:
            result[dim] = (axis, *free) if axis else free
            break
    return tuple(result)
