"""The intra-operator pass: one strategy per equation, least time, within memory.

In: a `StrategyGraph`, and the live sets of memory with their limit. Out: a `Choice`: a strategy number per node, its seconds,
and a proven lower bound. In order, each step exact:

    1. reductions (presolve.py) shrink the problem;
    2. what is small goes to the integer program (integer_program.py), and so does what is not large if step 3 leaves a gap;
    3. for the rest, dual ascent (dual_ascent.py) gives a bound. The choices within a hair of it, reduced again, give a solution;
       its value rules out choices, and the search goes on with what is left, in the shifted costs.

Where the linear relaxation has no gap, as for most training steps, step 3 meets the bound at once.

If the result breaks the memory limit, small problems are solved with their memory rows by the integer program. For the others
memory gets prices (memory_prices.py), and where these leave a gap the choices met are mixed: an integer program with the memory
rows decides, node by node, between what they choose. What can go wrong: nothing fits; the caller names the tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver import integer_program
from autopar.solver.classes import Classes, least_of_classes, merged_edges
from autopar.solver.dual_ascent import Bounded, bound_problem
from autopar.solver.memory_prices import MemoryRow, Priced, Pricing
from autopar.solver.presolve import Reduced, reduce_problem

Costs = Sequence[np.ndarray]
Edges = Mapping[tuple[int, int], np.ndarray]

SWEEPS = 96
"""Forward and backward sweeps of dual ascent per stage."""
STAGES = 4
"""How often the bound may shrink the problem before the best choice is returned with the bound reached."""
SLACKS = (1e-6, 1e-4)
"""Choices this near to the bound (relative) are searched for a good solution."""
GAP = 1e-6
"""Relative difference to the bound that counts as none."""
GOOD_ENOUGH = 2e-3
"""A large problem is not pursued further once the best solution known, of this problem or of another mesh, is this near to the
bound; the plan reports the bound."""
NODE_LIMIT = 500
MIXED_NODES = 50
"""Where choices are mixed, branch and bound ends here: alike layers make it long, and the first solutions are good."""
SEARCHED_PAIRS = 4_000_000
"""With a better choice to beat, a problem with more pairs of choices than this left open by its bound is not searched."""
SMALL_PAIRS = 2_000
"""Problems with at most this many pairs of choices over all edges go to the integer program as they are."""
DIRECT_PAIRS = 30_000
"""And those with at most this many if the bound does not meet a choice."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A choice per node, its objective, and the proven lower bound; no numbers where the search was cut off.

    `tried`: other choices met on the way to one that fits, which may be cheaper and too large; a start for other limits.
    """

    numbers: tuple[int, ...]
    seconds: float
    lower_bound_s: float
    tried: tuple[tuple[int, ...], ...] = ()


def choose(
    costs: Costs,
    edges: Edges,
    *,
    rows: Sequence[MemoryRow] = (),
    limit_bytes: float = np.inf,
    free: Choice | None = None,
    classes: Classes | None = None,
    cutoff_s: float = np.inf,
    tried: Sequence[tuple[int, ...]] = (),
) -> Choice | None:
    """The best choice within the limit; None if there is none. `free` is the best choice without a limit, if it is known.

    `classes`: choices of a mesh with equal axes, of which the merged problem (classes.py) rules out most. `cutoff_s`: only
    choices below it matter. Where there are none the search ends early, and where there is little to gain (`GOOD_ENOUGH`) or
    too much to search (`SEARCHED_PAIRS`) it does not begin: the result then has no numbers, and the bound says which it was.
    `tried`: what another limit's `Choice` says of it.
    """
    if any(row.least() > limit_bytes for row in rows):
        return None
    if classes is not None:
        return _choose_by_classes(_Problem(costs, edges, rows, limit_bytes, cutoff_s), classes, free)
    free = free if free is not None else _solve(costs, edges, cutoff_s)
    if np.isfinite(cutoff_s) and free.lower_bound_s >= cutoff_s:
        return Choice((), np.inf, free.lower_bound_s)
    if all(row.used(free.numbers) <= limit_bytes for row in rows):
        return free
    return _solve_within(_Problem(costs, edges, rows, limit_bytes, cutoff_s), free, tried)


def value_of(costs: Costs, edges: Edges, choice: Sequence[int]) -> float:
    """The objective of a choice."""
    total = sum(float(c[p]) for c, p in zip(costs, choice, strict=True))
    return total + sum(float(m[choice[u], choice[v]]) for (u, v), m in edges.items())


@dataclasses.dataclass(frozen=True, eq=False)
class _Problem:
    """What `choose` is asked."""

    costs: Costs
    edges: Edges
    rows: Sequence[MemoryRow]
    limit_bytes: float
    cutoff_s: float

    def restricted(self, left: Sequence[np.ndarray]) -> _Problem:
        """The same with only the choices `left` of each node."""
        edges = {(u, v): m[np.ix_(left[u], left[v])] for (u, v), m in self.edges.items()}
        rows = [dataclasses.replace(r, bytes_of={v: b[left[v]] for v, b in r.bytes_of.items()}) for r in self.rows]
        costs = [cost[numbers] for cost, numbers in zip(self.costs, left, strict=True)]
        return dataclasses.replace(self, costs=costs, edges=edges, rows=rows)

    def merged(self, classes: Classes) -> _Problem:
        """The problem between classes: a relaxation."""
        rows = [
            dataclasses.replace(r, bytes_of={v: least_of_classes(b, classes[v]) for v, b in r.bytes_of.items()})
            for r in self.rows
        ]
        costs = [least_of_classes(cost, number) for cost, number in zip(self.costs, classes, strict=True)]
        return dataclasses.replace(self, costs=costs, edges=merged_edges(self.edges, classes), rows=rows)

    def reduced(self) -> Reduced:
        """What is left of it after the reductions that memory allows."""
        usage = _usage(self.costs, self.rows)
        varying = frozenset(v for v, used in enumerate(usage) if np.ptp(used, axis=0).any())
        return reduce_problem(self.costs, self.edges, keep=varying, usage=usage)

    def priced(self, free: Choice, tried: Sequence[tuple[int, ...]]) -> Priced:
        """What prices on memory lead to."""

        def solve(costs: list[np.ndarray]) -> tuple[tuple[int, ...], float]:
            found = _solve(costs, self.edges)
            return found.numbers, found.lower_bound_s

        value = functools.partial(value_of, self.costs, self.edges)
        pricing = Pricing(self.costs, self.rows, self.limit_bytes, solve, value)
        known = [free.numbers, *tried]
        return pricing.run(known, free.lower_bound_s, cutoff_s=self.cutoff_s, good_enough=GOOD_ENOUGH)

    def choose(self, free: Choice | None = None) -> Choice | None:
        """`choose` of this problem."""
        return choose(
            self.costs, self.edges, rows=self.rows, limit_bytes=self.limit_bytes, free=free, cutoff_s=self.cutoff_s
        )


def _choose_by_classes(problem: _Problem, classes: Classes, free: Choice | None) -> Choice | None:
    """Bound the merged problem; search the choices that it leaves open."""
    merged = problem.merged(classes)
    bound = merged.choose()
    if bound is None:
        return None
    if (
        bound.lower_bound_s >= problem.cutoff_s * (1 - GOOD_ENOUGH)
        or not bound.numbers
        or not np.isfinite(bound.seconds)
    ):
        return Choice((), np.inf, bound.lower_bound_s)
    upper = problem.cutoff_s
    if not problem.rows:
        members = [np.flatnonzero(number == p) for number, p in zip(classes, bound.numbers, strict=True)]
        lifted = problem.restricted(members).choose()
        upper = min(upper, lifted.seconds) if lifted is not None else upper
    left = _left_open(merged, classes, upper * (1 + GAP))
    if left is None:
        return Choice((), np.inf, upper)
    rest = problem.restricted(left)
    if np.isfinite(problem.cutoff_s) and sum(m.size for m in rest.edges.values()) > SEARCHED_PAIRS:
        return Choice((), np.inf, bound.lower_bound_s)
    known = _renumbered(free, left)
    found = rest.choose(known)
    if found is None or not found.numbers:
        return found
    numbers = tuple(int(open_[p]) for open_, p in zip(left, found.numbers, strict=True))
    return Choice(numbers, found.seconds, found.lower_bound_s)


def _left_open(merged: _Problem, classes: Classes, upper: float) -> list[np.ndarray] | None:
    """The choices of each node whose class may be part of a solution of at most `upper`; None if there is no such solution.

    Dominance is left out: what is dominated in the relaxation may be needed in the problem.
    """
    left = [np.arange(len(number)) for number in classes]
    if not np.isfinite(upper):
        return left
    reduced = reduce_problem(merged.costs, merged.edges, dominance=False)
    alive = bound_problem(reduced.costs, reduced.edges, sweeps=SWEEPS).below(upper - reduced.constant)
    for v, keep in alive.items():
        left[v] = np.flatnonzero(np.isin(classes[v], reduced.open_choices[v][keep]))
    return left if all(len(open_) for open_ in left) else None


def _renumbered(choice: Choice | None, left: Sequence[np.ndarray]) -> Choice | None:
    """A choice in the numbers of what is left; None if some of it is gone."""
    if choice is None or any(p not in open_ for p, open_ in zip(choice.numbers, left, strict=True)):
        return None
    numbers = tuple(int(np.searchsorted(open_, p)) for open_, p in zip(left, choice.numbers, strict=True))
    return dataclasses.replace(choice, numbers=numbers)


def _solve(costs: Costs, edges: Edges, cutoff: float = np.inf) -> Choice:
    """Without memory."""
    found = _search(dict(enumerate(costs)), edges, stage=0, cutoff=cutoff)
    numbers = [found.choice[v] for v in range(len(costs))]
    seconds = value_of(costs, edges, numbers)
    return Choice(tuple(numbers), seconds, seconds - found.gap if np.isfinite(seconds) else np.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """A choice, and by how much at most it exceeds the optimum: the same whatever constant the objective lacks."""

    choice: Mapping[int, int]
    gap: float


def _search(costs: Mapping[int, np.ndarray], edges: Edges, *, stage: int, cutoff: float = np.inf) -> _Found:
    """Reduce; solve what is left if it is small; else bound it, drop what the bound rules out, and search again.

    A bound of `cutoff` or more ends the search.
    """
    order = sorted(costs)
    number = {v: i for i, v in enumerate(order)}
    reduced = reduce_problem([costs[v] for v in order], {(number[u], number[v]): m for (u, v), m in edges.items()})

    def extended(found: _Found) -> _Found:
        chosen = {v: int(reduced.open_choices[v][p]) for v, p in found.choice.items()}
        return _Found(dict(zip(order, reduced.extend(chosen), strict=True)), found.gap)

    if not reduced.nodes:
        return extended(_Found({}, 0.0))
    exact = GAP / 10 if stage == 0 else 100 * GAP
    if _pairs(reduced) <= (SMALL_PAIRS if stage < STAGES else DIRECT_PAIRS):
        direct = _integer_program(reduced, gap=exact)
        if direct is not None:
            return extended(direct)
    cutoff -= reduced.constant
    bounded = bound_problem(reduced.costs, reduced.edges, sweeps=SWEEPS, gap=GAP, cutoff=cutoff)
    best, upper = bounded.choice, bounded.upper
    if bounded.lower >= cutoff and np.isfinite(upper):
        return extended(_Found(best, upper - bounded.lower))
    for slack in SLACKS:
        if upper - bounded.lower > GAP * abs(upper):
            trial = _within(bounded, bounded.near_optimal(slack), stage=stage, last=True)
            value = _value(reduced.costs, reduced.edges, trial.choice)
            if value < upper:
                best, upper = trial.choice, value
    most = DIRECT_PAIRS if np.isfinite(upper) else 20 * DIRECT_PAIRS
    is_open = not np.isfinite(upper) or upper - bounded.lower > GAP * abs(upper)
    if is_open and _pairs(reduced) <= most:
        direct = _integer_program(reduced, gap=exact if np.isfinite(upper) else 100 * GAP)
        if direct is not None:
            return extended(direct)
    gap = upper - bounded.lower
    if gap > GOOD_ENOUGH * abs(upper) and stage < STAGES:
        rest = _within(bounded, bounded.below(upper), stage=stage + 1, last=False, cutoff=cutoff)
        value = _value(reduced.costs, reduced.edges, rest.choice)
        lower = max(bounded.lower, min(upper, value - rest.gap)) if np.isfinite(value) else bounded.lower
        if value < upper:
            best, upper = rest.choice, value
        gap = upper - lower
    return extended(_Found(best, max(gap, 0.0)))


def _within(
    bounded: Bounded, alive: Mapping[int, np.ndarray], *, stage: int, last: bool, cutoff: float = np.inf
) -> _Found:
    """Search among the choices that are alive, in the shifted costs."""
    left = {v: np.flatnonzero(keep) for v, keep in alive.items()}
    costs = {v: cost[left[v]] for v, cost in bounded.costs.items()}
    edges = {(u, v): m[np.ix_(left[u], left[v])] for (u, v), m in bounded.edges.items()}
    found = _search(costs, edges, stage=STAGES if last else stage, cutoff=cutoff)
    return _Found({v: int(left[v][p]) for v, p in found.choice.items()}, found.gap)


def _integer_program(reduced: Reduced, *, gap: float) -> _Found | None:
    solution = integer_program.solve(reduced.costs, reduced.edges, (), node_limit=NODE_LIMIT, gap=gap)
    if solution.choice is None:
        return None
    value = _value(reduced.costs, reduced.edges, solution.choice)
    return _Found(solution.choice, max(0.0, value - solution.lower))


def _pairs(reduced: Reduced) -> int:
    return sum(m.size for m in reduced.edges.values())


def _value(costs: Mapping[int, np.ndarray], edges: Edges, choice: Mapping[int, int]) -> float:
    total = sum((float(costs[v][choice[v]]) for v in costs), 0.0)
    return total + sum(float(m[choice[u], choice[v]]) for (u, v), m in edges.items())


# Within memory.


def _solve_within(problem: _Problem, free: Choice, tried: Sequence[tuple[int, ...]]) -> Choice | None:
    reduced = problem.reduced()
    if _pairs(reduced) <= DIRECT_PAIRS:
        return _direct(problem, reduced)
    priced = problem.priced(free, tried)
    if priced.lower_bound_s >= problem.cutoff_s:
        return Choice((), np.inf, priced.lower_bound_s)
    met = tuple(trial.numbers for trial in priced.trials)
    best = None
    if priced.best is not None:
        best = Choice(priced.best.numbers, priced.best.seconds, min(priced.lower_bound_s, priced.best.seconds), met)
        if best.seconds - best.lower_bound_s <= GOOD_ENOUGH * best.seconds:
            return best
    better = _mixed(problem, met)
    if better is not None and (best is None or better.seconds < best.seconds):
        best = dataclasses.replace(better, lower_bound_s=min(priced.lower_bound_s, better.seconds), tried=met)
    if best is None and _pairs(reduced) <= 20 * DIRECT_PAIRS:
        return _direct(problem, reduced)
    return best


def mixed(
    costs: Costs,
    edges: Edges,
    *,
    rows: Sequence[MemoryRow],
    limit_bytes: float,
    tried: Sequence[tuple[int, ...]],
) -> Choice | None:
    """The best choice within the limit that takes at every node what one of the choices `tried` takes; None if there is none.

    Its bound is one of these mixtures only.
    """
    return _mixed(_Problem(costs, edges, rows, limit_bytes, np.inf), tried)


def _mixed(problem: _Problem, tried: Sequence[tuple[int, ...]]) -> Choice | None:
    left = [np.unique(taken) for taken in zip(*tried, strict=True)]
    rest = problem.restricted(left)
    reduced = rest.reduced()
    if _pairs(reduced) > DIRECT_PAIRS:
        return None
    found = _direct(rest, reduced, gap=GOOD_ENOUGH / 2, node_limit=MIXED_NODES)
    if found is None:
        return None
    return dataclasses.replace(found, numbers=tuple(int(n[p]) for n, p in zip(left, found.numbers, strict=True)))


def _usage(costs: Costs, rows: Sequence[MemoryRow]) -> list[np.ndarray]:
    """Bytes of every node's choices, one column for each different amount that they take in some row."""
    columns: list[dict[bytes, np.ndarray]] = [{} for _ in costs]
    for row in rows:
        for v, used in row.bytes_of.items():
            columns[v].setdefault(used.tobytes(), used)
    return [np.stack(list(c.values()), 1) if c else np.zeros((len(n), 1)) for c, n in zip(columns, costs, strict=True)]


