"""A run that is killed at random moments, saves among them, ends as one that is not, and never restores what is not complete."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.checkpoints.killed_run import EVERY, STEPS
from tests.test_processes import free_port

LIMIT_S = 240


def start(folder, count):
    port, started = free_port(), []
    for rank in range(count):
        command = [sys.executable, "-m", "tests.checkpoints.killed_run", str(folder), *map(str, (rank, count, port))]
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        errors = (folder / f"{rank}.txt").open("w")
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment))
        errors.close()
    return started


def ends(folder, count, moment):
    """Start it, kill it at a moment or let it come to its end; returns (first, last) step that it made."""
    processes, seen, killed = start(folder, count), [], False
    watchdog = threading.Timer(LIMIT_S, lambda: [process.kill() for process in processes])
    watchdog.start()
    try:
        for line in processes[0].stdout:
            if found := re.match(r"step (\d+)", line):
                seen.append(int(found[1]))
            if moment is not None and len(seen) >= moment[0]:
                time.sleep(moment[1])
                killed = True
                break
        if killed:
            processes[-1].kill()
            time.sleep(0.1)
    finally:
        for process in processes:
            if killed:
                process.kill()
            process.wait()
            process.stdout.close()
        watchdog.cancel()
    if not killed:
        said = "".join((folder / f"{rank}.txt").read_text()[-3000:] for rank in range(count))
        assert [process.returncode for process in processes] == [0] * count, said
    return (seen[0], seen[-1]) if seen else None


def check(folder, kills, count):
    draw, whole = random.Random(kills), folder / "whole"
    whole.mkdir()
    ends(whole, count, None)
    expected = [(whole / f"end.{rank}").read_text() for rank in range(count)]
    made, done = 0, 0
    broken = folder / "broken"
    while made < kills:
        broken.mkdir(exist_ok=True)
        moment = draw.randrange(1, max(2, STEPS // 4)), draw.random() * 0.05
        span = ends(broken, count, moment)
        made += 1
        assert span is not None
        assert span[0] >= done - 2 * EVERY + 1, f"a run that had made {done} steps began again with step {span[0]}"
        done = span[1]
        if done >= STEPS:
            ends(broken, count, None)
            broken, done = folder / f"broken{made}", 0
    if done:
        ends(broken, count, None)
        assert [(broken / f"end.{rank}").read_text() for rank in range(count)] == expected
    for other in folder.glob("broken*"):
        found = [(other / f"end.{rank}").read_text().split()[0] for rank in range(count)]
        assert found == [one.split()[0] for one in expected]


@pytest.mark.fault(26)
@pytest.mark.slow
@pytest.mark.parametrize(("kills", "count"), [(3, 1), (70, 1), (25, 2), (5, 4)])
def test_a_run_that_is_killed_a_hundred_times_ends_as_one_that_is_not(tmp_path, kills, count):
    check(tmp_path, kills, count)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_gets_a_signal_and_both_save_the_same_step_and_end(tmp_path, rank):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    ends(whole, 2, None)
    processes = start(stopped, 2)
    for process in processes:
        assert next(line for line in process.stdout if line.startswith("step 3"))
    processes[rank].send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate(timeout=LIMIT_S)
    said = "".join((stopped / f"{rank}.txt").read_text()[-3000:] for rank in range(2))
    assert [process.returncode for process in processes] == [0, 0], said
    found = [(stopped / f"end.{rank}").read_text().split() for rank in range(2)]
    assert found[0] == found[1]
    assert found[0][3] == "SIGTERM"
    number = int(found[0][2])
    assert 3 < number < STEPS
    assert max(int(path.name) for path in (stopped / "run").iterdir()) == number
    ends(stopped, 2, None)
    assert [(stopped / f"end.{rank}").read_text() for rank in range(2)] == [
        (whole / f"end.{rank}").read_text() for rank in range(2)
    ]
