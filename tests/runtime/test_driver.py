"""The driver: right results, and what happens when a mesh fails or the user interrupts. Nothing hangs, nothing is left."""

import collections
import contextlib
import dataclasses
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from autopar.errors import ArgumentError, PipelineError
from autopar.runtime.driver import Driver
from autopar.runtime.step_state import StepState
from autopar.runtime.tuning import TUNING
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Free, Receive, Run, Send, TaskSpec, Value
from autopar.schedules.schedules import make_schedule
from tests.schedules.chains import callables_of, ctrl_c, driver_of, expected, inputs_of, number, small_schedules


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def by_name(outputs):
    return {str(value): array for (_, value), array in outputs.items()}


class Number:
    """A float that can be watched by weak references."""

    def __init__(self, content):
        self.content = content

    def __add__(self, other):
        return Number(self.content + other.content)

    def __mul__(self, other):
        return Number(self.content * other.content)


class Watched:
    """A chain on `Number`s; `before` is called in front of every task and transfer with the instruction, `copied` with copies."""

    def __init__(self, schedule, before, copied=lambda copy: None):
        self.work = make_chain(schedule)
        self.program = self.work.emit()
        self.alive = weakref.WeakSet()
        self.before, self.copied = before, copied
        self.next_run = {}
        self.sends = {(i.value, i.mesh, i.target_mesh): i for i in self.program.instructions if isinstance(i, Send)}
        calls = {name: self._call(name, function) for name, function in callables_of(self.work.specs).items()}
        self.driver = Driver(self.program, calls, self._transfer)

    def inputs(self):
        """What a new run needs; every task starts with its first microbatch."""
        runs = [i for i in self.program.instructions if isinstance(i, Run)]
        self.next_run = {run.task: iter([i for i in runs if i.task == run.task]) for run in runs}
        numbers = {key: Number(content) for key, content in inputs_of(self.work).items()}
        self.alive.update(numbers.values())
        return numbers

    def _call(self, name, function):
        def run(arrays):
            self.before(next(self.next_run[name]))
            results = function(arrays)
            self.alive.update(results)
            return results

        return run

    def _transfer(self, array, value, source, target):
        self.before(self.sends[value, source, target])
        copy = Number(array.content)
        self.alive.add(copy)
        self.copied(copy)
        return copy


def nothing(instruction):
    pass


def test_every_small_schedule_computes_what_a_plain_loop_computes():
    for schedule in small_schedules(max_meshes=4, max_microbatches=8, max_virtual=2):
        outputs = by_name(driver_of(schedule).run(inputs_of(make_chain(schedule))))
        assert outputs == pytest.approx(expected(schedule)), schedule.name


def test_all_schedules_add_gradients_in_the_same_order_to_the_last_bit():
    results = []
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = make_schedule(name, num_meshes=4, num_microbatches=8)
        inputs = inputs_of(
            make_chain(schedule), lambda mesh, v: {"w": 1.1, "d": 0.0, "x": 0.1 * ((v.microbatch or 0) + 1)}[v.name[0]]
        )
        results.append(driver_of(schedule).run(inputs))
    assert results[0] == results[1] == results[2]


def test_a_driver_runs_again_and_again_and_keeps_no_array():
    step = Watched(make_schedule("1f1b", num_meshes=3, num_microbatches=4), nothing)
    first = {key: number.content for key, number in step.driver.run(step.inputs()).items()}
    assert not step.alive
    for _ in range(3):
        outputs = step.driver.run(step.inputs())
        assert {key: number.content for key, number in outputs.items()} == first
        assert set(step.alive) == set(outputs.values())
        del outputs
    assert not step.alive


def test_consumed_inputs_die_during_the_step_if_nobody_else_holds_them():
    schedule = make_schedule("gpipe", num_meshes=1, num_microbatches=4)
    batches = []

    def before(instruction):
        batches.append(sum(1 for number in step.alive if number in first_inputs))

    step = Watched(schedule, before)
    first_inputs = weakref.WeakSet()

    def inputs():
        numbers = step.inputs()
        first_inputs.update(number for (_, value), number in numbers.items() if value.name == "x0")
        return numbers

    step.driver.run(inputs())
    # The four batch values live on as residuals; each dies with its backward.
    assert batches == [4, 4, 4, 4, 4, 3, 2, 1]


