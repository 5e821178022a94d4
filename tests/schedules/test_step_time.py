"""The time of a step without instructions is what the simulator finds of them, exactly."""

import random
from fractions import Fraction

import pytest

from autopar.schedules.chain import make_chain
from autopar.schedules.schedules import SCHEDULES, make_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.step_time import time_step
from tests.schedules.chains import small_schedules


def random_seconds(schedule, rng, most):
    """Of each kind of task on each stage; some are 0."""
    every = [(kind, stage) for kind in schedule.kinds for stage in range(schedule.num_stages)]
    return {one: Fraction(rng.randint(0, most), 7) for one in every}


def simulated(schedule, run_s, sent_s):
    def transfer_s(send):
        letter, stage = send.value.name[0], int(send.value.name[1:])
        backward = "input_gradient" if "input_gradient" in schedule.kinds else "backward"
        return sent_s["forward", stage - 1] if letter == "x" else sent_s[backward, stage]

    program = make_chain(schedule).emit()
    return simulate(program, run_s=lambda run: run_s[run.kind, run.stage], transfer_s=transfer_s)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("most", [0, 3, 30], ids=["no transfers", "short transfers", "long transfers"])
def test_a_step_takes_what_the_simulator_says(most):
    """Every small schedule, with random stages and transfers; interleaved meshes share a link between their chunks."""
    rng = random.Random(most)
    for schedule in small_schedules(max_meshes=4, max_microbatches=5):
        run_s, sent_s = random_seconds(schedule, rng, 9), random_seconds(schedule, rng, most)
        real, found = simulated(schedule, run_s, sent_s), time_step(schedule, run_s, sent_s)
        assert (found.makespan_s, found.busy_s) == (real.makespan_s, real.busy_s), schedule


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_of_many_microbatches_takes_what_the_simulator_says(name):
    schedule = make_schedule(name, num_meshes=8, num_microbatches=32, virtual_stages=2 if name == "interleaved" else 1)
    rng = random.Random(name)
    run_s, sent_s = random_seconds(schedule, rng, 9), random_seconds(schedule, rng, 5)
    real, found = simulated(schedule, run_s, sent_s), time_step(schedule, run_s, sent_s)
    assert (found.makespan_s, found.bubble) == (real.makespan_s, real.bubble)


def test_without_seconds_of_transfers_they_take_no_time():
    schedule = make_schedule("1f1b", num_meshes=4, num_microbatches=8)
    run_s = {(kind, stage): seconds for kind, seconds in (("forward", 1), ("backward", 2)) for stage in range(4)}
    assert time_step(schedule, run_s).makespan_s == (8 + 3) * 3
    sent_s = {(kind, stage): Fraction(1, 2) for kind, stage in run_s}
    assert time_step(schedule, run_s, sent_s).makespan_s == 33 + 2 * 3 * Fraction(1, 2) + (8 - 1) * 3 // 4


def test_a_link_carries_one_thing_after_the_other():
    """Three microbatches forward arrive at 6, 11, 16; their gradients leave from 18 on, and arrive at 23, 28, 33."""
    schedule = make_schedule("gpipe", num_meshes=2, num_microbatches=3)
    run_s = {(kind, stage): 1 for kind in schedule.kinds for stage in range(2)}
    assert time_step(schedule, run_s, {("forward", 0): 5, ("backward", 1): 5}).makespan_s == 34
