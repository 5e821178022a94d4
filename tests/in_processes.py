"""Cases run in processes of their own, so that one that ends its process, or waits for ever, is named.

`run` hands cases to a process, in which `work_through` says before each few of them how many these are, and what is wrong behind
them. If the process ends early or hangs, the cases that were under way run one by one, each in its own process,
and the others go on in a further one.
"""

import dataclasses
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

from tests.ir_contexts import share_contexts
from tests.seldom_collected import collect_seldom
from tests.xla_flags import DEVICES, QUICK_COMPILE

ROOT = Path(__file__).parents[1]
SILENT_SECONDS = 240.0
"""Cases that run together take seconds. A process that works and is silent for longer may have little of a busy machine: it hangs
only if it has worked for so long itself, or hardly at all."""
HARDLY_SECONDS = 1.0
"""Seconds of the processor that a process needs at most to wait for `SILENT_SECONDS`."""


@dataclasses.dataclass
class Report:
    """What a process said: problems by name, how it ended (None if well), who was under way then, and who was not reached."""

    problems: dict
    ending: str | None
    under_way: list
    left: list


def run(module, cases, *, together=1):
    """What is wrong, by the name of the case.

    Args:
        module: run as `python -m MODULE TOGETHER`; calls `work_through`.
        cases: lines whose last word is a name.
        together: how many cases the module works on at a time.
    """
    problems, left = {}, list(cases)
    while left:
        report = start(module, left, together)
        problems |= report.problems
        left = report.left
        if report.ending is None:
            assert not left, f"{module} left {left}"
        elif len(report.under_way) == 1:
            problems[report.under_way[0].split()[-1]] = report.ending
        elif report.under_way:
            for case in report.under_way:
                problems |= run(module, [case])
        else:
            raise AssertionError(f"{module} {report.ending}")
    return problems


def work_through(problems_of):
    """In the process: hand the cases of standard input to a function, a few at a time, and say what it returns.

    Args:
        problems_of: of a list of cases, what is wrong, by their names.
    """
    warnings.simplefilter("ignore")
    share_contexts()
    collect_seldom()
    together, cases = int(sys.argv[1]), sys.stdin.read().splitlines()
    for first in range(0, len(cases), together):
        part = cases[first : first + together]
        say("at", str(len(part)))
        say("done", json.dumps(problems_of(part)))


def say(kind, text):
    """Write a line at once."""
    sys.stdout.write(f"{kind} {text}\n")
    sys.stdout.flush()


def start(module, cases, together):
    """Run cases in one process until it ends or is silent for too long."""
    flags = f"{DEVICES} {QUICK_COMPILE}"
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    with tempfile.TemporaryFile("w+") as cases_file, tempfile.TemporaryFile("w+") as errors:
        cases_file.write("".join(f"{case}\n" for case in cases))
        cases_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(together)],
            stdin=cases_file,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        said = queue.Queue()
        listener = threading.Thread(target=listen, args=(process.stdout, said), daemon=True)
        listener.start()
        try:
            report = followed(said, cases, process.pid)
            if report.ending is None and process.wait(SILENT_SECONDS):
                errors.seek(0)
                report.ending = f"ends the process: {last_words(errors.read())}"
        finally:
            process.kill()
            process.wait()
            listener.join()
            process.stdout.close()
    return report


def listen(stream, said):
    """Put what a process prints into a queue, line by line, and None behind it."""
    for line in stream:
        said.put(line)
    said.put(None)


def followed(said, cases, pid):
    """The report of a process from its lines, up to its end or until it hangs."""
    report = Report({}, None, [], list(cases))
    spoke_s = used_s = cpu_seconds(pid)
    while True:
        try:
            line = said.get(timeout=SILENT_SECONDS)
        except queue.Empty:
            before_s, used_s = used_s, cpu_seconds(pid)
            if used_s - before_s > HARDLY_SECONDS and used_s - spoke_s < SILENT_SECONDS:
                continue
            report.ending = f"says nothing for {SILENT_SECONDS:.0f} seconds"
            return report
        if line is None:
            return report
        spoke_s = used_s = cpu_seconds(pid)
        kind, _, rest = line.partition(" ")
        if kind == "at":
            report.under_way, report.left = report.left[: int(rest)], report.left[int(rest) :]
        elif kind == "done":
            report.problems |= json.loads(rest)
            report.under_way = []


def cpu_seconds(pid):
    """Seconds of the processor that a process has used; not a number where the system does not say or the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def last_words(text):
    """The line of a process's standard error that says most."""
    told = [line for line in text.splitlines() if "Check failed" in line or "Error" in line]
    return (told or text.splitlines() or ["nothing said"])[-1][:500]
