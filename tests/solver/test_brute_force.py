"""The solver against brute force: ten thousand small problems with memory rows and forbidden pairs.

Hypothesis draws seeds; each seed gives a batch of problems, because making a problem entry by entry takes longer than to solve
it. All choices of a problem are enumerated by arrays. Tunings differ in which method is used: elimination, dual ascent, integer
programs, sweeps with prices.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.branching import Branching, Part, choose_by_branching, shrink
from autopar.solver.budget import Budget
from autopar.solver.followers import follow
from autopar.solver.local_search import Moves
from autopar.solver.memory_prices import PricedAscent
from autopar.solver.memory_rows import MemoryRow, SpanRows, Spans
from autopar.solver.outcomes import Chosen, DoesNotFit, Unfinished, Unreachable
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.solve import choose
from autopar.solver.tuning import Tuning

TUNINGS = (
    Tuning(),
    Tuning(entries=0, quick_entries=0, small_pairs=4),
    Tuning(tiny_pairs=0, memory_pairs=20, rows_at_once=0),
    Tuning(swept_pairs=0, priced_sweeps=30, entries=0),
)


def random_problem(random: np.random.Generator, tuning: Tuning) -> ChoiceProblem:
    """Up to five nodes of up to three choices; a third of them with many forbidden pairs, two thirds with memory rows."""
    count = int(random.integers(1, 6))
    sizes = random.integers(1, 4, count)
    forbidden = random.choice([0.0, 0.1, 0.45])
    costs = [random.integers(0, 20, size).astype(float) for size in sizes]
    edges = {}
    for u, v in itertools.combinations(range(count), 2):
        if random.uniform() < 0.6:
            matrix = random.integers(0, 20, (sizes[u], sizes[v])).astype(float)
            matrix[random.uniform(size=matrix.shape) < forbidden] = np.inf
            edges[u, v] = matrix
    rows = []
    for t in range(int(random.integers(0, 4))):
        alive = np.flatnonzero(random.uniform(size=count) < 0.7).tolist()
        sizes_of = {v: random.integers(0, 10, sizes[v]).astype(float) for v in alive}
        rows.append(MemoryRow(f"point {t}", sizes_of, float(random.integers(0, 4))))
    limit = max((row.least() for row in rows), default=0.0) + float(random.integers(-1, 13))
    given = SpanRows(Spans.of(rows)) if random.uniform() < 0.3 and rows else rows
    return ChoiceProblem(costs=Costs.of(costs, edges), rows=given, limit_bytes=limit, proof=0.0, tuning=tuning)


@functools.cache
def all_choices(sizes: tuple[int, ...]) -> np.ndarray:
    """Every choice of nodes of so many choices each, ints (all choices, nodes)."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*map(np.arange, sizes), indexing="ij")], axis=1)


def best_of(problem: ChoiceProblem) -> tuple[float, float]:
    """The least objective within memory, and without, over all choices."""
    nodes = list(problem.costs.nodes.values())
    every = all_choices(tuple(map(len, nodes)))
    value = sum(cost[every[:, v]] for v, cost in enumerate(nodes))
    for (u, v), matrix in problem.costs.edges.items():
        value = value + matrix[every[:, u], every[:, v]]
    fits = np.ones(len(every), dtype=bool)
    for row in problem.rows:
        used = sum((b[every[:, v]] for v, b in row.bytes_of.items()), np.full(len(every), row.fixed_bytes))
        fits &= used <= problem.limit_bytes
    return float(np.min(np.where(fits, value, np.inf))), float(np.min(value))


def assert_right(problem: ChoiceProblem, is_exact: bool) -> None:
    best, free = best_of(problem)
    found = choose(problem)
    if isinstance(found, Chosen):
        assert problem.fits(found.numbers)
        assert found.seconds == pytest.approx(problem.costs.value(found.numbers))
        assert found.lower_bound_s <= best + 1e-6 * abs(best) + 1e-9
        assert found.seconds >= best - 1e-9
        assert not is_exact or found.seconds == pytest.approx(best, rel=1e-6), f"{found}, not {best}"
    elif isinstance(found, DoesNotFit | Unreachable):
        assert not np.isfinite(best), f"{found}, but there is one of {best}"
        assert isinstance(found, DoesNotFit) or not np.isfinite(free)
    else:
        assert isinstance(found, Unfinished)
        assert not is_exact


