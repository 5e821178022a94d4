"""How the solver does on intra-operator problems that others posed: the instances of the IOPDDL contest (google/iopddl).

    python benchmarks/iopddl.py [FOLDER] [--only ABG] [--seconds 60] [--work 3e10] [--proof 0.001] [--twice]
        [--curve curve.svg] [--csv curve.csv]

In: a folder of instances, gzipped JSON as the contest describes them; `../shared/iopddl` by default. Out: a line per instance:
cost by the best known cost, own bound by the best known, gap, seconds of the clock and of the processor, nanoseconds of the
processor per unit of work, whether the choice fits memory, and a sum over the choice, which is the same where the choice is.
`--work` limits the search in units that are the same on every machine; results repeat where it ends the search, or a proof
does, before the clock. `--twice` solves each instance twice. `--curve` solves each instance with several budgets, 1/16, 1/8,
... of `--seconds`, and draws cost and bound over the time. What can go wrong: no folder, no lines.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.files.whole_file import save
from autopar.solver.budget import Budget
from autopar.solver.memory_rows import SpanRows, Spans
from autopar.solver.outcomes import Chosen
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.solve import choose

FORBIDDEN = 1e18
"""Costs from here on stand for what is impossible."""
BEST_KNOWN = {"A": 6548641531, "B": 532843, "G": 217039, "K": 2242640000, "P": 651833115436, "V": 1617084}
"""Of the contest's table, and for P of XLA."""
WORK = 7e10
"""Units of work: on a quiet core less than the 300 seconds, so that the clock decides nothing."""
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of the seconds, for the curve."""


class Row(NamedTuple):
    """One run."""

    name: str
    budget_s: float
    seconds: float
    processor_s: float
    work: float
    cost: float
    bound: float
    is_feasible: bool
    checksum: int


def read_instance(path: Path) -> tuple[Costs, SpanRows, float]:
    """Objective, memory rows and limit of an instance."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problem: dict[str, Any] = json.load(file)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    costs = [_costs(each) for each in nodes["costs"]]
    matrices: dict[tuple[int, int], np.ndarray] = {}
    for (a, b), entries in zip(edges["nodes"], edges["costs"], strict=True):
        matrix = _costs(entries).reshape(len(costs[a]), len(costs[b]))
        pair, matrix = ((a, b), matrix) if a < b else ((b, a), matrix.T)
        matrices[pair] = matrices[pair] + matrix if pair in matrices else matrix
    lives = enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
    spans = [(v, first, last, np.array(used, dtype=float)) for v, ((first, last), used) in lives if last > first]
    rows = np.zeros(max(last for _, last in nodes["intervals"]))
    limit = float(problem.get("usage_limit", math.inf))
    return Costs.of(costs, matrices), SpanRows(Spans.join(spans, rows)), limit


def _costs(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, dtype=float)
    array[array >= FORBIDDEN] = np.inf
    return array


def solve(path: Path, seconds: float, work: float, proof: float) -> Row:
    """Solve one instance; the seconds hold the solver's work, not the reading of the file."""
    costs, rows, limit = read_instance(path)
    started, processor = time.perf_counter(), time.process_time()
    budget = Budget(seconds=seconds, work=work)
    problem = ChoiceProblem(costs=costs, rows=rows, limit_bytes=limit, proof=proof, budget=budget)
    found = choose(problem)
    name = path.name.split(".")[0]
    times = time.perf_counter() - started, time.process_time() - processor, budget.spent
    if not isinstance(found, Chosen):
        return Row(name, seconds, *times, math.inf, -math.inf, False, 0)
    checksum = zlib.crc32(np.array(found.numbers, dtype=np.int64).tobytes())
    fits = problem.fits(found.numbers)
    return Row(name, seconds, *times, costs.value(found.numbers), found.lower_bound_s, fits, checksum)


