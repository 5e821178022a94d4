"""The sizes of each model as frozen data, apart from the models, so that a command line can offer them without JAX.

Each config adds its model's fields to `ModelConfig`, and sentences about values that cannot work together. What can go
wrong is an import of JAX here: it would cost every `--help` a second.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.models.config import ModelConfig
from autopar.models.data import BYTE_VALUES, DIGITS_CLASSES, DIGITS_SIZE, MARKED_VALUES

BLOCKS_PER_STAGE: Mapping[int, tuple[int, ...]] = {
    11: (1, 1, 1),
    14: (1, 1, 1, 1),
    20: (2, 2, 2),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Of a residual network, by its depth."""


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(ModelConfig):
    """A model with dropout; 0 leaves it out."""

    dropout: float = 0.0

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_a_rate("dropout")


@dataclass(frozen=True, kw_only=True)
class MLPConfig(DropoutConfig):
    """Sizes of the perceptron; `outputs` counts classes, or real values when `regression` is set."""

    inputs: int = 32
    hidden: int = 64
    layers: int = 6
    outputs: int = 8
    regression: bool = False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("inputs", "hidden", "layers", "outputs")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(DropoutConfig):
    """Sizes of a transformer; `vocab` has room for every byte, and may be larger."""

    batch: int = 16
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 64
    vocab: int = 256
    dropout: float = 0.1
    tied_embeddings: bool = True
    scan_layers: bool = False
    remat: bool = False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("layers", "hidden", "heads", "seq")
        if self.heads > 0 and self.hidden % self.heads:
            yield f"hidden is {self.hidden} and heads is {self.heads}, but heads must divide hidden"
        yield from self._vocab_too_small()

    def _vocab_too_small(self) -> Iterator[str]:
        if self.vocab < BYTE_VALUES:
            yield f"vocab is {self.vocab}, but the text is bytes and needs at least {BYTE_VALUES}"

    @property
    def head_depth(self) -> int:
        """D, the length of one head's vectors."""
        return self.hidden // self.heads

    @property
    def tokens_per_batch(self) -> int:
        """Places that a token stands in."""
        return self.batch * self.seq


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """Sizes of the transformer."""

    ffn_factor: int = 4

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("ffn_factor")


@dataclass(frozen=True, kw_only=True)
class GPTScanConfig(GPTConfig):
    """The same sizes, with one scanned block for all layers."""

    scan_layers: bool = True


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """Sizes of the mixture; `group` is the tokens per group, `balance_weight` the weight of the balancing loss."""

    experts: int = 8
    group: int = 64
    capacity_factor: float = 1.25
    balance_weight: float = 0.01

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("group", "capacity_factor")
        if self.experts < 2:
            yield f"experts is {self.experts}, but top-2 gating needs at least 2"
        if self.group > 0 and self.batch * self.seq % self.group:
            yield f"batch * seq is {self.batch * self.seq} and group is {self.group}, but group must divide batch * seq"
        if self.balance_weight < 0:
            yield f"balance_weight is {self.balance_weight}, but must be 0 or more"
        if self.layers < 2:
            yield f"layers is {self.layers}, but only every second layer is a mixture: use at least 2"
        if self.scan_layers:
            yield "scan_layers is True, but the layers of a mixture differ and cannot be scanned"

    @property
    def capacity(self) -> int:
        """Tokens of one group that one expert has room for."""
        return math.ceil(2 * self.group * self.capacity_factor / self.experts)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """Sizes of the transformer; `theta` is the base of the rotary angles.

    `fused_attention`: attention is `autopar.dot_product_attention`, one operation, which has no dropout on its weights.
    `balanced_attention`: where that goes around a ring of devices, they exchange halves of queries to have the same work.
    """

    kv_heads: int = 2
    ffn: int = 384
    theta: float = 10_000.0
    dropout: float = 0.0
    tied_embeddings: bool = False
    fused_attention: bool = False
    balanced_attention: bool = True

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("kv_heads", "ffn", "theta")
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield f"heads is {self.heads} and kv_heads is {self.kv_heads}, but kv_heads must divide heads"
        if self.heads > 0 and self.head_depth % 2:
            yield f"hidden / heads is {self.head_depth}, but rotary positions turn pairs: it must be even"
        if self.fused_attention and self.dropout:
            yield f"dropout is {self.dropout}, but fused_attention has none on its weights: use 0"


@dataclass(frozen=True, kw_only=True)
class MarkedTextConfig(TransformerConfig):
    """Sizes of a transformer whose `vocab` has room for the bytes and the marks of `data`."""

    vocab: int = 288

    def _vocab_too_small(self) -> Iterator[str]:
        if self.vocab < MARKED_VALUES:
            yield f"vocab is {self.vocab}, but bytes and marks need at least {MARKED_VALUES}"


