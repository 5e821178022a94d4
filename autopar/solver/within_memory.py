"""The search within a memory limit.

In: a problem whose best choice without a limit is known and is too large. Out: the best choice that fits. Small problems are
solved with their memory rows by the integer program. For the others memory gets prices (memory_prices.py), and where these leave
a gap the choices met are mixed: an integer program with the memory rows decides, node by node, between what they choose.
What can go wrong: on large problems neither prices nor mixtures may find what fits though something does; `Unfinished` says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.integer_program import Infeasible, Solved, solve_integer_program
from autopar.solver.memory_prices import Priced, PricedAscent, price_memory
from autopar.solver.memory_rows import SpanRows, Spans, find_peaks
from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, Numbers, Unfinished, Unreachable
from autopar.solver.presolve import Reduced, find_order, reduce_costs
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.search import Found, search

ROW_TOLERANCE = 2e-6
"""HiGHS keeps a row to a millionth of its scale, which is at most about the limit."""


def choose_within_memory(
    problem: ChoiceProblem, free: Chosen, tried: Sequence[Numbers]
) -> Chosen | CutOff | DoesNotFit | Unfinished:
    """The best choice that keeps the memory rows; classes and ties of the problem are not used.

    Args:
        problem: with memory rows.
        free: the best choice without them, which does not keep them.
        tried: choices met at other limits.
    """
    reduced = reduce_problem(problem)
    pairs, tuning = reduced.costs.pairs, problem.tuning
    most_pairs = tuning.direct_pairs if np.isfinite(problem.cutoff_s) else tuning.memory_pairs
    is_direct = pairs <= most_pairs and not problem.is_quick
    if is_direct and (pairs <= tuning.tiny_pairs or find_order(reduced.costs, tuning.entries) is None):
        gap = tuning.exact_gap if pairs <= tuning.direct_pairs else tuning.program_gap
        most_work = tuning.direct_work if math.isfinite(tuning.gap_work) else math.inf
        budget = problem.budget.part(tuning.direct_share).limit(work=most_work)
        limited = dataclasses.replace(problem, budget=budget)
        direct = _solve_directly(limited, reduced, gap=gap, node_limit=tuning.memory_nodes)
        if not isinstance(direct, Unfinished):
            return direct
        is_direct = False
    found = _choose_by_prices(problem, free, tried)
    if isinstance(found, CutOff) or (isinstance(found, Chosen) and (problem.is_quick or _is_near(problem, found))):
        return found
    is_solved = isinstance(found, Chosen) and tuning.good_enough > 0 and pairs > tuning.small_pairs
    if (is_direct and not is_solved) or (
        isinstance(found, Unfinished) and pairs <= tuning.last_resort * tuning.direct_pairs
    ):
        return _solve_after(problem, reduced, found)
    return found


def choose_by_sweeps(problem: ChoiceProblem) -> Chosen | CutOff | Unfinished:
    """By dual ascent with prices, for what is large; then a mixture of the choices met."""
    swept = PricedAscent(dataclasses.replace(problem, budget=problem.budget.part(problem.tuning.sweep_share))).run()
    if swept.lower_bound_s >= problem.cutoff_s:
        return CutOff(swept.lower_bound_s)
    if swept.numbers is None:
        return Unfinished()
    best = Chosen(swept.numbers, problem.costs.value(swept.numbers), swept.lower_bound_s, swept.met)
    if problem.is_quick or _is_near(problem, best):
        return best
    nearest = sorted(dict.fromkeys(swept.met), key=problem.costs.value)
    for count in problem.tuning.mixed_choices:  # fewer where the mixture of more is too large
        mixed = mix_choices(problem, (swept.numbers, *nearest[:count]))
        if isinstance(mixed, Chosen) and mixed.seconds < best.seconds:
            return dataclasses.replace(best, numbers=mixed.numbers, seconds=mixed.seconds)
    return best


def _is_near(problem: ChoiceProblem, found: Chosen) -> bool:
    return found.seconds - found.lower_bound_s <= problem.tuning.good_enough * found.seconds


def _solve_after(
    problem: ChoiceProblem, reduced: Reduced, found: Chosen | Unfinished
) -> Chosen | DoesNotFit | Unfinished:
    """The integer program for a limited time, after prices have left a gap or found nothing."""
    tuning = problem.tuning
    limited = problem
    if isinstance(found, Chosen) and tuning.good_enough > 0:
        work = min(tuning.direct_work, tuning.work_on(found.seconds - found.lower_bound_s))
        limited = dataclasses.replace(problem, budget=problem.budget.limit(work=work))
    start = found.numbers if isinstance(found, Chosen) else None
    solved = _solve_directly(limited, reduced, gap=tuning.exact_gap, node_limit=tuning.memory_nodes, start=start)
    if not isinstance(found, Chosen):
        return solved
    if not isinstance(solved, Chosen):
        return found
    best = min(found, solved, key=lambda each: each.seconds)
    lower = max(found.lower_bound_s, solved.lower_bound_s)
    return dataclasses.replace(best, lower_bound_s=min(lower, best.seconds), tried=found.tried)


def _choose_by_prices(problem: ChoiceProblem, free: Chosen, tried: Sequence[Numbers]) -> Chosen | CutOff | Unfinished:
    """The best choice that prices find, or a mixture of the choices that they met.

    Each price is searched quickly at first. Where that leaves a gap, prices are searched to the end.
    """
    tuning = problem.tuning
    strict = dataclasses.replace(tuning, good_enough=min(tuning.good_enough, tuning.cheap_gap))
    quick = dataclasses.replace(problem, tuning=strict, is_quick=True)
    priced = _try_prices(quick, [free.numbers, *tried], max(free.lower_bound_s, problem.at_least_s))
    if not (problem.is_quick or priced.is_exact or _is_settled(problem, priced)):
        known = [free.numbers, *tried, *(trial.numbers for trial in priced.trials)]
        priced = _try_prices(problem, known, priced.lower_bound_s)
    if priced.lower_bound_s >= problem.cutoff_s:
        return CutOff(priced.lower_bound_s)
    best = _best_of_prices(priced)
    if best is not None and (problem.is_quick or _is_near(quick, best)):
        return best
    mixed = mix_choices(problem, [trial.numbers for trial in priced.trials])
    if isinstance(mixed, Chosen) and (best is None or mixed.seconds < best.seconds):
        best = _with_bound(priced, mixed.numbers, mixed.seconds)
    return Unfinished() if best is None else best


def _is_settled(problem: ChoiceProblem, priced: Priced) -> bool:
    """Whether prices have found what is near enough to their bound, or have proven that nothing beats the cutoff."""
    best = _best_of_prices(priced)
    return priced.lower_bound_s >= problem.cutoff_s or (best is not None and _is_near(problem, best))


def _try_prices(problem: ChoiceProblem, known: Sequence[Numbers], lower_bound_s: float) -> Priced:
    def solve(costs: Costs) -> Found | Unreachable | Unfinished:
        return search(costs, tuning=problem.tuning, budget=problem.budget, is_quick=problem.is_quick)

    return price_memory(problem, known, lower_bound_s, solve=solve)


def _best_of_prices(priced: Priced) -> Chosen | None:
    return None if priced.best is None else _with_bound(priced, priced.best.numbers, priced.best.seconds)


def _with_bound(priced: Priced, numbers: Numbers, seconds: float) -> Chosen:
    """A choice that fits, with the bound that prices have proven."""
    tried = tuple(trial.numbers for trial in priced.trials)
    return Chosen(numbers, seconds, min(priced.lower_bound_s, seconds), tried)


def mix_choices(problem: ChoiceProblem, tried: Sequence[Numbers]) -> Chosen | DoesNotFit | Unfinished:
    """The best choice that keeps the memory rows and takes at every node what one of the choices `tried` takes.

    Its bound, and the proof that nothing fits, are of such mixtures only. Large mixtures are left unfinished.
    """
    tuning = problem.tuning
    left = [np.unique(taken) for taken in zip(*tried, strict=True)]
    rest = problem.restrict(left)
    reduced = reduce_problem(rest)
    if reduced.costs.pairs > tuning.direct_pairs:
        return Unfinished()
    found = _solve_directly(rest, reduced, gap=tuning.program_gap, node_limit=tuning.mixed_nodes)
    if not isinstance(found, Chosen):
        return found
    return dataclasses.replace(found, numbers=tuple(int(n[p]) for n, p in zip(left, found.numbers, strict=True)))


def reduce_problem(problem: ChoiceProblem) -> Reduced:
    """What is left after the reductions that memory allows: nodes whose bytes depend on their choice stay."""
    spans = problem.spans.beyond_least()
    columns: dict[int, list[np.ndarray]] = {}
    for v, used in zip(spans.node.tolist(), spans.each(), strict=True):
        columns.setdefault(v, []).append(used)
    usage = [np.stack(columns[v], 1) if v in columns else np.zeros((0, 0)) for v in problem.costs.nodes]
    return reduce_costs(problem.costs, keep=frozenset(columns), usage=usage, budget=problem.budget)


def reduce_spans(spans: Spans, reduced: Reduced) -> Spans:
    """The spans over the nodes and choices left; nodes that are gone use the same whatever they choose."""
    left = reduced.open_choices
    each = zip(spans.node.tolist(), spans.begin.tolist(), spans.end.tolist(), spans.each(), strict=True)
    kept = [(v, begin, end, used[left[v]]) for v, begin, end, used in each if v in left]
    gone = [0.0 if v in left else float(used.max()) for v, used in zip(spans.node.tolist(), spans.each(), strict=True)]
    return Spans.join(kept, spans.sum_over_rows(np.array(gone))).beyond_least()


def _solve_directly(
    problem: ChoiceProblem, reduced: Reduced, *, gap: float, node_limit: int, start: Numbers | None = None
) -> Chosen | DoesNotFit | Unfinished:
    """By the integer program over the nodes left, with the memory rows that matter: more of them while its choice breaks some."""
    limit, tuning = problem.limit_bytes, problem.tuning
    spans = reduce_spans(problem.spans, reduced)
    spans = spans.take_rows(spans.find_needed(limit))
    active = np.arange(len(spans.fixed))
    if len(active) > tuning.rows_at_once:
        active = find_peaks(spans.most(), limit)
    row_limit = limit
    for _ in range(tuning.row_rounds):
        solved = solve_integer_program(
            reduced.costs,
            SpanRows(spans.take_rows(active)),
            row_limit,
            node_limit=node_limit,
            gap=gap,
            budget=problem.budget,
            start=_restrict(reduced, start),
        )
        if isinstance(solved, Infeasible):
            return DoesNotFit(problem.least_bytes()) if row_limit == limit else Unfinished()
        if isinstance(solved, Unfinished):
            return solved
        used = _used(spans, solved.choice)
        if (used <= limit).all():
            return _extend(problem, reduced, solved)
        more = np.union1d(active, find_peaks(used, limit))
        if len(more) == len(active):
            # HiGHS keeps a row up to its tolerance, which may be more than what is too much.
            row_limit -= max(2 * float(used[active].max() - limit), ROW_TOLERANCE * limit)
        active = more
    return Unfinished()


def _restrict(reduced: Reduced, numbers: Numbers | None) -> dict[int, int] | None:
    """The part of a choice that is left to choose; None if it takes what is gone."""
    if numbers is None or any(numbers[v] not in left for v, left in reduced.open_choices.items()):
        return None
    return reduced.restrict(numbers)


def _used(spans: Spans, choice: Mapping[int, int]) -> np.ndarray:
    """Bytes of each row."""
    numbers = np.zeros(max(choice, default=0) + 1, dtype=np.int64)
    numbers[list(choice)] = list(choice.values())
    return spans.used_by(numbers)


def _extend(problem: ChoiceProblem, reduced: Reduced, solved: Solved) -> Chosen:
    slack = max(0.0, reduced.costs.value(solved.choice) - solved.lower_bound_s)
    numbers = tuple(reduced.extend(solved.choice).values())
    seconds = problem.costs.value(numbers)
    return Chosen(numbers, seconds, seconds - slack)
