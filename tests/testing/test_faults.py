"""Faults happen at the moment that they name, as often as they say, and nowhere else."""

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import ArgumentError, AutoparWarning, PipelineError
from autopar.events import StepRun, observing, reach, running
from autopar.files.whole_file import save
from autopar.progress import enter
from autopar.schedules.instructions import Free, Receive, Run, Send
from autopar.schedules.schedules import make_schedule
from autopar.testing.faults import Fault, InjectedFaultError, flip, inject, no_room, parse, point, spoil
from tests.runtime.watched import Watched, nothing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "text",
    [
        "kill@step,count=7,rank=1,attempt=0",
        "raise@instruction:run backward 1*",
        "slow@instruction:send y@0 to mesh 1 (transfer 3),times=2,seconds=0.5",
        "full@write:*.json",
        "stop@point:a, b=c,count=2",
    ],
)
def test_a_fault_is_what_its_text_says(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill", "'kill' is no fault: write EFFECT@KIND"),
        ("burn@step", "a fault has no effect 'burn'; there are raise, kill, stop, slow, corrupt, full"),
        ("kill@steps", "there are no moments of kind 'steps'; there are phase, step"),
        ("kill@step,count=0", "count from 1"),
        ("kill@step,count=1.2.3", "is no fault"),
    ],
)
def test_what_is_no_fault_is_refused(text, words):
    with pytest.raises(ArgumentError, match=words):
        parse(text)


def test_a_file_without_the_byte_cannot_be_corrupted(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ArgumentError, match="has 0 bytes, and none at 0"):
        flip(empty)


def test_a_fault_happens_at_its_moment_as_often_as_it_says():
    happened = []
    with inject(Fault(effect="raise", kind="point", name="b*", count=2, times=2)):
        for n, name in enumerate(["a", "b", "bb", "a", "b", "b"]):
            try:
                point(name)
            except InjectedFaultError as error:
                happened.append((n, str(error)))
    assert happened == [(2, "fault on purpose at point bb"), (4, "fault on purpose at point b")]
    point("bb")


def test_a_fault_is_of_one_worker_and_one_attempt(monkeypatch):
    monkeypatch.setenv("AUTOPAR_RANK", "1")
    monkeypatch.setenv("AUTOPAR_ATTEMPT", "0")
    with inject("raise@point,rank=0", "raise@point,rank=1,attempt=1"):
        point("here")
    with inject("raise@point,rank=1,attempt=0"), pytest.raises(InjectedFaultError):
        point("here")


def test_a_fault_whose_moment_never_comes_is_told():
    with (
        pytest.warns(AutoparWarning, match=r"the moment of kill@point:nowhere has never come"),
        inject("kill@point:nowhere"),
    ):
        point("here")


@pytest.mark.fault(1, 2, 3, 4)
def test_each_instruction_of_a_pipeline_can_fail_and_the_next_step_is_whole():
    step = Watched(make_schedule("1f1b", num_meshes=2, num_microbatches=2), nothing)
    good = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    kinds = set()
    for n, instruction in enumerate(step.program.instructions):
        place = [i for i in step.program.instructions[:n] if str(i) == str(instruction)]
        fault = Fault(
            effect="raise", kind="instruction", name=str(instruction), count=len(place) + 1, error=OSError("torn")
        )
        with inject(fault), pytest.raises(PipelineError, match=r"^OSError: torn") as caught:
            step.driver.run(step.inputs())
        assert f"on mesh {instruction.mesh} (instruction {n} of {len(step.program.instructions)})" in str(caught.value)
        kinds.add(type(instruction))
        again = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
        assert again == good
    assert kinds == {Run, Send, Receive, Free}


@pytest.mark.fault(10)
def test_a_slow_instruction_takes_longer_and_changes_nothing():
    step = Watched(make_schedule("gpipe", num_meshes=2, num_microbatches=2), nothing)
    good = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    began = time.monotonic()
    with inject("slow@instruction:send *,times=2,seconds=0.05"):
        found = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    assert time.monotonic() - began >= 0.1
    assert found == good


def test_what_an_instruction_reads_can_be_changed():
    step = Watched(make_schedule("inference", num_meshes=2, num_microbatches=1), nothing)
    good = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    seen = []

    def change(moment):
        if moment.kind == "instruction" and isinstance(moment.about, Run):
            moment.values[-1] = moment.values[-1] + moment.values[-1]
            seen.append(moment.name)

    with observing(change):
        found = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    assert seen
    assert found != good


@pytest.mark.fault(21, 22)
@pytest.mark.parametrize(("kind", "kept"), [("write", "old"), ("replace", "old"), ("written", "new")])
@pytest.mark.parametrize(("effect", "error"), [("full", ArgumentError), ("raise", InjectedFaultError)])
def test_a_file_is_old_or_new_at_whatever_moment_of_its_writing_something_fails(kind, kept, effect, error, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with inject(f"{effect}@{kind}:*plan.json"), pytest.raises(error) as caught:
        save(path, "new")
    assert path.read_text() == kept
    assert os.listdir(tmp_path) == ["plan.json"]
    if effect == "full":
        assert os.strerror(errno.ENOSPC) in str(caught.value)


def test_a_written_file_can_be_corrupt(tmp_path):
    path = tmp_path / "plan.json"
    with inject("corrupt@written"):
        save(path, "abc")
    assert path.read_bytes() == bytes([ord("a"), ord("b") ^ 0xFF, ord("c")])
    flip(path, 0)
    assert path.read_bytes()[0] == ord("a") ^ 0xFF


def test_no_file_becomes_larger_than_there_is_room(tmp_path):
    path = tmp_path / "data"
    with no_room(1000):
        path.write_bytes(bytes(1000))
        with pytest.raises(OSError, match="File too large"):
            path.write_bytes(bytes(2000))
    path.write_bytes(bytes(2000))


def test_arrays_are_spoilt_by_nan_in_the_first_that_can_hold_one():
    whole = np.arange(3)
    values = [whole, [whole, np.ones(2, np.float32)], np.ones(2)]
    spoil(values)
    assert np.isnan(values[1][1]).all()
    assert values[1][1].dtype == np.float32
    assert not np.isnan(values[2]).any()
    with inject("corrupt@step"), running(StepRun(name="train", plan=None, standing=list), leaves := [1, np.ones(2)]):
        pass
    assert np.isnan(leaves[1]).all()


@pytest.mark.parametrize(("effect", "ended"), [("kill", "SIGKILL"), ("stop", "SIGSTOP")])
def test_a_process_ends_or_stops_at_a_moment(effect, ended):
    program = f"from autopar.testing import faults\nwith faults.inject('{effect}@point'):\n    faults.point('here')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        process.kill()
        process.wait()
        assert os.WSTOPSIG(status) == getattr(signal, ended)
    else:
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == -getattr(signal, ended)


def test_phases_and_moments_without_observers_cost_nothing():
    with inject("raise@phase:compiling"), pytest.raises(InjectedFaultError):
        enter("compiling")
    began = time.perf_counter()
    for _ in range(100_000):
        reach("instruction", None)
    assert time.perf_counter() - began < 0.5  # a tenth of a microsecond each, on a machine that is busy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with inject():
            point("here")
