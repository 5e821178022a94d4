"""The tuned numbers of cutting a step into layers and stages, in one value that its passes take as an argument.

None of them changes what a step computes. They trade planning time, or a few operations, against bytes that stages send or keep.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """See the module's text; `TUNING` holds the values in use."""

    # Cuts of equal work: `even_cuts.py`.
    slack: float = 0.3
    """Part of a stage's share of the work by which a cut may move to where fewer bytes cross. A larger part sends less and leaves
    stages more unequal. `benchmarks/pipeline_efficiency.py` measures pipelines that are cut like this."""

    # Clustering into layers: `layers.py`. `benchmarks/stage_search_time.py` measures it on chains of 48 blocks.
    exact_places: int = 1024
    """Up to this many forward equations, every place is a candidate for a cut. The time grows with the square of the places."""
    stretches: int = 32
    """Candidates per layer in a longer chain. More of them find cheaper cuts and take longer."""
    same_place: float = 0.01
    """Places of equal bytes count as one if the work between them is at most this part of the bound on a layer's work. Equal
    blocks are then cut alike, and planned once. A larger part would merge places that are not alike."""
    nearby: float = 0.125
    """A cut is inside a block if cheaper ones are on both sides within this part of the work. With a larger part, the narrowest
    end counts alone where widths change (`benchmarks/weak_scaling.py`, Wide-ResNets)."""
    widening: float = 2.0
    """A cut may send as many times the bytes of the cheapest ones, and more if these are further away than `nearby`. With a
    smaller number, stages of a Wide-ResNet count as the inside of one block, as each halves what crosses; with a larger one,
    the insides of a perceptron's blocks count as ends where it has few of them."""
    furthest: float = 0.3
    """Cheaper cuts are looked for within this part of the work on either side. With a smaller part, a block that is larger than
    it on both sides of a cut is not noticed; from 0.5 on, a cut in the middle is judged by the ends of the model, where little
    may cross."""

    # Stacks of layers: `scan_stacks.py`.
    most_pieces: int = 64
    """A search cuts a scan over layers into at most this many pieces. With more, a scan over a thousand layers would take much
    longer to search than one over sixty (`benchmarks/stage_search_time.py --scan`)."""

    # Recomputation by layers: `recompute_layers.py`.
    recomputed_layers: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    """Numbers of layers that recomputation compares. More numbers come closer to the fewest bytes kept and take longer.
    `benchmarks/planner_time.py` measures steps of up to 48 layers."""
    kept_bytes: int = 1024
    """Results of forward up to this size are kept and not computed again, since they save next to no memory."""


TUNING = Tuning()
"""The values in use."""
