"""Branch and bound over what memory takes, for problems in which a few large values decide what fits.

In: a problem with memory rows, and the best choice known. Out: a better one if there is one, and a bound. The gap that prices on
memory leave is that of a knapsack: a few nodes take much of the room, each in a few sizes. Once it is settled how much each of
them takes, prices and dual ascent are nearly exact. So a part of the search is the choices that are still open at each node, and

    shrink    what costs more than the best choice known, or does not fit beside the least of all others, goes; then followers
              (followers.py) and reductions (presolve.py), which take far more nodes once memory leaves a node no choice of bytes
    bound     dual ascent with prices on memory, which start from those of the part around it; what the bound rules out goes
    solve     where prices hardly distinguish what is open: the search without memory at these prices (search.py)
    branch    on the node whose open choices differ most in what they pay for memory: one part for each number of bytes

The most promising part of a branching comes next, until nothing is left of it or its bound is far above the least; then the
open part of the least bound. What can go wrong: many nodes of about the same size make as many parts as there are ways to fill
the room; the budget ends that.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from autopar.solver.budget import CALL
from autopar.solver.dual_ascent import ROUNDING, Ascent
from autopar.solver.followers import follow
from autopar.solver.local_search import Moves
from autopar.solver.memory_prices import WORK_PER_ENTRY
from autopar.solver.memory_rows import SpanRows
from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, Unfinished, Unreachable
from autopar.solver.presolve import Reduced
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.search import Found, search
from autopar.solver.within_memory import reduce_problem, reduce_spans

Left = tuple[np.ndarray, ...]
"""The open choices of each node, ascending ints (choices open,)."""


def choose_by_branching(problem: ChoiceProblem, known: Chosen | None) -> Chosen | CutOff | DoesNotFit | Unfinished:
    """The best choice within memory, from the best one known; classes and ties of the problem are not used."""
    search = Branching(problem, known)
    numbers, lower = search.run(-np.inf if known is None else known.lower_bound_s)
    if numbers is not None:
        tried = () if known is None else known.tried
        return Chosen(tuple(numbers.tolist()), search.upper, min(lower, search.upper), tried)
    if search.open or problem.budget.is_over:
        return Unfinished()
    return CutOff(lower) if np.isfinite(problem.cutoff_s) else DoesNotFit(problem.least_bytes())


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of the search.

    Attributes:
        lower: seconds that no choice of this part that fits goes below.
        left: what is open.
        prices: of the memory rows, in seconds per limit (rows,).
    """

    lower: float
    left: Left
    prices: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Shrunk:
    """What is left of a part.

    Attributes:
        problem: over the nodes that lead.
        leader: the leader of each node of the whole problem, ints (nodes,).
        choice_of: of each node of the whole problem, what it takes under each choice of its leader, ints (leader's choices,).
    """

    problem: ChoiceProblem
    leader: np.ndarray
    choice_of: Sequence[np.ndarray]


def shrink(problem: ChoiceProblem, left: Left, upper_s: float) -> Shrunk | None:
    """Drop what is part of no choice that fits in less than `upper_s` seconds; None if nothing is left."""
    shrunk: Shrunk | None = Shrunk(problem.restrict(left), np.arange(len(left)), left)
    size = np.inf
    while shrunk is not None and shrunk.problem.spans.least().max(initial=-np.inf) <= problem.limit_bytes:
        costs = shrunk.problem.costs
        problem.budget.spend(CALL * (len(costs.nodes) + len(costs.edges)))
        before, size = size, sum(len(cost) for cost in costs.nodes.values())
        if size == before:
            return shrunk
        shrunk = _drop_unfit(_follow(forbid_above(shrunk.problem, upper_s), shrunk))
    return None


def forbid_above(problem: ChoiceProblem, upper_s: float) -> ChoiceProblem:
    """The problem with infinity for every cost that no choice of at most `upper_s` seconds can hold.

    A cost x is one if x - (the least of its node or edge) + (the sum of the least of all nodes and edges) > upper_s.
    """
    costs = problem.costs
    problem.budget.spend(costs.pairs + CALL * (len(costs.nodes) + len(costs.edges)))
    least = sum(float(values.min()) for values in (*costs.nodes.values(), *costs.edges.values()))
    slack = upper_s - least + ROUNDING * abs(upper_s)
    if not np.isfinite(slack) or slack < 0:
        return problem

    def cut(values: np.ndarray) -> np.ndarray:
        above = values - values.min() > slack
        return np.where(above, np.inf, values) if above.any() else values

    nodes = {v: cut(cost) for v, cost in costs.nodes.items()}
    return dataclasses.replace(problem, costs=Costs(nodes, {e: cut(matrix) for e, matrix in costs.edges.items()}))