def wait_for(condition):
    """Whether the condition is met within ten seconds."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_a_copy_from_another_mesh_dies_with_its_last_use_and_not_with_the_step():
    copies, died = [], []

    def before(instruction):
        if isinstance(instruction, Run) and (instruction.mesh, instruction.microbatch) == (1, 2):
            died.append(wait_for(lambda: not any(copy() for copy in copies[:2])))

    schedule = make_schedule("inference", num_meshes=2, num_microbatches=3)
    step = Watched(schedule, before, lambda copy: copies.append(weakref.ref(copy)))
    step.driver.run(step.inputs())
    assert died == [True]


def test_one_mesh_runs_in_the_calling_thread():
    names = set()
    schedule = make_schedule("gpipe", num_meshes=1, num_microbatches=2)
    step = Watched(schedule, lambda instruction: names.add(threading.current_thread().name))
    step.driver.run(step.inputs())
    assert names == {threading.current_thread().name}


def test_each_mesh_has_its_own_thread():
    names = {}
    schedule = make_schedule("1f1b", num_meshes=3, num_microbatches=3)
    step = Watched(schedule, lambda i: names.setdefault(i.mesh, set()).add(threading.current_thread().name))
    step.driver.run(step.inputs())
    assert names == {mesh: {f"autopar mesh {mesh}"} for mesh in range(3)}


def test_meshes_overlap():
    """The tasks on a diagonal of the grid meet at a barrier, which breaks if one of them has to wait for another."""
    schedule = make_schedule("inference", num_meshes=4, num_microbatches=8)
    barriers = {k: threading.Barrier(4) for k in range(3, 8)}

    def before(instruction):
        if isinstance(instruction, Run) and (diagonal := instruction.stage + instruction.microbatch) in barriers:
            barriers[diagonal].wait(60)

    step = Watched(schedule, before)
    step.driver.run(step.inputs())
    assert not any(barrier.broken for barrier in barriers.values())


# Failures


SMALL = [("1f1b", 3, 3), ("zb-h1", 2, 2), ("gpipe", 1, 2), ("inference", 3, 2)]


def performed(program):
    """The instructions that call something of the user's: tasks and transfers."""
    return [n for n, i in enumerate(program.instructions) if isinstance(i, Run | Send)]


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
        assert f"instruction {n} of {len(step.program.instructions)}, `{culprit}`" in text
        assert f"on mesh {culprit.mesh}" in text
        assert "ValueError: the user's words\nAll meshes were stopped" in text
        if isinstance(culprit, Run):
            kind = culprit.kind.replace("_", " ")
            assert text.startswith(f"Stage {culprit.stage}, microbatch {culprit.microbatch}: the {kind} failed")
        else:
            assert text.startswith(f"Moving {culprit.value} from mesh {culprit.mesh} to {culprit.target_mesh} failed")
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
    with pytest.raises(PipelineError, match=r"Stage 1: the prologue failed on mesh 1 .*ValueError: one"):
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
    with pytest.raises(PipelineError, match=r"Stage 0, microbatch 0: the forward failed on mesh 0 .*SystemExit: 3"):
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


# Interrupts


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


LONG_S = 60.0


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
    assert "autopar.errors.PipelineError: Stage 1, microbatch 0: the backward failed on mesh 1" in done.stderr
    assert "ValueError: boom" in done.stderr


# Arguments and timelines


def test_missing_and_unknown_inputs_are_reported_together():
    schedule = make_schedule("inference", num_meshes=2, num_microbatches=1)
    inputs = inputs_of(make_chain(schedule))
    inputs[0, Value("typo")] = inputs.pop((0, Value("w0")))
    with pytest.raises(ArgumentError) as error:
        driver_of(schedule).run(inputs)
    assert str(error.value) == (
        "The inputs of this step are not the program's:\n  - w0 on mesh 0 is missing\n  - typo on mesh 0 is no input"
    )


def test_a_task_without_a_callable_is_reported():
    work = make_chain(make_schedule("inference", num_meshes=2, num_microbatches=1))
    with pytest.raises(ArgumentError, match="No callable is given for task 'forward0', 'forward1'"):
        Driver(work.emit(), {}, lambda a, v, s, t: a)


def test_a_timeline_has_a_span_for_every_instruction_in_the_order_of_its_mesh():
    schedule = make_schedule("1f1b", num_meshes=2, num_microbatches=3)
    driver = driver_of(schedule)
    with pytest.raises(ArgumentError, match=r"No timeline was recorded: call run\(..., record=True\) first"):
        driver.timeline()
    driver.run(inputs_of(make_chain(schedule)), record=True)
    timeline = driver.timeline()
    program = make_chain(schedule).emit()
    for mesh in range(2):
        spans = [span for span in timeline.spans if span.instruction.mesh == mesh]
        assert tuple(span.instruction for span in spans) == program.of(mesh)
        times = [time for span in spans for time in (span.start_s, span.end_s)]
        assert times == sorted(times)
    assert min(span.start_s for span in timeline.spans) == 0
    kinds = {type(span.instruction) for span in timeline.spans}
    assert kinds == {Run, Send, Receive, Free}


class Late:
    """An array that is still in computation."""

    def __init__(self, waited):
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(threading.current_thread().name)
        return self


