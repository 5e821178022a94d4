"""The list of faults of docs/howto/faults.md: each ends in our words, or the run goes on as if nothing had happened.

Those of several processes are in tests/launch, those of instructions and files in test_faults.py.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.events import StepRun, reach, running
from autopar.monitor import Monitor
from autopar.testing.faults import InjectedFaultError, inject


def train_step(state, batch):
    def loss_of(state):
        return jnp.mean((jnp.tanh(batch @ state["a"]) @ state["b"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), loss


def start():
    return {name: jnp.asarray(np.random.default_rng(n).normal(size=(8, 8)), jnp.float32) for n, name in enumerate("ab")}


BATCH = np.ones((8, 8), np.float32)
WAYS = [{"mesh_shape": (2,)}, {"mesh_shape": [(1,), (1,)], "num_microbatches": 2}]


@pytest.fixture(scope="module", params=WAYS, ids=["one mesh", "stages"])
def parallel(request):
    """A step that has not been planned; the tests of this module use it in their order."""
    return autopar.parallelize(train_step, plan_cache=False, **request.param)


@pytest.fixture(scope="module")
def expected():
    return float(jax.jit(train_step)(start(), BATCH)[1])


@pytest.mark.fault(5, 6)
@pytest.mark.parametrize("phase", ["tracing", "planning", "compiling"])
def test_a_fault_of_a_phase_is_raised_as_it_is_and_the_next_call_goes_on(phase, parallel):
    state = start()
    with inject(f"raise@phase:{phase}"), pytest.raises(InjectedFaultError, match=phase):
        parallel(state, BATCH)
    assert not any(x.is_deleted() for x in state.values())


def test_after_faults_of_all_phases_the_step_is_right(parallel, expected):
    _, loss = parallel(start(), BATCH)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.fault(7)
def test_a_fault_of_a_gather_leaves_what_was_to_be_gathered(parallel, expected):
    state, _ = parallel(start(), BATCH)
    with inject("raise@gather"), pytest.raises(InjectedFaultError, match="fault on purpose at gather 2 arrays"):
        parallel.gather(state)
    whole = parallel.gather(state)
    reference, _ = jax.jit(train_step)(start(), BATCH)
    for name in reference:
        np.testing.assert_allclose(whole[name], reference[name], rtol=1e-5, atol=1e-6)


@pytest.mark.fault(9)
def test_a_nan_in_the_batch_is_found_where_it_is_looked_for_and_otherwise_in_the_loss(parallel):
    with inject("corrupt@step"):
        assert np.isnan(parallel(start(), BATCH)[1])
    raised = pytest.raises((FloatingPointError, autopar.PipelineError), match=r"invalid value \(nan\)")
    with inject("corrupt@step"), jax.debug_nans(True), raised:
        parallel(start(), BATCH)


@pytest.mark.fault(8)
def test_a_fault_at_the_beginning_of_a_step_consumes_nothing(parallel, expected):
    state = start()
    with inject("raise@step"), pytest.raises(InjectedFaultError, match="fault on purpose at step train_step"):
        parallel(state, BATCH)
    np.testing.assert_allclose(parallel(state, BATCH)[1], expected, rtol=1e-5)


def test_calls_of_pipelines_are_measured_task_by_task_if_asked_for(parallel):
    found = []
    with Monitor(on_step=found.append, timeline_every=2):
        for _ in range(2):
            parallel(start(), BATCH)
    first, second = (one.exposed_comm_s for one in found)
    if isinstance(parallel.last_plan(), autopar.PipelinePlan):
        assert first is None
        assert 0 <= second <= found[1].call_s
    else:
        assert first == second


@pytest.mark.fault(24)
def test_a_clock_that_jumps_is_no_stall_and_no_step_of_a_day(monkeypatch):
    day, real, found, said = 86_400.0, time.time, [], []
    with Monitor(stall_s=5, on_step=found.append, on_stall=said.append):
        run = StepRun(name="train", plan=None, standing=list)
        with running(run, []):
            monkeypatch.setattr(time, "time", lambda: real() + day)
            time.sleep(0.05)
        reach("launched", run, [])
    assert not said
    assert found[0].step_s < 60


@pytest.mark.fault(23)
def test_a_plan_of_another_step_is_refused_with_what_differs(parallel):
    def other(state, batch):
        return {"a": state["a"] * 2, "b": state["b"]}, batch.sum()

    with pytest.raises(autopar.PlanError, match="plan"):
        autopar.parallelize(other, plan=parallel.last_plan())(start(), BATCH)