def _follow(problem: ChoiceProblem, shrunk: Shrunk) -> Shrunk | None:
    led = follow(problem)
    if isinstance(led, Unreachable):
        return None
    if led is None:
        return dataclasses.replace(shrunk, problem=problem)
    leader = shrunk.leader
    choice_of = [each[led.choice_of[u]] for u, each in zip(leader.tolist(), shrunk.choice_of, strict=True)]
    return Shrunk(led.problem, np.array(led.leader, dtype=np.int64)[leader], choice_of)


def _drop_unfit(shrunk: Shrunk | None) -> Shrunk | None:
    """Without the choices that do not fit beside the least of all other nodes; None if a node is left with none."""
    if shrunk is None:
        return None
    problem = shrunk.problem
    first = np.cumsum([0, *(len(cost) for cost in problem.costs.nodes.values())])
    is_fit = problem.spans.find_fitting(problem.limit_bytes, first)
    if is_fit.all():
        return shrunk
    fit = np.split(is_fit, first[1:-1])
    if not all(each.any() for each in fit):
        return None
    left = [np.flatnonzero(each) for each in fit]
    choice_of = [each[left[u]] for u, each in zip(shrunk.leader.tolist(), shrunk.choice_of, strict=True)]
    return Shrunk(problem.restrict(left), shrunk.leader, choice_of)


class _Bounding:
    """Dual ascent with prices over what is left of one part."""

    def __init__(self, shrunk: Shrunk, prices: np.ndarray) -> None:
        problem = shrunk.problem
        self.shrunk, self.budget = shrunk, problem.budget
        self.limit, self.scale = problem.limit_bytes, problem.limit_bytes or 1.0
        self.reduced: Reduced = reduce_problem(problem)
        spans = reduce_spans(problem.spans, self.reduced)
        self.nodes = tuple(self.reduced.costs.nodes)
        number = {v: i for i, v in enumerate(self.nodes)}
        self.spans = dataclasses.replace(spans, node=np.array([number[v] for v in spans.node.tolist()], dtype=np.int64))
        self.costs = self.reduced.costs.renumber()
        self.ascent = Ascent(self.costs, self.budget)
        self.first, self.cost = self.ascent.flat.first, self.ascent.given
        self.room = (self.limit - self.spans.fixed) / self.scale
        self.prices, self.lower = prices, -np.inf

    def extend(self, choice: np.ndarray) -> np.ndarray:
        """A choice of what is left as one of all nodes of the whole problem, ints (nodes,)."""
        full = self.reduced.extend(dict(zip(self.nodes, choice.tolist(), strict=True)))
        pairs = zip(self.shrunk.leader.tolist(), self.shrunk.choice_of, strict=True)
        return np.array([each[full[u]] for u, each in pairs], dtype=np.int64)

    def paid(self, prices: np.ndarray) -> np.ndarray:
        """What each place pays for memory (places,)."""
        return self.spans.price(prices / self.scale, self.first)

    def find_excess(self, choice: np.ndarray) -> np.ndarray:
        """By how much a choice exceeds the limit in each row, in limits (rows,)."""
        excess: np.ndarray = (self.spans.used_by(choice) - self.limit) / self.scale
        return excess

    def sweep(self, prices: np.ndarray) -> float:
        """One sweep at these prices, which are kept with the messages if the bound is the best; the bound."""
        self.ascent.given = self.cost + self.paid(prices)
        self.ascent.sweep()
        self.budget.spend(WORK_PER_ENTRY * len(self.spans.used) + len(prices))
        bound = self.ascent.lower() - float(prices @ self.room) + self.reduced.constant
        if bound > self.lower:
            self.lower, self.prices = bound, prices
            self.best = self.ascent.messages.copy(), self.ascent.given
        return bound

    def search(self, upper_s: float) -> tuple[float, np.ndarray | None]:
        """The least choice at the best prices, by the search without memory: its bound, and the choice (nodes left,)."""
        offset = self.reduced.constant - float(self.prices @ self.room)
        paid = self.ascent.flat.split(self.paid(self.prices))
        nodes = {v: cost + each for (v, cost), each in zip(self.costs.nodes.items(), paid, strict=True)}
        costs, tuning = Costs(nodes, self.costs.edges), self.shrunk.problem.tuning
        budget = self.budget.limit(work=tuning.branch_work)
        found = search(costs, cutoff_s=upper_s - offset, tuning=tuning, budget=budget)
        if isinstance(found, Found):
            lower = costs.value(found.choice) - found.gap + offset
            return lower, np.array(list(found.choice.values()), dtype=np.int64)
        return (np.inf if isinstance(found, Unreachable) else -np.inf), None

    def leave(self, slack: float) -> Left | None:
        """The choices of the whole problem's nodes that raise the bound by at most `slack`; None if nothing is left."""
        self.ascent.messages, self.ascent.given = self.best
        alive = dict(zip(self.nodes, self.ascent.flat.split(self.ascent.rises() <= slack), strict=True))
        if not all(each.any() for each in alive.values()):
            return None
        kept = {v: self.reduced.open_choices[v][each] for v, each in alive.items()}
        pairs = zip(self.shrunk.leader.tolist(), self.shrunk.choice_of, strict=True)
        return tuple(np.unique(each[kept[u]] if u in kept else each) for u, each in pairs)