@pytest.mark.parametrize("record", [True, False])
def test_results_and_copies_are_waited_for_when_recording(record):
    """Two forwards on mesh 0; on mesh 1 two copies and two forwards."""
    work = make_chain(make_schedule("inference", num_meshes=2, num_microbatches=2))
    waited = []
    calls = {spec.name: lambda arrays: [Late(waited)] for spec in work.specs}
    driver = Driver(work.emit(), calls, lambda a, v, s, t: a)
    driver.run(inputs_of(work), record=record)
    expected_waits = ["autopar mesh 0"] * 2 + ["autopar mesh 1"] * 4
    assert sorted(waited) == (expected_waits if record else [])


class Poisoned(Number):
    """A number of a program that may have failed behind the caller's back; what is made of it holds the same error."""

    def __init__(self, content, error=None, waited=()):
        super().__init__(content)
        self.error, self.waited = error, waited

    def __add__(self, other):
        return Poisoned(self.content + other.content, self.error or other.error, self.waited)

    def __mul__(self, other):
        return Poisoned(self.content * other.content, self.error or other.error, self.waited)

    def block_until_ready(self):
        self.waited.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return self


def with_witnesses(work, culprit, waited):
    """Calls that return a witness; the culprit, a task's name and how often it was called before, fails."""
    counts = collections.Counter()

    def call(name, function):
        def run(arrays):
            results = function(arrays)
            if (name, counts[name]) == culprit:
                results = [Poisoned(x.content, ValueError(f"{name} broke\nand more"), waited) for x in results]
            counts[name] += 1
            return [*results, results[0] * results[0]]

        return run

    calls = {name: call(name, function) for name, function in callables_of(work.specs).items()}
    inputs = inputs_of(work, lambda mesh, value: Poisoned(number(value), None, waited))
    return calls, inputs


@pytest.mark.parametrize("p", [1, 3])
def test_every_late_failure_is_traced_to_its_instruction_and_every_mesh_waits_in_its_own_thread(p):
    schedule = make_schedule("gpipe", num_meshes=p, num_microbatches=3)
    work = make_chain(schedule)
    for spec in work.specs:
        for k in range(3):
            waited = []
            calls, inputs = with_witnesses(work, (spec.name, k), waited)
            driver = Driver(work.emit(), calls, lambda a, v, s, t: a)
            words = f"Stage {spec.stage}, microbatch {k}: the {spec.kind} failed on mesh {spec.mesh} .*: {spec.name} broke\n"
            with pytest.raises(PipelineError, match=words):
                driver.run(inputs)
            names = {f"autopar mesh {mesh}" for mesh in range(p)} if p > 1 else {threading.current_thread().name}
            assert set(waited) <= names


def test_results_without_late_failures_are_waited_for_once():
    work = make_chain(make_schedule("inference", num_meshes=2, num_microbatches=2))
    waited = []
    calls, inputs = with_witnesses(work, None, waited)
    Driver(work.emit(), calls, lambda a, v, s, t: a).run(inputs)
    assert sorted(waited) == ["autopar mesh 0"] * 2 + ["autopar mesh 1"] * 2


def test_a_late_failure_of_one_mesh_stops_the_others():
    """Mesh 0 finds its own when it has nothing more to start; mesh 1 is then in its first task."""
    work = make_chain(make_schedule("inference", num_meshes=2, num_microbatches=2))
    calls, inputs = with_witnesses(work, ("forward0", 0), [])
    forward, called, started = calls["forward0"], [], []

    def forward_that_is_followed(arrays):
        called.append(len(called))
        assert called == [0] or wait_for(lambda: started)
        return forward(arrays)

    def slow(arrays):
        started.append(len(started))
        gone = wait_for(lambda: all(thread.name != "autopar mesh 0" for thread in threading.enumerate()))
        return [Number(0.0), Number(0.0)] if gone else []

    calls |= {"forward0": forward_that_is_followed, "forward1": slow}
    with pytest.raises(PipelineError, match=r"Stage 0, microbatch 0: the forward failed on mesh 0 .*: forward0 broke"):
        Driver(work.emit(), calls, lambda a, v, s, t: a).run(inputs)
    assert started == [0]


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


def test_an_instruction_costs_less_than_50_microseconds_of_python():
    """Processor time of all threads, so that other work on the machine does not count."""
    schedule = make_schedule("1f1b", num_meshes=4, num_microbatches=32)
    work = make_chain(schedule)
    program = work.emit()
    writes = {spec.name: [0.0] * len(spec.outputs) for spec in work.specs}
    driver = Driver(program, {name: (lambda a, r=r: r) for name, r in writes.items()}, lambda a, v, s, t: a)
    inputs = inputs_of(work)
    seconds = []
    for _ in range(5):
        started = time.process_time()
        driver.run(inputs)
        seconds.append(time.process_time() - started)
    assert min(seconds) / len(program.instructions) < 50e-6
