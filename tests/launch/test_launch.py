"""`autopar launch` brings jobs to their end although workers are lost, leaves no process behind, and says what happened."""

import os
import random
import re
import signal
import time

import pytest

from autopar.__main__ import main
from tests.launch.launching import (
    COUNTING,
    HERE,
    end,
    is_gone,
    lines,
    pids,
    printed,
    processes_of,
    results,
    run,
    start,
    uninterrupted,
    wait_until,
)

STEPS = 40


def check_restarted(folder, status, said, words):
    """One worker was lost once, for a reason in these words; both started again and ended as if nothing had happened."""
    assert status == 0, said
    assert re.search(words, said), said
    assert "2 workers start again from the last checkpoint (restart 1 of 10)" in said
    assert "restart 2" not in said
    assert results(folder, 2) == uninterrupted(2, STEPS)
    assert len(lines(folder, "started")) == 4
    ends = {line for line in printed(folder).splitlines() if "ends" in line}
    assert ends == {f"[{rank}] ends with {state['x']!r}" for rank, state in enumerate(uninterrupted(2, STEPS))}


@pytest.mark.fault(13, 16)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("SIGKILL", r"worker 1 was ended by SIGKILL \(by the kernel if memory ran out"),
        pytest.param(
            "raise",
            r"worker 1 ended with status 1: ValueError: broken on purpose \(.*counting.py:\d+\)",
            marks=pytest.mark.slow,
        ),
        pytest.param("exit", r"worker 1 ended with status 7: it called sys.exit\(7\)", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_loses_a_worker_starts_again_and_ends_as_if_nothing_had_happened(what, words, tmp_path):
    status, said = run(tmp_path, "-n", "2", arguments=(STEPS, what, 1, 5))
    check_restarted(tmp_path, status, said, words)
    did_its_work = printed(tmp_path).count("[0] ends with") == 2  # its process may live on for a moment, or not
    assert did_its_work or "worker 0 cannot go on without it, and is ended\n" in said


STANDSTILLS = {
    "SIGSTOP": ((), r"worker 1 has stood still by SIGSTOP for \d+ s; before: runs .*counting.py"),
    "stick": (
        ("--silence-seconds", "3"),
        r"worker 1 has given no sign for \d+ s; the last it said: runs .*counting.py",
    ),
    "stand": (
        ("--stall-seconds", "0.2", "--metrics", "{folder}/metrics{rank}"),
        r"launch: worker 1: train \(call 1\) stands still:\n  its arrays are being placed.*\(for \d+.\d s\)",
    ),
}


@pytest.mark.fault(11, 14)
def test_a_worker_that_stands_still_in_whatever_way_is_told_and_the_job_starts_again(tmp_path):
    """Jobs side by side, as all that they do is to wait."""
    jobs = {}
    for what, (options, _) in STANDSTILLS.items():
        (tmp_path / what).mkdir()
        given = (option.replace("{folder}", str(tmp_path / what)) for option in options)
        jobs[what] = start(tmp_path / what, "-n", "2", *given, arguments=(STEPS, what, 1, 5))
    for what, (_, words) in STANDSTILLS.items():
        check_restarted(tmp_path / what, *end(jobs[what], tmp_path / what), words)
    assert (tmp_path / "stand" / "metrics1").exists()


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("kill@point:step 7,rank=1,attempt=0", "worker 1 was ended by SIGKILL", marks=pytest.mark.slow),
        (
            "full@point,count=5,rank=0,attempt=0",
            "worker 0 ended with status 1: OSError: [Errno 28] No space left on device: 'step 4'",
        ),
    ],
)
def test_a_fault_on_purpose_happens_in_its_worker(fault, words, tmp_path):
    status, said = run(tmp_path, "-n", "2", "--fault", fault, arguments=(20,))
    assert status == 0, said
    assert words in said
    assert "restart 1 of 10" in said
    assert "restart 2" not in said
    assert results(tmp_path, 2) == uninterrupted(2, 20)


