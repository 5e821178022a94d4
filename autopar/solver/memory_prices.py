"""Prices on memory: how a choice that is too large is traded for one that fits.

In: memory rows with their limit, and a function that solves the problem without rows for given node costs. With a price
lambda_t >= 0 per row, in seconds per limit,

    L(lambda) = min_s  cost(s) + sum_t lambda_t (used_t(s) / limit - 1)   <=   the constrained optimum.

L is concave, and every choice s ever met bounds it from above, by a plane: the next prices are where the lowest of these planes
is highest (cutting planes; Kelley 1960), within a box that grows while nothing fits. The solution at these prices is a new
plane, a lower bound, and, if it fits, a candidate. Out: a `Priced`. What can go wrong: the best prices leave a gap, of the kind
that a knapsack has: one choice is just too large, the next much too small. The choices met on the way, mixed node by node
(`intra_op.mixed`), then come close.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pulp

ROUNDS = 24
"""Prices tried at most."""
FIRST = 1e-3
"""The first price would pay this part of the objective for what exceeds the limit."""
GROWTH = 4.0
"""The box of prices grows by this factor while nothing fits."""
LARGEST = 1e6
"""Prices beyond so many objectives per limit are not tried: what does not fit then never will."""


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryRow:
    """The values alive at one program point: bytes of every choice, by node; `fixed_bytes` are alive whatever is chosen."""

    name: str
    bytes_of: Mapping[int, np.ndarray]
    fixed_bytes: float = 0.0

    def used(self, choice: Sequence[int]) -> float:
        """Bytes under a choice."""
        return self.fixed_bytes + sum(float(b[choice[v]]) for v, b in self.bytes_of.items())

    def least(self) -> float:
        """Bytes that no choice can avoid."""
        return self.fixed_bytes + sum(float(b.min()) for b in self.bytes_of.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A choice, its objective, and by how much it exceeds the limit in each row, in limits; negative where it is below."""

    numbers: tuple[int, ...]
    seconds: float
    excess: np.ndarray

    @property
    def fits(self) -> bool:
        """Whether every row is within the limit."""
        return bool((self.excess <= 0).all())


@dataclasses.dataclass(frozen=True, eq=False)
class Priced:
    """The fastest trial that fits, if one does, a proven lower bound, and all trials, the fastest first."""

    best: Trial | None
    lower_bound_s: float
    trials: tuple[Trial, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Pricing:
    """What prices are put on: node costs, rows and their limit.

    `solve`: a choice for other node costs and a lower bound of theirs. `value`: the objective of a choice at the real costs.
    """

    costs: Sequence[np.ndarray]
    rows: Sequence[MemoryRow]
    limit_bytes: float
    solve: Callable[[list[np.ndarray]], tuple[tuple[int, ...], float]]
    value: Callable[[Sequence[int]], float]

    def run(
        self, known: Sequence[tuple[int, ...]], lower_bound_s: float, *, cutoff_s: float, good_enough: float
    ) -> Priced:
        """Try prices until bound and best trial are within `good_enough` (relative), the bound reaches `cutoff_s`, or is as
        high as prices make it. `known`: choices met before, the first of them the best without a limit."""
        trials = [self._trial(numbers) for numbers in dict.fromkeys(known)]
        scale = abs(trials[0].seconds) or 1.0
        box = FIRST * scale / max(float(trials[0].excess.max()), FIRST)
        lower = lower_bound_s
        for _ in range(ROUNDS):
            best = _fastest(trials)
            if lower >= cutoff_s or (best is not None and best.seconds - lower <= good_enough * best.seconds):
                break
            highest, prices = _best_prices(trials, box)
            at_edge = prices.sum() >= box * (1 - 1e-6)
            if not at_edge and highest - lower <= good_enough / 10 * scale:
                break
            numbers, bound = self.solve(self._priced(prices))
            room = np.array([1.0 - row.fixed_bytes / self.limit_bytes for row in self.rows])
            lower = max(lower, bound - float(prices @ room))
            trials.append(self._trial(numbers))
            if at_edge and not trials[-1].fits:
                box *= GROWTH
                if box > LARGEST * scale:
                    break
        ordered = {trial.numbers: trial for trial in sorted(trials, key=lambda trial: trial.seconds)}
        return Priced(_fastest(trials), lower, tuple(ordered.values()))

    def _trial(self, numbers: tuple[int, ...]) -> Trial:
        excess = np.array([row.used(numbers) / self.limit_bytes - 1.0 for row in self.rows])
        return Trial(numbers, self.value(numbers), excess)

    def _priced(self, prices: np.ndarray) -> list[np.ndarray]:
        priced = [np.array(cost, dtype=float) for cost in self.costs]
        for price, row in zip(prices.tolist(), self.rows, strict=True):
            if price > 0:
                for v, used in row.bytes_of.items():
                    priced[v] += price / self.limit_bytes * used
        return priced


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    return min((trial for trial in trials if trial.fits), key=lambda trial: trial.seconds, default=None)


def _best_prices(trials: Sequence[Trial], box: float) -> tuple[float, np.ndarray]:
    """Where the lowest plane is highest, among prices that sum to at most `box`: (its height there, the prices).

    maximise theta  subject to  theta <= cost_i + sum_t lambda_t excess_it  for every trial i,  sum_t lambda_t <= box.
    """
    model = pulp.LpProblem("prices", pulp.LpMaximize)
    theta = model.add_variable("theta")
    price = [model.add_variable(f"price_{t}", 0) for t in range(len(trials[0].excess))]
    model.setObjective(theta)
    model.addConstraint(pulp.lpSum(price) <= box, "box")
    for number, trial in enumerate(trials):
        paid = pulp.lpSum([float(excess) * x for excess, x in zip(trial.excess, price, strict=True)])
        model.addConstraint(theta - paid <= trial.seconds, f"plane_{number}")
    model.solve(pulp.HiGHS(msg=False, threads=1))
    return float(pulp.value(theta)), np.maximum([float(pulp.value(x)) for x in price], 0.0)
