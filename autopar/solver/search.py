"""The search without memory: reduce, bound, drop what the bound rules out, and search what is left.

In: an objective. Out: a choice, and by how much at most it exceeds the optimum. In order, each step exact:

    1. reductions (presolve.py) shrink the problem;
    2. what is narrow is solved by elimination (presolve.py);
    3. what is small goes to the integer program (integer_program.py), and so does what is not large if step 4 leaves a gap;
    4. for the rest, dual ascent (dual_ascent.py) gives a bound. The choices within a hair of it, reduced again, give a solution;
       its value rules out choices, and the search goes on in another round with what is left, in the shifted costs.

Where the linear relaxation has no gap, as for most training steps, step 4 meets the bound at once. What can go wrong: rounds and
nodes of branch and bound are limited, so a gap may remain, and where hardly any choice is possible none may be found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.dual_ascent import Bounded, bound_costs
from autopar.solver.integer_program import Infeasible, Solved, solve_integer_program
from autopar.solver.outcomes import Unfinished, Unreachable
from autopar.solver.presolve import eliminate, find_order, reduce_costs
from autopar.solver.problem import Costs
from autopar.solver.tuning import TUNING, Tuning


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A choice of every node of finite cost, and by how many seconds at most it exceeds the optimum.

    The gap is the same whatever constant the objective lacks, so reductions and shifts of costs keep it.
    """

    choice: Mapping[int, int]
    gap: float


def search(
    costs: Costs,
    *,
    cutoff_s: float = np.inf,
    at_least_s: float = -np.inf,
    tuning: Tuning = TUNING,
    budget: Budget | None = None,
    is_quick: bool = False,
) -> Found | Unreachable | Unfinished:
    """Search the least choice of an objective.

    Args:
        costs: the objective.
        cutoff_s: the search ends where the bound reaches it; the gap then says so.
        at_least_s: a bound known before.
        tuning: when to stop, and what to try.
        budget: when it is over, the best choice met is returned with the bound reached.
        is_quick: whether to be content with the choice and the bound of a short dual ascent.

    Returns:
        A choice of finite cost; or that there is none; or that none was found.
    """
    return _Search(tuning, budget or Budget(), is_quick).run(costs, cutoff_s, at_least_s=at_least_s)


