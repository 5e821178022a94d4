"""Model names -> everything that a training loop or a planner needs, at any size.

`build(name, **size_overrides)` makes the config, the steps and the data of one model. An unknown name or size raises
with the known ones; sizes that cannot work together raise with their numbers, before anything is traced.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

import jax

from autopar.models import bert, gpt, llama, mlp, moe, t5, unet, wide_resnet
from autopar.models.bert import BertConfig
from autopar.models.config import ModelConfig
from autopar.models.data import (
    NumpyBatch,
    continued_batches,
    image_batches,
    masked_batches,
    noisy_image_batches,
    teacher_batches,
    text_batches,
)
from autopar.models.gpt import GPTConfig, GPTScanConfig
from autopar.models.llama import LlamaConfig
from autopar.models.mlp import MLPConfig
from autopar.models.moe import MoEConfig
from autopar.models.t5 import T5Config
from autopar.models.train_steps import Batch, Metrics, Objective, TrainState, make_steps
from autopar.models.transformer import TransformerConfig
from autopar.models.unet import UNetConfig
from autopar.models.wide_resnet import WideResNetConfig

BatchShape: TypeAlias = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class BuiltModel:
    """One model at one size.

    Attributes:
        name: as in `MODELS`.
        config: all sizes.
        train_step: (state, batch) -> (state of the same structure, metrics with "loss"); pure.
        eval_step: (state, batch) -> metrics; no dropout, running statistics.
        create_state: key -> state; pure, so it can be jitted or shape-evaluated.
        batch_shape: () -> the shapes and dtypes of one batch.
        tokens_per_batch: tokens in a batch of text, else examples.
        data: seed -> endless numpy batches, the same ones for the same seed.
    """

    name: str
    config: ModelConfig
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    eval_step: Callable[[TrainState, Batch], Metrics]
    create_state: Callable[[jax.Array], TrainState]
    batch_shape: Callable[[], BatchShape]
    tokens_per_batch: int
    data: Callable[[int], Iterator[NumpyBatch]]


@dataclass(frozen=True)
class ModelEntry:
    """How to build a model: its config class, and functions of a config of that class."""

    summary: str
    config: type[ModelConfig]
    objective: Callable[[Any], Objective]
    batch_shape: Callable[[Any], BatchShape]
    tokens_per_batch: Callable[[Any], int]
    data: Callable[[Any, int], Iterator[NumpyBatch]]


def build(name: str, **size_overrides: int | float | bool) -> BuiltModel:
    """Build the model `name`, its default sizes overridden by keyword.

    Raises:
        ValueError: no such model, no such size, or sizes that cannot work together.
    """
    entry = MODELS.get(name)
    if entry is None:
        raise ValueError(f"no model named {name!r}{_closest(name, MODELS)}; the models are {', '.join(MODELS)}")
    _check_known(name, entry, size_overrides)
    sizes: dict[str, Any] = dict(size_overrides)
    config = entry.config(**sizes)
    steps = make_steps(config, entry.objective(config))
    return BuiltModel(
        name=name,
        config=config,
        train_step=steps.train_step,
        eval_step=steps.eval_step,
        create_state=steps.create_state,
        batch_shape=lambda: entry.batch_shape(config),
        tokens_per_batch=entry.tokens_per_batch(config),
        data=lambda seed: entry.data(config, seed),
    )


def _check_known(name: str, entry: ModelEntry, size_overrides: Mapping[str, object]) -> None:
    known = {field.name: field.default for field in fields(entry.config)}
    unknown = [size for size in size_overrides if size not in known]
    if unknown:
        offered = ", ".join(f"{size} (default {default})" for size, default in known.items())
        named = ", ".join(f"{size!r}{_closest(size, known)}" for size in unknown)
        raise ValueError(f"model {name!r} has no size named {named}; its sizes are {offered}")


def _closest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _text(config: TransformerConfig, seed: int) -> Iterator[NumpyBatch]:
    return text_batches(seed, batch=config.batch, seq=config.seq)


def _images(config: WideResNetConfig, seed: int) -> Iterator[NumpyBatch]:
    return image_batches(seed, batch=config.batch, image_size=config.image_size, channels=config.channels)


def _masked(config: BertConfig, seed: int) -> Iterator[NumpyBatch]:
    return masked_batches(seed, batch=config.batch, seq=config.seq)


def _continued(config: T5Config, seed: int) -> Iterator[NumpyBatch]:
    return continued_batches(seed, batch=config.batch, seq=config.seq, target_seq=config.target_seq)


def _noisy(config: UNetConfig, seed: int) -> Iterator[NumpyBatch]:
    return noisy_image_batches(
        seed, batch=config.batch, image_size=config.image_size, channels=config.channels, noise=config.noise
    )


def _taught(config: MLPConfig, seed: int) -> Iterator[NumpyBatch]:
    return teacher_batches(
        seed, batch=config.batch, inputs=config.inputs, outputs=config.outputs, regression=config.regression
    )


def _tokens(config: TransformerConfig) -> int:
    return config.batch * config.seq


def _tokens_read_and_written(config: T5Config) -> int:
    return config.batch * (config.seq + config.target_seq)


def _examples(config: ModelConfig) -> int:
    return config.batch


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "mlp": ModelEntry(
            "multi-layer perceptron on a synthetic task",
            MLPConfig, mlp.objective, mlp.batch_shape, _examples, _taught,
        ),
        "gpt": ModelEntry(
            "byte-level GPT on the standard library's sources",
            GPTConfig, gpt.objective, gpt.batch_shape, _tokens, _text,
        ),
        "gpt_scan": ModelEntry(
            "the same GPT, one block scanned over the layers",
            GPTScanConfig, gpt.objective, gpt.batch_shape, _tokens, _text,
        ),
        "moe": ModelEntry(
            "GPT with a top-2 mixture of experts in every second layer",
            MoEConfig, moe.objective, gpt.batch_shape, _tokens, _text,
        ),
        "wide_resnet": ModelEntry(
            "wide residual network on handwritten digits",
            WideResNetConfig, wide_resnet.objective, wide_resnet.batch_shape, _examples, _images,
        ),
        "bert": ModelEntry(
            "encoder that fills in masked bytes of the standard library's sources",
            BertConfig, bert.objective, bert.batch_shape, _tokens, _masked,
        ),
        "t5": ModelEntry(
            "encoder and decoder that continue a piece of the standard library's sources",
            T5Config, t5.objective, t5.batch_shape, _tokens_read_and_written, _continued,
        ),
        "llama": ModelEntry(
            "byte-level LLaMA on the standard library's sources",
            LlamaConfig, llama.objective, gpt.batch_shape, _tokens, _text,
        ),
        "unet": ModelEntry(
            "convolutional U-Net that removes noise from handwritten digits",
            UNetConfig, unet.objective, unet.batch_shape, _examples, _noisy,
        ),
    }
)  # fmt: skip
