"""One part of a real model as a step of its own, built abstractly, with a row's plan stated as constraints.

In: a `Part` of a training job (a block, the embedding or the head), the ZeRO stage, the number format. Out: a `PartStep`: a
function of a state, its shapes, the logical mesh, the `Constraints`. The step runs the part forward and backward once on all
data ranks' samples and adds the gradients to accumulators:

    state   params, grads, taken (what the part is given), given (the gradient of what it gives back), ids (tokens or targets)
    result  the same with what the part gives back in the place of what it was given, and the gradients likewise

so that a value enters and leaves in one layout, as between the layers of a stack. The plan is stated on the leaves: samples
split over the data (and expert) axes, tokens over the tensor axis under sequence parallelism, matrices as in Megatron, experts
over theirs; with ZeRO 1 and more gradients, with ZeRO 3 parameters too, over the data axis. Nothing inside the part is stated.
What can go wrong: a size that `models/` cannot take; the error names the column.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.cost_model.training_job import Part
from autopar.cost_model.transformer import LayerSplit
from autopar.cost_model.transformer_shape import TransformerShape
from autopar.models import bert, gpt, llama, moe, objective, sizes, t5, transformer
from autopar.options import Constraints, Rule, SplitBatch

Apply = Callable[[Any, Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]
"""(parameters, what the part is given, ids) -> what it gives back: hidden states, or the loss."""

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32}
# How Megatron splits each matrix, by its place in the model; what is not listed is whole on every tensor rank.
_SPLIT: Mapping[str, tuple[str | None, ...]] = {
    "*qkv/kernel": (None, None, TENSOR, None),
    "*qkv/bias": (None, TENSOR, None),
    "*query/kernel": (None, TENSOR, None),
    "*query/bias": (TENSOR, None),
    "*key/kernel": (None, TENSOR, None),
    "*key/bias": (TENSOR, None),
    "*value/kernel": (None, TENSOR, None),
    "*value/bias": (TENSOR, None),
    "*out/kernel": (TENSOR, None, None),
    "*up/kernel": (None, TENSOR),
    "*up/bias": (TENSOR,),
    "*ffn/gate/kernel": (None, TENSOR),
    "*down/kernel": (TENSOR, None),
    "*moe/up": (EXPERT, None, TENSOR),
    "*moe/down": (EXPERT, TENSOR, None),
    "*tokens/embedding": (TENSOR, None),
    "*output_bias": (TENSOR,),
    "*vocabulary/kernel": (None, TENSOR),
}


class UnbuildablePart(ValueError):
    """`models/` has no such part; the text names the column and what it takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartStep:
    """See the module's text; `axes` are the sizes of the mesh's axes."""

    run: Callable[..., Any]
    state: Mapping[str, Any]
    axes: Mapping[str, int]
    constraints: Constraints


@dataclasses.dataclass(frozen=True)
class _Model:
    """A part of a model: how to make its parameters, how to apply it, and the shapes of what it is given."""

    init: Callable[[jax.Array], Any]
    apply: Apply
    taken: Mapping[str, tuple[int, ...]]
    ids: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    gives_loss: bool = False


def part_step(part: Part, *, zero_stage: int, precision: str) -> PartStep:
    """The step of a part of a transformer. Raises UnbuildablePart."""
    if not isinstance(part.shape, TransformerShape) or not isinstance(part.split, LayerSplit):
        raise UnbuildablePart(
            "column 'family' is 'wide_resnet': its published network widens another convolution than models/ does; there is a "
            "closed form only"
        )
    axes = _axes(part, part.split)
    model = _model(part, part.shape, part.split)
    apply = jax.checkpoint(model.apply) if part.split.recompute == "full" and model.taken else model.apply
    dtype = _DTYPES[precision]
    shapes = jax.eval_shape(model.init, jax.ShapeDtypeStruct((2,), jnp.uint32))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    gradient = {4: jnp.float32, 2: dtype}[part.split.gradient_bytes]
    state = {
        "params": params,
        "grads": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, gradient), shapes),
        "taken": {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in model.taken.items()},
    }
    if not model.gives_loss:
        samples = (_batch(part), part.shape.seq_len, part.shape.hidden)
        state["given"] = {"x": jax.ShapeDtypeStruct(samples, dtype)}
        state["result"] = {} if model.taken else {"x": jax.ShapeDtypeStruct(samples, dtype)}
    state["ids"] = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in model.ids.items()}
    return PartStep(
        _loss_step(apply) if model.gives_loss else _block_step(apply),
        state,
        axes,
        _constraints(part, part.split, state, axes, zero_stage),
    )


