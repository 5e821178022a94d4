"""Prices on memory: how a choice that is too large is traded for one that fits.

In: a problem with memory rows, and choices known. With a price lambda_t >= 0 per row, in seconds per limit,

    L(lambda) = min_s  cost(s) + sum_t lambda_t (used_t(s) / limit - 1)   <=   the constrained optimum.

L is concave, and every choice s ever met bounds it from above, by a plane: the next prices are where the lowest of these planes
is highest (cutting planes; Kelley 1960), within a box that grows while nothing fits. The solution at these prices, a search
without memory, is a new plane, a lower bound, and, if it fits, a candidate. Out: a `Priced`. What can go wrong: the best prices
leave a gap, of the kind that a knapsack has: one choice is just too large, the next much too small. The choices met on the way,
mixed node by node (`within_memory.mix_choices`), then come close.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autopar.solver.dual_ascent import Ascent
from autopar.solver.integer_program import Limits, Program, solve_program
from autopar.solver.local_search import Moves
from autopar.solver.memory_rows import Spans
from autopar.solver.messages import argmin_of_parts
from autopar.solver.outcomes import Numbers, Unfinished, Unreachable
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.search import Found

WORK_PER_ENTRY = 5.0
"""Units of work that a sweep takes beside its messages for each entry of the spans: their prices, and what a choice uses."""
Solve = Callable[[Costs], Found | Unreachable | Unfinished]
"""The search without memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A choice that was met.

    Attributes:
        numbers: the choice of every node.
        seconds: its objective.
        excess: by how much it exceeds the limit in each row with a price, in limits, negative where it is below (rows,).
        fits: whether every row is within the limit.
    """

    numbers: Numbers
    seconds: float
    excess: np.ndarray
    fits: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Priced:
    """What prices came to.

    Attributes:
        best: the fastest trial that fits, if one does.
        lower_bound_s: proven: no choice that fits takes less.
        trials: all choices met, the fastest first.
        is_exact: whether each price was searched to its optimum, so that a longer search finds the same.
    """

    best: Trial | None
    lower_bound_s: float
    trials: tuple[Trial, ...]
    is_exact: bool


def price_memory(problem: ChoiceProblem, known: Sequence[Numbers], lower_bound_s: float, *, solve: Solve) -> Priced:
    """Try prices until bound and best trial are near, the bound reaches the cutoff, or is as high as prices make it.

    Args:
        problem: with at least one memory row.
        known: choices met before; the first is the best without a limit.
        lower_bound_s: a bound known before.
        solve: finds the best choice of an objective, the problem's with prices on its nodes' choices.
    """
    tuning = problem.tuning
    spans = problem.spans.beyond_least()
    spans = spans.take_rows(_find_rows(spans, problem, known[0]))
    trials = [_try_choice(problem, spans, numbers) for numbers in dict.fromkeys(known)]
    scale = abs(trials[0].seconds) or 1.0
    box = tuning.first_price * scale / max(float(trials[0].excess.max()), tuning.first_price)
    room = 1.0 - spans.fixed / problem.limit_bytes
    lower, is_exact, last = lower_bound_s, True, np.empty(0)
    for _ in range(tuning.price_rounds):
        if problem.budget.is_over:
            break
        best = _fastest(trials)
        if lower >= problem.cutoff_s:
            break
        if best is not None and best.seconds - lower <= tuning.good_enough * best.seconds:
            break
        highest, prices = _best_prices(trials, box)
        at_edge = prices.sum() >= box * (1 - 1e-6)
        if not at_edge and highest - lower <= tuning.good_enough / 10 * scale:
            break
        if np.array_equal(prices, last):  # there was no new plane
            break
        last, priced = prices, _add_prices(problem, spans, prices)
        found = solve(priced)
        is_exact = is_exact and isinstance(found, Found) and found.gap == 0
        if not isinstance(found, Found):
            break
        lower = max(lower, priced.value(found.choice) - found.gap - float(prices @ room))
        trial = _try_choice(problem, spans, tuple(found.choice.values()))
        if all(trial.numbers != other.numbers for other in trials):
            trials.append(trial)
        if at_edge and not trial.fits:
            box *= tuning.price_growth
            if box > tuning.largest_price * scale:
                break
    ordered = {trial.numbers: trial for trial in sorted(trials, key=lambda trial: trial.seconds)}
    return Priced(_fastest(trials), lower, tuple(ordered.values()), is_exact)


def _find_rows(spans: Spans, problem: ChoiceProblem, numbers: Numbers) -> np.ndarray:
    """The rows that get prices: those that say all, or, if these are very many, those that the choice breaks most."""
    needed = spans.find_needed(problem.limit_bytes)
    if len(needed) <= problem.tuning.priced_rows:
        return needed
    used = spans.used_by(np.asarray(numbers))
    return np.sort(needed[np.argsort(-used[needed], kind="stable")[: problem.tuning.priced_rows]])


def _try_choice(problem: ChoiceProblem, spans: Spans, numbers: Numbers) -> Trial:
    excess = spans.used_by(np.asarray(numbers)) / problem.limit_bytes - 1.0
    return Trial(numbers, problem.costs.value(numbers), excess, problem.fits(numbers))


def _add_prices(problem: ChoiceProblem, spans: Spans, prices: np.ndarray) -> Costs:
    """The objective of L: every choice pays for the bytes that it uses; `prices` in seconds per limit (rows,)."""
    nodes = problem.costs.nodes
    first = np.concatenate([[0], np.cumsum([len(cost) for cost in nodes.values()])])
    paid = np.split(spans.price(prices / problem.limit_bytes, first), first[1:-1])
    return Costs({v: cost + each for (v, cost), each in zip(nodes.items(), paid, strict=True)}, problem.costs.edges)


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    """The fastest trial that fits."""
    return min((trial for trial in trials if trial.fits), key=lambda trial: trial.seconds, default=None)


def _best_prices(trials: Sequence[Trial], box: float) -> tuple[float, np.ndarray]:
    """Where the lowest plane is highest, among prices that sum to at most `box`: (its height in seconds, the prices (rows,)).

    maximise theta  subject to  theta <= cost_i + sum_t lambda_t excess_it  for every trial i,  sum_t lambda_t <= box.
    """
    rows, prices = len(trials), len(trials[0].excess)
    least = min(trial.seconds for trial in trials)  # the height where all prices are zero
    scale = max(trial.seconds for trial in trials) - least + box * float(np.abs(trials[0].excess).max()) or 1.0
    price_of = np.stack([-trial.excess for trial in trials]) * box / scale
    matrix = np.vstack([np.append(price_of, np.ones((rows, 1)), axis=1), np.append(np.ones(prices), 0.0)])
    at = np.nonzero(matrix)
    program = Program(
        objective=np.append(np.zeros(prices), -1.0),
        upper=np.full(prices + 1, np.inf),
        is_integer=np.zeros(prices + 1, dtype=bool),
        low=np.full(rows + 1, -np.inf),
        high=np.append([(trial.seconds - least) / scale for trial in trials], 1.0),
        entry_row=at[0],
        entry_column=at[1],
        entry=matrix[at],
    )
    solution = solve_program(program, Limits(nodes=0, gap=0.0)).solution
    assert solution is not None, "prices of zero are a solution"
    return least + float(solution[-1]) * scale, np.maximum(solution[:-1], 0.0) * box


@dataclasses.dataclass(frozen=True, eq=False)
class Swept:
    """What sweeps with prices came to: the best choice that fits, if one was met, a bound, and the last choices that fit."""

    numbers: Numbers | None
    seconds: float
    lower_bound_s: float
    met: tuple[Numbers, ...]


class PricedAscent:
    """Dual ascent over messages and prices in one loop, with a choice decoded, repaired and improved on the way.

    Prices move along the excess of the decoded choice, by a part of the way from bound to best choice (Polyak's rule).
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        """Start from prices of zero."""
        self.problem, self.budget = problem, problem.budget
        spans = problem.spans.beyond_least()
        self.spans = spans.take_rows(spans.find_needed(problem.limit_bytes))
        self.ascent = Ascent(problem.costs, self.budget)
        self.moves = Moves(problem.costs, self.spans, problem.limit_bytes)
        self.cost = self.ascent.given
        self.prices = np.zeros(len(self.spans.fixed))
        self.best: np.ndarray | None = None
        self.met: list[Numbers] = []
        self.upper, self.lower = np.inf, -np.inf

    def run(self) -> Swept:
        """Sweep until bound and best choice are near, the rounds are over, or the budget is."""
        tuning, scale = self.problem.tuning, 1.0
        for number in range(tuning.priced_sweeps):
            is_near = self.best is not None and self.upper - self.lower <= tuning.good_enough * abs(self.upper)
            if self.budget.is_over or is_near:
                break
            paid = self.spans.price(self.prices / self.problem.limit_bytes, self.moves.first)
            self.ascent.given = self.cost + paid
            self.ascent.sweep()
            self.budget.spend(WORK_PER_ENTRY * len(self.spans.used) + len(self.prices))
            before, bound = self.lower, self._bound()
            self.lower = max(self.lower, bound)
            choice = self.ascent.decode()
            excess = self.spans.used_by(choice) / self.problem.limit_bytes - 1.0
            if (number > tuning.warm_sweeps and number % tuning.repair_every == 0) or (excess <= 0).all():
                self._try(choice, paid)
            if number >= tuning.warm_sweeps:
                scale = scale if self.lower > before + 1e-4 * abs(self.lower) else scale * tuning.step_decay
                self._move_prices(excess, bound, choice, scale)
        numbers = None if self.best is None else tuple(self.best.tolist())
        return Swept(
            numbers, self.upper, min(self.lower, self.upper), tuple(self.met[-2 * max(tuning.mixed_choices) :])
        )

    def _bound(self) -> float:
        return self.ascent.lower() - float(self.prices @ (1.0 - self.spans.fixed / self.problem.limit_bytes))

    def _try(self, choice: np.ndarray, paid: np.ndarray) -> None:
        """Repair and improve a choice, and keep it if it is the best."""
        moves, tuning = self.moves, self.problem.tuning
        fitting = moves.repair(choice, paid, self.budget, most_moves=tuning.repair_moves)
        if fitting is None and self.best is None:
            smallest = argmin_of_parts(self.spans.price(np.ones(len(self.prices)), moves.first), moves.first[:-1])
            fitting = moves.repair(smallest, paid, self.budget, most_moves=tuning.repair_moves)
        if fitting is None:
            return
        better = moves.improve(fitting, self.budget)
        value = self.problem.costs.value(better.tolist())
        if not np.isfinite(value):
            return
        self.met.append(tuple(better.tolist()))
        if value < self.upper and self.problem.fits(better.tolist()):
            self.best, self.upper = better, value

    def _move_prices(self, excess: np.ndarray, bound: float, choice: np.ndarray, scale: float) -> None:
        slope = np.where((excess > 0) | (self.prices > 0), excess, 0.0)
        length = float(slope @ slope)
        aim = self.upper if np.isfinite(self.upper) else 1.1 * max(self.moves.value(choice), bound)
        if length > 0:
            step = scale * max(aim - bound, 1e-3 * abs(bound)) / length
            self.prices = np.maximum(self.prices + step * slope, 0.0)
