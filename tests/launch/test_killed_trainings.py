"""A training with checkpoints is killed two hundred times, also while it saves, and ends with the bits of one that is not.

In half of the runs steps go on while a checkpoint is written; in the others they wait, and no kill costs more than an interval.
One that goes on with fewer devices after kills, on another plan, has the losses of one device.
"""

import os
import random
import signal
import time

import numpy as np
import pytest

from tests.launch.launching import HERE, end, lines, processes_of, said, start, wait_until
from tests.launch.training_step import losses_of_one_device

pytestmark = pytest.mark.slow
TRAINING, STEPS, EVERY = (HERE / "training.py",), 120, 3
KILLS = 10
LIMIT_S = 1500
JOBS = []
"""All that were begun. One whose test fails is ended with the test."""


@pytest.fixture(autouse=True)
def no_job_is_left():
    yield
    for job in JOBS:
        if job.poll() is None:
            job.kill()
            job.wait()
    JOBS.clear()


def begin(folder, count, waits=False, devices=4, more_options=()):
    """A job of so many workers with these devices together, which keeps its plans beside its checkpoints."""
    folder.mkdir()
    options = (*f"-n {count} --devices-per-process {devices // count} --max-restarts 1000".split(), *more_options)
    more = {"TRAINING_PAUSE_S": "0.05", "AUTOPAR_CACHE": str(folder / "plans")}
    if waits:
        more["TRAINING_WAITS"] = "1"
    JOBS.append(start(folder, *options, script=TRAINING, arguments=(STEPS, "mesh"), **more))
    return JOBS[-1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """For a number of workers: the losses and the last state's digest of a job that nobody kills."""
    known = {}

    def find(count):
        if count not in known:
            folder = tmp_path_factory.mktemp("whole") / "job"
            status, words = end(begin(folder, count), folder, LIMIT_S)
            assert (status, words) == (0, "")
            known[count] = losses(folder), lines(folder, "end")
        return known[count]

    return find


def losses(folder):
    """By step, all losses that were written for it, as text."""
    found = {}
    for line in lines(folder, "losses"):
        _, _, number, loss = line.split()
        found.setdefault(int(number), set()).add(loss)
    return found


def steps_of(folder):
    """(attempt, step) in the order in which they were made."""
    return [(int(line.split()[0]), int(line.split()[2])) for line in lines(folder, "losses")]


def workers_of(folder):
    return {pid for pid, words in processes_of(folder).items() if b"autopar.launch.worker" in words}


def is_saving(folder):
    return any((folder / "states").glob("*.orbax-checkpoint-tmp*"))


def complete(folder):
    """How many steps the last complete checkpoint holds."""
    return max((int(path.name) for path in (folder / "states").glob("*") if path.name.isdecimal()), default=0)


def wait_for_a_moment(folder, kind, chance):
    """Wait until a worker may be killed: anywhere from its start on, between steps, or during a save."""
    made = len(steps_of(folder))
    if kind == "start":
        wait_until(lambda: len(steps_of(folder)) > made, chance.uniform(0, 8))
        return
    assert wait_until(lambda: len(steps_of(folder)) > made, LIMIT_S), said(folder)
    if kind == "save":
        assert wait_until(lambda: is_saving(folder), LIMIT_S), said(folder)
    time.sleep(chance.uniform(0, 0.05 if kind == "save" else 0.6))


def kill(job, folder, count, before, chance):
    """Kill a worker of the next attempt of a job.

    Returns:
        Its workers, and (kind of moment, steps noted by all attempts, steps that are made if this one made any, last complete
        checkpoint, whether a save was under way).
    """
    noted = len(steps_of(folder))
    wait_until(lambda: len(workers_of(folder) - before) == count or job.poll() is not None, LIMIT_S, 0.1)
    assert len(workers_of(folder) - before) == count, said(folder)
    workers, kind = workers_of(folder) - before, chance.choice(["start", "steps", "save"])
    wait_for_a_moment(folder, kind, chance)
    kept, was_saving = complete(folder), is_saving(folder)
    os.kill(chance.choice(sorted(workers)), signal.SIGKILL)
    assert wait_until(lambda: not workers & workers_of(folder), LIMIT_S, 0.1), said(folder)
    steps = steps_of(folder)
    made = steps[-1][1] + 1 if len(steps) > noted else None
    return workers, (kind, len(steps), made, kept, was_saving or is_saving(folder))


def lost_steps(folder, moment, waits):
    """How many steps were made again after a kill: none that a checkpoint has, and at most an interval.

    Where steps do not wait for a save, two intervals if one was under way.
    """
    kind, noted, made, kept, was_saving = moment
    first = next((step for _, step in steps_of(folder)[noted:]), STEPS)
    assert first >= kept, moment
    lost = 0 if made is None else made - first
    assert lost <= EVERY * (1 + (was_saving and not waits)), moment
    return kind, was_saving, lost


@pytest.mark.fault(13, 15, 26)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "goes on"])
def test_a_training_that_is_killed_ten_times_ends_as_one_that_is_not(waits, count, seed, uninterrupted, tmp_path):
    chance, folder = random.Random(100 * count + seed), tmp_path / "job"
    job, before, moments = begin(folder, count, waits), set(), []
    while len(moments) < KILLS and complete(folder) < STEPS - 4 * EVERY:
        workers, moment = kill(job, folder, count, before, chance)
        before |= workers
        moments.append(moment)
    status, words = end(job, folder, LIMIT_S)
    assert status == 0, words
    assert words.count("start again from the last checkpoint") >= len(moments)
    expected, digest = uninterrupted(count)
    assert losses(folder) == expected
    assert lines(folder, "end") == digest
    (tmp_path / "moments").write_text(str([lost_steps(folder, moment, waits) for moment in moments]))


@pytest.mark.fault(13, 15, 18, 26)
@pytest.mark.parametrize("seed", range(3))
def test_a_training_whose_workers_are_killed_and_not_replaced_goes_on_under_other_plans(seed, tmp_path):
    """Each second kill costs the job a worker: it has six devices, then four, then two."""
    chance, folder = random.Random(seed), tmp_path / "job"
    job, before, moments = begin(folder, 3, True, 6, ("--min-processes", "1")), set(), []
    for count in (3, 3, 2, 2):
        workers, moment = kill(job, folder, count, before, chance)
        before |= workers
        moments.append(moment)
    status, words = end(job, folder, LIMIT_S)
    assert status == 0, words
    assert words.count("start again from the last checkpoint") == len(moments)
    (tmp_path / "moments").write_text(str([lost_steps(folder, moment, True) for moment in moments]))
    attempts = [tuple(map(int, line.split()[:2])) for line in lines(folder, "losses")]
    assert {devices for attempt, devices in attempts if attempt == 4} == {2}
    assert all(devices == (6, 6, 4, 4, 2)[attempt] for attempt, devices in attempts)
    made = losses(folder)
    assert sorted(made) == [*range(STEPS)]
    for number, expected in enumerate(losses_of_one_device(STEPS)):
        np.testing.assert_allclose([float(loss) for loss in made[number]], expected, rtol=1e-5)
