"""The tuned numbers of attention."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One value of each."""

    longest_block: int = 512
    """Queries, and keys, of a block. Longer ones are fewer products, each nearer to what a device can do; the scores of a block,
    its square for each example and head, are what memory must hold."""


TUNING = Tuning()
