"""When the user interrupts: no mesh hangs, no task is left behind, and nothing is left."""

import dataclasses
import threading
import time

import pytest

from autopar.runtime.driver import Driver
from autopar.runtime.step_state import StepState
from autopar.runtime.tuning import TUNING
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Run
from autopar.schedules.schedules import make_schedule
from tests.runtime.watched import LONG_S, SMALL, Watched, performed, with_witnesses
from tests.schedules.chains import ctrl_c

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "p", "m"), SMALL)
def test_ctrl_c_at_any_place_stops_all_and_leaves_nothing(name, p, m):
    schedule = make_schedule(name, num_meshes=p, num_microbatches=m)
    culprit = None

    def before(instruction):
        if instruction is culprit:
            press()

    step = Watched(schedule, before)
    good = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    for n in performed(step.program):
        culprit = step.program.instructions[n]
        with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
            step.driver.run(step.inputs())
        assert not step.alive
        culprit = None
        again = step.driver.run(step.inputs())
        assert {key: number.content for key, number in again.items()} == good
        del again


def test_ctrl_c_while_all_meshes_but_one_wait_does_not_start_another_task():
    schedule = make_schedule("1f1b", num_meshes=4, num_microbatches=4)
    seen = []

    def before(instruction):
        seen.append(instruction)
        if isinstance(instruction, Run) and (instruction.stage, instruction.microbatch) == (3, 0):
            press()
            time.sleep(0.5)  # for the main thread to go from the handler to the driver

    step = Watched(schedule, before)
    with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
        step.driver.run(step.inputs())
    assert not [i for i in seen if isinstance(i, Run) and i.kind == "backward"]


def test_meshes_that_wait_are_woken_by_ctrl_c(monkeypatch):
    """They look up rarely here, so that only being woken ends the step soon."""
    rarely = dataclasses.replace(TUNING, poll_s=LONG_S)
    for module in ("mesh_threads", "step_state"):
        monkeypatch.setattr(f"autopar.runtime.{module}.TUNING", rarely)

    def before(instruction):
        time.sleep(0.5)  # for the others to start and to wait
        press()
        time.sleep(0.5)  # for the main thread to go from the handler to the driver

    step = Watched(make_schedule("1f1b", num_meshes=3, num_microbatches=2), before)
    began = time.monotonic()
    with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
        step.driver.run(step.inputs())
    assert time.monotonic() - began < LONG_S / 2


def test_a_task_that_takes_long_is_not_left_behind_by_ctrl_c(monkeypatch):
    monkeypatch.setattr("autopar.runtime.mesh_threads.TUNING", dataclasses.replace(TUNING, leave_s=0.01))
    ended = []

    def before(instruction):
        if isinstance(instruction, Run):
            press()
            time.sleep(0.5)
            ended.append(instruction)

    step = Watched(make_schedule("inference", num_meshes=2, num_microbatches=1), before)
    with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
        step.driver.run(step.inputs())
    assert len(ended) == 1, "the step has returned before its only task has"


def test_a_launch_wakes_the_mesh_whose_turn_is_next(monkeypatch):
    monkeypatch.setattr("autopar.runtime.step_state.TUNING", dataclasses.replace(TUNING, poll_s=LONG_S))
    step, came = StepState(meshes=[], wait=False), []
    thread = threading.Thread(target=lambda: came.append(step.wait_for_turn(1)))
    thread.start()
    time.sleep(0.1)  # for the thread to come to its wait
    step.pass_turn()
    thread.join(LONG_S / 2)
    assert came == [True]


@pytest.mark.parametrize("p", [1, 2])
def test_an_interrupt_does_not_wait_for_what_is_under_way(p):
    work = make_chain(make_schedule("inference", num_meshes=p, num_microbatches=2))
    waited = []
    calls, inputs = with_witnesses(work, None, waited)
    real, called = calls["forward0"], []

    def interrupted(arrays):
        called.append(len(called))
        if called[-1] == (1 if p == 1 else 0):
            press()
        return real(arrays)

    with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
        Driver(work.emit(), {**calls, "forward0": interrupted}, lambda a, v, s, t: a).run(inputs)
    assert waited == []