def bound_quickly(
    costs: Costs, *, cutoff_s: float = np.inf, tuning: Tuning = TUNING, budget: Budget | None = None
) -> float:
    """Bound an objective without looking for a choice, by elimination if that is cheap, or else by a few sweeps of dual ascent.

    Args:
        costs: the objective.
        cutoff_s: the ascent ends where the bound reaches it.
        tuning: `quick_entries` says what is cheap, `quick_sweeps` what is few.
        budget: when it is over, the bound reached is returned.

    Returns:
        Seconds that no choice goes below; infinity if there is no choice of finite cost.
    """
    budget = budget or Budget()
    reduced = reduce_costs(costs, dominance=False, budget=budget)
    if not np.isfinite(reduced.constant) or not reduced.costs.nodes:
        return reduced.constant
    order = find_order(reduced.costs, tuning.quick_entries)
    exact = None if order is None else eliminate(reduced.costs, order, budget)
    if exact is not None:
        return reduced.constant + exact.value
    few = dataclasses.replace(tuning, sweeps=tuning.quick_sweeps)
    bounded = bound_costs(
        reduced.costs, gap=tuning.good_enough, cutoff=cutoff_s - reduced.constant, tuning=few, budget=budget
    )
    return reduced.constant + bounded.lower


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search by one tuning. `round_number`: how often a bound has shrunk the problem before."""

    tuning: Tuning
    budget: Budget
    is_quick: bool

    def run(
        self, costs: Costs, cutoff_s: float, *, at_least_s: float = -np.inf, round_number: int = 0
    ) -> Found | Unreachable | Unfinished:
        """Reduce an objective, search what is left, and extend what is found.

        Nodes are renumbered without gaps: PuLP sorts variables by name, and equal problems are to have equal solutions.
        """
        order = list(costs.nodes)
        reduced = reduce_costs(costs.renumber(), budget=self.budget)
        if not np.isfinite(reduced.constant):
            return Unreachable()
        found = self._search_reduced(
            reduced.costs, cutoff_s - reduced.constant, at_least_s - reduced.constant, round_number
        )
        if not isinstance(found, Found):
            return found
        return Found(dict(zip(order, reduced.extend(found.choice).values(), strict=True)), found.gap)

    def _search_reduced(
        self, costs: Costs, cutoff_s: float, at_least_s: float, round_number: int
    ) -> Found | Unreachable | Unfinished:
        """Solve what is small directly; bound the rest."""
        if not costs.nodes:
            return Found({}, 0.0)
        tuning, is_last = self.tuning, round_number >= self.tuning.rounds
        exact = self._eliminate(costs)
        if exact is not None:
            return exact
        gap = tuning.exact_gap if round_number == 0 else tuning.rough_gap
        if self.is_quick:
            return self._search_quickly(costs, cutoff_s)
        if costs.pairs <= (tuning.direct_pairs if is_last else tuning.small_pairs):
            solved = self._solve_directly(costs, gap)
            if not isinstance(solved, Unfinished):
                return solved
        near = tuning.large_gap if costs.pairs > tuning.large_pairs else tuning.gap
        bounded = bound_costs(costs, gap=near, cutoff=cutoff_s, tuning=tuning, budget=self.budget)
        if bounded.lower >= cutoff_s and np.isfinite(bounded.upper):
            return Found(bounded.choice, bounded.upper - bounded.lower)
        gap = bounded.upper - max(bounded.lower, at_least_s)
        budget = self.budget.limit(work=tuning.work_on(gap))
        found = dataclasses.replace(self, budget=budget)._close_gap(costs, bounded, cutoff_s, round_number)
        if not isinstance(found, Found):
            return found
        return dataclasses.replace(found, gap=max(0.0, min(found.gap, costs.value(found.choice) - at_least_s)))

    def _close_gap(
        self, costs: Costs, bounded: Bounded, cutoff_s: float, round_number: int
    ) -> Found | Unreachable | Unfinished:
        """Search what dual ascent has left open, as far as the budget goes."""
        tuning, is_last = self.tuning, round_number >= self.tuning.rounds
        gap = tuning.exact_gap if round_number == 0 else tuning.rough_gap
        best, upper = self._try_near_bound(costs, bounded, max(round_number + 1, tuning.rounds))
        is_possible = bool(np.isfinite(upper))
        most = tuning.direct_pairs * (1 if is_possible else tuning.last_resort)
        is_open = not is_possible or upper - bounded.lower > tuning.gap * abs(upper)
        if is_open and costs.pairs <= most:
            solved = self._solve_directly(costs, gap if is_possible else tuning.rough_gap)
            if isinstance(solved, Unreachable) or (isinstance(solved, Found) and not is_possible):
                return solved
            if isinstance(solved, Found):
                return _best_of(costs, solved, Found(best, max(upper - bounded.lower, 0.0)))
        if not is_possible:
            return Unfinished()
        found = Found(best, max(upper - bounded.lower, 0.0))
        if found.gap > tuning.good_enough * abs(upper) and not is_last and not self.budget.is_over:
            return self._search_below(costs, bounded, found, cutoff_s, round_number + 1)
        return found

    def _eliminate(self, costs: Costs) -> Found | Unreachable | None:
        """The optimum by elimination, where its tables are small enough."""
        tuning = self.tuning
        order = find_order(costs, tuning.quick_entries if self.is_quick else tuning.entries)
        exact = None if order is None else eliminate(costs, order, self.budget)
        if exact is None:
            return None
        return Found(exact.choice, 0.0) if np.isfinite(exact.value) else Unreachable()

    def _search_quickly(self, costs: Costs, cutoff_s: float) -> Found | Unfinished:
        """A few sweeps of dual ascent, and its best choice."""
        tuning = dataclasses.replace(self.tuning, sweeps=self.tuning.quick_sweeps)
        bounded = bound_costs(costs, gap=tuning.good_enough, cutoff=cutoff_s, tuning=tuning, budget=self.budget)
        return Found(bounded.choice, bounded.upper - bounded.lower) if np.isfinite(bounded.upper) else Unfinished()

    def _solve_directly(self, costs: Costs, gap: float) -> Found | Unreachable | Unfinished:
        """By the integer program."""
        match solve_integer_program(costs, node_limit=self.tuning.node_limit, gap=gap, budget=self.budget):
            case Solved(choice, lower):
                return Found(choice, max(0.0, costs.value(choice) - lower))
            case Infeasible():
                return Unreachable()
            case Unfinished() as unfinished:
                return unfinished

    def _try_near_bound(self, costs: Costs, bounded: Bounded, round_number: int) -> tuple[Mapping[int, int], float]:
        """The best choice known and its value, after a search among choices near the bound for each slack.

        These searches are last rounds; they have such searches of their own, `Tuning.nested` deep at most.
        """
        best, upper = bounded.choice, bounded.upper
        is_too_deep = round_number > self.tuning.rounds + self.tuning.nested
        for slack, enough in () if is_too_deep else zip(self.tuning.slacks, self.tuning.slack_gaps, strict=True):
            if upper - bounded.lower > enough * abs(upper) and not self.budget.is_over:
                trial = self._search_among(bounded, bounded.near_optimal(slack), np.inf, round_number)
                value = costs.value(trial.choice) if isinstance(trial, Found) else np.inf
                if isinstance(trial, Found) and value < upper:
                    best, upper = trial.choice, value
        return best, upper

    def _search_below(self, costs: Costs, bounded: Bounded, found: Found, cutoff_s: float, round_number: int) -> Found:
        """Another round, among the choices that may be better than the one found."""
        upper = costs.value(found.choice)
        rest = self._search_among(bounded, bounded.below(upper), cutoff_s, round_number)
        if not isinstance(rest, Found):
            return found
        value = costs.value(rest.choice)
        lower = max(bounded.lower, min(upper, value - rest.gap))
        best = rest.choice if value < upper else found.choice
        return Found(best, max(min(value, upper) - lower, 0.0))

    def _search_among(
        self, bounded: Bounded, alive: Mapping[int, np.ndarray], cutoff_s: float, round_number: int
    ) -> Found | Unreachable | Unfinished:
        """Search the choices that are alive, a bool array (choices,) per node, in the shifted costs."""
        left = {v: np.flatnonzero(keep) for v, keep in alive.items()}
        found = self.run(bounded.shifted.restrict(left), cutoff_s, round_number=round_number)
        return (
            Found({v: int(left[v][p]) for v, p in found.choice.items()}, found.gap)
            if isinstance(found, Found)
            else found
        )


def _best_of(costs: Costs, *found: Found) -> Found:
    """The best of some choices, by the highest of their bounds."""
    values = [costs.value(each.choice) for each in found]
    best, least = min(zip(found, values, strict=True), key=lambda each: each[1])
    lower = max(value - each.gap for each, value in zip(found, values, strict=True))
    return Found(best.choice, max(least - lower, 0.0))
