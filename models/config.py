"""Sizes of a model as frozen data.

Every field is an int, a float, a bool or one of a few words, so that a command line can offer each as a flag. A config
checks itself when it is made and reports every impossible value at once, with the numbers that disagree.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "adafactor", "lion", "lamb", "rmsprop")
"""Of optax; `momentum` is SGD with 0.9 of it."""
DTYPES = ("float32", "bfloat16", "float16")
PARAM_DTYPES = ("float32", "bfloat16")
"""Weights in float16 would lose their updates, and the optimizer's epsilon would be 0."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every train step needs: examples per batch, the optimiser with clipping of the global norm, its reports.

    Attributes:
        optimizer: of optax, with decay of weights where it has one: all but adam and rmsprop.
        sgd: the same as the optimizer sgd.
        dtype: the type that the model computes in. float16 scales its loss and skips updates with infinities.
        param_dtype: the type of the weights and of the optimizer's statistics.
        aux_metrics: training reports, as evaluation does, how good the outputs are, and both the loss of each example.

    Raises:
        ValueError: naming all fields whose values cannot work.
    """

    batch: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    optimizer: str = field(default="adamw", metadata={"choices": OPTIMIZERS})
    sgd: bool = False
    aux_metrics: bool = False
    dtype: str = field(default="float32", metadata={"choices": DTYPES})
    param_dtype: str = field(default="float32", metadata={"choices": PARAM_DTYPES})

    def __post_init__(self) -> None:
        problems = list(self._wrong_types()) or list(self._problems())
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a batch of text; in one of anything else its examples."""
        return self.batch

    def _problems(self) -> Iterator[str]:
        """Yield one sentence per value that cannot work; subclasses add their own."""
        yield from self._not_positive("batch", "learning_rate", "clip_norm")
        if self.weight_decay < 0:
            yield f"weight_decay is {self.weight_decay}, but must be 0 or more"
        if self.sgd and self.optimizer not in ("adamw", "sgd"):
            yield f"sgd is set and optimizer is {self.optimizer!r}: give only one"
        for sized in fields(self):
            choices = sized.metadata.get("choices")
            if choices and getattr(self, sized.name) not in choices:
                yield f"{sized.name} is {getattr(self, sized.name)!r}, but must be one of {', '.join(choices)}"

    def _wrong_types(self) -> Iterator[str]:
        """Yield a sentence per size whose value is not of the size's type; an int is accepted for a float."""
        for size in fields(self):
            value = getattr(self, size.name)
            accepted = (int, float) if size.type is float else size.type
            assert isinstance(accepted, (type, tuple)), f"{size.name} must be annotated with int, float, bool or str"
            if not isinstance(value, accepted) or (isinstance(value, bool) and size.type is not bool):
                yield f"{size.name} is {value!r}, but must be of type {getattr(size.type, '__name__', size.type)}"
            elif isinstance(value, float) and not math.isfinite(value):
                yield f"{size.name} is {value!r}, but must be finite"

    def _not_positive(self, *names: str) -> Iterator[str]:
        for name in names:
            if getattr(self, name) <= 0:
                yield f"{name} is {getattr(self, name)}, but must be more than 0"

    def _not_a_rate(self, name: str) -> Iterator[str]:
        value = getattr(self, name)
        if not 0 <= value < 1:
            yield f"{name} is {value}, but must be at least 0 and less than 1"
