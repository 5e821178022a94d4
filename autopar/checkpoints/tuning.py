"""The tuned numbers of checkpoints."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """See the comments; `benchmarks/checkpoint_cost.py` shows what each is worth."""

    # Most bytes of one chunk of a file. A device that reads a part of a chunk reads all of it, so larger ones cost memory and
    # time where a state is restored onto another layout; smaller ones cost a lookup each.
    chunk_bytes: int = 2**23
    # Most bytes that a restore reads ahead of the copy to the devices. More of them keep disks with a long way busy, and are the
    # memory that a restore takes beside the state itself.
    in_flight_bytes: int = 2**25


TUNING = Tuning()
