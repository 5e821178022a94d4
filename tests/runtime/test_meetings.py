"""Processes, which are threads here, meet before they act together: all go on, or all refuse alike; then one plans for all."""

import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from autopar.errors import ArgumentError, AutoparWarning, OutOfMemoryError, PlanError
from autopar.runtime import meetings
from autopar.runtime.meetings import KEPT_MEETINGS, MANY, Group, refusing_together
from autopar.runtime.shared_plan import CHUNK_BYTES, SharedPlan
from tests.process_table import Table

PROCESSES = (1, 4, 5)


def groups_of(table, processes=PROCESSES, **options):
    """How each process sees the group."""
    return {process: Group(table, process, processes, **options) for process in processes}


def outcomes(groups, act):
    """What comes of `act` on each process: its result, or its exception."""

    def outcome(process):
        try:
            return act(groups[process])
        except (ArgumentError, OutOfMemoryError, PlanError) as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(outcome, groups))


def said(errors):
    """The words of errors, which are PlanErrors all."""
    assert {*map(type, errors)} == {PlanError}, errors
    return [str(error) for error in errors]


@pytest.mark.parametrize("count", [2, 3, MANY + 4])
@pytest.mark.parametrize("odd", [0, 1, -1])
def test_where_one_process_is_about_to_do_something_else_all_are_told_the_same_and_all_can_go_on(count, odd):
    table, processes = Table(), tuple(range(3, 3 + count))
    groups = groups_of(table, processes)
    assert len({*outcomes(groups, lambda group: group.meet("runs a"))}) == 1
    other = processes[odd]
    words = {*said(outcomes(groups, lambda group: group.meet("runs b" if group.here == other else "runs a")))}
    (told,) = words
    assert told.startswith(f"process 3 runs {'b' if odd == 0 else 'a'}, process ")
    assert f"process {other} runs b" in told
    assert "every process has to make the same calls in the same order" in told
    assert len({*outcomes(groups, lambda group: group.meet("runs a"))}) == 1


def test_words_that_are_too_long_to_publish_are_told_apart():
    groups = groups_of(Table())
    long = "runs " + "x" * 2 * meetings.MAX_WORDS
    found = said(outcomes(groups, lambda group: group.meet(long + str(group.here == 4))))
    assert len({*found}) == 1
    assert max(map(len, groups[1].service.entries.values())) < 3 * meetings.MAX_WORDS


@pytest.mark.parametrize("failing", [1, 4])
def test_an_error_of_one_process_is_told_to_the_others_which_do_not_wait(failing):
    def act(group):
        with refusing_together(group):
            if group.here == failing:
                raise ArgumentError("w no longer exists\nand more")
        return group.meet("runs step")

    table = Table()
    groups = groups_of(table)
    found = dict(zip(groups, outcomes(groups, act), strict=True))
    assert isinstance(found.pop(failing), ArgumentError)
    for words in said(found.values()):
        assert words.startswith(f"process {failing} cannot go on: ArgumentError: w no longer exists")
        assert "and more" not in words
    assert len({*outcomes(groups, lambda group: group.meet("runs step"))}) == 1


def test_without_other_processes_an_error_is_the_processs_own():
    with pytest.raises(ArgumentError), refusing_together(None):
        raise ArgumentError


@pytest.mark.sampled(4)
@pytest.mark.parametrize("absent", [1, 5])
def test_for_a_process_that_does_not_come_the_others_wait_for_a_while_with_a_word_and_refuse(absent, monkeypatch):
    monkeypatch.setattr(meetings, "LOOK_S", 0.01)
    monkeypatch.setattr(meetings, "SILENCE_S", 0.02)
    groups = groups_of(Table(), limit_s=0.2)
    here = {process: group for process, group in groups.items() if process != absent}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", AutoparWarning)
        found = said(outcomes(here, lambda group: group.meet("runs step")))
    leader, *_ = (str(w.message) for w in warned if f"process {4 if absent == 1 else 1} runs" in str(w.message))
    assert f"runs step, and has waited for process {absent}" in leader
    late = said(outcomes({absent: groups[absent]}, lambda group: group.meet("runs step")))
    assert {*found} == {*late}
    assert f"runs step, and process {absent} has not done so within 0 s" in late[0]
    assert len({*outcomes(groups, lambda group: group.meet("runs step"))}) == 1


