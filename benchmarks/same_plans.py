"""Do the plans of the example models stay the same? Plans each model on each cluster, and compares with another checkout.

    python benchmarks/same_plans.py write FOLDER [--only gpt ...]       plan with the autopar that is on the path
    python benchmarks/same_plans.py compare BEFORE AFTER                exit status 1 if any plan differs

A change that should not affect plans is shown by `write` on both sides (PYTHONPATH names the checkout) and `compare`.
Two plans are the same if their JSON is, except for the seconds that planning took and the lines of code that operations
come from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from autopar.files.whole_file import save

MODELS = ("mlp", "gpt", "gpt_scan", "moe", "wide_resnet", "bert", "t5", "llama", "unet", "densenet")
CLUSTERS = ("cpu", "dgx-h100", "p3.16xlarge")
LEFT_OUT = ("planning_s", "source")
"""What says nothing of a plan: the seconds that planning took, and the lines of code that operations come from."""


def write(folder: Path, models: tuple[str, ...], clusters: tuple[str, ...]) -> None:
    """Plan every model on every cluster, with the command that a user types."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        for cluster in clusters:
            target = folder / f"{model}-{cluster}.json"
            command = [sys.executable, "-m", "autopar", "plan", model, "--cluster", cluster, "-o", str(target)]
            searching = {**os.environ, "AUTOPAR_CACHE": "off"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=searching)
            if done.returncode != 0:
                save(target, json.dumps({"error": done.stderr}))
            print(f"{target.name}: {'planned' if done.returncode == 0 else done.stderr.strip()}", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print which plans differ and where; returns how many do."""
    differing = 0
    for one in sorted(before.glob("*.json")):
        other = after / one.name
        if not other.exists():
            found = ["missing"]
        else:
            found = list(differences(json.loads(one.read_text()), json.loads(other.read_text()), ""))
        differing += bool(found)
        print(f"{one.name}: {'same' if not found else '; '.join(found[:5])}")
    return differing


def differences(one: Any, other: Any, at: str) -> list[str]:
    """Where two JSON values differ, as paths."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if key not in LEFT_OUT]
        return [d for key in keys for d in differences(one.get(key), other.get(key), f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{at}/{i}")]
    return [] if one == other else [f"{at}: {str(one)[:60]} before, {str(other)[:60]} after"]


def main() -> int:
    """Read the arguments, run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--only", nargs="+", default=MODELS, choices=MODELS)
    writing.add_argument("--clusters", nargs="+", default=CLUSTERS)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        write(options.folder, tuple(options.only), tuple(options.clusters))
        return 0
    return 1 if compare(options.before, options.after) else 0


if __name__ == "__main__":
    raise SystemExit(main())