def _block_step(apply: Apply) -> Callable[..., Any]:
    """Forward, and backward from the given gradient; an embedding takes nothing, and its result has a place of its own."""

    def step(state: Mapping[str, Any]) -> Mapping[str, Any]:
        ids = state["ids"]
        y, backward = jax.vjp(lambda params, taken: apply(params, taken, ids), state["params"], state["taken"])
        grads, d_taken = backward(state["given"]["x"])
        new = {"params": state["params"], "grads": _accumulated(state["grads"], grads), "ids": ids}
        if not state["taken"]:
            return new | {"taken": {}, "given": state["given"], "result": {"x": y}}
        return new | {"taken": d_taken | {"x": y}, "given": {"x": d_taken["x"]}, "result": {}}

    return step


def _loss_step(apply: Apply) -> Callable[..., Any]:
    """Forward to the loss, and backward; the gradient of what was given takes its place."""

    def step(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], jax.Array]:
        ids = state["ids"]
        loss, backward = jax.vjp(lambda params, taken: apply(params, taken, ids), state["params"], state["taken"])
        grads, d_taken = backward(jnp.ones_like(loss))
        grads = _accumulated(state["grads"], grads)
        return {"params": state["params"], "grads": grads, "taken": d_taken, "ids": ids}, loss

    return step


def _accumulated(sums: Any, grads: Any) -> Any:
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)


def _batch(part: Part) -> int:
    return round(part.split.samples * part.data_ranks)