def _direct(
    problem: _Problem, reduced: Reduced, *, gap: float = GAP / 10, node_limit: int = 10 * NODE_LIMIT
) -> Choice | None:
    rows = _live_sets(reduced, problem.rows, problem.limit_bytes)
    if any(sum(float(b.min()) for b in row.bytes_of.values()) > row.limit_bytes for row in rows):
        return None
    solution = integer_program.solve(reduced.costs, reduced.edges, rows, node_limit=node_limit, gap=gap)
    if solution.choice is None:
        return None
    chosen = {v: int(reduced.open_choices[v][p]) for v, p in solution.choice.items()}
    slack = max(0.0, _value(reduced.costs, reduced.edges, solution.choice) - solution.lower)
    numbers = reduced.extend(chosen)
    seconds = value_of(problem.costs, problem.edges, numbers)
    return Choice(tuple(numbers), seconds, seconds - slack)


def _live_sets(reduced: Reduced, rows: Sequence[MemoryRow], limit: float) -> list[integer_program.LiveSet]:
    """Memory rows over the nodes left; nodes that went use the same whatever they choose."""
    left = set(reduced.nodes)
    live = []
    for row in rows:
        gone = row.fixed_bytes + sum(float(b.max()) for v, b in row.bytes_of.items() if v not in left)
        bytes_of = {v: b[reduced.open_choices[v]] for v, b in row.bytes_of.items() if v in left}
        live.append(integer_program.LiveSet(row.name, bytes_of, limit - gone))
    return live
