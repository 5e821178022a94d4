"""`simulate --plan`: a saved plan on hardware that one does not own.

It prints compute, communication by kind, memory and overlap on the other cluster, against what was planned. What can go wrong:
a plan for a cluster whose file is not at hand; the error says how to name it.
"""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console

from autopar.commands.plans.plan import read_plan
from autopar.commands.terminal.printing import new_table, print_json
from autopar.cost_model.hardware import Cluster, find_cluster
from autopar.errors import ArgumentError
from autopar.explain import standard_output
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.simulate.plan_overlap import overlap_of, overlap_rows, overlap_table
from autopar.simulate.reprice import RepricedPlan, reprice


def simulate_plan(options: argparse.Namespace) -> int:
    """Run `simulate --plan`; 0 if the plan could be priced."""
    try:
        cluster = find_cluster(options.cluster)
        before = find_cluster(options.planned_for) if options.planned_for else None
        plan = read_plan(options.plan)
        found = reprice(plan, cluster, planned_for=before)
        overlap = overlap_of(plan, cluster, planned_for=before)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    if options.json:
        print_json(dataclasses.asdict(found) | {"overlap": overlap_rows(overlap)})
    else:
        console = standard_output()
        _print_plan(console, found, cluster)
        console.print()
        console.print(overlap_table(overlap, plan))
    return 0


def _print_plan(console: Console, found: RepricedPlan, cluster: Cluster) -> None:
    console.print(f"The plan on {found.cluster}, planned for {found.planned_for}", markup=False, highlight=False)
    table = new_table("", "", "planned", "here", "bytes", "times", words=("",))
    table.add_row("compute", seconds_text(found.planned_compute_s), seconds_text(found.compute_s), "", "")
    for kind in found.communication:
        cells = (
            kind.kind,
            seconds_text(kind.planned_s),
            seconds_text(kind.seconds),
            bytes_text(kind.bytes),
            f"{kind.count:,.0f}",
        )
        table.add_row(*cells)
    if len(found.communication) > 1:
        planned_s = sum(kind.planned_s for kind in found.communication)
        here_s = sum(kind.seconds for kind in found.communication)
        table.add_row("communication", seconds_text(planned_s), seconds_text(here_s), "", "")
    if found.planned_hidden_s or found.hidden_s:
        parts = (found.planned_hidden_s, found.hidden_s)
        hidden = [f"-{seconds_text(seconds)}" if seconds else seconds_text(0.0) for seconds in parts]
        table.add_row("hidden behind compute", *hidden, "", "")
    if found.planned_waited_s or found.waited_s:
        waited = map(seconds_text, (found.planned_waited_s, found.waited_s))
        table.add_row("waited for transfers", *waited, "", "")
    table.add_section()
    table.add_row("step", seconds_text(found.planned_step_s), seconds_text(found.step_s), "", "")
    console.print(table)
    memory = (
        f"memory: {bytes_text(found.peak_bytes)} of {bytes_text(cluster.usable_memory_bytes)} usable on each device"
    )
    share = percent_text(found.peak_bytes, cluster.usable_memory_bytes)
    console.print(f"\n{memory} ({share}): {'fits' if found.fits else 'does not fit'}", markup=False, highlight=False)
    console.print(found.basis, markup=False, highlight=False)
