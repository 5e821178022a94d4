"""The tuned numbers of the time plan, in one value that its passes take as an argument.

They weigh where an operation runs: before, in or after the loop over microbatches. Every choice computes the same results. No
benchmark sets them, because what counts is which operations end up in the loop: `tests/microbatches` and
`tests/test_strangers_programs.py` compare that with what each step needs. `benchmarks/stage_search_time.py` measures how long
the planning of phases takes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """See the module's text; `TUNING` holds the values in use. Costs are in bytes moved."""

    flops_per_byte: float = 100.0
    """Operations that cost as much as one byte moved."""
    resident: float = 8.0
    """Cost of each byte of an example-dependent value that has to stay in memory. It must be high enough that working on slices
    of the batch is worth a loop."""
    on_examples: float = 2.0
    """Factor on the cost of work on examples that runs outside the loop. Above 1, a leaf of the batch is read in slices wherever
    it can be."""
    prologue_bytes: float = 1.0
    """Extra cost of an equation before the loop. It breaks ties, so that what only the update needs runs after the loop."""
    little: float = 0.01
    """Part of the heavy work on examples that may run outside the loop although it mixes examples, such as a correlation among
    the metrics. A larger part accepts more steps, and lets more work run on the full batch at once."""
    few: float = 0.25
    """The same for heavy work on rearranged examples, which may be a look at a few of them. A larger part accepts more steps."""
    less_for_little: float = 16.0
    """Heavy work outside the loop is penalised this many times less if it is at most `little` of all heavy work. The small
    operation that mixes examples then leaves the loop, and not the large one that feeds it."""
    strictly: float = 8.0
    """Heavy work outside the loop is penalised this many times more if its indices are examples than if they are rearranged
    examples. Where one of two operations has to leave the loop, it is then the one on rearranged examples."""
    if_finite: float = 0.06
    """Each product that takes terms of a sum because its other factor is assumed to be finite costs such a part of what heavy
    work outside the loop does, divided by the operations of the step: all of them together cost less than that work, and each
    more than bytes do. There are then few of them."""


TUNING = Tuning()
"""The values in use."""