@pytest.mark.sweep
@pytest.mark.fault(15)
def test_the_worker_with_the_coordination_service_may_be_lost_like_any_other(tmp_path):
    fault = "kill@point:all have joined,rank=0,attempt=0"
    status, said = run(tmp_path, "-n", "2", "--fault", fault, script=(HERE / "joined.py",), arguments=())
    assert status == 0, said
    assert "autopar launch: worker 0 was ended by SIGKILL" in said
    assert "2 workers start again from the last checkpoint (restart 1 of 10)" in said
    assert "restart 2" not in said
    assert sorted(printed(tmp_path).splitlines()) == [f"[{rank}] ends in attempt 1" for rank in range(2)]


@pytest.mark.slow
def test_a_standstill_of_the_supervisor_itself_is_not_held_against_workers(tmp_path):
    job = start(tmp_path, "-n", "2", "--silence-seconds", "4", arguments=(550,), COUNTING_HOLD="549")
    assert wait_until(lambda: len(lines(tmp_path, "started")) == 2)
    time.sleep(0.5)
    job.send_signal(signal.SIGSTOP)
    time.sleep(5)
    job.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    status, said = end(job, tmp_path)
    assert (status, said) == (0, "")
    assert results(tmp_path, 2) == uninterrupted(2, 550)


@pytest.mark.fault(17)
def test_an_error_that_comes_twice_without_a_step_in_between_ends_the_job(tmp_path):
    status, said = run(tmp_path, "-n", "2", arguments=(40, "always raise", 0, 5))
    assert status == 1
    assert "the same error has come twice" in said
    assert said.count("broken on purpose\n") == 2  # each time the script's own traceback
    assert len(lines(tmp_path, "started")) == 4


LAST = {
    "raise and stay": (1, "worker 1 ended with status 1: ValueError: broken on purpose"),
    "raise and abort": (1, "worker 1 ended with status 1: ValueError: broken on purpose"),
    "SIGKILL": (137, "worker 1 was ended by SIGKILL"),
    "exit": (7, "worker 1 ended with status 7"),
}


@pytest.mark.sweep
@pytest.mark.fault(18)
def test_a_job_that_may_not_start_again_ends_soon_with_the_status_of_what_failed(tmp_path):
    """A script that has raised is known before its process has ended, and whatever becomes of that."""
    jobs = {}
    for what in LAST:
        (tmp_path / what).mkdir()
        jobs[what] = start(tmp_path / what, "-n", "2", "--max-restarts", "0", arguments=(400, what, 1, 2))
    for what, (expected, words) in LAST.items():
        status, said = end(jobs[what], tmp_path / what)
        assert (status, words in said) == (expected, True), (what, said)
        assert "the job is given up; with --max-restarts it would be started again" in said


def test_a_signal_reaches_the_workers_which_save_and_end(tmp_path):
    job = start(tmp_path, "-n", "2", arguments=(10_000,))
    assert wait_until(lambda: len(lines(tmp_path, "started")) == 2)
    job.send_signal(signal.SIGTERM)
    status, said = end(job, tmp_path)
    assert status == 128 + signal.SIGTERM, said
    assert sorted(lines(tmp_path, "stopped")) == ["0 15", "1 15"]
    assert said.endswith("stopped by SIGTERM; no worker is left\n")


def test_a_signal_that_is_ignored_for_the_supervisor_ends_nothing(tmp_path):
    job = start(tmp_path, "-n", "1", arguments=(40,), through=("nohup",), COUNTING_HOLD="1")
    assert wait_until(lambda: lines(tmp_path, "started"))
    job.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    status, said = end(job, tmp_path)
    assert status == 0, said
    assert results(tmp_path, 1) == uninterrupted(1, 40)


@pytest.mark.fault(19)
def test_no_process_is_left_when_the_supervisor_itself_is_killed(tmp_path):
    job = start(tmp_path, "-n", "2", arguments=(10_000, "leave", 1, 2))
    assert wait_until(lambda: any(b"-c" in words for words in processes_of(tmp_path).values())), (
        "what it leaves is there"
    )
    job.kill()
    job.wait()
    assert is_gone(tmp_path)


