"""`autopar.Run` ends with the same bits however often it is interrupted, and does not go on from a bad loss."""

import functools
import io
import math
import os
import signal

import jax
import numpy as np
import pytest
from rich.console import Console

import autopar
from autopar.checkpoints import Checkpoints
from autopar.errors import ArgumentError, CheckpointError, TrainingError
from autopar.training import Guard
from autopar.training.run import usual_loss
from tests.checkpoints.steps import bits, laid_out, make_batch, make_state, planned, scanned_step

step_of = functools.cache(planned)
STEPS = 9


def forever():
    number = 0
    while True:
        yield make_batch(number)
        number += 1


def run(folder, step=None, data=forever, **options):
    options = {"every": 2, "keep": 2, "console": Console(file=io.StringIO()), **options}
    return autopar.Run(step or step_of("zero3"), data, folder, create_state=make_state, **options)


@functools.cache
def uninterrupted():
    """State and losses of a run that saves nothing."""
    seen = []
    found = run(None, on_step=lambda made: seen.append((made.number, made.loss))).train(STEPS)
    assert (found.number, found.stopped, found.loss) == (STEPS, None, seen[-1][1])
    return bits(found.state), dict(seen)


def test_a_run_makes_the_steps_of_a_loop():
    step, state, losses = step_of("zero3"), None, []
    state = step.init_state(make_state)
    for number in range(STEPS):
        state, loss = step(state, make_batch(number))
        losses.append(float(loss))
    assert uninterrupted() == (bits(state), dict(enumerate(losses, 1)))


