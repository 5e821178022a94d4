"""The tuned numbers of checkpoints."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """See the comments; `benchmarks/checkpoint_cost.py` shows what each is worth."""

    # Most bytes of one chunk of a file. A device that reads a part of a chunk reads all of it, so larger ones cost memory and
    # time where a state is restored onto another layout; smaller ones cost a lookup each.
    chunk_bytes: int = 2**20
    # Most bytes of chunks that a restore has read and not yet copied to the devices. They are held three times: as read, decoded,
    # and put together. More of them keep a disk with a long way busy, and are memory that a restore takes beside the state.
    in_flight_bytes: int = 2**22
    # Bytes that are saved until the heaps are trimmed of what saves have let go of. To trim takes milliseconds, and what is used
    # again has to be had from the system anew: before every save of 18 MiB it doubled what a save costs a step. Without it the
    # heaps of a run hold some tens of MiB more.
    saved_bytes: int = 2**28


TUNING = Tuning()
