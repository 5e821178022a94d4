"""The tuned numbers of the outer search, in one value that its passes take as an argument.

None of them changes what a plan means. Each trades planning time against the chance that a better plan is missed.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """See the module's text; `TUNING` holds the values in use."""

    # One mesh: `one_mesh.py`.
    dear: float = 0.2
    """Part of the step's time without a limit that a memory limit may cost before microbatches and recomputation are compared.
    A larger part plans faster and keeps dearer plans. `tests/inter_op/test_one_mesh.py` compares with every way by hand."""

    repeated_share: float = 0.25
    """Of a step on one mesh that does all forward work again, the part that this takes: forward is a third of the rest."""
    far_slower: float = 3.0
    """If a step takes more than this many times what its work takes, ways with forward work done again that were left after
    little work, as others were to follow, are searched once more, as if they were the last. A ViT of 12 layers within 300 MB per
    V100 takes 1.1 s so, and 5 s without (`tests/inter_op/test_insisting.py`). A smaller number plans longer."""
    begun: float = 0.5
    """Where there is a plan, another way to run the step is only begun if the clock leaves this part of what the last one took,
    and one mesh only if it leaves this part of what all stages took. GPT-39B on 64 V100s (`benchmarks/planning_ordinary.py`)
    made another step for 27 s, of which the clock left two."""

    # One mesh or stages: `one_or_stages.py`. "Stages on one node" in benchmarks/README.md holds the measured planning times.
    surely_slower: float = 1.3
    """Across nodes, one mesh is not planned if one stage, as the sum of its layers, takes this many times the best stages' time.
    `benchmarks/layer_sums.py` shows how far such a sum is off: 3 %, and 27 % where latencies dominate."""
    reduced: float = 1.0
    """Across nodes, one mesh is planned before stages if reducing the gradients among nodes takes at most this part of the work.
    What is planned first and wins spares the other (`benchmarks/planning_ordinary.py`, two nodes)."""
    held: float = 0.5
    """And if the state takes at most this part of a node's memory: gradients and activations need the rest. A model that fills a
    node with its state runs in stages (`benchmarks/planning_ordinary.py`, GPT-39B on 64 and 1,024 devices)."""
    many: float = 16.0
    """And if its temporaries exceed the memory by at most this factor: one mesh then needs few microbatches, of which one number
    is planned. GPT on 8 V100s (9, `benchmarks/planning_ordinary.py`) is planned twice as fast for it; GPTs and a mixture on 4
    to 16 V100s (30 to 216, `benchmarks/weak_scaling.py`) left no time for stages."""
    many_across: float = 3.0
    """The same across nodes, where microbatches send more over slow links and one mesh takes longer to plan. A Wide-ResNet on 32
    V100s (10, `benchmarks/weak_scaling.py`) got one mesh in 192 microbatches, five times slower than its stages. A Llama on 32
    A100s in 0.6 of its memory (3.9, `benchmarks/planning_ordinary.py --tight`) got one that took most of the clock to plan, and
    is 5 % slower than its stages."""
    least_gain: float = 0.1
    """After one mesh, stages are searched only if the bound on their gain exceeds this part of one mesh's step. Stages reach
    about half of the bound."""
    repaid_in_steps: int = 1000
    """After one mesh, stages are searched only if the bound on their gain repays the search in this number of steps."""
    search_s: float = 2.0
    """Seconds that a search of stages takes on one core at least, as that condition assumes. `benchmarks/stage_search_time.py`
    measures them."""
    search_s_per_equation: float = 5e-3
    """Seconds per equation of the step that a search of stages takes beyond that. GPTs of 4 layers took 0.5 to 4 ms per
    equation; `benchmarks/stage_search_time.py` measures deeper ones."""
    searched_first: int = 2000
    """Equations from which on stages of a given number are searched by layers before equal ones are planned as wholes."""

    # Timetables: `timetables.py`, `compare_timetables.py` and `search.py`.
    virtual_stages: tuple[int, ...] = (2, 4)
    """Stages per mesh with which interleaved schedules are compared. More of them idle less and send more often."""
    widest: int = 8
    """Numbers of microbatches are compared from the usual one divided by this to the usual one times this."""
    most_counts: int = 7
    """If more numbers of microbatches than this are possible, this many are compared, evenly spaced. Most are only estimated.
    `tests/inter_op/test_search.py` compares the result with a search of each timetable alone."""
    roomier: float = 2.0
    """Where given stages do not fit the memory, so many times as many microbatches are tried next as would do if all that a stage
    needs were divided by them. A failure takes as long as a plan: GPT-2.6B in 2 stages of 2 V100s took three, and the clock."""
    roomier_mesh: float = 1.5
    """The same for one mesh, where stages are planned and the clock goes on: it is better then to fit in too many microbatches,
    and to try fewer if there is time. A Wide-ResNet on 4 V100s (`benchmarks/weak_scaling.py`) spent what stages had left in
    24, which exceed the memory by 2 %, and has 31.3 s in 48 in place of 43.2 in stages."""
    worth: float = 0.03
    """Relative gain that an estimate must promise before a timetable is planned. Sums of layers are up to 3 % off
    (`benchmarks/layer_sums.py`), so a smaller gain may be none."""
    early: float = 1 / 3
    """The part of the search's time in which other numbers of microbatches are planned for little."""
    worth_early: float = 0.01
    """The same while it is `early`. GPT-2.6B on 8 V100s (`benchmarks/weak_scaling.py`) was planned in 64
    microbatches in 14 s; 512 promised 1.6 % less, and keep that. When the clock ends the search, stages on equal submeshes may
    take so much longer than unlike ones: GPT-39B takes 347 s in equal ones and 337 s in others, which are planned as fast."""
    worth_late: float = 0.05
    """The same later. Numbers that promised a tenth less then kept a third of it or all, and those that promised up to 4 % less
    kept nothing (`benchmarks/weak_scaling.py`, `benchmarks/planning_ordinary.py`)."""
    near: float = 0.15
    """Relative excess over the best within which an estimate is planned all the same: of a number of microbatches next to the
    best one, or of stages that have to beat one mesh. The estimate assumes equal stages, and unequal ones may idle less."""

    searched: float = 0.5
    """The part of the time that is left which the search over layers may take. The chosen stages are planned as wholes in the
    rest, which takes as long for GPT-39B, and half as long on 1,024 devices (`benchmarks/planning_ordinary.py`)."""
    ways_at_once: int = 4
    """Timetables for which stages are chosen side by side, before the best of them is looked at. More use more cores, and choose
    for timetables that are not needed (`benchmarks/stage_search_time.py`)."""
    last_look_s: float = 3.0
    """Seconds in which the last choice among planned layers is made after the clock has ended the search. Without them it is the
    first choice that fits (`benchmarks/planning_ordinary.py`, GPT-39B)."""
    hoped: float = 1.3
    """If the clock ends the search, an estimate of stages on submeshes on which no layer is planned counts as this many times
    longer. Submeshes that were planned turned out up to this much slower than estimated (`benchmarks/planning_ordinary.py`, GPT
    on 1,024 devices)."""

    # Mixed clusters: `plan_on_kinds.py`.
    together: float = 0.9
    """Stages on all kinds are planned before the fastest kind alone if their bound is at most this part of that one's. The first
    plan takes as long as it takes, and the fastest kind's took the whole clock (`benchmarks/mixed_clusters.py`)."""
    alone: float = 0.2
    """The part of the time that is left for one kind of node alone."""
    order: float = 0.8
    """The part of the time that is left for stages on the kinds in one order: the fastest kind first. Another order is seldom
    much better, and has the rest (`benchmarks/mixed_clusters.py`)."""

    # The dynamic program over layers: `search.py`, `layer_costs.py` and `planned_layers.py`.
    tolerance: float = 1e-3
    """Relative gain below which the dynamic program stops looking. Layers' costs are less exact than this
    (`benchmarks/layer_sums.py`)."""
    room: float = 1.0
    """Part of the memory limit that stages may use by the sum of their layers. The sum is near what stages need, and adds up the
    fastest layouts of layers, where stages that are planned as wholes find leaner ones (`benchmarks/weak_scaling.py`: in 0.92 the
    mixture on 64 V100s took twice as long)."""
    smaller_rooms: tuple[float, ...] = (0.92, 0.82, 0.7)
    """Parts of the memory limit in which stages are chosen again if those chosen in `room` do not fit as wholes, one after the
    other; the first also if they are `squeezed`. The other way to a plan is one mesh, which takes minutes to plan then
    (`benchmarks/weak_scaling.py`, GPT-39B on 64 V100s)."""
    squeezed: float = 0.06
    """If stages that fit take this part longer than their layers promised, they may have been squeezed into the memory, and are
    chosen again in less of it. One mesh may as well: stages that promise at most this much more than it are planned before it
    where it needs many microbatches (`benchmarks/weak_scaling.py`, gpt-2, moe-4). A smaller part plans stages twice for less than
    it can gain (`benchmarks/planning_ordinary.py --tight`, GPT of 24 layers on V100s: 4 %, 14 s)."""
    layer_counts: tuple[int, ...] = (64, 48, 40, 32, 24, 16, 12, 8, 4, 2)
    """Numbers of layers into which a step without block boundaries may be clustered. The number whose cuts are at ends of blocks
    wins, the largest among equals. `benchmarks/stage_search_time.py` plans 48 layers."""
    layer_axes: int = 2
    """Layers, and so stages, are planned on logical meshes of at most this many axes. A third axis is seldom chosen and adds
    meshes to plan for every layer (`benchmarks/stage_search_time.py`)."""
    divided: float = 0.5
    """The part of a layer's work that a prime number of devices has to divide, or the layer is taken to make no use of it. Three
    devices divide the joined projections of a transformer's attention, a quarter of its work, and were no faster than one
    (`benchmarks/planning_ordinary.py`, GPT on 1,024 devices)."""
    alike: float = 0.9
    """The part of the forward work in the layer that repeats from which on the best number of microbatches to begin with is that
    for this layer alone. Of 1,024 devices (`benchmarks/planning_ordinary.py`) it is the number that is chosen in the end, and a
    search from the usual one planned layers in that for 14 s; the two halves of a T5 mislead each other."""
    same_meshes: float = 1.1
    """If many layers are alike, the other layers are planned only on meshes on which those take at most this many times their
    best, since a stage has one mesh for all its layers. A larger factor plans more meshes
    (`benchmarks/stage_search_time.py`)."""

    recomputed_shares: tuple[float, ...] = (0.0, 0.5, 1.0)
    """The parts of its forward work that the backward pass of a stage may do again. The time of the dynamic program grows with
    their number (`benchmarks/stage_search_time.py`, GPT-39B)."""

    # Stages as wholes: `plan_stages.py` and `search_pipeline.py`.
    second_looks: int = 1
    """Other numbers of stages that are planned as wholes if the chosen number takes longer than its layers promised. The formula
    of zb-h1 holds for equal stages. A GPT of 12 layers (`benchmarks/stage_search_time.py --layers 12`) gains 5 %."""
    stage_gap: float = 0.02
    """The gap to its bound, relative, at which a stage's plan within the memory is not searched to the end. Sums of layers, by
    which stages are cut, are less exact. To the end it takes four times as long for the stages of GPT-39B, and finds the same
    plans (`benchmarks/stage_search_time.py`)."""
    memory_rounds: int = 4
    """Times that a stage is planned again for its microbatches in flight before it counts as too large."""


TUNING = Tuning()
"""The values in use."""
