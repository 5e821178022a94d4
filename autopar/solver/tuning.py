"""The tuned numbers of the solver, in one value.

None of them changes what is optimal: they trade planning time against the gap that is left between the choice and its proven
bound. `benchmarks/planner_time.py` prints both, by depth of the model; `benchmarks/stage_search_time.py` prints the time of a
pipeline's search, which solves many small problems. Run them before and after a change.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """When to stop, and when to use which method.

    "Pairs" are pairs of choices over all edges, sum_(u,v) |S_u| |S_v|: the number of entries of all edge matrices.
    """

    gap: float = 1e-6
    """Difference between a choice and its bound, relative, that counts as none. Set by `planner_time.py` (column gap)."""
    good_enough: float = 2e-3
    """A large problem is not pursued further once the best choice known, of this problem or of another mesh, is this near to
    the bound (relative). The plan reports the bound. Less costs time in `planner_time.py`; more costs step time."""
    cheap_gap: float = 2e-3
    """The gap (relative) of searches that cost little, also where the caller is content with more: prices with quick searches,
    integer programs of what is left (`stage_search_time.py`)."""

    # Dual ascent and the search around it.
    sweeps: int = 96
    """Forward and backward sweeps of dual ascent at most; more tighten the bound and cost time (`planner_time.py`)."""
    quick_sweeps: int = 16
    """The same for a candidate that is to be cheap: the bound of a GPT of 24 layers is within 0.03 % of its end after 20."""
    bound_gap: float = 1e-9
    """The sweeps end when bound and best choice are this near (relative), unless the caller is content with less."""
    check_every: int = 8
    """Sweeps between two looks at the bound, each of which costs about as much as a sweep (`planner_time.py`)."""
    stalled: float = 1e-7
    """Dual ascent ends when the bound grows by less than this part of the best value between two looks (`planner_time.py`)."""
    large_pairs: float = math.inf
    """In problems of more pairs than this that is enough to be within `large_gap` of the bound; none by default."""
    large_gap: float = 5e-4
    """There the sweeps end when the best choice met is this near to the bound (relative), and so to the best of all.
    In a dense-net of 120 layers 8 sweeps come within 0.05 %, and 96 within 0.03 % (`benchmarks/planning_ordinary.py`)."""
    rounds: int = 4
    """How often the bound may shrink the problem before the best choice is returned with the bound reached
    (`planner_time.py`)."""
    slacks: tuple[float, ...] = (1e-6, 1e-4)
    """Choices this near to the bound (relative) are searched for a good solution, one slack after the other
    (`planner_time.py`)."""
    slack_gaps: tuple[float, ...] = (1e-6, 5e-4)
    """Each of these searches is left out if the best choice known is so near to the bound (relative). The second takes a third
    of the planning of a GPT of four layers, and gains 0.02 % there (`planner_time.py`)."""
    nested: int = 4
    """How deep searches near the bound may be nested. Where all choices cost about the same, each leaves as many choices as the
    one around it, and each level doubles the work."""

    # What a gap is worth.
    gap_work: float = math.inf
    """Units of work that may be spent on closing a gap, for each second by which the best choice known exceeds its bound. No
    limit by default; the planner sets it by what a step of a run may repay (`intra_op/mesh_search.py`)."""
    least_gap_work: float = 2.5e7
    """And so many in any case: a tenth of a second. A U-Net of 3 ms a step took 5 seconds for 0.06 ms (`small_programs.py`)."""

    # Elimination.
    entries: float = 2e7
    """Entries of all tables of exact elimination together: a tenth of a second. Branch and bound takes ten seconds for a
    problem of 10,000 pairs that elimination solves with 5 million entries (14 operations on a mesh of 2 x 4)."""
    quick_entries: float = 2e6
    """The same for a candidate that is to be cheap."""

    # The integer program.
    small_pairs: int = 2_000
    """Problems with at most so many pairs go to the integer program at once: below this it is faster than dual ascent
    (`planner_time.py`)."""
    direct_pairs: int = 30_000
    """And those with at most so many if dual ascent leaves a gap: beyond this the integer program takes longer than all the
    rest (`planner_time.py`)."""
    memory_pairs: int = 100_000
    """Problems with memory rows and at most so many pairs go to the integer program at once, unless they are narrow: it proves B
    and G of `iopddl.py` in seconds, of 34,000 pairs, where prices leave 2.4 %. With a choice to beat, only `direct_pairs` do:
    14 operations on a mesh of 2 x 2 x 2 took five seconds for a choice of twenty times the best known (`small_programs.py`)."""
    direct_share: float = 0.5
    """The part of the budget that it gets there."""
    tiny_pairs: int = 300
    """Problems with memory rows and at most so many pairs are solved to the end by the integer program."""
    direct_work: float = 2e8
    """Units of work for the integer program where prices on memory have found a choice, or are still to be asked and a gap has
    a worth (`gap_work`). To prove 14 operations
    on a mesh of 2 x 4 optimal takes 9 s; the first third of a second finds what there is (`defects.md` D)."""
    last_resort: int = 20
    """So many times `direct_pairs` are accepted where nothing else has found any choice; seconds, but a result."""
    node_limit: int = 500
    """Nodes of branch and bound without memory rows. A limit in nodes, not in seconds, so that plans are reproducible."""
    memory_nodes: int = 5_000
    """The same with memory rows, where the relaxation is weaker (`benchmarks/memory_error.py` plans under limits)."""
    mixed_nodes: int = 50
    """The same where choices are mixed: alike layers make branch and bound long, and its first solutions are good
    (`planner_time.py` under a limit)."""

    # Other meshes' plans as a cutoff.
    searched_pairs: int = 4_000_000
    """With a better choice to beat, a problem with more open pairs than this is not searched (`planner_time.py`)."""

    # Memory rows.
    rows_at_once: int = 400
    """More rows than this enter an integer program one after the other, as its choices break them (`iopddl.py`: P has 30,000)."""
    row_rounds: int = 20
    """How often rows may be added."""
    priced_rows: int = 2_000
    """So many rows get prices at most (`iopddl.py`)."""

    # Dual ascent with prices on memory, for what is large.
    priced_sweeps: int = 400
    """Sweeps at most (`iopddl.py`, K and V)."""
    warm_sweeps: int = 4
    """Sweeps before the first price."""
    repair_every: int = 10
    """Sweeps from one choice that is repaired and improved to the next, which takes longer than a sweep."""
    repair_moves: int = 3_000
    """Moves of one repair at most."""
    mixed_choices: tuple[int, ...] = (12, 8, 5, 3, 2)
    """So many of the best choices that fit are mixed by an integer program; the first number that it can take."""
    swept_pairs: int = 300_000
    """Problems with memory rows and more pairs than this are swept with prices at once, if their best choice without memory is
    not known: to look for that takes longer (`iopddl.py`, K and V)."""
    sweep_share: float = 0.6
    """The part of the budget that sweeps get before the choices are mixed."""
    step_decay: float = 0.98
    """By what a step shrinks where the bound hardly rose."""

    # Branch and bound over memory.
    branched_pairs: int = 2_000_000
    """Problems with memory rows and at most so many pairs, where they are swept with prices and a gap stays, are branched."""
    branch_root_sweeps: int = 200
    """Sweeps with prices over the whole problem."""
    branch_sweeps: int = 20
    """The same over each part, which starts from the prices of the part around it."""
    branch_decay: float = 0.9
    """By what a step of the prices shrinks where the bound did not rise."""
    branch_hope: float = 0.3
    """A step of the prices aims at the bound and this part of it at most, while the best choice known is still far."""
    branch_share: float = 0.1
    """A part is searched at fixed prices once its nodes differ by at most this part of the gap in what they pay for memory."""
    branch_work: float = 2e9
    """Units of work of one such search."""
    branch_plunge: float = 0.5
    """The part next to a branching comes next while its bound is within this part of the gap from the least bound."""
    branch_moves: int = 300
    """Moves of one repair of a choice at most."""

    # Prices on memory.
    price_rounds: int = 24
    """Prices tried at most; each is a search without memory (`stage_search_time.py`)."""
    first_price: float = 1e-3
    """The first price would pay this part of the objective for the bytes that exceed the limit (`stage_search_time.py`)."""
    price_growth: float = 4.0
    """The box of prices grows by this factor while nothing fits (`stage_search_time.py`)."""
    largest_price: float = 1e6
    """Prices beyond so many objectives per limit are not tried: what does not fit then never will."""

    # Repeated layers.
    deep: int = 2_500
    """Problems of up to so many nodes are solved whole: they take under a second or two anyway (`planner_time.py`)."""
    worth: float = 0.6
    """Ties between alike nodes are used if they leave at most this part of the nodes (`planner_time.py`)."""
    near: float = 1e-3
    """Dual ascent of a deep problem ends when solution and bound are this near, relative (`planner_time.py`, column gap)."""
    lifted_sweeps: tuple[int, ...] = (4, 16)
    """Sweeps over the tied problem after which the bound is lifted to the whole, ascending; the best counts. 16 raise the bound
    of T5 on two nodes by 6 %, 32 by 8 % in half as much time again (`benchmarks/planning_ordinary.py`, t5-2-nodes)."""
    radius: int = 4
    """How many edges away nodes must look alike to be tied: more keeps more of the ends apart, and ties less
    (`planner_time.py`)."""

    def work_on(self, gap_s: float) -> float:
        """Units of work that may be spent on closing a gap of so many seconds, which is infinite where no choice is known."""
        return self.least_gap_work + self.gap_work * gap_s if gap_s > 0 else self.least_gap_work

    @property
    def exact_gap(self) -> float:
        """Relative gap of the integer program where its result is final."""
        return self.gap / 10

    @property
    def program_gap(self) -> float:
        """Relative gap of the integer program where a good choice will do."""
        return min(self.good_enough, self.cheap_gap) / 2

    @property
    def rough_gap(self) -> float:
        """Relative gap of the integer program where its result is one step of a search."""
        return 100 * self.gap


TUNING = Tuning()
