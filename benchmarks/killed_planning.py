"""Does `autopar plan` hand over a plan whenever it is told to stop? Sends it SIGINT and SIGTERM at random moments.

    python benchmarks/killed_planning.py [--case gpt-v100] [--moments 10] [--planning-seconds 60] [--seed 0] [--json FILE]

In: a case of `planning_ordinary.py`. It is planned once undisturbed, which says how long its search takes and when the first
plan comes. Then it is planned again for each moment, drawn between 10 % of the budget and the end of the undisturbed search,
counted from the line of the log that says that the search begins; the two signals take turns. Out: per moment the signal, the
exit status, the seconds from the signal to the end of the process, and the step of the plan; exit status 1 unless each run
has written a plan that `autopar.plan_from_json` reads and `parallelize(plan=)` takes for the step, with the exit status of an
interrupted command. What can go wrong: a search that ends within 10 % of its budget has no such moments, which is said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from planning_ordinary import CASES, command_of, wait

import autopar
from autopar.commands.arguments.subject import find_subject
from autopar.commands.parser import read
from autopar.files.whole_file import save

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
SMALL = {"small": "gpt --layers 2 --hidden 64 --heads 4 --seq 32 --batch 32 --devices 8 --cluster p3.16xlarge"}
"""To see in a minute whether this script runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the command; seconds count from the beginning of the search.

    Attributes:
        number: the signal that was sent, 0 if none was.
        at_s: when it was sent.
        status: exit status, negative for a signal that the process did not handle.
        first_plan_s: when the log told of a first plan; None if it never did.
        ended_s: when the process ended.
        cpu_s: seconds of the processor, tracing included.
        step_s: of the plan that was handed over; None if there is none.
        error: why what was handed over is no plan for this step, or the last line that was printed.
    """

    number: int
    at_s: float | None
    status: int
    first_plan_s: float | None
    ended_s: float
    cpu_s: float
    step_s: float | None
    error: str

    @property
    def is_good(self) -> bool:
        """Whether a legal plan was handed over, with the right exit status; 0 if the search was over before the signal."""
        return self.step_s is not None and self.status in (
            0,
            STATUS.get(signal.Signals(self.number)) if self.number else 0,
        )


class Log:
    """The lines that the command logs, read as they come, each with its time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Begin to read."""
        self.began = threading.Event()
        self.first_plan: float | None = None
        self.start, self.last = time.perf_counter(), ""
        self._process = process
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for text in self._process.stderr:
            self.last = text.strip() or self.last
            if " INFO planning: seconds_left" in text:
                self.start = time.perf_counter()
                self.began.set()
            elif "best_s " in text and self.first_plan is None:
                self.first_plan = time.perf_counter()
        self.began.set()

    def finish(self) -> None:
        """Wait for the last line."""
        self._reader.join()
        if self._process.stderr is not None:
            self._process.stderr.close()


def run(arguments: list[str], number: int, at_s: float | None, limit_s: float) -> Run:
    """Plan in a fresh process, which gets a signal `at_s` seconds after its search has begun."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.json"
        process = subprocess.Popen(
            command_of([*arguments, "-vv"], target),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "AUTOPAR_CACHE": "off"},
            preexec_fn=_hear_interrupts,
            start_new_session=True,
        )
        log = Log(process)
        sender = None
        if at_s is not None:
            log.began.wait()
            sender = threading.Timer(log.start + at_s - time.perf_counter(), _send, (process, number))
            sender.start()
        used = wait(process, limit_s)
        ended = time.perf_counter()
        log.finish()
        if sender is not None:
            sender.cancel()
        step_s, error = check(target, arguments)
    return Run(
        number=number,
        at_s=at_s,
        status=process.returncode,
        first_plan_s=None if log.first_plan is None else log.first_plan - log.start,
        ended_s=ended - log.start,
        cpu_s=used.ru_utime + used.ru_stime,
        step_s=step_s,
        error=error or log.last if step_s is None else "",
    )


def _hear_interrupts() -> None:
    """A shell lets commands in the background ignore SIGINT, and they pass that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _send(process: subprocess.Popen[str], number: int) -> None:
    if process.returncode is None:
        process.send_signal(number)


def check(target: Path, arguments: list[str]) -> tuple[float | None, str]:
    """The step of a written plan, in seconds, if it is one for the step of the command; else why not."""
    if not target.exists():
        return None, ""
    options = read(["plan", *arguments])
    subject = find_subject(options.model, options.sizes)
    try:
        plan = autopar.plan_from_json(target.read_text())
        step = autopar.parallelize(subject.step, devices=options.devices, cluster=options.cluster, plan=plan)
        return float(step.plan(subject.state, subject.batch).step_s), ""
    except autopar.AutoparError as error:
        return None, f"{type(error).__name__}: {error}"


def draw_moments(seed: int, count: int, *, budget_s: float, ends_s: float) -> list[float]:
    """Random seconds from 10 % of the budget to the end of the search, in order; none if it ends before."""
    first_s, last_s = 0.1 * budget_s, min(budget_s, ends_s)
    draw = random.Random(seed)
    return sorted(draw.uniform(first_s, last_s) for _ in range(count)) if first_s < last_s else []


def line(one: Run) -> str:
    """One row of the table."""
    name = signal.Signals(one.number).name if one.number else "undisturbed"
    sent = "" if one.at_s is None else f"sent at {one.at_s:6.2f} s, ended {one.ended_s - one.at_s:6.2f} s later"
    first = "never" if one.first_plan_s is None else f"{one.first_plan_s:.2f} s"
    step = "no plan" if one.step_s is None else f"step {1e3 * one.step_s:.2f} ms"
    clocks = f"search {one.ended_s:6.2f} s, {one.cpu_s:6.1f} s of processor, first plan {first}"
    return f"{name:12s} {sent:42s} exit {one.status:4d}  {clocks}  {step}  {one.error[:120]}"


def main() -> int:
    """Plan undisturbed, then with a signal at each moment; print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="gpt-v100", choices=[*CASES, *SMALL])
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--planning-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a run may take")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    arguments = [*{**CASES, **SMALL}[given.case].split(), "--planning-seconds", f"{given.planning_seconds:g}"]
    runs = [run(arguments, 0, None, given.limit)]
    print(line(runs[0]), flush=True)
    budget_s = given.planning_seconds
    moments = draw_moments(given.seed, given.moments, budget_s=budget_s, ends_s=runs[0].ended_s)
    if not moments:
        print(f"the search ended within 10 % of its {budget_s:g} s: give fewer --planning-seconds")
    for number, at_s in enumerate(moments):
        runs.append(run(arguments, (signal.SIGINT, signal.SIGTERM)[number % 2], at_s, given.limit))
        print(line(runs[-1]), flush=True)
    if given.json:
        save(given.json, json.dumps([dataclasses.asdict(one) for one in runs], indent=1))
    bad = [one for one in runs if not one.is_good]
    if runs[0].first_plan_s is not None:
        share = runs[0].first_plan_s / budget_s
        print(f"undisturbed, the first plan came after {share:.0%} of the budget{' TOO LATE' if share > 0.1 else ''}")
    print(f"{len(runs) - len(bad)} of {len(runs)} runs handed over a legal plan")
    return 1 if bad or not moments else 0


if __name__ == "__main__":
    sys.exit(main())
