"""One plan for all processes, which are threads here: what the first makes the others get, errors and differences included."""

import random
from concurrent.futures import ThreadPoolExecutor

from autopar.errors import OutOfMemoryError, PlanError
from autopar.shared_plan import CHUNK_BYTES, Group
from tests.process_table import Table

PROCESSES = (1, 4, 5)


def asked(table, questions, plan, **options):
    """What comes of the questions of each process: its plan, or its exception."""

    def outcome(process):
        try:
            return Group(table, process, PROCESSES, **options).agree(questions[process], lambda: plan(process))
        except (OutOfMemoryError, PlanError) as error:
            return error

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(outcome, questions))


def alike(words="step"):
    return dict.fromkeys(PROCESSES, words)


def test_only_the_first_process_plans_and_every_question_has_its_own_answer():
    table, planned = Table(), []

    def plan(process):
        planned.append(process)
        return f"plan {len(planned)}"

    assert asked(table, alike(), plan) == ["plan 1"] * 3
    assert asked(table, alike(), plan) == ["plan 2"] * 3
    assert planned == [1, 1]


def test_a_plan_of_many_chunks_arrives_whole():
    text = random.Random(0).randbytes(3 * CHUNK_BYTES).hex()
    table = Table()
    assert asked(table, alike(), lambda process: text) == [text] * 3
    assert max(map(len, table.entries.values())) == CHUNK_BYTES


def test_an_error_of_the_process_that_plans_is_its_own_there_and_told_to_the_others():
    def plan(process):
        raise OutOfMemoryError("needs 9 bytes")

    first, *others = asked(Table(), alike(), plan)
    assert isinstance(first, OutOfMemoryError)
    for error in others:
        assert isinstance(error, PlanError)
        assert str(error) == "process 1 could not plan step: OutOfMemoryError: needs 9 bytes"


def test_processes_with_different_questions_are_told_both():
    first, same, other = asked(Table(), {1: "step", 4: "step", 5: "another"}, lambda process: "plan")
    assert same == "plan"
    assert str(first).startswith(
        "process 1 plans step, process 5 plans another: every process has to make the same calls"
    )
    assert str(other).startswith(
        "process 5 plans another, process 1 plans step: every process has to make the same calls"
    )


def test_a_process_that_never_asks_is_waited_for_no_longer_than_agreed():
    outcomes = asked(Table(), {1: "step", 4: "step"}, lambda process: "plan", answer_s=-1.0)
    assert "process 1 plans step, and process 5 has not done so within" in str(outcomes[0])
    assert outcomes[1] == "plan"


def test_a_service_that_does_not_answer_is_not_waited_for():
    table = Table()
    table.trouble = "UNAVAILABLE: connection refused\nmore"
    error = asked(table, {4: "step"}, lambda process: "plan")[0]
    assert "process 4 plans step, and cannot hear of process 1" in str(error)
    assert "(UNAVAILABLE: connection refused). Start all processes again" in str(error)
