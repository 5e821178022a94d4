"""Run every harness and count by group: `python -m tests.harnesses.report` writes `tests/data/harnesses.json`.

It prints which harnesses did not run, or were not equal, and why. docs/coverage.md shows the counts of each version of JAX.
It takes ten minutes on one core, and with `AUTOPAR_HARNESS_MESHES=all`, which runs each harness on all three meshes, half
an hour.
"""

import json
import sys
from pathlib import Path

import jax

from tests.harnesses.cases import NOT_RUN_BY_JAX, all_harnesses
from tests.harnesses.selection import EVERY_MESH, by_group, on_meshes, run_lines
from tests.harnesses.splitting import any_splits

COUNTS = Path(__file__).parents[1] / "data" / "harnesses.json"


def counts_by_group(found, groups):
    """How many harnesses each group has, how many JAX runs, how many of these are equal, and whether one splits anything."""
    counts = {}
    for group, harnesses in sorted(groups.items()):
        names = [harness.fullname for harness in harnesses]
        not_run = sum(found.get(name) == NOT_RUN_BY_JAX for name in names)
        wrong = sum(name in found for name in names) - not_run
        run = len(names) - not_run
        counts[group] = {
            "harnesses": len(names),
            "run": run,
            "equal": run - wrong,
            "splits": any_splits(harnesses),
        }
    return counts


def write(version, counts):
    """Put the counts of a version of JAX into the file."""
    known = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    lines = [
        f'  "{v}": {{\n' + ",\n".join(f'    "{g}": {json.dumps(c)}' for g, c in groups.items()) + "\n  }"
        for v, groups in sorted({**known, version: counts}.items())
    ]
    COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    everything = [harness.fullname for harness in all_harnesses()]
    found = run_lines(on_meshes(everything, every=EVERY_MESH))
    sys.stdout.writelines(f"{name}: {text}\n" for name, text in found.items())
    write(jax.__version__, counts_by_group(found, by_group()))
