"""How long and how often things are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All trade the time that `calibrate` takes against steady figures; `benchmarks/calibrated_plans.py` shows how far it comes.

    Attributes:
        case_s: A case is repeated inside its program until a call takes about this long.
        chains: Small operations are measured in so many chains side by side.
        chain_length: How many small operations a chain has.
        repeats: How often a program without a loop does what it measures.
        pairs: How often a program alternates compute and a collective.
        merged: Independent all-reduces at once; so many are a few layers' statistics or the gradients of a block.
        waiting_width: Elements of a collective whose waiting is measured: too few for their bytes to count.
        warm_rounds: Rounds that do not count.
        beside_length: Elements on which each device computes beside transfers: half a millisecond, as short tasks of stages.
        disturbed: Compute that takes this many times its processor time was disturbed by other programs.
    """

    case_s: float = 0.02
    chains: int = 4
    chain_length: int = 16
    repeats: int = 4
    pairs: int = 8
    merged: int = 4
    waiting_width: int = 64
    warm_rounds: int = 2
    beside_length: int = 2**14
    disturbed: float = 1.25


TUNING = Tuning()
