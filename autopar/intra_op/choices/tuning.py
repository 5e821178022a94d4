"""The tuned numbers of prices on one mesh, in one value that their users take as an argument."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """See the module's text; `TUNING` holds the values in use."""

    row_bytes: int = 128 * 1024
    """The longest row that a kernel reduces without reading it twice: half of the 256 KiB of registers of a multiprocessor. A
    longer row lets more of a softmax be one kernel in the prices; `benchmarks/planned_rows.py` compares them with published
    runs."""
    tie: float = 1e-3
    """Of the bytes that an operation inside a kernel gives, the part that is priced although it stays in registers: enough that
    of choices that move as much the one that computes less wins, too little to outweigh what is moved
    (`benchmarks/planned_rows.py`)."""


TUNING = Tuning()
