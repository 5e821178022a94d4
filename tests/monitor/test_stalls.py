"""A step that stands still is named: which mesh, which instruction, for whom it waits, for how long."""

import dataclasses
import re
import threading
import time

import jax.numpy as jnp
import pytest

from autopar.errors import ArgumentError
from autopar.events import StepRun, reach, running
from autopar.monitor import Monitor, monitor
from autopar.monitor.stalls import StallWatch
from autopar.schedules.instructions import Receive, Run, Send
from autopar.schedules.schedules import make_schedule
from tests.runtime.watched import LONG_S, Watched, nothing

STALL_S = 0.2


def heard(said, event, pattern=""):
    """A callback that keeps what is said, and sets an event once that has a pattern."""

    def hear(words):
        said.append(words)
        if re.search(pattern, words):
            event.set()

    return hear


def stalled_at(choose, pattern):
    """What is said of a pipeline whose chosen instruction takes until words with the pattern have been said.

    On a busy machine what came before may have been called a standstill too.
    """
    told, said, blocked = threading.Event(), [], threading.Event()

    def before(instruction):
        if choose(instruction) and not blocked.is_set():
            blocked.set()
            assert told.wait(LONG_S), said

    step = Watched(make_schedule("1f1b", num_meshes=2, num_microbatches=2), before)
    run = StepRun(name="train", plan="plan", standing=lambda: step.driver.standing(lambda mesh: f" of process {mesh}"))
    with Monitor(stall_s=STALL_S, on_stall=heard(said, told, pattern)):
        with running(run, []):
            step.driver.run(step.inputs())
        reach("launched", run, [])
    assert step.driver.standing() == []
    assert [bool(words) for words in said] == [True, False] * (len(said) // 2), "what stood still goes on"
    return next(words for words in said if re.search(pattern, words))


@pytest.mark.fault(11)
def test_a_task_that_stands_still_is_named_with_its_stage_and_whoever_waits_for_it():
    chosen = stalled_at(
        lambda i: isinstance(i, Run) and (i.stage, i.microbatch, i.kind) == (1, 0, "forward"),
        r"mesh 0 .* waits .*\n.*mesh 1 .* performs instruction \d+ of \d+, forward",
    )
    title, first, second = chosen.split("\n")
    assert title == "train (call 1) stands still:"
    assert re.fullmatch(
        r"  mesh 0 of process 0 waits for instruction \d+ of \d+, receive `\S+@0` from mesh 1 of process 1; state waiting; "
        r"latest events: .*finish \d+ \(for \d+\.\d s\)",
        first,
    )
    assert re.fullmatch(
        r"  mesh 1 of process 1 performs instruction \d+ of \d+, forward of stage 1, microbatch 0 \(forward1\), "
        r"which reads what it receives from mesh 0 of process 0; state running; "
        r"latest events: .*start \d+ \(for \d+\.\d s\)",
        second,
    )


def test_a_transfer_that_stands_still_is_named_with_its_peer():
    assert stalled_at(
        lambda i: isinstance(i, Send) and i.mesh == 0,
        r"mesh 0 of process 0 performs instruction \d+ of \d+, send `\S+@0` to mesh 1 of process 1;.*\n"
        r".*mesh 1 of process 1 waits for instruction \d+ of \d+, receive `\S+@0` from mesh 0 of process 0;",
    )


def test_every_kind_of_instruction_is_described():
    step = Watched(make_schedule("1f1b", num_meshes=2, num_microbatches=2), nothing)
    lines = set()
    step.before = lambda instruction: lines.update(step.driver.standing())
    step.driver.run(step.inputs())
    assert any("has launched all" in line for line in lines) or len(lines) > 10
    assert {type(i) for i in step.program.instructions} >= {Run, Send, Receive}


def test_what_moves_is_not_named_and_what_stands_is_named_once():
    watch = StallWatch(1.0)
    assert watch.look("step", ["a 1"], 0.0) is None
    assert watch.look("step", ["a 2"], 0.9) is None
    assert watch.look("step", ["a 2"], 1.8) is None
    assert watch.look("step", ["a 2"], 2.0) == "step stands still:\n  a 2 (for 1.1 s)"
    assert watch.look("step", ["a 2"], 5.0) is None
    assert watch.look("step", ["a 3"], 5.1) is None
    assert not watch.told
    assert watch.look("step", ["a 3"], 6.2, patience=2.0) is None
    assert watch.look("step", ["a 3"], 7.2, patience=2.0) == "step stands still:\n  a 3 (for 2.1 s)"
    assert watch.forget()
    assert not watch.forget()


@pytest.mark.fault(12)
def test_a_wait_for_another_process_is_named():
    said, told, gone_on = [], threading.Event(), threading.Event()
    told_or_gone_on = {True: told.set, False: gone_on.set}
    with Monitor(stall_s=0.1, on_stall=lambda words: (said.append(words), told_or_gone_on[bool(words)]())):
        reach("waiting", "process 1, while process 0 runs step train")
        assert told.wait(LONG_S)
        reach("heard", "process 1")
        assert gone_on.wait(LONG_S)
    assert re.fullmatch(
        r"a step stands still:\n  waits for process 1, while process 0 runs step train \(for \d+\.\d s\)", said[0]
    )
    assert said[1:] == [""]


def test_a_step_that_fails_is_no_longer_watched():
    said = []
    run = StepRun(name="train", plan=None, standing=list)
    with Monitor(stall_s=1, on_stall=said.append), pytest.raises(ValueError, match="broken"), running(run, []):
        raise ValueError("broken")
    assert said == []


def test_a_time_after_which_nothing_can_stand_still_is_refused():
    with pytest.raises(ArgumentError, match=r"stall_s=0 is not above zero"):
        Monitor(stall_s=0)


def test_metrics_come_from_results_that_are_there():
    found = []
    with Monitor(on_step=found.append):
        for _ in range(2):
            run = StepRun(name="train", plan=None, standing=list)
            with running(run, []):
                time.sleep(0.02)
            reach("launched", run, [jnp.ones(4), jnp.float32(1)])
    assert [(one.name, one.call) for one in found] == [("train", 1), ("train", 2)]
    assert all(0.02 <= one.call_s < LONG_S for one in found)
    assert all(0 < one.step_s < LONG_S for one in found)
    assert all(one.host_bytes > 1 << 20 for one in found)


def test_steps_in_quick_succession_are_all_measured():
    found, result = [], jnp.float32(1)
    with Monitor(on_step=found.append):
        for _ in range(1000):
            run = StepRun(name="train", plan=None, standing=list)
            with running(run, []):
                pass
            reach("launched", run, [result])
    assert [one.call for one in found] == list(range(1, 1001))


def test_the_first_call_after_a_phase_has_more_time(monkeypatch):
    monkeypatch.setattr(monitor, "TUNING", dataclasses.replace(monitor.TUNING, first_call=10 * LONG_S / 0.1))
    said, told, run = [], threading.Event(), StepRun(name="train", plan=None, standing=list)
    with Monitor(stall_s=0.1, on_stall=heard(said, told)):
        reach("phase", "compiling")
        for is_first in (True, False):
            with running(run, []):
                assert told.wait(0.3 if is_first else LONG_S) is not is_first
            reach("launched", run, [])
    assert said[0].startswith("train (call 2) stands still")