def _axes(part: Part, split: LayerSplit) -> dict[str, int]:
    """The mesh axes longer than 1, the outermost first."""
    lengths = {DATA: part.data_ranks // split.expert_ranks, EXPERT: split.expert_ranks, TENSOR: split.tensor_ranks}
    return {name: length for name, length in lengths.items() if length > 1} or {DATA: 1}


def _model(part: Part, shape: TransformerShape, split: LayerSplit) -> _Model:
    config = _config(part, shape, split)
    x = (config.batch, config.seq, config.hidden)
    if part.kind == "embedding":
        return _embedding(shape, config)
    if part.kind == "head":
        return _head(shape, config)
    assert isinstance(part.kind, str)
    block, arguments = _block(part.kind, shape, config)
    taken = {"x": x, "memory": x} if part.kind == "decoder" else {"x": x}

    def apply(params: Any, given: Mapping[str, jax.Array], ids: Mapping[str, jax.Array]) -> jax.Array:
        result: Any = block.apply({"params": params}, given["x"], None, *arguments(given))
        y: jax.Array = result[0] if isinstance(result, tuple) else result
        return y

    def init(key: jax.Array) -> Any:
        zeros = {name: jnp.zeros(size) for name, size in taken.items()}
        return block.init(key, zeros["x"], None, *arguments(zeros))["params"]

    return _Model(init, apply, taken)


Arguments = Callable[[Mapping[str, jax.Array]], Sequence[jax.Array]]


def _block(kind: str, shape: TransformerShape, config: Any) -> tuple[Any, Arguments]:
    """The module of a block, and its arguments beside the hidden states and the dropout key."""
    everything = jnp.ones((1, 1, 1, config.seq), bool)
    match shape.family, kind:
        case "gpt", _:
            return gpt.Block(config), lambda given: ()
        case "moe", _:
            return (moe.MoEBlock if kind == "expert" else gpt.Block)(config), lambda given: ()
        case "llama", _:
            angles = llama.rotary_angles
            return llama.Block(config), lambda given: (angles(config.seq, config.head_depth, config.theta),)
        case "bert", _:
            return bert.Block(config), lambda given: (everything,)
        case _, "decoder":
            return t5.DecoderBlock(config), lambda given: (_no_bias(config), given["memory"], everything)
    return t5.EncoderBlock(config), lambda given: (everything, _no_bias(config))


def _no_bias(config: Any) -> jax.Array:
    return jnp.zeros((config.heads, config.seq, config.seq))


def _tables(shape: TransformerShape, config: Any) -> Any:
    """The module that holds the token table and makes the logits."""
    kinds: Mapping[str, Any] = {"gpt": gpt.Embedding, "moe": gpt.Embedding, "bert": bert.Embedding}
    return kinds.get(shape.family, transformer.TokenEmbedding)(config)


def _embedding(shape: TransformerShape, config: Any) -> _Model:
    tables, tokens = _tables(shape, config), (config.batch, config.seq)

    def embed(module: Any, numbers: jax.Array) -> Any:
        return module.embed(numbers, numbers) if shape.family == "bert" else module(numbers)

    def apply(params: Any, given: Mapping[str, jax.Array], ids: Mapping[str, jax.Array]) -> Any:
        return tables.apply({"params": params}, ids["tokens"], method=embed)

    def init(key: jax.Array) -> Any:
        return tables.init(key, jnp.zeros(tokens, jnp.int32), method=embed)["params"]

    return _Model(init, apply, {}, {"tokens": tokens})


def _head(shape: TransformerShape, config: Any) -> _Model:
    """The product with the token table, or the head's own, and the loss; the last norm is left to the closed form's rounding."""
    x = (config.batch, config.seq, config.hidden)

    def apply(params: Any, given: Mapping[str, jax.Array], ids: Mapping[str, jax.Array]) -> jax.Array:
        logits = given["x"] @ params["vocabulary"]["kernel"]
        loss, _ = objective.cross_entropy(config, logits.astype(jnp.float32), ids["targets"], evaluating=False)
        return loss

    def init(key: jax.Array) -> Any:
        return {"vocabulary": {"kernel": jnp.zeros((config.hidden, config.vocab))}}

    return _Model(init, apply, {"x": x}, {"targets": (config.batch, config.seq)}, gives_loss=True)


def _config(part: Part, shape: TransformerShape, split: LayerSplit) -> Any:
    """The sizes as `models/` takes them; a vocabulary is padded to a multiple of the tensor ranks, as Megatron does."""
    vocab = math.ceil(shape.vocab / split.tensor_ranks) * split.tensor_ranks
    common: dict[str, Any] = {
        "batch": _batch(part),
        "layers": 2,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "seq": shape.seq_len,
        "vocab": vocab,
        "dropout": 0.0,
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
    if shape.family == "moe":
        group = shape.expert_group or shape.seq_len
        return sizes.MoEConfig(**common, experts=shape.experts, group=group, capacity_factor=1.0)
    if shape.family == "t5":
        return sizes.T5Config(**common, target_seq=shape.seq_len)
    return sizes.BertConfig(**common) if shape.family == "bert" else sizes.GPTConfig(**common)


def _constraints(
    part: Part, split: LayerSplit, state: Mapping[str, Any], axes: Mapping[str, int], zero_stage: int
) -> Constraints:
    """The row's plan, leaf by leaf."""
    samples = tuple(name for name in (DATA, EXPERT) if axes.get(name, 1) > 1)
    tokens = TENSOR if split.sequence_parallel and TENSOR in axes else None
    rules = [
        Rule("state/taken/*", SplitBatch(samples, PartitionSpec(tokens, None)), must_match=False),
        Rule("state/given/*", SplitBatch(samples, PartitionSpec(tokens, None)), must_match=False),
        Rule("state/result/*", SplitBatch(samples, PartitionSpec(tokens, None)), must_match=False),
        Rule("state/ids/*", SplitBatch(samples), must_match=False),
    ]
    for place, since in (("params", 3), ("grads", 1)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(state[place])[0]:
            name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
            matrix = _matrix_spec(name, leaf.shape, axes)
            spec = _over_data(matrix, leaf.shape, axes) if zero_stage >= since else matrix
            rules.append(Rule(f"state/{place}/{name}", PartitionSpec(*spec)))
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
