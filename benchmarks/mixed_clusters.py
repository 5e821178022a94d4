"""Plans for clusters of unlike nodes: against all devices as the slowest, and against the fastest kind of node alone.

    python benchmarks/mixed_clusters.py [--only "8 A100 + 8 V100"] [--planning-seconds 60] [--json FILE]

Two clusters on one network of 100 Gb/s a node, of presets: a node of 8 A100 and one of 8 V100; two DGX-A100 and two DGX-H100. All
figures are predictions under the cost model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import jax

import autopar
from autopar.cost_model.device import slowest_device
from autopar.cost_model.hardware import find_cluster
from autopar.cost_model.machine import Cluster, NodeKind
from autopar.explain import standard_output
from autopar.explain.tables import new_table
from autopar.files.whole_file import save
from autopar.models import registry
from autopar.pipeline_plan import PipelinePlan

CLUSTERS = {
    "8 A100 + 8 V100": (("p4d.24xlarge", 1), ("p3dn.24xlarge", 1)),
    "2 DGX-A100 + 2 DGX-H100": (("dgx-a100-80gb", 2), ("dgx-h100", 2)),
}
MODELS = {
    "8 A100 + 8 V100": {"layers": 24, "hidden": 2048, "heads": 16, "seq": 1024, "vocab": 51200, "batch": 512},
    "2 DGX-A100 + 2 DGX-H100": {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 51200, "batch": 512},
}


def join(name: str, parts: tuple[tuple[str, int], ...]) -> Cluster:
    """Nodes of presets on the network of the one whose network is slowest."""
    presets = [(find_cluster(preset), count) for preset, count in parts]
    kinds = tuple(NodeKind(one.name, count, one.device, one.tiers[:1]) for one, count in presets)
    slowest = min((one for one, _ in presets), key=lambda one: one.tiers[1].sustained_bytes_per_s)
    weakest = min(kinds, key=lambda kind: kind.tiers[0].sustained_bytes_per_s)
    device = slowest_device([kind.device for kind in kinds])
    return dataclasses.replace(
        slowest, name=name, device=device, tiers=(weakest.tiers[0], *slowest.tiers[1:]), node_kinds=kinds
    )


def describe(plan: autopar.Plan | PipelinePlan) -> str:
    """The meshes of a plan, and their kinds of node."""
    if isinstance(plan, PipelinePlan):
        return " + ".join(f"{stage.plan.num_devices} {stage.node_kind}".strip() for stage in plan.stages)
    return f"{plan.num_devices} {plan.node_kind}".strip()


def main() -> None:
    """Plan, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--planning-seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=CLUSTERS, nargs="+", default=[*CLUSTERS], help="these clusters")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    table = new_table("Predicted steps", "cluster", "devices", "step", "planned in", "times faster", numbers=("step",))
    figures = {}
    for name in options.only:
        cluster = join(name, CLUSTERS[name])
        ways = {
            "plan": cluster,
            "all as the slowest": dataclasses.replace(cluster, node_kinds=()),
            **{f"{kind.name} alone": cluster.of_kind(kind.name) for kind in cluster.node_kinds},
        }
        found = {}
        for way, machine in ways.items():
            kinds = {kind.name: kind.count * kind.devices_per_node for kind in cluster.node_kinds}
            devices = kinds.get(way.removesuffix(" alone"), sum(kinds.values()))
            model = registry.build("gpt", **MODELS[name], dtype="float16", dropout=0.0)
            state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
            step = autopar.parallelize(
                model.train_step, devices=devices, cluster=machine, planning_seconds=options.planning_seconds
            )
            plan = step.plan(state, model.batch_shape())
            found[way] = {"step_s": plan.step_s, "planning_s": plan.planning_s, "devices": describe(plan)}
            print(f"{name}, {way}: {plan.step_s:.3f} s, planned in {plan.planning_s:.1f} s", flush=True)
            faster = found[way]["step_s"] / found["plan"]["step_s"]
            table.add_row(
                f"{name}, {way}",
                found[way]["devices"],
                f"{plan.step_s:.3f} s",
                f"{plan.planning_s:.1f} s",
                "" if way == "plan" else f"{faster:.2f}",
            )
        figures[name] = found
    standard_output().print(table)
    if options.json:
        save(options.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
