"""Threads that share a step, and steps that call themselves: every call ends, with its result or with a clear error."""

import collections
import gc
import os
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import ArgumentError
from autopar.execution.recent import Recent
from autopar.execution.turns import Turn

STAGES = {"num_stages": 2, "mesh_shape": (1,), "num_microbatches": 2}
WAYS = pytest.mark.parametrize("options", [{"mesh_shape": (4,)}, STAGES], ids=["one mesh", "stages"])
ROUNDS = 20


def new_state():
    return {"a": jnp.eye(8), "b": jnp.eye(8)}


def train_step(state, batch):
    def loss_of(state):
        return jnp.mean(jnp.tanh(jnp.tanh(batch @ state["a"]) @ state["b"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def together(*calls):
    """What calls return or raise that threads begin at the same time."""
    begin = threading.Barrier(len(calls))

    def outcome(call):
        begin.wait()
        try:
            return call()
        except (ArgumentError, KeyError) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


@pytest.mark.sampled(4)
@WAYS
def test_of_two_threads_with_one_state_one_consumes_it_and_the_other_is_told(options):
    step, batch = autopar.parallelize(train_step, **options), jnp.ones((8, 8))
    laid_out, _ = step(new_state(), batch)
    for _ in range(ROUNDS):
        state = jax.tree.map(jnp.copy, laid_out)
        outcomes = together(*[lambda state=state: step(state, batch)] * 2)
        assert collections.Counter(map(type, outcomes)) == {tuple: 1, ArgumentError: 1}
        (refused,) = (outcome for outcome in outcomes if isinstance(outcome, ArgumentError))
        assert "2 of the 3 arrays given to train_step no longer exist" in str(refused)


def test_state_that_a_step_has_consumed_is_neither_gathered_nor_laid_out():
    step, state, batch = autopar.parallelize(train_step, mesh_shape=(2,)), new_state(), jnp.ones((8, 8))
    state, _ = step(state, batch)
    kept = step.gather(state)
    step(state, batch)
    for call in (lambda: step.gather({"state": state, "kept": kept}), lambda: step.init_state(lambda s: s, state)):
        with pytest.raises(
            ArgumentError, match=r"2 of the \d arrays given to train_step no longer exist: given/.*/a, given/"
        ):
            call()
    assert step.gather(kept)["a"].shape == (8, 8)


def test_threads_whose_first_call_is_the_same_plan_once_and_each_has_its_own_result():
    traces = []

    def counted(state, batch):
        traces.append(threading.get_ident())
        return train_step(state, batch)

    step, batches = autopar.parallelize(counted, mesh_shape=(2,)), [jnp.full((8, 8), n) for n in range(3)]
    outcomes = together(*[lambda batch=batch: step(new_state(), batch)[1] for batch in batches])
    assert len(set(traces)) == 1
    assert len(step._memory.programs) == 1
    for batch, loss in zip(batches, outcomes, strict=True):
        np.testing.assert_allclose(loss, train_step(new_state(), batch)[1], rtol=1e-5)


def by_pure_callback(function, batch):
    return jax.pure_callback(function, batch, batch)


def by_debug_callback(function, batch):
    jax.debug.callback(function, batch)
    return batch


@pytest.mark.sampled(4)
@WAYS
@pytest.mark.parametrize("ask", [by_pure_callback, by_debug_callback])
@pytest.mark.filterwarnings("ignore:the step calls Python")
def test_a_callback_of_a_step_cannot_call_a_step(ask, options):
    told, other = [], autopar.parallelize(train_step, mesh_shape=(1,))

    def call_again(batch):
        for call in (lambda: step(new_state(), batch), lambda: other(new_state(), batch), lambda: step.gather(batch)):
            with pytest.raises(ArgumentError) as caught:
                call()
            told.append(str(caught.value))
        return np.asarray(batch)

    def calls_itself(state, batch):
        return train_step(state, ask(call_again, batch))

    step = autopar.parallelize(calls_itself, **options)
    _, loss = step(new_state(), jnp.ones((8, 8)))
    np.testing.assert_allclose(loss, train_step(new_state(), jnp.ones((8, 8)))[1], rtol=1e-5)
    jax.effects_barrier()
    assert {words.partition(":")[0] for words in told} == {
        f"{name} is called from a Python callback of a step that is running" for name in ("calls_itself", "train_step")
    }


def test_a_step_cannot_plan_itself_while_it_is_traced_but_afterwards():
    recursion = iter([True, False])

    def plans_itself(state, batch):
        if next(recursion):
            step.plan(new_state(), np.ones((8, 8), np.float32))
        return train_step(state, batch)

    step = autopar.parallelize(plans_itself, mesh_shape=(2,))
    with pytest.raises(ArgumentError, match="a step cannot contain itself"):
        step.plan(new_state(), jnp.ones((8, 8)))
    assert step.plan(new_state(), jnp.ones((8, 8))).mesh_shape == (2,)


def test_a_turn_is_given_back_after_an_error_and_never_shared():
    turn, inside = Turn(), []

    def enter(is_bad):
        with turn.take("step"):
            inside.append(1)
            assert len(inside) == 1
            inside.pop()
            if is_bad:
                raise KeyError

    outcomes = together(*[lambda n=n: [enter(False) for _ in range(50)] and enter(n % 2) for n in range(4)])
    assert [type(outcome) for outcome in outcomes] == [type(None), KeyError] * 2


def test_what_was_not_used_for_longest_goes_first():
    kept = Recent(2)
    for key in "ab":
        kept.keep(key, key.upper())
    assert kept.find("a") == "A"
    assert kept.find("b", is_use=False) == "B"
    kept.keep("c", "C")
    assert (kept.values(), kept.dropped, kept.find("b")) == (("A", "C"), 1, None)
    kept.keep("c", "D")
    assert (kept.values(), kept.dropped, len(kept)) == (("A", "D"), 1, 2)


def test_of_many_shapes_a_step_keeps_the_last_and_says_so_once():
    step = autopar.parallelize(train_step, mesh_shape=(2,), max_programs=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for examples in (2, 4, 6, 8):
            compiled = step.compile(new_state(), jnp.ones((examples, 8)))
            if examples == 2:
                watched = [weakref.ref(compiled), weakref.ref(compiled.traced), weakref.ref(compiled.executable)]
            del compiled
    gc.collect()
    assert [thing() for thing in watched] == [None] * 3
    assert len(step._memory.programs) == 2
    assert len([w for w in said if "more than 2 sets of shapes" in str(w.message)]) == 1
    assert step.last_plan() is step.plan(new_state(), jnp.ones((8, 8)))
    _, loss = step(step.init_state(new_state), jnp.ones((2, 8)))
    np.testing.assert_allclose(loss, train_step(new_state(), jnp.ones((2, 8)))[1], rtol=1e-5)


def resident_mib():
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.sampled(4)
@WAYS
@pytest.mark.filterwarnings("ignore:train_step was called with more than 2 sets")
@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_loop_over_many_shapes_keeps_the_executables_of_a_few(options, count):
    """Those of the shapes that were dropped are gone at once: they do not wait for Python to collect garbage.

    Batches are made by NumPy: JAX keeps an executable of its own for each shape that `jnp.ones` makes. It also keeps one that
    copies each leaf of the state, once the plan of a large batch wants that elsewhere. Each shape takes about a second.
    """
    step = autopar.parallelize(train_step, max_programs=2, **options)
    state, alive, resident = jax.tree.map(np.asarray, new_state()), [], []
    gc.collect()
    gc.disable()
    try:
        for number in range(1, count + 1):
            state, loss = step(state, np.ones((8 * number, 8), np.float32))
            assert np.isfinite(loss)
            if number >= 3:
                alive.append(len(jax.devices()[0].client.live_executables()))
            if number % 20 == 0:
                gc.collect()
                resident.append(resident_mib())
    finally:
        gc.enable()
    assert max(alive) - alive[0] <= (len(state) if count > 5 else 0)
    if resident:
        assert resident[-1] - resident[0] < 0.5 * count
