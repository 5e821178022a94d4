"""One part of a real model as a step of its own, built abstractly, with a row's plan stated as constraints.

In: a `Part` of a training job (a block, the embedding or the head), the ZeRO stage, the number format. Out: a `PartStep`: a
function of a state, its shapes, the logical mesh, the `Constraints`. The step runs the part forward and backward once on all
data ranks' samples and adds the gradients to accumulators:

    state   params, grads, taken (what the part takes), given (the gradient of what it gives), ids (tokens or targets)
    result  the same with the gradient of what it took in the place of that, and what it gave in the place of its gradient

so that values and their gradients enter and leave in one layout, as between the layers of a stack. The plan is stated on the
leaves alone (`part_constraints.py`).
What can go wrong: a size that `models/` cannot take; the error names the column.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp

from autopar.layouts.constraints import Constraints
from autopar.models import bert, gpt, llama, moe, objective, sizes, t5, transformer, wide_resnet
from autopar.program.call import PyTree
from autopar.simulate.closed_forms.job_prediction import Part
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.residual_network import BlockSplit
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.part_constraints import DATA, EXPERT, TENSOR, plan_constraints

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

_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32}


class UnbuildablePart(ValueError):
    """`models/` has no such part; the text names the column and what it takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartProgram:
    """A function of a state, and its shapes: the same under every plan."""

    run: Callable[..., PyTree]
    state: Mapping[str, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class PartStep:
    """See the module's text; `axes` are the sizes of the mesh's axes."""

    program: PartProgram
    axes: Mapping[str, int]
    constraints: Constraints

    @property
    def state(self) -> Mapping[str, PyTree]:
        """The shapes that its program takes."""
        return self.program.state


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
    return planned_step(part, part_program(part, precision=precision), zero_stage=zero_stage)


def planned_step(part: Part, program: PartProgram, *, zero_stage: int, whole_gradients: bool = False) -> PartStep:
    """A program under a part's plan."""
    axes = _axes(part)
    constraints = plan_constraints(part, program.state, axes, zero_stage=zero_stage, whole_gradients=whole_gradients)
    return PartStep(program, axes, constraints)


def part_program(part: Part, *, precision: str) -> PartProgram:
    """The program of a part. Raises UnbuildablePart."""
    split = part.split
    model = _model(part, part.shape, split) if isinstance(part.shape, TransformerShape) else _residual(part)
    dtype = _DTYPES[precision]
    shapes = jax.eval_shape(model.init, jax.ShapeDtypeStruct((2,), jnp.uint32))
    gradient = dtype if _gradient_bytes(split) == 2 else jnp.float32
    state = {
        "params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes),
        "grads": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, gradient), shapes),
        "taken": {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in model.takes.items()},
        "given": {} if model.gives is None else {"x": jax.ShapeDtypeStruct(model.gives, dtype)},
        "ids": {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in model.ids.items()},
        "key": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }
    twice = bool(_recomputed(split) and model.takes and model.gives)
    return PartProgram(_step(_in_full_precision(model.apply), twice=twice), state)


def _in_full_precision(apply: Apply) -> Apply:
    """With products of float32 in float32, as in the runs that are replayed: PyTorch rounds none of them unless told to."""

    def applied(params: Parameters, arrays: Arrays, beside: Beside) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return apply(params, arrays, beside)

    return applied


def program_key(part: Part, *, precision: str) -> Hashable:
    """What two parts have in common if their programs are equal."""
    shape, split = part.shape, part.split
    if isinstance(shape, TransformerShape):
        of_ends = part.kind in ("embedding", "head")
        shape = dataclasses.replace(
            shape, layers=1, decoder_layers=None, vocab=_padded_vocab(shape, split) if of_ends else 1
        )
    return part.kind, shape, _batch(part), _recomputed(split), _gradient_bytes(split), precision


def _recomputed(split: LayerSplit | BlockSplit) -> bool:
    """Whether forward runs again before backward, all of it."""
    return split.recompute == "full" if isinstance(split, LayerSplit) else split.recompute


def _gradient_bytes(split: LayerSplit | BlockSplit) -> int:
    return split.gradient_bytes if isinstance(split, LayerSplit) else 4


def _padded_vocab(shape: TransformerShape, split: LayerSplit | BlockSplit) -> int:
    """A multiple of the tensor ranks, as Megatron pads it."""
    return math.ceil(shape.vocab / split.tensor_ranks) * split.tensor_ranks


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
    """The sizes as `models/` takes them, the vocabulary padded."""
    common: dict[str, Any] = {
        "batch": _batch(part),
        "layers": 2,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "seq": shape.seq_len,
        "vocab": _padded_vocab(shape, split),
        "dropout": 0.1,
    }
    if shape.family == "llama":
        _refuse_unknown_sizes(shape)
        return sizes.LlamaConfig(**common, kv_heads=shape.kv_heads, ffn=shape.ffn_hidden)
    if shape.ffn_hidden % shape.hidden:
        raise UnbuildablePart(
            f"column 'ffn_hidden' is {shape.ffn_hidden}: models/ builds a {shape.family} whose feed-forward is a multiple of "
            f"hidden = {shape.hidden}"
        )
    _refuse_unknown_sizes(shape)
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


def _refuse_unknown_sizes(shape: TransformerShape) -> None:
    """Columns that only the closed form prices."""
    if shape.head_width not in (None, shape.hidden // shape.heads):
        raise UnbuildablePart(
            f"column 'head_width' is {shape.head_width}: models/ builds heads of hidden / heads = {shape.hidden // shape.heads}"
        )
    if shape.shared_experts:
        raise UnbuildablePart(f"column 'shared_experts' is {shape.shared_experts}: models/ builds a moe without any")
    if shape.gated != (shape.family == "llama"):
        word = "gated" if shape.family == "llama" else "plain"
        raise UnbuildablePart(
            f"column 'gated' is {int(shape.gated)}: models/ builds a {shape.family} with a {word} feed-forward"
        )
