"""Progress reaches its listeners and the log, and what it leaves out stays as it was."""

import dataclasses
import logging
import os

import jax
import jax.numpy as jnp

import autopar
from autopar.forks.jobs import run_side_by_side
from autopar.progress import Progress, enter, listening, planning_parts, report, searching
from tests.inter_op.test_search import arguments, step, two_nodes


def a_step(state, batch):
    return {"w": state["w"] - jnp.mean(batch @ state["w"])}, jnp.sum(batch)


SHAPES = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}, jax.ShapeDtypeStruct((32, 16), jnp.float32)


def test_listeners_hear_reports_while_they_listen():
    outer, inner = [], []
    enter("before")
    with listening(outer.append):
        with listening(inner.append):
            enter("tracing")
        report(Progress(dropped=3))
    enter("after")
    assert inner == [Progress(phase="tracing")]
    assert outer == [Progress(phase="tracing"), Progress(dropped=3)]


def test_what_a_report_leaves_out_is_as_before_and_a_new_phase_is_nowhere_yet():
    before = Progress(phase="planning", at="mesh (8,)", bounded=4, best_s=0.5)
    assert Progress(bounded=5).after(before) == Progress(phase="planning", at="mesh (8,)", bounded=5, best_s=0.5)
    assert Progress(phase="planning", best_s=0.4).after(before).at == "mesh (8,)"
    assert Progress(phase="compiling").after(before) == Progress(phase="compiling", bounded=4, best_s=0.5)


def test_of_another_search_nothing_is_known_yet_but_that_planning_is_to_end():
    before = Progress(phase="planning", at="mesh (8,)", best_s=0.5, search="ZeRO-2, 2 of 5", stopping="stopping")
    assert Progress(phase="planning").after(before).search == "ZeRO-2, 2 of 5"
    third = Progress(search="ZeRO-3, 3 of 5")
    assert third.after(before) == Progress(search="ZeRO-3, 3 of 5", stopping="stopping")
    assert str(dataclasses.replace(third, phase="planning")) == "ZeRO-3, 3 of 5, planning"


def test_the_best_step_is_the_least_so_far_and_ends_what_stages_promise():
    before = Progress(phase="planning", best_s=0.5, promised_s=0.3)
    assert Progress(promised_s=0.2).after(before) == Progress(phase="planning", best_s=0.5, promised_s=0.2)
    assert Progress(best_s=0.6).after(before) == Progress(phase="planning", best_s=0.5)
    assert Progress(best_s=0.4).after(before) == Progress(phase="planning", best_s=0.4)


def test_the_cut_into_microbatches_and_their_loop_are_told():
    """Whether the number is given, or found because nothing else fits the memory."""
    for options in ({"num_microbatches": 4}, {"num_stages": 1, "memory_limit_bytes": 2200}):
        heard = []
        with listening(heard.append):
            plan = autopar.parallelize(a_step, devices=2, **options).plan(*SHAPES)
        places, count = [one.at for one in heard], plan.num_microbatches
        assert count > 1
        assert places.index(f"the cut into {count} microbatches") < places.index(f"the loop over {count} microbatches")


def test_of_one_search_only_a_better_step_is_news(caplog):
    """The log promises better plans, and had the stages in each schedule, whatever they take."""
    with caplog.at_level(logging.DEBUG, logger="autopar"):
        for _ in range(2):
            with searching():
                for seconds in (0.5, 0.6, 0.5, 0.4):
                    report(Progress(best_s=seconds), is_news=True)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "DEBUG", "DEBUG", "INFO"] * 2


def test_figures_of_a_part_are_not_said_of_the_step(caplog):
    heard = []
    with listening(heard.append), caplog.at_level(logging.DEBUG, logger="autopar"):
        with planning_parts():
            report(Progress(best_s=0.1), is_news=True)
            report(Progress(at="mesh (2,)"))
            report(Progress(bounded=2, dropped=1, proven=1, best_s=0.1, bound_s=0.1, seconds_left=9.0))
        report(Progress(best_s=0.7))
    assert heard == [Progress(at="mesh (2,)"), Progress(seconds_left=9.0), Progress(best_s=0.7)]
    assert [record.message for record in caplog.records] == ["mesh (2,)", "seconds_left 9", "best_s 0.7"]


def test_of_stages_what_they_promise_is_heard_and_then_what_they_take():
    heard = []
    with listening(heard.append):
        plan = autopar.parallelize(step, devices=4, cluster=two_nodes(), planning_processes=1).plan(*arguments(64))
    assert len(plan.stages) > 1
    promised = [n for n, progress in enumerate(heard) if progress.promised_s is not None]
    best = [n for n, progress in enumerate(heard) if progress.best_s is not None]
    assert min(promised) < min(best)
    assert min(heard[n].best_s for n in best) == plan.step_s
    assert 0.9 * plan.step_s < heard[max(n for n in promised if n < min(best))].promised_s < 1.1 * plan.step_s
    assert any((progress.phase or "").startswith("planning layers") for progress in heard[: best[0]])


def test_the_log_has_phases_and_better_plans_as_info_and_the_rest_as_debug(caplog):
    with caplog.at_level(logging.DEBUG, logger="autopar"):
        enter("tracing")
        report(Progress(bounded=2, dropped=1, at="mesh (8,)"))
        report(Progress(best_s=0.25), "data parallel over 8 devices takes 250 ms", is_news=True)
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("autopar", "INFO", "tracing"),
        ("autopar", "DEBUG", "mesh (8,): bounded 2, dropped 1"),
        ("autopar", "INFO", "data parallel over 8 devices takes 250 ms"),
    ]


def test_importing_installs_no_handler():
    assert logging.getLogger("autopar").handlers == []


def test_a_step_says_its_phases():
    heard = []
    step = autopar.parallelize(a_step, devices=2)
    with listening(heard.append):
        plan = step.plan(*SHAPES)
        step.plan(*SHAPES)
    phases = [progress.phase for progress in heard if progress.phase is not None]
    assert phases[0] == "tracing"
    assert phases.count("tracing") == 1
    assert any(phase.startswith("planning") for phase in phases)
    assert [progress.best_s for progress in heard if progress.best_s is not None][-1] == plan.step_s


def test_a_listener_hears_its_own_process_alone():
    heard = []

    def job() -> int:
        enter("a job")
        return os.getpid()

    with listening(heard.append):
        processes = run_side_by_side([job] * 6, processes=2)
    assert len(heard) == processes.count(os.getpid())
