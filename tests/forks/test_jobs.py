"""Jobs side by side: the same results, errors and warnings as one after the other, whatever becomes of a fork."""

import json
import os
import threading
import time
import warnings

import jax
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.forks.jobs import CAN_COUNT, run_side_by_side, started_aside
from autopar.models.registry import build
from tests.inter_op.test_search import arguments, step, two_nodes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("processes", [1, 2, 4, 9])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_results_come_in_the_order_of_the_jobs(count, processes):
    assert run_side_by_side([lambda n=n: n * n for n in range(count)], processes=processes) == [
        n * n for n in range(count)
    ]


LIMIT_S, LONG_S = 60, 600
"""Seconds in which a fork has its turn on a busy machine, and seconds that no test waits for."""


def wait_until(holds):
    """Wait; returns whether it holds in time."""
    ends = time.monotonic() + LIMIT_S
    while not holds() and time.monotonic() < ends:
        time.sleep(0.005)
    return holds()


def test_several_processes_work_at_the_same_time(tmp_path):
    def job():
        (tmp_path / str(os.getpid())).touch()
        assert wait_until(lambda: len(list(tmp_path.iterdir())) > 1)
        return os.getpid()

    assert len(set(run_side_by_side([job] * 4, processes=4))) > 1


def test_several_processes_take_the_largest_jobs_first_and_results_keep_their_order(tmp_path):
    """When the smallest is taken, at most one of the others is under way."""

    def job(number):
        ended = len(list(tmp_path.iterdir()))
        time.sleep(0.05)
        (tmp_path / str(number)).touch()
        return number, ended

    found = run_side_by_side([lambda n=n: job(n) for n in range(6)], processes=2, weights=[1, 2, 3, 4, 5, 6])
    assert [number for number, _ in found] == [0, 1, 2, 3, 4, 5]
    assert found[0][1] >= 4


def test_the_first_job_that_fails_is_the_one_whose_error_is_raised():
    def fail(number):
        time.sleep(0.05 * (4 - number))
        raise ValueError(f"job {number}")

    jobs = [lambda: 0, *(lambda n=n: fail(n) for n in (1, 2, 3))]
    with pytest.raises(ValueError, match="job 1"):
        run_side_by_side(jobs, processes=3)


def test_a_warning_is_heard_whichever_process_it_came_up_in():
    def job(number):
        time.sleep(0.05)
        warnings.warn(f"job {number}", UserWarning, stacklevel=1)
        return number

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert run_side_by_side([lambda n=n: job(n) for n in range(4)], processes=2) == [0, 1, 2, 3]
    assert sorted(str(one.message) for one in heard) == ["job 0", "job 1", "job 2", "job 3"]


def test_results_that_cannot_be_sent_are_found_here():
    def job():
        time.sleep(0.05)
        return lambda: os.getpid()

    assert [found() for found in run_side_by_side([job] * 3, processes=2)] == [os.getpid()] * 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fate", ["hangs", "dies"])
def test_what_a_fork_does_not_bring_is_done_here(fate):
    here = os.getpid()

    def job(number):
        if os.getpid() != here:
            time.sleep(LONG_S) if fate == "hangs" else os._exit(3)
        time.sleep(0.1)
        return number

    started = time.monotonic()
    assert run_side_by_side([lambda n=n: job(n) for n in range(4)], processes=3, patience_s=0.5) == [0, 1, 2, 3]
    assert time.monotonic() - started < LONG_S / 2


