"""Jobs started by the tests of `autopar launch`, and what has to hold when they have ended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COUNTING = HERE / "counting.py"
LIMIT_S = 60


def start(folder, *options, script=(COUNTING,), arguments=(), through=(), **environment):
    """`autopar launch OPTIONS SCRIPT FOLDER ARGUMENTS`, with its output in files of the folder; `through` another command."""
    command = [
        *through,
        sys.executable,
        "-m",
        "autopar",
        "launch",
        "--restart-pause",
        "0",
        *options,
        *script,
        folder,
        *arguments,
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        return subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=err, env={**os.environ, "PYTHONPATH": paths, **environment}
        )


def end(job, folder, limit_s=LIMIT_S):
    """Its status and what it said, once it has ended; no process of it may be left."""
    try:
        status = job.wait(limit_s)
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    assert processes_of(folder) == {}
    return status, said(folder)


def run(folder, *options, limit_s=LIMIT_S, **more):
    return end(start(folder, *options, **more), folder, limit_s)


def said(folder):
    return (folder / "err.txt").read_text()


def printed(folder):
    return (folder / "out.txt").read_text()


def processes_of(folder):
    """The processes that have a folder on their command line, by number."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words:
            found[int(entry.name)] = words
    return found


def is_gone(folder, limit_s=10.0):
    """Whether within a time no process of a job is left."""
    return wait_until(lambda: not processes_of(folder), limit_s)


def wait_until(holds, limit_s=20.0, pause_s=0.01):
    ends = time.monotonic() + limit_s
    while not holds() and time.monotonic() < ends:
        time.sleep(pause_s)
    return holds()


def lines(folder, name):
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


def pids(folder, attempt=0):
    """The processes of the workers of an attempt, in order of their ranks, of those that have started."""
    words = sorted(line.split() for line in lines(folder, "started") if f" attempt {attempt} " in line)
    return [int(line[-1]) for line in words]


def results(folder, count):
    """The last state of each worker."""
    return [json.loads((folder / f"state{rank}.json").read_text()) for rank in range(count)]


def uninterrupted(count, steps):
    """What workers end with if nothing happens to them."""
    found = []
    for rank in range(count):
        x = 0.3 + rank / 100
        for _ in range(steps):
            x = 3.9 * x * (1 - x)
        found.append({"step": steps, "x": x})
    return found
