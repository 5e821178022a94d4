"""When a mesh fails: the first failure is named with its place, all meshes are stopped, and nothing is left."""

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

from autopar.errors import PipelineError
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Run, TaskSpec
from autopar.schedules.schedules import make_schedule
from tests.runtime.watched import SMALL, Number, Watched, nothing, performed
from tests.schedules.chains import callables_of, inputs_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.fault(1, 2, 3)
@pytest.mark.parametrize(("name", "p", "m"), SMALL)
def test_a_failure_at_any_place_is_named_stops_all_and_leaves_nothing(name, p, m):
    schedule = make_schedule(name, num_meshes=p, num_microbatches=m)
    culprit = None

    def before(instruction):
        if instruction is culprit:
            raise ValueError("the user's words\nand more of them")

    step = Watched(schedule, before)
    good = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    for n in performed(step.program):
        culprit = step.program.instructions[n]
        with pytest.raises(PipelineError) as caught:
            step.driver.run(step.inputs())
        text = str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)
        cause, place, rest = text.split("\n")
        assert cause == "ValueError: the user's words"
        assert f"on mesh {culprit.mesh} (instruction {n} of {len(step.program.instructions)})" in place
        assert rest.startswith("All meshes were stopped")
        if isinstance(culprit, Run):
            kind = culprit.kind.replace("_", " ")
            assert place.startswith(f"Stage {culprit.stage}, microbatch {culprit.microbatch}: the {kind} failed")
            assert place.endswith(f", which runs lines of {culprit.task}.")
        else:
            assert place.startswith(f"Moving {culprit.value} from mesh {culprit.mesh} to {culprit.target_mesh} failed")
        assert not step.alive, "arrays outlive the failure although the exception is still held"
        culprit = None
        again = step.driver.run(step.inputs())
        assert {key: number.content for key, number in again.items()} == good
        del again


def prologue(name, mesh):
    """A task that runs once, reads nothing and writes nothing."""
    return TaskSpec(name=name, mesh=mesh, kind="prologue", stage=mesh, inputs=(), outputs=())


def test_the_first_in_the_global_order_is_reported_when_several_meshes_fail():
    schedule = make_schedule("inference", num_meshes=3, num_microbatches=1)
    barrier = threading.Barrier(2)

    def fail(words):
        def run(arrays):
            barrier.wait(10)
            raise ValueError(words)

        return run

    work = make_chain(schedule)
    alone = tuple(prologue(f"alone{mesh}", mesh) for mesh in (1, 2))
    program = dataclasses.replace(work, specs=alone + work.specs).emit()
    calls = {**callables_of(work.specs), "alone1": fail("one"), "alone2": fail("two")}
    driver = Driver(program, calls, lambda a, v, s, t: a)
    with pytest.raises(PipelineError, match=r"^ValueError: one\nStage 1: the prologue failed on mesh 1 "):
        driver.run(inputs_of(work))


def test_what_the_cause_of_a_failure_held_is_let_go():
    schedule = make_schedule("inference", num_meshes=2, num_microbatches=1)
    work, held = make_chain(schedule), []

    def compute():
        array = Number(1.0)
        held.append(weakref.ref(array))
        raise KeyError("what went wrong first")

    def fail(arrays):
        try:
            compute()
        except KeyError as error:
            raise ValueError("in the user's words") from error

    calls = {**callables_of(work.specs), "forward1": fail}
    with pytest.raises(PipelineError, match="in the user's words"):
        Driver(work.emit(), calls, lambda a, v, s, t: a).run(inputs_of(work))
    assert [array() for array in held] == [None]


def test_a_task_that_returns_too_few_arrays_is_named():
    schedule = make_schedule("inference", num_meshes=2, num_microbatches=1)
    work = make_chain(schedule)
    calls = {**callables_of(work.specs), "forward1": lambda arrays: []}
    driver = Driver(work.emit(), calls, lambda a, v, s, t: a)
    with pytest.raises(PipelineError, match="task 'forward1' returned 0 arrays, it writes 1"):
        driver.run(inputs_of(work))


def test_a_task_that_exits_is_reported_like_any_failure():
    schedule = make_schedule("inference", num_meshes=2, num_microbatches=1)
    work = make_chain(schedule)
    calls = {**callables_of(work.specs), "forward0": lambda arrays: sys.exit(3)}
    driver = Driver(work.emit(), calls, lambda a, v, s, t: a)
    with pytest.raises(PipelineError, match=r"^SystemExit: 3\nStage 0, microbatch 0: the forward failed on mesh 0 "):
        driver.run(inputs_of(work))


@contextlib.contextmanager
def refused(settings):
    raise ValueError("no such setting here")
    yield


@contextlib.contextmanager
def cannot_be_left(settings):
    yield
    raise ValueError("no such setting here")


@pytest.mark.parametrize("under", [refused, cannot_be_left])
def test_settings_of_the_caller_that_a_thread_cannot_have_end_the_step_with_an_error(monkeypatch, under):
    """The calling thread waits for every mesh: one that ends without a word would keep it waiting for ever."""
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=2)
    step = Watched(schedule, lambda instruction: None)
    monkeypatch.setattr("autopar.runtime.mesh_threads.under", under)
    with pytest.raises(PipelineError, match="ValueError: no such setting here"):
        step.driver.run(step.inputs())
    assert not step.alive


def test_a_mesh_that_cannot_start_wakes_those_that_wait_for_it(monkeypatch):
    def refused_on_the_first(settings):
        is_first = threading.current_thread().name == "autopar mesh 0"
        return refused(settings) if is_first else contextlib.nullcontext()

    step = Watched(make_schedule("1f1b", num_meshes=2, num_microbatches=2), nothing)
    monkeypatch.setattr("autopar.runtime.mesh_threads.under", refused_on_the_first)
    with pytest.raises(PipelineError, match="ValueError: no such setting here"):
        step.driver.run(step.inputs())
    assert not step.alive


def test_an_interpreter_whose_step_failed_ends():
    """A script that lets the error through ends with it, and does not hang on a thread."""
    script = """
        from tests.schedules.chains import *
        schedule = make_schedule("1f1b", num_meshes=3, num_microbatches=4)
        work = make_chain(schedule)
        def fail(arrays):
            raise ValueError("boom")
        driver = Driver(work.emit(), {**callables_of(work.specs), "backward1": fail}, lambda a, v, s, t: a)
        driver.run(inputs_of(work))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert (
        "autopar.errors.PipelineError: ValueError: boom\nStage 1, microbatch 0: the backward failed on mesh 1"
        in done.stderr
    )