def describe(row: Row) -> str:
    """A line of the table."""
    best = BEST_KNOWN.get(row.name, math.nan)
    gap = 1 - row.bound / row.cost if row.is_feasible else math.nan
    per_unit = 1e9 * row.processor_s / max(row.work, 1.0)
    return (
        f"{row.name:<8} {row.cost:>16.0f} {row.cost / best:>10.5f} {row.bound / best:>11.5f} {gap:>9.4%} "
        f"{row.seconds:>8.1f} {row.processor_s:>9.1f} {per_unit:>8.2f} "
        f"{'yes' if row.is_feasible else 'no':>9} {row.checksum:>10x}"
    )


def draw(rows: Sequence[Row]) -> str:
    """Cost (line) and bound (dashes) by the best known cost over seconds, one colour per instance, as SVG."""
    colours = ("#1b6ca8", "#c0392b", "#27824a", "#8e44ad", "#b9770e", "#444444")
    longest = max(row.seconds for row in rows) or 1.0

    def point(row: Row, value: float) -> str:
        part = min(max(value / BEST_KNOWN.get(row.name, math.nan), 0.5), 1.5)
        return f"{60 + 520 * math.log1p(row.seconds) / math.log1p(longest):.1f},{300 - 260 * (part - 0.5):.1f}"

    drawn = []
    for number, name in enumerate(dict.fromkeys(row.name for row in rows)):
        own = [row for row in rows if row.name == name and row.is_feasible and name in BEST_KNOWN]
        colour = colours[number % len(colours)]
        costs, bounds = " ".join(point(row, row.cost) for row in own), " ".join(point(row, row.bound) for row in own)
        drawn.append(f'<polyline points="{costs}" fill="none" stroke="{colour}"/>')
        drawn.append(f'<polyline points="{bounds}" fill="none" stroke="{colour}" stroke-dasharray="4"/>')
        drawn.append(f'<text x="590" y="{40 + 18 * number}" fill="{colour}">{name}</text>')
    for part in (0.5, 0.75, 1.0, 1.25, 1.5):
        drawn.append(f'<text x="10" y="{304 - 260 * (part - 0.5):.0f}">{part:.2f}</text>')
    drawn.append(f'<text x="60" y="325">0 s</text><text x="560" y="325">{longest:.0f} s</text>')
    return '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="340">' + "".join(drawn) + "</svg>\n"


def main() -> None:
    """Solve the instances and print the table."""
    parser = argparse.ArgumentParser(description="The solver on instances of the IOPDDL contest.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/iopddl"))
    parser.add_argument("--only", default="", help="letters of the instances")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--work", type=float, default=WORK, help="units of work at most (autopar/solver/budget.py)")
    parser.add_argument("--twice", action="store_true", help="solve each instance twice")
    parser.add_argument("--proof", type=float, default=1e-3, help="the relative gap that is enough")
    parser.add_argument("--curve", type=Path, help="an SVG of cost and bound over time")
    parser.add_argument("--csv", type=Path, help="the same as figures")
    args = parser.parse_args()
    paths = [path for path in sorted(args.folder.glob("*.json.gz")) if not args.only or path.name[0] in args.only]
    if not paths:
        print(f"no instances in {args.folder}: skipped")
        return
    print(
        f"{'instance':<8} {'cost':>16} {'cost/best':>10} {'bound/best':>11} {'gap':>9} {'seconds':>8} {'processor':>9} "
        f"{'ns/unit':>8} {'feasible':>9} {'checksum':>10}"
    )
    rows = []
    for path in paths:
        for part in PARTS if args.curve or args.csv else (1.0,):
            for _ in range(2 if args.twice else 1):
                rows.append(solve(path, part * args.seconds, part * args.work, args.proof))
                print(describe(rows[-1]), flush=True)
    if args.curve:
        save(args.curve, draw(rows))
    if args.csv:
        table = io.StringIO(newline="")
        csv.writer(table).writerows([Row._fields, *rows])
        save(args.csv, table.getvalue())


if __name__ == "__main__":
    main()