@dataclass(frozen=True, kw_only=True)
class BertConfig(MarkedTextConfig):
    """Sizes of the encoder."""

    ffn_factor: int = 4

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("ffn_factor")
        if self.seq == 1:
            yield "seq is 1, but an example has two segments and needs at least 2"


@dataclass(frozen=True, kw_only=True)
class T5Config(MarkedTextConfig):
    """Sizes of both stacks."""

    layers: int = 2
    target_seq: int = 32
    ffn_factor: int = 4
    buckets: int = 32
    furthest: int = 128

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("target_seq", "ffn_factor")
        if self.buckets < 4 or self.buckets % 4:
            yield f"buckets is {self.buckets}, but must be a multiple of 4: two directions, near and far"
        elif self.furthest <= self.buckets // 2:
            yield f"furthest is {self.furthest} and buckets is {self.buckets}, but furthest must be over half of buckets"

    @property
    def tokens_per_batch(self) -> int:
        """Of the sources and of the targets."""
        return self.batch * (self.seq + self.target_seq)


@dataclass(frozen=True, kw_only=True)
class UNetConfig(DropoutConfig):
    """Sizes of the network; `levels` counts the halvings, `noise` is the deviation of what is added to the images."""

    image_size: int = 16
    channels: int = 1
    base_channels: int = 16
    levels: int = 2
    groups: int = 4
    noise: float = 0.5

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("image_size", "channels", "base_channels", "levels", "groups", "noise")
        if self.image_size % DIGITS_SIZE:
            yield f"image_size is {self.image_size}, but digits are repeated to a multiple of {DIGITS_SIZE}"
        if self.levels > 0 and self.image_size % 2**self.levels:
            yield f"image_size is {self.image_size}, but is halved {self.levels} times: must be a multiple of {2**self.levels}"
        if self.groups > 0 and self.base_channels % self.groups:
            yield f"base_channels is {self.base_channels} and groups is {self.groups}, but groups must divide base_channels"


@dataclass(frozen=True, kw_only=True)
class DenseNetConfig(DropoutConfig):
    """Sizes of the network; `growth` is the channels that a layer adds, `layers` counts those of all `blocks`."""

    image_size: int = 16
    channels: int = 1
    classes: int = 10
    layers: int = 12
    blocks: int = 3
    growth: int = 8
    groups: int = 4

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("image_size", "channels", "layers", "blocks", "growth", "groups")
        if self.image_size % DIGITS_SIZE:
            yield f"image_size is {self.image_size}, but digits are repeated to a multiple of {DIGITS_SIZE}"
        if self.classes < DIGITS_CLASSES:
            yield f"classes is {self.classes}, but the digits have {DIGITS_CLASSES}"
        if self.blocks > 0 and self.image_size % 2 ** (self.blocks - 1):
            halved = f"image_size is {self.image_size}, but is halved {self.blocks - 1} times"
            yield f"{halved}: must be a multiple of {2 ** (self.blocks - 1)}"
        if 0 < self.layers < self.blocks:
            yield f"layers is {self.layers} and blocks is {self.blocks}, but each block needs a layer"
        if self.groups > 0 and self.growth % self.groups:
            yield f"growth is {self.growth} and groups is {self.groups}, but groups must divide growth"

    @property
    def layers_per_block(self) -> tuple[int, ...]:
        """The layers divided over the blocks, as evenly as they go."""
        least, left = divmod(self.layers, self.blocks)
        return tuple(least + (block < left) for block in range(self.blocks))


@dataclass(frozen=True, kw_only=True)
class WideResNetConfig(ModelConfig):
    """Sizes of the network; `depth` counts layers with weights; `imagenet_stem` starts with 7x7/2 and a max pool.

    `narrow_entry`: only the 3x3 convolution of a block is widened, not the 1x1 before it.
    """

    image_size: int = 16
    channels: int = 1
    classes: int = 10
    depth: int = 11
    base_channels: int = 16
    width_factor: int = 2
    imagenet_stem: bool = False
    narrow_entry: bool = False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._not_positive("image_size", "channels", "base_channels", "width_factor")
        if self.image_size % DIGITS_SIZE:
            yield f"image_size is {self.image_size}, but digits are repeated to a multiple of {DIGITS_SIZE}"
        if self.classes < DIGITS_CLASSES:
            yield f"classes is {self.classes}, but the digits have {DIGITS_CLASSES}"
        if self.depth not in BLOCKS_PER_STAGE:
            yield f"depth is {self.depth}, but must be one of {', '.join(map(str, BLOCKS_PER_STAGE))}"