def test_runs_one_after_the_other_end_as_one_does(tmp_path):
    for steps in (1, 4, 5, STEPS):
        found = run(tmp_path).train(steps)
        assert found.number == steps
    assert bits(found.state) == uninterrupted()[0]
    assert Checkpoints(tmp_path, step_of("zero3")).numbers() == [8, 9]
    again = run(tmp_path).train(STEPS)
    assert (again.loss, bits(again.state)) == (None, uninterrupted()[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_a_step_with_a_checkpoint(tmp_path, number):
    def interrupt(made):
        if made.number == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    found = run(tmp_path, on_step=interrupt).train(STEPS)
    assert (found.stopped, 3 <= found.number < 6) == (number.name, True)
    assert signal.getsignal(number) is before
    assert Checkpoints(tmp_path, step_of("zero3")).numbers()[-1] == found.number
    assert bits(run(tmp_path).train(STEPS).state) == uninterrupted()[0]


def test_a_run_that_ends_anywhere_without_a_word_goes_on_from_its_last_checkpoint(tmp_path):
    for last in (1, 2, 4, 5, 8):

        def end(made, last=last):
            if made.number == last:
                raise SystemExit

        with pytest.raises(SystemExit):
            run(tmp_path, on_step=end).train(STEPS)
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    assert bits(run(tmp_path).train(STEPS).state) == uninterrupted()[0]
    assert sorted(os.listdir(tmp_path)) == ["8", "9"]


def test_a_second_signal_ends_it_at_once(tmp_path):
    def interrupt(made):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_step=interrupt).train(STEPS)
    assert bits(run(tmp_path).train(STEPS).state) == uninterrupted()[0]


def poisoned(at, value=np.nan):
    """Batches of which one makes the loss bad."""

    def batches():
        for number, batch in enumerate(forever()):
            yield {**batch, "y": batch["y"] + value} if number == at else batch

    return batches


def without(*gone):
    def batches():
        for number, batch in enumerate(forever()):
            if number not in gone:
                yield batch

    return batches


@pytest.mark.fault(36)
def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(
        TrainingError,
        match=r"step 6 of scanned_step: the loss is nan\. The last good state is the checkpoint of step 4",
    ):
        run(tmp_path, data=poisoned(5)).train(STEPS)
    assert Checkpoints(tmp_path, step_of("zero3")).numbers()[-1] == 4


@pytest.mark.fault(36)
@pytest.mark.parametrize("at", [0, 5, 8])
def test_skip_is_as_if_the_batch_had_not_been_there(tmp_path, at):
    found = run(tmp_path / "a", data=poisoned(at), guard=Guard(action="skip")).train(STEPS)
    expected = run(None, data=without(at)).train(STEPS)
    assert (found.number, bits(found.state)) == (STEPS, bits(expected.state))


@pytest.mark.fault(36)
def test_back_goes_on_behind_the_batch_and_the_checkpoint_stays_before_it(tmp_path):
    found = run(tmp_path / "a", data=poisoned(5), guard=Guard(action="back")).train(STEPS)
    expected = run(None, data=without(4, 5)).train(STEPS)  # the checkpoint is that of step 4
    assert bits(found.state) == bits(expected.state)


@pytest.mark.fault(36)
def test_a_spike_is_a_bad_loss_and_three_times_is_enough(tmp_path):
    guard = Guard(action="back", spike=10, window=3)
    found = run(tmp_path / "a", data=poisoned(5, 100.0), guard=guard).train(STEPS)
    assert bits(found.state) == bits(run(None, data=without(4, 5)).train(STEPS).state)
    always = lambda: ({**batch, "y": batch["y"] * np.nan} for batch in forever())  # noqa: E731
    with pytest.raises(TrainingError, match="step 1 "):
        run(tmp_path / "b", data=always, guard=Guard(action="back")).train(STEPS)


@pytest.mark.parametrize(("usual", "fine", "bad"), [(2.0, 5.9, 6.1), (-2.0, 1.9, 2.1), (-2.0, -1.0, math.inf)])
def test_a_spike_lies_above_the_usual_losses_also_below_zero(usual, fine, bad):
    guard = Guard(spike=3, window=3)
    assert guard.judge([usual] * 3, usual) is None
    assert guard.judge([usual] * 3, fine) is None
    assert guard.judge([usual] * 3, bad) is not None
    assert guard.judge([usual] * 2, fine) is None


def test_a_run_goes_on_from_what_a_loop_has_saved_under_the_number_of_its_folder(tmp_path):
    step, state = step_of("zero3"), laid_out(step_of("zero3"), make_state())
    for number in range(4):
        state, _ = step(state, make_batch(number))
    autopar.save(tmp_path / "4", state, step).wait()
    found = run(tmp_path).train(STEPS)
    assert (found.number, bits(found.state)) == (STEPS, uninterrupted()[0])


@pytest.mark.parametrize(("folder", "number"), [("4", None), ("last", 4), ("last", None)])
def test_data_of_a_restored_state_goes_on_behind_the_steps_that_were_made(tmp_path, folder, number):
    step, state = step_of("zero3"), make_state()
    autopar.save(tmp_path / folder, laid_out(step, state), step, number=number).wait()
    data = autopar.data.sharded(forever, step)
    if (folder, number) == ("last", None):
        words = r"last has no position of the batches and no number of steps.*save with data= or number=.*data\.seek"
        with pytest.raises(CheckpointError, match=words):
            autopar.restore(tmp_path / folder, step, data=data)
        return
    autopar.restore(tmp_path / folder, step, data=data)
    np.testing.assert_array_equal(np.asarray(next(data)["x"]), make_batch(4)["x"])
    data.seek({"batches": 0, "state": None})
    if folder == "4":
        Checkpoints(tmp_path, step).restore(data=data)
        np.testing.assert_array_equal(np.asarray(next(data)["x"]), make_batch(4)["x"])


def test_the_loss_is_what_a_step_returns_or_its_entry_of_that_name():
    loss = jax.numpy.float32(2.0)
    assert usual_loss(loss) is usual_loss({"accuracy": jax.numpy.float32(0.5), "loss": loss}) is loss
    for other in ({"accuracy": loss}, [loss, loss], jax.numpy.ones(3)):
        with pytest.raises(ArgumentError, match="find_loss=lambda rest"):
            usual_loss(other)


def test_what_a_run_tells(tmp_path):
    console = Console(file=io.StringIO(), width=150)
    run(tmp_path, console=console, tokens_per_batch=128).train(2)
    run(tmp_path, console=console, tokens_per_batch=128).train(3)
    said = console.file.getvalue()
    assert "scanned_step  step 1/2  loss " in said
    assert "tokens/s" in said
    assert "MFU" in said
    assert " left" in said
    assert "goes on from the checkpoint of step 2" in said


def unplanned(**options):
    return autopar.parallelize(scanned_step, **{"mesh_shape": (2,), "constraints": autopar.zero3(), **options})


def generated():
    yield from forever()


@pytest.mark.parametrize(
    "data", [forever, [make_batch(n) for n in range(STEPS)], generated()], ids=["function", "list", "generator"]
)
def test_a_step_that_has_not_been_planned_is_planned_for_the_first_batch(data, tmp_path):
    assert run(None, unplanned(), data).train(2).loss == run(None, two_devices()).train(2).loss


@functools.cache
def two_devices():
    step = unplanned()
    step.plan(make_state(), make_batch())
    return step


def test_a_run_that_goes_on_takes_the_plan_of_its_checkpoint_without_a_search(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    run(tmp_path, two_devices()).train(4)
    with monkeypatch.context() as patch:
        patch.setattr("autopar.decide._search", lambda settings, traced: pytest.fail("it searches"))
        again = run(tmp_path, step := unplanned()).train(6)
    assert step.last_plan() == two_devices().last_plan()
    assert f"the plan is that of the checkpoint {tmp_path / '4'}" in caplog.text
    assert bits(again.state) == bits(run(None, two_devices()).train(6).state)


@pytest.mark.fault(25, 29)
@pytest.mark.parametrize(
    "other", [{"mesh_shape": (4,)}, {"constraints": autopar.data_parallel()}, {"memory_limit_bytes": 2**30}]
)
def test_where_another_plan_is_asked_for_it_is_searched(other, tmp_path, caplog):
    caplog.set_level("INFO")
    run(tmp_path, two_devices(), every=None).train(1)
    assert run(tmp_path, unplanned(**other)).train(2).number == 2
    assert "the plan is that of the checkpoint" not in caplog.text


def test_no_step_begins_before_a_checkpoint_is_complete_if_that_is_asked_for(tmp_path):
    known, kept = Checkpoints(tmp_path, step_of("zero3")), {}
    found = run(
        tmp_path, keep=None, wait_for_saves=True, on_step=lambda made: kept.update({made.number: known.numbers()})
    )
    assert bits(found.train(STEPS).state) == uninterrupted()[0]
    assert kept == {number: list(range(2, number, 2)) for number in range(1, STEPS + 1)}


def test_arguments_that_cannot_be_used(tmp_path):
    run(tmp_path).train(1)
    with pytest.raises(ArgumentError, match="has checkpoints, of step 1 the last"):
        run(tmp_path, resume=False).train(2)
    with pytest.raises(ArgumentError, match="the data ended after 1 batches, and 3 steps"):
        run(tmp_path / "a", data=[make_batch(0)]).train(3)
    with pytest.raises(ArgumentError, match="the data has no batch to plan the step for"):
        run(None, unplanned(), data=[])
    with pytest.raises(ArgumentError, match="every=0"):
        run(tmp_path, every=0)
    with pytest.raises(ArgumentError, match="'later'"):
        Guard(action="later")
    with pytest.raises(ArgumentError, match="spike"):
        Guard(spike=0.5)
