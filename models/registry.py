"""Model names -> everything that a training loop or a planner needs, at any size.

`build(name, **size_overrides)` makes the config, the steps and the data of one model. An unknown name or size raises
with the known ones; sizes that cannot work together raise with their numbers, before anything is traced. Names and sizes
can be looked up without JAX: a model's module is imported when the model is built.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
from autopar.models.sizes import (
    BertConfig,
    DenseNetConfig,
    GPTConfig,
    GPTScanConfig,
    LlamaConfig,
    MLPConfig,
    MoEConfig,
    T5Config,
    TransformerConfig,
    UNetConfig,
    WideResNetConfig,
)

if TYPE_CHECKING:
    import jax

    from autopar.models.objective import Batch, BatchShape, Metrics
    from autopar.models.train_steps import Steps, TrainState


@dataclass(frozen=True, kw_only=True)
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
    """How to build a model: its config class, a function from such a config and a seed to data, and the module in this
    package with `objective(config)` and `batch_shape(config)`, which is imported when a model is built."""

    summary: str
    config: type[ModelConfig]
    data: Callable[[Any, int], Iterator[NumpyBatch]]
    module: str


def build(name: str, **size_overrides: int | float | bool | str) -> BuiltModel:
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
    module: Any = importlib.import_module(f"autopar.models.{entry.module}")
    train_steps: Any = importlib.import_module("autopar.models.train_steps")
    steps: Steps = train_steps.make_steps(config, module.objective(config))
    return BuiltModel(
        name=name,
        config=config,
        train_step=steps.train_step,
        eval_step=steps.eval_step,
        create_state=steps.create_state,
        batch_shape=lambda: module.batch_shape(config),
        tokens_per_batch=config.tokens_per_batch,
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


def _images(config: DenseNetConfig | WideResNetConfig, seed: int) -> Iterator[NumpyBatch]:
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


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "mlp": ModelEntry("multi-layer perceptron on a synthetic task", MLPConfig, _taught, "mlp"),
        "gpt": ModelEntry("byte-level GPT on the standard library's sources", GPTConfig, _text, "gpt"),
        "gpt_scan": ModelEntry("the same GPT, one block scanned over the layers", GPTScanConfig, _text, "gpt"),
        "moe": ModelEntry("GPT with a top-2 mixture of experts in every second layer", MoEConfig, _text, "moe"),
        "wide_resnet": ModelEntry("wide residual network on digits", WideResNetConfig, _images, "wide_resnet"),
        "bert": ModelEntry("encoder that fills in masked bytes of these sources", BertConfig, _masked, "bert"),
        "t5": ModelEntry("encoder and decoder that continue a piece of these sources", T5Config, _continued, "t5"),
        "llama": ModelEntry("byte-level LLaMA on the standard library's sources", LlamaConfig, _text, "llama"),
        "unet": ModelEntry("convolutional U-Net that removes noise from digits", UNetConfig, _noisy, "unet"),
        "densenet": ModelEntry(
            "dense network, all layers of other shapes, on digits", DenseNetConfig, _images, "densenet"
        ),
    }
)
