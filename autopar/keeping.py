"""What a schedule keeps of the microbatches that it has in flight: data between the passes, which plan stages, and the runtime.

In: from a planned stage, `Kept`: what tasks hand to its tasks. Out: from a schedule, `Keeping`: how many microbatches each stage
has in flight, and how many bytes of what is handed on are there at once (`runtime/lifetimes.py`). What can go wrong: a `Kept` of
a split backward where the schedule has none; `StageMemory` knows both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

TaskKind = Literal["forward", "backward", "input_gradient", "weight_gradient"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes per device and microbatch of what `maker` of stage `source` makes, and `reader` of the keeping stage reads last."""

    maker: TaskKind
    source: int
    reader: TaskKind
    bytes: int


@dataclass(frozen=True)
class Keeping:
    """`in_flight`: microbatches per stage. `is_split`: whether input and weight gradients are two tasks.

    `most_bytes(stage, kept)`: bytes per device that a stage keeps at most of all microbatches together.
    """

    in_flight: tuple[int, ...]
    is_split: bool
    most_bytes: Callable[[int, Sequence[Kept]], int]
