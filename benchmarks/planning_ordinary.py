"""How long does planning take at ordinary sizes, and how good is the plan? Runs `autopar plan` as a user types it.

    python benchmarks/planning_ordinary.py [--only gpt-v100 ...] [--limit 120] [--tight] [--scan-layers] [--json FILE]

Each case is a fresh process with everything left open and nothing cached. Printed are seconds of wall clock (start of Python and
tracing included) and of the processor, which a busy machine changes less, the largest memory of the process, the plan, its gap to
the bound, and what e10404d did. `--tight` plans each case again with 0.6 of the memory that its plan takes, where the machine's
own memory allowed more; `--scan-layers` plans only the models that can scan over their layers, in that form. A case that is not
planned within `--limit` seconds is reported as such. What can go wrong: on a busy machine the clock ends a search that would have
come further; give more `--planning-seconds` there, and read the processor's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from autopar.files.whole_file import save

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
    "densenet": "densenet --layers 120 --blocks 3 --growth 16 --image-size 32 --batch 256 --cluster p3.16xlarge --devices 8",
    "gpt-1024": "gpt --layers 48 --hidden 8192 --heads 64 --batch 1024 --seq 2048 --vocab 51200 "
    "--cluster dgx-a100-80gb --devices 1024",
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


CAN_SCAN = ("bert", "gpt", "llama", "t5")
"""Models with `--scan-layers`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one command did, on the wall's clock and the processor's; `plan` is None if it made none."""

    seconds: float
    cpu_seconds: float
    gigabytes: float
    plan: dict[str, Any] | None
    text: str


def run(arguments: list[str], limit_s: float, kept: Path | None = None) -> Outcome:
    """One command, with nothing cached; `kept`: where the plan is written, nowhere else if None."""
    with tempfile.TemporaryDirectory() as folder:
        target, printed = kept or Path(folder) / "plan.json", Path(folder) / "printed"
        target.unlink(missing_ok=True)
        started = time.perf_counter()
        with printed.open("w") as text:
            process = subprocess.Popen(
                command_of(arguments, target),
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=subprocess.STDOUT,
                env={**os.environ, "AUTOPAR_CACHE": "off"},
                start_new_session=True,
            )
        used = wait(process, limit_s)
        seconds = time.perf_counter() - started
        plan = json.loads(target.read_text()) if target.exists() else None
        return Outcome(
            seconds=seconds,
            cpu_seconds=used.ru_utime + used.ru_stime,
            gigabytes=used.ru_maxrss / 2**20,
            plan=plan,
            text=f"no plan in {limit_s:.0f} s" if process.returncode == -signal.SIGKILL else printed.read_text(),
        )


def command_of(arguments: list[str], target: Path) -> list[str]:
    """`autopar plan` with the arguments of a case, which writes its plan to `target`."""
    return [sys.executable, "-m", "autopar", "plan", *arguments, "-o", str(target)]


def wait(process: subprocess.Popen[bytes] | subprocess.Popen[str], limit_s: float) -> resource.struct_rusage:
    """What the first process of a session and those that it waited for used until it ended; all are killed after `limit_s`."""
    killer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    _, status, used = os.wait4(process.pid, 0)
    killer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return used


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
    step = re.search(r"predicted step ([\d.]+ \w+)", outcome.text)
    gap = re.search(r"at most ([\d.]+%)", outcome.text)
    last = (outcome.text.strip().splitlines() or [""])[-1]
    what = describe(outcome.plan) if outcome.plan else last[:70]
    clocks = f"{outcome.seconds:6.1f} s, {outcome.cpu_seconds:6.1f} s of processor, {outcome.gigabytes:5.2f} GB"
    figures = f"step {step[1] if step else '-':>9}  gap {gap[1] if gap else '-':>6}"
    return f"{name:22s} {clocks}  {figures}  before {BEFORE.get(name, '-'):>7}  {what}"


def main() -> int:
    """Read the arguments, plan each case, print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--planning-seconds", type=float, help="of each case, if not the default")
    parser.add_argument("--tight", action="store_true", help="plan each case again with 0.6 of its memory")
    parser.add_argument(
        "--scan-layers", action="store_true", help="only models with a scan over their layers, in that form"
    )
    parser.add_argument("--plans", type=Path, help="keep the plans in this folder, as CASE.json")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    found: dict[str, Any] = {}

    def plan(name: str, arguments: list[str]) -> dict[str, Any] | None:
        outcome = run(arguments, options.limit, options.plans and options.plans / f"{name}.json")
        print(line(name, outcome), flush=True)
        found[name] = dataclasses.asdict(outcome)
        if options.json:
            save(options.json, json.dumps(found, indent=1))
        return outcome.plan

    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        arguments, label = CASES[name].split(), name
        if options.planning_seconds is not None:
            arguments += ["--planning-seconds", f"{options.planning_seconds:g}"]
        if options.scan_layers:
            if arguments[0] not in CAN_SCAN:
                continue
            arguments, label = [*arguments, "--scan-layers"], f"{name}-scan"
        best = plan(label, arguments)
        if options.tight and best is not None:
            plan(f"{label}-tight", [*arguments, "--memory-limit", str(int(0.6 * peak_bytes(best)))])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
