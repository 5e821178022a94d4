"""The driver: right results, arrays that die in time, threads, arguments and timelines."""

import threading
import time
import weakref

import pytest

from autopar.errors import ArgumentError
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Free, Receive, Run, Send, Value
from autopar.schedules.schedules import make_schedule
from tests.runtime.watched import Watched, nothing, wait_for
from tests.schedules.chains import TRAINING_IN_ONE, driver_of, expected, inputs_of, small_schedules

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def by_name(outputs):
    return {str(value): array for (_, value), array in outputs.items()}


def test_every_small_schedule_computes_what_a_plain_loop_computes():
    for schedule in small_schedules(max_meshes=4, max_microbatches=8, max_virtual=2):
        outputs = by_name(driver_of(schedule).run(inputs_of(make_chain(schedule))))
        assert outputs == pytest.approx(expected(schedule)), schedule.name


def test_all_schedules_add_gradients_in_the_same_order_to_the_last_bit():
    results = []
    for name in TRAINING_IN_ONE:
        schedule = make_schedule(name, num_meshes=4, num_microbatches=8)
        inputs = inputs_of(
            make_chain(schedule), lambda mesh, v: {"w": 1.1, "d": 0.0, "x": 0.1 * ((v.microbatch or 0) + 1)}[v.name[0]]
        )
        results.append(driver_of(schedule).run(inputs))
    assert all(result == results[0] for result in results[1:])


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