@pytest.mark.fault(20)
def test_a_process_that_a_worker_has_left_behind_ends_with_the_job(tmp_path):
    status, said = run(tmp_path, "-n", "2", arguments=(10, "leave", 1, 2))
    assert status == 0
    assert "1 process that the workers had left behind is killed" in said


@pytest.mark.fault(25)
def test_a_job_takes_another_size_while_it_runs(tmp_path):
    size = tmp_path / "size"
    job = start(tmp_path, "-n", "2", "--size-file", size, arguments=(90,), COUNTING_HOLD="80")
    for text, started, words in [
        ("3 2\n", 2, "the job is to have 3 workers with 2 devices each in place of 2 workers"),
        ("what", 5, "'what' is no size of a job: write how many workers"),
        ("1\n", 5, "the job is to have 1 worker with 2 devices each in place of 3 workers with 2 devices each"),
    ]:
        assert wait_until(lambda: len(lines(tmp_path, "started")) == started)  # noqa: B023
        size.write_text(text)
        assert wait_until(lambda: words in (tmp_path / "err.txt").read_text())  # noqa: B023
    (tmp_path / "go").touch()
    status, said = end(job, tmp_path)
    assert status == 0, said
    assert [line.split()[2] for line in lines(tmp_path, "started")] == ["2"] * 2 + ["3"] * 3 + ["1"]
    assert results(tmp_path, 1) == uninterrupted(1, 90)


@pytest.mark.sweep
@pytest.mark.fault(18)
def test_a_job_goes_on_with_fewer_workers_if_it_may(tmp_path):
    job = start(tmp_path, "-n", "3", "--min-processes", "2", arguments=(60,), COUNTING_HOLD="50")
    for attempt in range(2):
        assert wait_until(lambda: len(pids(tmp_path, attempt)) == 3)  # noqa: B023
        os.kill(pids(tmp_path, attempt)[2], signal.SIGKILL)
    (tmp_path / "go").touch()
    status, said = end(job, tmp_path)
    assert status == 0, said
    assert "2 workers start again" in said
    assert [line.split()[2] for line in lines(tmp_path, "started")] == ["3"] * 6 + ["2"] * 2
    assert results(tmp_path, 2) == uninterrupted(2, 60)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "launch needs a script to run"),
        (["none.py", "-n", "2"], "there is no script none.py; options of launch stand before it"),
        (["-n", "0", COUNTING], "argument -n/--processes: '0' is no whole number from 1 on"),
        (["-n", "2", "--min-processes", "3", COUNTING], "--min-processes 3 is more than --processes 2"),
        (
            ["-n", "2", "--min-processes", "1", "--nodes", "2", COUNTING],
            "--min-processes is for one machine: on --nodes the",
        ),
        (["--nodes", "2", COUNTING], "--nodes needs --coordinator HOST:PORT"),
        (["--node-rank", "1", COUNTING], "--node-rank 1 is not below --nodes 1"),
        (["--grace-seconds", "-1", COUNTING], "'-1' is no number of seconds"),
        (["--fault", "kill", COUNTING], "'kill' is no fault"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(argv, words, capsys):
    assert main(["launch", *map(str, argv)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.fault(13, 14)
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_workers_that_are_killed_at_random_moments_cost_no_step(count, first, tmp_path):
    """Ten moments each: the job that is killed at them ends as if nothing had happened."""
    for seed in range(first, first + 10):
        folder, chance = tmp_path / str(seed), random.Random(1000 * count + seed)
        folder.mkdir()
        job = start(folder, "-n", str(count), arguments=(60,), COUNTING_HOLD="59")
        assert wait_until(lambda: len(pids(folder)) == count)  # noqa: B023
        time.sleep(chance.uniform(0, 0.6))
        victim = chance.choice(pids(folder))
        os.kill(victim, signal.SIGSTOP if chance.random() < 0.2 else signal.SIGKILL)
        (folder / "go").touch()
        status, said = end(job, folder)
        assert status == 0, said
        assert results(folder, count) == uninterrupted(count, 60)
