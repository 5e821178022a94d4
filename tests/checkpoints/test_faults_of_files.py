"""What goes wrong around the files of a run ends in our words and costs no checkpoint, or the run goes on."""

import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

import autopar
from autopar.checkpoints import Checkpoints
from autopar.errors import CheckpointError
from autopar.testing.faults import inject, no_room
from tests.checkpoints.steps import bits, laid_out, make_batch, make_state, planned, scanned_step
from tests.unwritable import unwritable

ROOT = Path(__file__).resolve().parents[2]
step_of = functools.cache(planned)


def save(path, number=0):
    return autopar.save(path, laid_out(step_of("zero3"), make_state(number)), step_of("zero3"))


def run(folder, step, **options):
    batches = [make_batch(number) for number in range(9)]
    more = {"every": 2, "console": Console(file=io.StringIO()), **options}
    return autopar.Run(step, batches, folder, create_state=make_state, **more)


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("full", "words"),
    [(lambda: no_room(2000), "File too large"), (lambda: inject("full@write:*"), "No space left on device")],
    ids=["in the library", "before it"],
)
def test_a_disk_that_is_full_is_told_and_what_was_there_stays(full, words, tmp_path):
    save(tmp_path / "1", 1).wait()
    with full(), pytest.raises(CheckpointError, match=rf"2 cannot be written.*{words}"):
        save(tmp_path / "2").wait()
    assert Checkpoints(tmp_path, step_of("zero3")).numbers() == [1]
    assert bits(autopar.restore(tmp_path, step_of("zero3"))) == bits(make_state(1))
    Checkpoints(tmp_path, step_of("zero3")).clear_unfinished()
    assert os.listdir(tmp_path) == ["1"]
    assert save(tmp_path / "2", 2).wait() == tmp_path / "2"


@pytest.mark.fault(30)
def test_a_run_whose_disk_is_full_ends_with_the_reason_and_goes_on_once_there_is_room(tmp_path):
    step = step_of("zero3")
    with inject("full@write,count=2,times=99"), pytest.raises(CheckpointError, match="No space left on device"):
        run(tmp_path, step).train(9)
    assert Checkpoints(tmp_path, step).numbers() == [2]
    assert bits(run(tmp_path, step).train(9).state) == bits(run(None, step).train(9).state)


KILLED = """
import sys
from pathlib import Path
from autopar.testing.faults import inject
from tests.checkpoints.test_faults_of_files import run, step_of
with inject("kill@write,count=2"):
    run(Path(sys.argv[1]), step_of("zero3")).train(9)
"""


@pytest.mark.sweep
@pytest.mark.fault(26)
def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path):
    folder, step = tmp_path / "run", step_of("zero3")
    killed = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Checkpoints(folder, step).numbers() == [2]
    assert [path.name.partition(".")[0] for path in folder.glob("*.orbax-checkpoint-tmp*")] == ["4"]
    assert bits(autopar.restore(folder, step)) == bits(run(None, step).train(2).state)
    assert bits(run(folder, step).train(9).state) == bits(run(None, step).train(9).state)
    assert sorted(os.listdir(folder)) == ["6", "8", "9"]


@pytest.mark.fault(31)
def test_a_folder_that_is_read_only_is_restored_from_and_not_written_to():
    step = step_of("zero3")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "1", 1).wait()
        with unwritable(folder):
            assert bits(autopar.restore(folder, step)) == bits(make_state(1))
            with pytest.raises(CheckpointError, match=r"2 cannot be written.*Permission denied"):
                save(folder / "2").wait()
            with pytest.raises(CheckpointError, match="cannot be written to: Permission denied"):
                run(folder, step).train(9)
        assert os.listdir(folder) == ["1"]


@pytest.mark.fault(32)
def test_a_save_and_a_restore_that_fail_leave_everything_as_it_was(tmp_path):
    save(tmp_path / "1", 1).wait()
    with inject("raise@write"), pytest.raises(CheckpointError, match="2 cannot be written: fault on purpose at write"):
        save(tmp_path / "2").wait()
    with inject("raise@read"), pytest.raises(CheckpointError, match="1 cannot be restored: fault on purpose at read"):
        autopar.restore(tmp_path, step_of("zero3"))
    assert bits(autopar.restore(tmp_path, step_of("zero3"))) == bits(make_state(1))


@pytest.mark.fault(29)
def test_the_plan_of_a_step_that_has_changed_is_searched_anew(tmp_path, caplog):
    def with_loss_doubled(state, batch):
        new, loss = scanned_step(state, batch)
        return new, 2 * loss

    options = {"mesh_shape": (2,), "constraints": autopar.zero3()}
    run(tmp_path, autopar.parallelize(scanned_step, **options)).train(2)
    caplog.set_level("INFO")
    trained = run(tmp_path, autopar.parallelize(with_loss_doubled, **options)).train(4)
    assert trained.number == 4
    assert (
        f"the plan of the checkpoint {tmp_path / '2'} cannot be restored: the plan was made for another step"
        in caplog.text
    )


@pytest.mark.fault(34)
def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_goes_on(tmp_path):
    step, refused = step_of("zero3"), []

    def start_another(made):
        if made.number == 3:
            with pytest.raises(
                CheckpointError, match=rf"another run writes its checkpoints to .* \(process {os.getpid()} on "
            ):
                run(tmp_path, step).train(9)
            refused.append(made.number)

    first = run(tmp_path, step, on_step=start_another).train(9)
    assert refused == [3]
    assert bits(first.state) == bits(run(None, step).train(9).state)
    assert sorted(os.listdir(tmp_path)) == ["6", "8", "9"]


@pytest.mark.fault(35)
@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_a_clock_that_jumps_changes_neither_order_nor_times(tmp_path, jump_s, monkeypatch):
    step, real, made = step_of("zero3"), time.time, []
    run(tmp_path, step, on_step=made.append).train(5)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + jump_s)
        trained = run(tmp_path, step, on_step=made.append).train(9)
    assert [one.number for one in made] == [*range(1, 10)]
    assert all(0 < one.seconds < 3600 for one in made)
    assert Checkpoints(tmp_path, step).numbers() == [6, 8, 9]
    assert bits(trained.state) == bits(run(None, step).train(9).state)
    assert jax.tree.structure(autopar.restore(tmp_path, step)) == jax.tree.structure(trained.state)