@pytest.mark.sampled(2)
@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(
    ("number", "batch"),
    [
        (0, 200),
        (1, 120),
        (2, 50),
        (3, 10),
        pytest.param(0, 620, marks=pytest.mark.slow),
        pytest.param(1, 320, marks=pytest.mark.slow),
    ],
)
def test_the_optimum_is_that_of_brute_force_and_nothing_is_ruled_out_that_is_possible(
    number: int, batch: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    for _ in range(batch):
        assert_right(random_problem(random, TUNINGS[number]), is_exact=number in (0, 3))


@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1), st.integers(0, 60_000))
def test_a_budget_or_a_quick_answer_is_legal_and_the_same_twice(seed: int, work: int) -> None:
    random = np.random.default_rng(seed)
    for number in range(20):
        problem = random_problem(random, TUNINGS[number % len(TUNINGS)])
        results = []
        for _ in range(2):
            asked = dataclasses.replace(problem, budget=Budget(work=work), is_quick=number % 3 == 0)
            assert_right(asked, is_exact=False)
            results.append(choose(dataclasses.replace(asked, budget=Budget(work=work))))
        assert results[0] == results[1]


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_leaders_have_the_optimum_of_the_whole_and_the_way_back(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(20):
        problem = random_problem(random, TUNINGS[0])
        led = follow(problem)
        best, free = best_of(problem)
        if isinstance(led, Unreachable):
            assert not np.isfinite(free)
        elif led is not None:
            assert best_of(led.problem) == (pytest.approx(best), pytest.approx(free))
            numbers = [int(random.integers(len(cost))) for cost in led.problem.costs.nodes.values()]
            whole = led.extend(numbers)
            assert problem.costs.value(whole) == pytest.approx(led.problem.costs.value(numbers))
            assert problem.fits(whole) == led.problem.fits(numbers)
            assert led.restrict(whole) == tuple(numbers)


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_spans_say_what_the_rows_say_and_needed_rows_say_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(40):
        problem = random_problem(random, TUNINGS[0])
        rows, spans = list(problem.rows), Spans.of(problem.rows)
        choice = np.array([random.integers(len(cost)) for cost in problem.costs.nodes.values()])
        used = np.array([row.used(choice.tolist()) for row in rows])
        assert spans.used_by(choice) == pytest.approx(used)
        assert spans.least() == pytest.approx(np.array([row.least() for row in rows]))
        beyond = spans.beyond_least()
        assert beyond.used_by(choice) == pytest.approx(used)
        needed = beyond.take_rows(beyond.find_needed(problem.limit_bytes))
        fits = (needed.used_by(choice) <= problem.limit_bytes).all()
        assert fits == (used <= problem.limit_bytes).all()


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_a_repair_fits_or_ends_before_it_comes_to_the_same_choice_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(25):
        problem = random_problem(random, TUNINGS[0])
        moves, budget = Moves(problem.costs, problem.spans, problem.limit_bytes), Budget()
        sizes = moves.flat.sizes
        prices = random.uniform(0, 3, int(sizes.sum()))
        found = moves.repair(random.integers(0, sizes), prices, budget, most_moves=10_000)
        assert found is None or problem.fits(found.tolist())
        assert budget.spent <= math.prod(sizes.tolist()) * (len(moves.place) + len(moves.spans.used))


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_what_fits_beside_the_least_of_all_others_is_what_each_row_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(25):
        problem = random_problem(random, TUNINGS[0])
        sizes = [len(cost) for cost in problem.costs.nodes.values()]
        if problem.least_bytes() <= problem.limit_bytes:
            fit = problem.spans.find_fitting(problem.limit_bytes, np.cumsum([0, *sizes]))
            expected = [least_with(problem, v, p) <= problem.limit_bytes for v, n in enumerate(sizes) for p in range(n)]
            assert fit.tolist() == expected


def least_with(problem: ChoiceProblem, v: int, p: int) -> float:
    """Bytes that no choice of the other nodes can avoid in some row if node v takes p."""
    return max(
        (row.least() + row.bytes_of[v][p] - row.bytes_of[v].min() for row in problem.rows if v in row.bytes_of),
        default=-np.inf,
    )


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_sweeps_with_prices_bound_from_below_and_choose_what_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(15):
        problem = random_problem(random, dataclasses.replace(TUNINGS[0], priced_sweeps=25, good_enough=-1.0))
        best, _ = best_of(problem)
        if problem.rows and np.isfinite(best):
            ascent = PricedAscent(problem)
            swept = ascent.run()
            assert ascent.lower <= best + 1e-9 * abs(best) + 1e-9
            assert swept.lower_bound_s <= best + 1e-9 * abs(best) + 1e-9
            assert swept.numbers is None or (problem.fits(swept.numbers) and swept.seconds >= best - 1e-9)


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1))
def test_branching_finds_the_optimum_or_proves_that_nothing_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    few = dataclasses.replace(Tuning(), branch_root_sweeps=1, branch_sweeps=1, branch_share=0.0, branch_plunge=0.1)
    often = dataclasses.replace(few, branch_share=1e9, entries=0)
    for number in range(90):
        problem = random_problem(random, (few, often, Tuning())[number % 3])
        problem = dataclasses.replace(problem, tuning=dataclasses.replace(problem.tuning, good_enough=0.0))
        if not problem.rows:
            continue
        best, _ = best_of(problem)
        found = choose_by_branching(problem, None)
        if isinstance(found, Chosen):
            assert found.seconds == pytest.approx(best, rel=1e-6), f"{found}, not {best}"
            assert problem.fits(found.numbers)
            assert found.lower_bound_s == pytest.approx(best, rel=1e-6)
        else:
            assert isinstance(found, DoesNotFit)
            assert not np.isfinite(best)


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1), st.integers(0, 60_000))
def test_branching_cut_short_leaves_a_bound_and_what_is_better_than_the_choice_known(seed: int, work: int) -> None:
    random = np.random.default_rng(seed)
    for number in range(40):
        problem = random_problem(random, dataclasses.replace(Tuning(), good_enough=0.0, branch_sweeps=1))
        if not problem.rows:
            continue
        best, _ = best_of(problem)
        known = choose(dataclasses.replace(problem, is_quick=True)) if number % 2 else None
        known = known if isinstance(known, Chosen) else None
        results = []
        for _ in range(2):
            found = choose_by_branching(dataclasses.replace(problem, budget=Budget(work=work)), known)
            results.append(found)
            assert isinstance(found, Chosen | DoesNotFit | Unfinished)
            assert not isinstance(found, DoesNotFit) or not np.isfinite(best)
            if isinstance(found, Chosen):
                assert problem.fits(found.numbers)
                assert found.seconds == pytest.approx(problem.costs.value(found.numbers))
                assert found.lower_bound_s <= best + 1e-6 * abs(best) + 1e-9
                assert found.seconds <= (known.seconds if known else np.inf)
        assert results[0] == results[1]


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1))
def test_shrinking_keeps_every_choice_that_fits_and_is_good_enough(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(40):
        problem = random_problem(random, Tuning())
        if not problem.rows:
            continue
        best, _ = best_of(problem)
        left = tuple(np.arange(len(cost)) for cost in problem.costs.nodes.values())
        shrunk = shrink(problem, left, best)
        if shrunk is None:
            assert not np.isfinite(best)
        elif np.isfinite(best):
            assert best_of(shrunk.problem)[0] == pytest.approx(best)
            numbers = [int(random.integers(len(cost))) for cost in shrunk.problem.costs.nodes.values()]
            whole = [int(each[numbers[u]]) for u, each in zip(shrunk.leader, shrunk.choice_of, strict=True)]
            value = shrunk.problem.costs.value(numbers)
            assert not np.isfinite(value) or value == pytest.approx(problem.costs.value(whole))
            assert problem.fits(whole) == shrunk.problem.fits(numbers)


@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_a_part_keeps_what_is_better_than_the_choice_known(seed: int) -> None:
    random = np.random.default_rng(seed)
    for number in range(30):
        problem = dense_problem(random)
        best, _ = best_of(problem)
        search = Branching(problem, None)
        search.upper = best + random.uniform(0, 0.3)
        left = tuple(np.arange(len(cost)) for cost in problem.costs.nodes.values())
        whole = Part(-np.inf, left, np.zeros(len(search.problem.rows)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "_try", lambda choice: None)  # else the best choice is known too soon
            part = search._bound(whole, 2 + number % 4, is_solved=True)
        assert part is not None
        assert part.lower <= best + 1e-6
        assert best_of(problem.restrict(part.left))[0] == pytest.approx(best)


def dense_problem(random: np.random.Generator) -> ChoiceProblem:
    """Six nodes of four choices, each pair joined, so that sweeps leave a gap; two rows of memory, in parts of the room."""
    costs = [random.uniform(0, 1, 4) for _ in range(6)]
    edges = {pair: random.uniform(0, 1, (4, 4)) for pair in itertools.combinations(range(6), 2)}
    rows = [MemoryRow(str(t), {v: random.integers(0, 5, 4) / 4 for v in range(6)}) for t in range(2)]
    limit = max(row.least() for row in rows) + 1.0
    tuning = dataclasses.replace(Tuning(), good_enough=0.0)
    return ChoiceProblem(costs=Costs.of(costs, edges), rows=rows, limit_bytes=limit, tuning=tuning)


def test_what_a_node_uses_takes_room_for_what_changes_and_not_for_every_row() -> None:
    rows = 10**6
    spans = Spans.join(
        [(0, 0, rows, np.array([0.0, 1.0, 1.0])), (0, 10, 20, np.array([2.0, 2.0, 2.0]))], np.zeros(rows)
    )
    levels = spans.find_levels([3])[0]
    assert levels.cuts.tolist() == [0, 10, 20, rows]
    assert levels.used.tolist() == [[0.0, 2.0, 0.0], [1.0, 3.0, 1.0]]
    assert levels.level_of.tolist() == [0, 1, 1]
