"""Sizes of a model as frozen data.

Every field is an int, a float or a bool, so that a command line can offer each as a flag. A config checks itself when
it is made and reports every impossible value at once, with the numbers that disagree.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every train step needs: examples per batch, the optimiser with clipping of the global norm, its reports.

    Attributes:
        sgd: plain stochastic gradient descent in place of AdamW, with the same decay of weights.
        aux_metrics: training reports, as evaluation does, how good the outputs are, and both the loss of each example.

    Raises:
        ValueError: naming all fields whose values cannot work.
    """

    batch: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    sgd: bool = False
    aux_metrics: bool = False

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

    def _wrong_types(self) -> Iterator[str]:
        """Yield a sentence per field whose value is not of the field's type; an int is accepted for a float."""
        for field in fields(self):
            value = getattr(self, field.name)
            accepted = (int, float) if field.type is float else field.type
            assert isinstance(accepted, (type, tuple)), f"{field.name} must be annotated with int, float or bool"
            if not isinstance(value, accepted) or (isinstance(value, bool) and field.type is not bool):
                yield f"{field.name} is {value!r}, but must be of type {getattr(field.type, '__name__', field.type)}"
            elif isinstance(value, float) and not math.isfinite(value):
                yield f"{field.name} is {value!r}, but must be finite"

    def _not_positive(self, *names: str) -> Iterator[str]:
        for name in names:
            if getattr(self, name) <= 0:
                yield f"{name} is {getattr(self, name)}, but must be more than 0"

    def _not_a_rate(self, name: str) -> Iterator[str]:
        value = getattr(self, name)
        if not 0 <= value < 1:
            yield f"{name} is {value}, but must be at least 0 and less than 1"
