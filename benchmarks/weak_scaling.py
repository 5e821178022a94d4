"""Weak scaling, simulated: our plan beside Alpa's and the classic ones under one cost model, 1 to 64 V100s, three families.

    python benchmarks/weak_scaling.py [--only 'gpt-*' moe-8] [--ways autopar 'ZeRO-*'] [--planning-seconds 60] [--plot]

In: Alpa's 21 end-to-end runs (`data/`), on the `p3.16xlarge` cluster, in the paper's precision. Out: for each case a JSON file
in `docs/benchmarks/weak_scaling/` with a row for each way; rows that are there are kept, so that a run goes on where the last
one ended (`--again` makes them anew). `--plot` draws them. The exit status is 1 if our plan is slower than another way of its
case. What can go wrong: a clock on a busy machine ends a search early; such rows say so. Only prices are compared: nothing
runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alpa_models import config_of, count_parameters, subject_of
from alpa_ways import ALPAS, CLUSTER, OURS, Case, cases, ways
from hand_plans import TOLERANCE, Row, plan
from weak_scaling_plots import draw

from autopar.commands.arguments.subject import Subject
from autopar.cost_model.cores import available_cores
from autopar.files.whole_file import save

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "weak_scaling"
Rows = dict[str, Row]
Ways = Callable[[Case, Subject], Iterable[tuple[str, dict[str, Any]]]]
Draw = Callable[[Sequence[Case], Mapping[str, Rows], Path], None]


def run_case(case: Case, given: argparse.Namespace, ways_of: Ways) -> Rows:
    """Plan every way of a case that is asked for and not known yet; each row is kept as soon as it is there."""
    found = {} if given.again else read(given.results, case.name)
    print(f"\n{case.name}: {case.family} {case.size} on {case.devices} V100s", flush=True)
    config = config_of(case.row, **given.changes)
    subject = subject_of(config)
    print(f"  {count_parameters(subject) / 1e9:.4f}e9 parameters", flush=True)
    for name, fixed in ways_of(case, subject):
        if name in found or (given.ways and not any(fnmatch.fnmatch(name, glob) for glob in given.ways)):
            continue
        found[name] = plan_way(name, subject, {**common(case, given), **fixed})
        print(line(found[name], found.get(OURS), case), flush=True)
        write(given.results, case, found)
    return found


def common(case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `parallelize` that all ways share. Statistics of images are those of a microbatch, as in Alpa."""
    return {
        "devices": case.devices,
        "cluster": CLUSTER,
        "planning_seconds": given.planning_seconds,
        "planning_processes": given.planning_processes,
        "batch_statistics": "microbatch",
    }


def plan_way(name: str, subject: Subject, wishes: Mapping[str, Any]) -> Row:
    """The row of a way; what planning fails with is its outcome, and the other ways are still planned."""
    try:
        return plan(name, subject, wishes)[0]
    except Exception as error:  # noqa: BLE001
        what = f"failed: {type(error).__name__}: {(str(error) or '-').splitlines()[0][:110]}"
        return Row(name=name, step_s=None, peak_bytes=0, cpu_s=0.0, wall_s=0.0, what=what)


def read(folder: Path, name: str) -> Rows:
    """The rows of a case that are known, by their ways."""
    file = folder / f"{name}.json"
    return {row["name"]: Row(**row) for row in json.loads(file.read_text())["rows"]} if file.exists() else {}


def write(folder: Path, case: Case, found: Rows) -> None:
    """Keep the rows of a case, with what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = {"size": case.size, "devices": case.devices, "alpa_measured_s": case.alpa_s, "alpa_tflops": case.tflops}
    rows = [dataclasses.asdict(row) for row in found.values()]
    save(folder / f"{case.name}.json", json.dumps({**measured, "rows": rows}, indent=1) + "\n")


def line(row: Row, ours: Row | None, case: Case) -> str:
    """One row of the table."""
    if row.step_s is None:
        return f"  {row.name:16s} {'-':>9}  {row.cpu_s:6.1f} s of processor  {row.what}"
    over = "-" if ours is None or ours.step_s is None else f"{row.step_s / ours.step_s:.3f}"
    return (
        f"  {row.name:16s} {row.step_s:7.2f} s  {case.tflops_at(row.step_s):6.1f} TFLOP/s  this/ours {over:>6}  "
        f"{row.peak_bytes / 1e9:5.1f} GB  {row.cpu_s:6.1f} s of processor  {row.what}"
    )


def slower_than(found: Rows) -> list[str]:
    """The ways that are faster than ours."""
    ours = found.get(OURS)
    if ours is None:
        return []
    limit = float("inf") if ours.step_s is None else ours.step_s / (1 + TOLERANCE)
    return [row.name for row in found.values() if row.step_s is not None and row.step_s < limit]


def summary(known: Mapping[str, Rows]) -> str:
    """What the cases show together."""
    ours = {name: rows[OURS] for name, rows in known.items() if OURS in rows}
    with_alpas = [
        (rows[ALPAS].step_s or 0.0) / (rows[OURS].step_s or 1.0)
        for name, rows in known.items()
        if name in ours and ours[name].step_s and ALPAS in rows and rows[ALPAS].step_s
    ]
    lines = [f"{len(ours)} cases have our plan, {sum(row.step_s is not None for row in ours.values())} of them fit"]
    if with_alpas:
        lines.append(
            f"Alpa's plan over ours in {len(with_alpas)} cases: median {statistics.median(with_alpas):.3f}, "
            f"{min(with_alpas):.3f} to {max(with_alpas):.3f}"
        )
    lines += [f"{name}: ours is SLOWER than {', '.join(slower_than(r))}" for name, r in known.items() if slower_than(r)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the cases, then say what all known ones show."""
    return run_all(arguments, doc=__doc__, results=RESULTS, ways_of=ways, draw=draw)


def run_all(
    arguments: Sequence[str] | None = None,
    *,
    doc: str | None,
    results: Path,
    ways_of: Ways,
    draw: Draw,
    only: Sequence[str] | None = None,
) -> int:
    """Plan the ways of all cases that are asked for, or draw what is known; 1 if our plan is slower than another way.

    `doc`: what the command is for. `results`: the folder of the JSON files. `only`: the cases, if no others are asked for.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=only, metavar="GLOB", help="only these cases, such as 'gpt-*' moe-8"
    )
    parser.add_argument("--ways", nargs="+", metavar="GLOB", help="only these ways, such as autopar 'ZeRO-*'")
    parser.add_argument("--planning-seconds", type=float, default=60.0, help="of each plan; default %(default)s")
    parser.add_argument(
        "--planning-processes",
        type=int,
        default=available_cores(),
        help="of each plan; default: as `autopar plan` does, one for each core",
    )
    parser.add_argument("--again", action="store_true", help="plan what is known again")
    parser.add_argument("--plot", action="store_true", help="draw what is known, and plan nothing")
    parser.add_argument("--results", type=Path, default=results, help="the folder of the JSON files")
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="fields of all models as JSON, to make them small"
    )
    given = parser.parse_args(arguments)
    every = cases()
    if not given.plot:
        chosen = [case for case in every if not given.only or any(fnmatch.fnmatch(case.name, g) for g in given.only)]
        for case in chosen:
            run_case(case, given, ways_of)
    known = {case.name: rows for case in every if (rows := read(given.results, case.name))}
    print(f"\n{summary(known)}")
    if given.plot:
        draw(every, known, given.results.parent)
    return 1 if any(map(slower_than, known.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
