"""The solver's front door: the best choice of a pairwise choice problem (`problem.py` states it).

In: a `ChoiceProblem`. Out: an `Outcome`. A problem is solved by the first of these that it allows:

    ties       alike layers choose alike (repeated_layers.py); the bound is still of the whole problem, by dual ascent from the
               tied choice. If the two stay apart, the whole problem is solved;
    classes    the problem between classes of choices (classes.py) is solved and bounded; what its bound leaves open is searched;
    as it is   the search without memory (search.py), and if its choice is too large the search within memory
               (within_memory.py).

What can go wrong: nothing fits, nothing is possible, or the search ends before it knows; each has its outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.solver.branching import choose_by_branching
from autopar.solver.classes import find_open_choices, merge_classes
from autopar.solver.followers import follow
from autopar.solver.outcomes import (
    Chosen,
    CutOff,
    DoesNotFit,
    NotSearched,
    Numbers,
    Outcome,
    Unfinished,
    Unreachable,
)
from autopar.solver.problem import ChoiceProblem, Classes, Ties
from autopar.solver.repeated_layers import bound_whole, restrict_to_ties, untie
from autopar.solver.search import Found, search
from autopar.solver.within_memory import choose_by_sweeps, choose_within_memory


def choose(problem: ChoiceProblem, *, free: Chosen | None = None, tried: Sequence[Numbers] = ()) -> Outcome:
    """The best choice within the limit.

    Args:
        problem: what to choose.
        free: the best choice of the same problem without memory rows, if it is known.
        tried: choices that were met at other limits (`Chosen.tried`).
    """
    if problem.rows and problem.least_bytes() > problem.limit_bytes:
        return DoesNotFit(problem.least_bytes())
    if problem.proof is not None:
        tuning = dataclasses.replace(problem.tuning, good_enough=problem.proof)
        problem = dataclasses.replace(problem, proof=None, tuning=tuning)
    if problem.ties is not None:
        return _choose_tied(problem, problem.ties, free, tried)
    if problem.classes is not None:
        return _choose_by_classes(problem, problem.classes, free)
    return _choose_as_it_is(problem, free, tried)


def _choose_as_it_is(problem: ChoiceProblem, free: Chosen | None, tried: Sequence[Numbers]) -> Outcome:
    """For the leaders, if some nodes follow others."""
    led = follow(problem)
    if isinstance(led, Unreachable):
        return led
    if led is None:
        return _choose_plainly(problem, free, tried)
    if free is not None:
        start = led.restrict(free.numbers)
        free = None if start is None else dataclasses.replace(free, numbers=start)
    known = [numbers for numbers in map(led.restrict, tried) if numbers is not None]
    found = _choose_plainly(led.problem, free, known)
    if not isinstance(found, Chosen):
        return found
    numbers, met = led.extend(found.numbers), tuple(map(led.extend, found.tried))
    return dataclasses.replace(found, numbers=numbers, seconds=problem.costs.value(numbers), tried=met)


def _choose_plainly(problem: ChoiceProblem, free: Chosen | None, tried: Sequence[Numbers]) -> Outcome:
    """Without memory first, then, if that does not fit, within it."""
    if free is None and problem.rows and problem.costs.pairs > problem.tuning.swept_pairs:
        return _sweep_first(problem)
    found = free if free is not None else _choose_without_memory(problem)
    if not isinstance(found, Chosen):
        return found
    if np.isfinite(problem.cutoff_s) and found.lower_bound_s >= problem.cutoff_s:
        return CutOff(found.lower_bound_s)
    return found if problem.fits(found.numbers) else choose_within_memory(problem, found, tried)


def _sweep_first(problem: ChoiceProblem) -> Outcome:
    """By sweeps with prices; where they leave a gap, by branch and bound, if the problem is not too large for it."""
    swept = choose_by_sweeps(problem)
    is_done = isinstance(swept, CutOff) or problem.is_quick or problem.budget.is_over
    if isinstance(swept, Chosen):
        is_done |= swept.seconds - swept.lower_bound_s <= problem.tuning.good_enough * swept.seconds
    if is_done or problem.costs.pairs > problem.tuning.branched_pairs:
        return swept
    return choose_by_branching(problem, swept if isinstance(swept, Chosen) else None)


def _choose_without_memory(problem: ChoiceProblem) -> Chosen | Unreachable | Unfinished:
    found = search(
        problem.costs,
        cutoff_s=problem.cutoff_s,
        at_least_s=problem.at_least_s,
        tuning=problem.tuning,
        budget=problem.budget,
        is_quick=problem.is_quick,
    )
    if not isinstance(found, Found):
        return found
    numbers = tuple(found.choice.values())
    seconds = problem.costs.value(numbers)
    return Chosen(numbers, seconds, seconds - found.gap)


def _choose_by_classes(problem: ChoiceProblem, classes: Classes, free: Chosen | None) -> Outcome:
    """Bound the merged problem; search the choices that it leaves open."""
    merged, tuning = merge_classes(problem, classes), problem.tuning
    bound = choose(merged)
    if not isinstance(bound, Chosen):
        return bound
    if bound.lower_bound_s >= problem.cutoff_s * (1 - tuning.good_enough):
        return CutOff(bound.lower_bound_s)
    upper = _upper_bound(problem, classes, bound)
    left = find_open_choices(merged, classes, upper * (1 + tuning.gap))
    if left is None:
        return CutOff(upper)
    at_least_s = max(problem.at_least_s, bound.lower_bound_s)
    rest = dataclasses.replace(problem.restrict(left), at_least_s=at_least_s)
    if np.isfinite(problem.cutoff_s) and rest.costs.pairs > tuning.searched_pairs:
        return NotSearched(bound.lower_bound_s)
    found = choose(rest, free=_renumber(free, left))
    if not isinstance(found, Chosen):
        return found
    numbers = tuple(int(choices[p]) for choices, p in zip(left, found.numbers, strict=True))
    return Chosen(numbers, found.seconds, found.lower_bound_s)


def _upper_bound(problem: ChoiceProblem, classes: Classes, bound: Chosen) -> float:
    """Seconds above which nothing matters: the cutoff, or, without memory, those of the best choice in the classes chosen."""
    if problem.rows:
        return problem.cutoff_s
    members = [np.flatnonzero(number == p) for number, p in zip(classes, bound.numbers, strict=True)]
    lifted = choose(problem.restrict(members))
    return min(problem.cutoff_s, lifted.seconds) if isinstance(lifted, Chosen) else problem.cutoff_s


def _renumber(choice: Chosen | None, left: Sequence[np.ndarray]) -> Chosen | None:
    """A choice in the numbers of what is left; None if some of it is gone."""
    if choice is None or any(p not in choices for p, choices in zip(choice.numbers, left, strict=True)):
        return None
    numbers = tuple(int(np.searchsorted(choices, p)) for choices, p in zip(left, choice.numbers, strict=True))
    return dataclasses.replace(choice, numbers=numbers)


def _choose_tied(problem: ChoiceProblem, ties: Ties, free: Chosen | None, tried: Sequence[Numbers]) -> Outcome:
    """Choose for one node of each class; bound the whole problem, and solve it if the two are apart.

    Ties restrict the problem, so what they rule out is not ruled out of the whole.
    """
    lower = free.lower_bound_s if free is not None else bound_whole(problem)
    if lower >= problem.cutoff_s:
        return CutOff(lower) if np.isfinite(lower) else Unreachable()
    found = choose(
        restrict_to_ties(problem, ties),
        free=None if free is None else dataclasses.replace(free, numbers=tuple(ties.take_first(free.numbers))),
        tried=[tuple(ties.take_first(numbers)) for numbers in tried],
    )
    match found:
        case Chosen():
            whole = untie(problem, ties, found, lower)
        case DoesNotFit() | Unfinished():
            return Unfinished()
        case CutOff(bound) | NotSearched(bound):
            return NotSearched(lower if problem.is_proven else max(lower, bound))
        case Unreachable():
            return NotSearched(lower) if np.isfinite(problem.cutoff_s) else Unfinished()
    if not problem.is_proven:
        return dataclasses.replace(whole, lower_bound_s=min(max(lower, found.lower_bound_s), whole.seconds))
    if free is None:
        lower = max(lower, bound_whole(problem, whole))
        is_near = whole.seconds - lower <= problem.tuning.good_enough * whole.seconds
        if not (is_near or problem.is_quick or problem.budget.is_over):
            return choose(dataclasses.replace(problem, ties=None), tried=tried)
    return dataclasses.replace(whole, lower_bound_s=min(lower, whole.seconds))
