"""Programs that fail after they were launched: the error comes out of the array, and is traced to its instruction."""

import threading

import pytest

from autopar.errors import PipelineError
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.schedules import make_schedule
from tests.runtime.watched import Number, wait_for, with_witnesses

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("p", [1, 3])
def test_every_late_failure_is_traced_to_its_instruction_and_every_mesh_waits_in_its_own_thread(p):
    schedule = make_schedule("gpipe", num_meshes=p, num_microbatches=3)
    work = make_chain(schedule)
    for spec in work.specs:
        for k in range(3):
            waited = []
            calls, inputs = with_witnesses(work, (spec.name, k), waited)
            driver = Driver(work.emit(), calls, lambda a, v, s, t: a)
            words = f"^.*: {spec.name} broke\nStage {spec.stage}, microbatch {k}: the {spec.kind} failed on mesh {spec.mesh} "
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
    with pytest.raises(
        PipelineError, match=r"^.*: forward0 broke\nStage 0, microbatch 0: the forward failed on mesh 0 "
    ):
        Driver(work.emit(), calls, lambda a, v, s, t: a).run(inputs)
    assert started == [0]
