"""How long does planning take at ordinary sizes, and how good is the plan? Runs `autopar plan` as a user types it.

    python benchmarks/planning_ordinary.py [--only gpt-v100 ...] [--limit 120] [--tight] [--json FILE]

Each case is a fresh process with everything left open and nothing cached. Printed are seconds of wall clock (start of Python and
tracing included), the largest memory of the process, the plan, its gap to the bound, and what e10404d did. `--tight` plans each
case again with 0.6 of the memory that its plan takes, where the machine's own memory allowed more. A case that is not planned
within `--limit` seconds is reported as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GPT = "gpt --layers 24 --hidden 2048 --heads 16 --seq 1024 --batch 64 --vocab 51200 --devices 8"
BERT = "bert --layers 24 --hidden 1024 --heads 16 --batch 256 --seq 512 --vocab 30522 --cluster p4d.24xlarge"
CASES = {
    "gpt-v100": f"{GPT} --cluster p3.16xlarge",
    "gpt-a100": f"{GPT} --cluster dgx-a100-80gb",
    "gpt-h100": f"{GPT} --cluster dgx-h100",
    "gpt-39b": "gpt --layers 48 --hidden 8192 --heads 64 --batch 1024 --seq 1024 --vocab 51200 "
    "--cluster p3dn.24xlarge --devices 64",
    "llama": "llama --layers 32 --hidden 4096 --heads 32 --batch 64 --seq 2048 --cluster dgx-a100-80gb --devices 32",
    "bert": f"{BERT} --devices 8",
    "bert-2-nodes": f"{BERT} --devices 16",
    "t5": "t5 --layers 12 --hidden 1024 --heads 16 --batch 128 --cluster p4d.24xlarge --devices 8",
    "t5-2-nodes": "t5 --layers 12 --hidden 1024 --heads 16 --batch 128 --cluster p4d.24xlarge --devices 16",
    "moe": "moe --layers 12 --hidden 1024 --heads 16 --batch 64 --cluster p3.16xlarge --devices 8",
    "moe-2-nodes": "moe --layers 12 --hidden 1024 --heads 16 --batch 64 --cluster p3.16xlarge --devices 16",
    "wide-resnet": "wide_resnet --depth 50 --batch 512 --cluster p3.16xlarge --devices 8",
    "unet": "unet --batch 256 --cluster p4d.24xlarge --devices 8",
}
BEFORE = {
    "gpt-v100": "> 420 s",
    "gpt-a100": "> 110 s",
    "gpt-39b": "189 s",
    "llama": "> 110 s",
    "bert": "> 110 s",
    "moe-2-nodes": "> 110 s",
    "wide-resnet": "> 110 s",
    "unet": "85 s",
    "t5": "94 s",
}
"""Seconds at e10404d, as far as they were measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one command did; `plan` is None if it made none."""

    seconds: float
    gigabytes: float
    plan: dict[str, Any] | None
    text: str


def run(arguments: list[str], limit_s: float) -> Outcome:
    """One command, with nothing cached."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "autopar", "plan", *arguments, "-o", str(target)]
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=limit_s,
                env={**os.environ, "AUTOPAR_CACHE": "off"},
            )
            text = done.stdout if done.returncode == 0 else done.stderr
        except subprocess.TimeoutExpired:
            text = f"no plan in {limit_s:.0f} s"
        seconds = time.perf_counter() - started
        plan = json.loads(target.read_text()) if target.exists() else None
    return Outcome(seconds=seconds, gigabytes=_largest_child_gb(), plan=plan, text=text)


def _largest_child_gb() -> float:
    """The largest memory of any process so far that this one has started."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def describe(plan: dict[str, Any]) -> str:
    """A plan in a few words."""
    stages = plan.get("stages")
    again = ", recomputes" if plan.get("recompute") else ""
    if stages is not None:
        return f"{len(stages)} stages, {plan['num_microbatches']} microbatches, {plan['schedule']}{again}"
    return f"mesh {'x'.join(map(str, plan['mesh_shape']))}, {plan['num_microbatches']} microbatches{again}"


def peak_bytes(plan: dict[str, Any]) -> int:
    """The peak of the plan, or of the stage that needs most."""
    return int(max(stage["peak_bytes"] for stage in plan["stages"]) if plan.get("stages") else plan["peak_bytes"])


def line(name: str, outcome: Outcome) -> str:
    """One row of the table."""
    step = re.search(r"predicted step ([\d.]+ \S+)", outcome.text)
    gap = re.search(r"at most ([\d.]+%)", outcome.text)
    what = (
        describe(outcome.plan) if outcome.plan else outcome.text.strip().splitlines()[-1][:70] if outcome.text else ""
    )
    figures = f"{outcome.seconds:7.1f} s {outcome.gigabytes:5.2f} GB  step {step[1] if step else '-':>9}"
    return f"{name:22s} {figures}  gap {gap[1] if gap else '-':>6}  before {BEFORE.get(name, '-'):>7}  {what}"


def main() -> int:
    """Read the arguments, plan each case, print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--tight", action="store_true", help="plan each case again with 0.6 of its memory")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.only:
        arguments = CASES[name].split()
        outcome = run(arguments, options.limit)
        print(line(name, outcome), flush=True)
        found[name] = dataclasses.asdict(outcome)
        if options.tight and outcome.plan is not None:
            limit = int(0.6 * peak_bytes(outcome.plan))
            tight = run([*arguments, "--memory-limit", str(limit)], options.limit)
            print(line(f"{name}, 0.6 of it", tight), flush=True)
            found[f"{name}-tight"] = dataclasses.asdict(tight)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