class Branching:
    """The search: the parts that are open, and the best choice known."""

    def __init__(self, problem: ChoiceProblem, best: Chosen | None) -> None:
        """Start with all choices open."""
        spans = problem.spans.beyond_least()
        spans = spans.take_rows(spans.find_needed(problem.limit_bytes))
        self.problem = dataclasses.replace(problem, rows=SpanRows(spans), classes=None, ties=None)
        self.tuning, self.budget = problem.tuning, problem.budget
        self.moves = Moves(problem.costs, spans, problem.limit_bytes)
        self.levels = spans.find_levels([len(cost) for cost in problem.costs.nodes.values()])
        self.best = None if best is None else np.array(best.numbers, dtype=np.int64)
        self.upper = min(problem.cutoff_s, np.inf if best is None else best.seconds)
        self.open: list[tuple[float, int, Part]] = []
        self.count = 0

    @property
    def target(self) -> float:
        """Parts whose bound is at least this are closed."""
        return self.upper - self.tuning.good_enough * abs(self.upper) if np.isfinite(self.upper) else np.inf

    def run(self, lower: float) -> tuple[np.ndarray | None, float]:
        """Search until no part is open or the budget is over: the best choice (nodes,), and the bound; `lower`: one known."""
        left: Left = tuple(np.arange(len(cost)) for cost in self.problem.costs.nodes.values())
        root = Part(lower, left, np.zeros(len(self.problem.rows)))
        part = self._bound(root, self.tuning.branch_root_sweeps)
        while part is not None or self.open:
            if part is None:
                part = heapq.heappop(self.open)[2]
            if self.budget.is_over:
                return self.best, min([self.upper, part.lower, *(each[0] for each in self.open)])
            part = self._branch(part) if part.lower < self.target else None
            if part is not None and self._is_far(part):
                self._keep(part)
                part = None
        return self.best, max(lower, self.target)

    def _branch(self, part: Part) -> Part | None:
        """Open the parts of a part; the most promising of them."""
        node, paid = self._pick(part)
        gap = self.upper - part.lower
        if node is None or (np.isfinite(gap) and paid <= self.tuning.branch_share * gap):
            solved = self._bound(part, self.tuning.branch_sweeps, is_solved=True)
            if solved is None:
                return None
            part = solved
            node, _ = self._pick(part)
        if node is None:
            return self._branch_anywhere(part)
        level_of = self.levels[node].level_of[part.left[node]]
        return self._open(part, node, [part.left[node][level_of == level] for level in np.unique(level_of)])

    def _branch_anywhere(self, part: Part) -> Part | None:
        """Where memory is settled: on the node of the most choices, in two halves."""
        node = int(np.argmax([len(each) for each in part.left]))
        half = (len(part.left[node]) + 1) // 2
        if half == len(part.left[node]):
            return None
        return self._open(part, node, [part.left[node][:half], part.left[node][half:]])

    def _open(self, part: Part, node: int, halves: Sequence[np.ndarray]) -> Part | None:
        parts = []
        for kept in halves:
            left = (*part.left[:node], kept, *part.left[node + 1 :])
            bounded = self._bound(dataclasses.replace(part, left=left), self.tuning.branch_sweeps)
            if bounded is not None:
                parts.append(bounded)
        parts.sort(key=lambda each: each.lower)
        for each in parts[1:]:
            self._keep(each)
        return parts[0] if parts else None

    def _keep(self, part: Part) -> None:
        """Leave a part open for later."""
        self.count += 1
        heapq.heappush(self.open, (part.lower, self.count, part))

    def _is_far(self, part: Part) -> bool:
        """Whether a part is so far from the least bound that what is there comes first."""
        least = self.open[0][0] if self.open else np.inf
        return bool(part.lower > least + self.tuning.branch_plunge * (self.upper - least))

    def _pick(self, part: Part) -> tuple[int | None, float]:
        """The node whose open choices differ most in what they pay for memory, and by how many seconds; None: none differs."""
        best, most = None, -1.0
        paid_before = np.concatenate([[0.0], np.cumsum(part.prices)])
        for v, levels in self.levels.items():
            each = np.unique(levels.level_of[part.left[v]])
            if len(each) > 1:
                used = levels.used[each]
                width = used.max(axis=0) - used.min(axis=0)
                paid = float(np.diff(paid_before[levels.cuts]) @ width) / (self.problem.limit_bytes or 1.0)
                best, most = (v, paid) if paid > most else (best, most)
        return best, most

    def _bound(self, part: Part, sweeps: int, *, is_solved: bool = False) -> Part | None:
        """The part with a bound and less open; None if it is closed."""
        shrunk = shrink(self.problem, part.left, self.upper)
        if shrunk is None:
            return None
        bounding = _Bounding(shrunk, part.prices)
        self._sweep(bounding, sweeps)
        prices, lower = bounding.prices, max(part.lower, bounding.lower)
        if is_solved and bounding.lower < self.target:
            bound, choice = bounding.search(self.upper)
            lower = max(lower, bound)
            if choice is not None:
                self._try(bounding.extend(choice))
                prices = self._move(bounding, prices, choice, lower, 0.5)
        if lower >= self.target:
            return None
        left = bounding.leave(self.upper - bounding.lower + ROUNDING * abs(self.upper))
        return None if left is None else Part(lower, left, prices)

    def _sweep(self, bounding: _Bounding, sweeps: int) -> None:
        """Some sweeps, with a choice tried where one fits, and at the end while none is known."""
        prices, scale = bounding.prices, 1.0
        for number in range(sweeps):
            before = bounding.lower
            bound = bounding.sweep(prices)
            scale *= 1.0 if bound > before else self.tuning.branch_decay
            if bounding.lower >= self.target or (self.budget.is_over and number):
                break
            choice = bounding.ascent.decode()
            is_last = number == sweeps - 1 and not np.isfinite(self.upper)
            if is_last or (bounding.find_excess(choice) <= 0).all():
                self._try(bounding.extend(choice))
            prices = self._move(bounding, prices, choice, bound, scale)

    def _move(
        self, bounding: _Bounding, prices: np.ndarray, choice: np.ndarray, bound: float, scale: float
    ) -> np.ndarray:
        """Prices moved along the excess of a choice, by a part of the way to what is hoped for (Polyak's rule)."""
        excess = bounding.find_excess(choice)
        slope = np.where((excess > 0) | (prices > 0), excess, 0.0)
        length = float(slope @ slope)
        highest = max(bounding.lower, bound)
        aim = min(self.upper, highest + self.tuning.branch_hope * abs(highest))
        return np.maximum(prices + scale * (aim - bound) / length * slope, 0.0) if length > 0 else prices

    def _try(self, choice: np.ndarray) -> None:
        """Repair and improve a choice, and keep it if it is the best."""
        paid = np.zeros(int(self.moves.first[-1]))
        fitting = self.moves.repair(choice, paid, self.budget, most_moves=self.tuning.branch_moves)
        if fitting is None:
            return
        better = self.moves.improve(fitting, self.budget)
        value = self.problem.costs.value(better.tolist())
        if value < self.upper and self.problem.fits(better.tolist()):
            self.best, self.upper = better, value
