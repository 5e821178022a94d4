"""The tuned numbers of the planner for one mesh, in one value. Those of its solver are `solver/tuning.py`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Which meshes to compare, and how hard to try to meet a memory limit."""

    most_axes: int = 3
    """Logical meshes of more axes are planned only when asked for by shape: each further axis multiplies the planning time
    (`benchmarks/planner_time.py`) and has rarely made a step faster (`benchmarks/planned_rows.py`)."""
    merged_axes: int = 3
    """From so many axes on, choices that exchanging equal axes makes alike are first bounded together; with fewer, the merged
    problem is hardly smaller (`benchmarks/planner_time.py`)."""
    worth: float = 5e-4
    """In a large program a mesh whose bound promises a smaller part of the step than this over the best plan is not planned."""
    most_worth: float = 3e-3
    """Nor is one that promises a smaller part than this, unless what it may save repays the search (below). Llama planned three
    more meshes for 15 s that could save 0.2 % of 0.67 s (`benchmarks/planning_ordinary.py`)."""
    most_worth_within: float = 1e-2
    """Nor is one searched within the memory that promises a smaller part than this without a limit, unless it repays the search.
    The limit takes a part of it, and BERT on two nodes searched for 20 s in vain what promised 0.5 % of 0.28 s (the same)."""
    least_gain: float = 0.1
    """A mesh of `merged_axes` axes or more is only looked at if it may save this part of the step by its bound."""
    repaid_in_steps: int = 1000
    """And if what it may save repays the search in this number of steps: first that for its bound, then that for its plan."""
    axis_factor: float = 2.0
    """How many times longer it takes to look at a mesh of one more axis, at most; 1.2 where it is only bounded. Where less time
    than that is left, it is not begun. With 4, Wide-ResNet on a busy machine lost its bound: a gap of 110 % instead of 43
    (`benchmarks/planning_ordinary.py`, wide-resnet, t5-2-nodes)."""
    bounded: int = 10_000
    """In programs of up to so many equations such a mesh is bounded even if a second axis did not help, for the sake of the
    plan's gap: that takes about a second per 1,000 equations (`benchmarks/planning_ordinary.py`, unet)."""
    bound_s_per_equation: float = 1e-3
    """Seconds per equation that such a mesh and its bound take, as that condition assumes: 0.8 to 3 ms (`planning_ordinary.py`,
    t5-2-nodes; `small_programs.py`, unet)."""
    search_s_per_equation: float = 2e-3
    """And its plan: 1.3 to 6.4 ms in small programs, where it never paid (`benchmarks/small_programs.py`)."""
    quick_s: float = 0.5
    """A bound of such a mesh, or a search on it, that takes no longer than this need not be repaid, and no search goes on for
    longer than this and what it may repay: 14 operations under half of their memory took eight seconds (`small_programs.py`)."""
    far: float = 1.25
    """If the temporaries take this many times the memory that is left for them, other meshes are not tried, but other ways to
    run the step, such as more microbatches."""
    in_vain: int = 2
    """And so it is after this many meshes that a large program does not fit. A GPT of 32 heads took 85 s with all
    meshes in 16 microbatches, of which none fits, before 32 were planned in 9 (`autopar plan gpt --heads 32`, V100s)."""
    undivided: float = 1.02
    """How many times more temporaries a plan without a limit has than if all were divided evenly: 1.005 to 1.02 for BERT and GPT
    (`benchmarks/planning_ordinary.py --tight`). If that is far too much, one microbatch is not planned."""
    weights: float = 0.4
    """Of the memory left for temporaries, the part that weights may take as wholes in a guess of the number of microbatches.
    Without this a GPT of 24 layers on 8 V100s (0.39) was searched in 8, in vain and for a minute, before it was planned in 16;
    with 0.5 the same model on 4, in float16, was guessed at 512, in which no plan was found to fit; it fits in 256."""
    large: int = 2000
    """From so many equations on a search takes so long that a gain has to be worth it (`Worth`)."""
    side_by_side: int = 500
    """From so many equations on several processes plan meshes side by side. A Llama of 32 layers in a scan has 700, and each of
    its meshes of three axes takes 4 to 7 s (`benchmarks/planning_ordinary.py --scan-layers`)."""
    mesh_work: float = 2.5e9
    """Units of work (`solver/budget.py`) that the choice on one mesh may take without a memory limit, about ten seconds. What is
    open then is a gap in the plan (`benchmarks/planning_ordinary.py`, unet)."""
    bounded_pairs: int = 3_000_000
    """Up to so many pairs of choices the steps on a mesh are bounded by dual ascent on the whole problem, which takes a second.
    Beyond, ascent on layers does it if they are alike, whose bound is a third lower for a GPT of 4 layers
    (`benchmarks/planner_time.py`). A dense-net's took three times as long by layers, and was 1.3 % below the step, not 0.2."""
    bound_work: float = 7e8
    """Units of work (`solver/budget.py`) for that, three seconds or less. GPT and BERT of the command line are then within 3 % of
    their bound, and take a quarter longer to plan; with a third of it they are within 17 and 21 %."""
    quick_pairs: int = 200_000
    """Beyond so many pairs that ascent ends after `solver.tuning.Tuning.quick_sweeps`, which takes a fifth of the time that it
    takes to its end and leaves the bound within 0.1 % of that (`benchmarks/planning_ordinary.py`, densenet)."""
    large_pairs: int = 100_000
    """Problems that reductions leave with more pairs than this are searched to within 0.05 % of the best
    (`solver.tuning.Tuning.large_gap`): a quarter of the time that a dense-net takes (`benchmarks/planning_ordinary.py`)."""
    shared_pairs: int = 400_000
    """Up to so many pairs, where layers choose alike, a fan_out may hand on two layouts (`choices/shared_copies.py`). The search
    of a GPT of 24 layers on 2 x 4 devices takes 0.9 s then, 0.4 without; that of a dense-net, of 8 million pairs, 11 s and 5."""
    shared_part: float = 1e-6
    """The part of the step's work, divided evenly, that cutting a shard out of a value must take for that."""
    narrowed: float = 0.01
    """A mesh is searched again where the plan's step waits for this part of itself more than the search took for granted, as
    there is too little compute to hide communication behind (`benchmarks/small_programs.py`)."""
    first_work: float = 2.5e9
    """Units of work that the search on one mesh may take before there is a first plan, where the step may be run in other ways,
    such as more microbatches, or is a stage, in whose place others are chosen: those of GPT-39B take a tenth of it, and with
    scans over its layers some took five times as much, when the clock had ended. With twice as much, a mesh of 2 x 4 took
    61 s of processor and found nothing, where one of 8 had a plan after 10 (`benchmarks/planning_ordinary.py --tight`,
    gpt-v100)."""
    first_limited_s: float = 30.0
    """Seconds for the search of a first plan within the memory on one mesh where the clock leaves less. There may be a plan
    on the next mesh."""
    limited_gap: float | None = None
    """The gap to its bound, relative, at which a plan within a memory limit is good enough; None: that of the solver. Stages have
    one of their own (`inter_op/candidates/tuning.py`)."""
    memory_rounds: int = 6
    """How often the limit of the memory rows is changed before a step counts as too large. Each is a search; more find plans
    nearer to the limit (`benchmarks/memory_error.py` plans under limits)."""
    unseen_part: float = 0.5
    """Of what the best choice without a limit requires above the memory rows, the part that every choice is taken to require,
    where there are other ways to run the step. Of 60 choices of the example models in 0.5 to 0.9 of their memory four required
    less, none of them where this left no room. GPT of 24 layers in half of a V100 searched 17 s for nothing
    (`benchmarks/planning_ordinary.py --tight`)."""
    met_part: float = 1.02
    """Part of the memory limit up to which a choice met on the way may peak, by what it keeps and the least that others peak
    above that, for its peak to be computed at the end of a search in vain. A larger part finds more plans near the limit, and
    takes a second for each choice of a deep step (`benchmarks/weak_scaling.py`, GPT-760M under ZeRO-2)."""


TUNING = Tuning()