@pytest.mark.skipif(not CAN_COUNT, reason="the system does not say what a fork has used of the processor")
def test_a_fork_that_works_for_longer_than_patience_lasts_is_waited_for(tmp_path):
    here = os.getpid()

    def job(number):
        if os.getpid() == here:
            assert wait_until((tmp_path / "fork").exists)
            return here
        (tmp_path / "fork").touch()
        while time.process_time() < 1.2:
            pass
        return os.getpid()

    found = run_side_by_side([lambda n=n: job(n) for n in range(2)], processes=2, patience_s=0.6)
    assert len(set(found)) == 2, "nothing that the fork did is done again"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_forks_are_gone_after_an_interrupt_or_an_error_that_ends_all(tmp_path, kind):
    here = os.getpid()

    def job():
        if os.getpid() != here:
            (tmp_path / "fork").write_text(str(os.getpid()))
            time.sleep(LONG_S)
        while not (tmp_path / "fork").exists() or not (tmp_path / "fork").read_text():
            time.sleep(0.01)
        raise kind

    with pytest.raises(kind):
        run_side_by_side([job] * 2, processes=2, ends_at_error=kind is ValueError)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "fork").read_text()), 0)


def without_times(data):
    """A plan's JSON without the time that planning took."""
    if isinstance(data, dict):
        return {name: without_times(value) for name, value in data.items() if name != "planning_s"}
    return [without_times(one) for one in data] if isinstance(data, list) else data


def planned(step, state, batch, processes, **wishes):
    parallel = autopar.parallelize(step, devices=4, planning_processes=processes, **wishes)
    return without_times(json.loads(parallel.plan(state, batch).to_json()))


@pytest.mark.sweep
def test_a_search_over_stages_ends_with_the_plan_of_one_process():
    weights, x = arguments(64)
    found = [planned(step, weights, x, processes, cluster=two_nodes()) for processes in (1, 3)]
    assert len(found[0]["stages"]) > 1
    assert found[0] == found[1]


TEXT = {"heads": 4, "seq": 8}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mlp", {"layers": 2}),
        pytest.param("gpt_scan", {"layers": 2, **TEXT}, marks=pytest.mark.slow),
        pytest.param("gpt", {"layers": 2, **TEXT}, marks=pytest.mark.slow),
        pytest.param("moe", {"layers": 2, "experts": 4, "group": 16, **TEXT}, marks=pytest.mark.slow),
    ],
    ids=["mlp", "gpt_scan", "gpt", "moe"],
)
def test_stages_planned_side_by_side_are_those_of_one_process(name, sizes):
    model = build(name, hidden=32, batch=16, sgd=True, **sizes)
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    wishes = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}
    found = [planned(model.train_step, state, model.batch_shape(), processes, **wishes) for processes in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("given", [0, "all", 1.0, True])
def test_a_number_of_processes_that_is_none_is_refused(given):
    with pytest.raises(ArgumentError, match=r"planning_processes=.*a positive whole number is expected"):
        autopar.parallelize(step, planning_processes=given)


def test_what_only_a_fork_is_at_work_on_is_given_up_on_demand(tmp_path):
    here, started = os.getpid(), time.monotonic()

    def job():
        if os.getpid() != here:
            (tmp_path / "fork").touch()
            time.sleep(LONG_S)
        assert wait_until((tmp_path / "fork").exists)
        return "done"

    found = run_side_by_side([job] * 2, processes=2, may_give_up=lambda: True, given_up="left")
    assert sorted(found) == ["done", "left"]
    assert time.monotonic() - started < LONG_S / 2


def test_a_job_aside_is_done_by_a_fork_while_this_process_goes_on(tmp_path):
    def job():
        (tmp_path / "done").touch()
        return os.getpid()

    with started_aside(job, processes=2) as find:
        assert wait_until((tmp_path / "done").exists)
        assert find() != os.getpid()
    with started_aside(os.getpid, processes=1) as find:
        assert find() == os.getpid()


def test_a_job_aside_that_the_fork_does_not_bring_is_done_here():
    here = os.getpid()
    with started_aside(lambda: threading.Lock() if os.getpid() != here else "here", processes=2) as find:
        assert find() == "here"


def test_a_job_aside_that_nobody_asks_for_is_ended():
    with started_aside(lambda: time.sleep(1000), processes=2):
        pass
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