@pytest.mark.parametrize("ended", PROCESSES)
@pytest.mark.parametrize("why", [None, ValueError("no more data\nat all")])
def test_a_process_that_ends_leaves_a_note_and_is_not_waited_for(ended, why, monkeypatch):
    monkeypatch.setattr(meetings, "LOOK_S", 0.01)
    monkeypatch.setattr(sys, "last_value", why, raising=False)
    groups = groups_of(Table())
    groups[ended].leave()
    here = {process: group for process, group in groups.items() if process != ended}
    (words,) = {*said(outcomes(here, lambda group: group.meet("runs step")))}
    cause = " with ValueError: no more data" if why else ""
    assert words.startswith(f"process {ended} has ended{cause}, while process ")


def test_process_0_lingers_after_an_error_so_that_its_note_is_read(monkeypatch):
    slept = []
    monkeypatch.setattr(meetings.time, "sleep", slept.append)
    for here, why in ((0, None), (1, KeyError("x")), (0, KeyError("x"))):
        monkeypatch.setattr(sys, "last_value", why, raising=False)
        Group(Table(), here, (0, 1)).leave()
    assert slept == [meetings.LINGER_S]


@pytest.mark.parametrize("interrupted", [1, 4])
def test_a_process_that_is_interrupted_while_it_waits_tells_the_others(interrupted, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    groups = groups_of(Table())
    one = groups.pop(interrupted)
    monkeypatch.setattr(one, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.meet("runs step")
    (told,) = {*said(outcomes(groups, lambda group: group.meet("runs step")))}
    assert told == f"process {interrupted} was interrupted while it waited for the others"


def test_a_service_that_does_not_answer_is_not_waited_for():
    table = Table()
    table.trouble = "UNAVAILABLE: connection refused\nmore"
    (words,) = said(outcomes({4: Group(table, 4, PROCESSES)}, lambda group: group.meet("runs step")))
    assert "process 4 runs step, and cannot hear of process 1" in words
    assert "(UNAVAILABLE: connection refused). Start all processes again" in words


def test_the_service_does_not_fill_with_old_meetings():
    table = Table()
    groups = groups_of(table, (0, 1))

    def act(group):
        for n in range(5 * KEPT_MEETINGS):
            group.meet(f"runs step {n}")

    outcomes(groups, act)
    assert len(table.entries) <= 2 * 2 * KEPT_MEETINGS


# --- one plan ---------------------------------------------------------------------------------------------------------


def plans(groups, plan, question="step"):
    return outcomes(groups, lambda group: SharedPlan.meet(group, question).make(lambda: plan(group.here), within_s=60))


def test_only_the_first_process_plans_and_every_question_has_its_own_answer():
    groups, planned = groups_of(Table()), []

    def plan(process):
        planned.append(process)
        return f"plan {len(planned)}"

    assert plans(groups, plan) == ["plan 1"] * 3
    assert plans(groups, plan) == ["plan 2"] * 3
    assert planned == [1, 1]


def test_a_plan_of_many_chunks_arrives_whole():
    text = random.Random(0).randbytes(3 * CHUNK_BYTES).hex()
    table = Table()
    assert plans(groups_of(table), lambda process: text) == [text] * 3
    assert max(map(len, table.entries.values())) == CHUNK_BYTES


def test_an_error_of_the_process_that_plans_is_its_own_there_and_told_to_the_others():
    def plan(process):
        raise OutOfMemoryError("needs 9 bytes")

    first, *others = plans(groups_of(Table()), plan)
    assert isinstance(first, OutOfMemoryError)
    assert said(others) == ["process 1 could not plan step: OutOfMemoryError: needs 9 bytes"] * 2


def test_where_questions_differ_nobody_plans():
    def ask(group):
        return SharedPlan.meet(group, f"step {group.here == 5}").make(lambda: pytest.fail("it plans"), within_s=60)

    (words,) = {*said(outcomes(groups_of(Table()), ask))}
    assert words.startswith("process 1 plans step False, process 5 plans step True: every process has to make")
