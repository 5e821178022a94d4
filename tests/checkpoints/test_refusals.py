"""What is no whole checkpoint of this state is refused, in words that name the folder and the leaf; nothing wrong is restored."""

import functools
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.checkpoints import Checkpoints
from autopar.errors import ArgumentError, CheckpointError
from tests.checkpoints.steps import bits, laid_out, make_batch, make_state, planned, scanned_step

step_of = functools.cache(planned)
LEAVES = "params|momentum|key|count|mask"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a state, and the state."""
    folder, state = tmp_path_factory.mktemp("saved") / "one", make_state(5)
    autopar.save(folder, laid_out(step_of("2_stages"), state), step_of("2_stages")).wait()
    return folder, state


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(saved[0], tmp_path / "one")
    return tmp_path / "one"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.sweep
@pytest.mark.fault(27)
def test_a_byte_that_changes_anywhere_is_noticed_or_does_not_matter(copied, saved):
    draw, noticed = np.random.default_rng(0), 0
    for path in files_of(copied):
        whole = path.read_bytes()
        for place in draw.integers(len(whole), size=6):
            damaged = bytearray(whole)
            damaged[place] ^= 0x41
            path.write_bytes(damaged)
            noticed += str(copied) in refusal(copied, saved[1])
        path.write_bytes(whole)
    assert noticed > 20


@pytest.mark.fault(27)
@pytest.mark.parametrize("harm", ["missing", "empty", "half"])
def test_a_file_that_is_not_whole_is_noticed_or_does_not_matter(copied, saved, harm):
    noticed = 0
    for path in files_of(copied):
        whole = path.read_bytes()
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(b"" if harm == "empty" else whole[: len(whole) // 2])
        said = refusal(copied, saved[1])
        path.write_bytes(whole)
        has_shards = path.parent.name == "d"
        assert re.match(rf"({LEAVES})\S* cannot be read from .*damaged", said) or not has_shards, (path, said)
        assert not said or str(copied) in said
        noticed += bool(said)
    assert noticed >= 3


def refusal(copied, state):
    """What is said of a damaged checkpoint; nothing if its state is restored, bit for bit."""
    try:
        assert bits(autopar.restore(copied, step_of("zero3"))) == bits(state)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.fault(27)
def test_damage_to_an_array_is_told_by_its_path(copied):
    largest = max(files_of(copied / "state" / "ocdbt.process_0"), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    with pytest.raises(CheckpointError, match=rf"({LEAVES})\S* cannot be read from .*damaged"):
        autopar.restore(copied, step_of("zero3"))


@pytest.mark.parametrize("field", ["number", "position", "plan", "wishes"])
def test_a_description_that_was_changed_is_noticed(copied, field):
    path = copied / "about" / "metadata"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "content": {**whole["content"], field: "another"}}))
    with pytest.raises(CheckpointError, match="its description does not have the digest that it says"):
        autopar.restore(copied, step_of("zero3"))


@pytest.mark.fault(26)
def test_a_folder_that_was_not_finished_is_no_checkpoint(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "10.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint at .*; 1 that were not finished"):
        autopar.restore(tmp_path, step_of("zero3"))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        autopar.restore(tmp_path / "nowhere", step_of("zero3"))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        autopar.restore(tmp_path / "10.orbax-checkpoint-tmp", step_of("zero3"))


@pytest.mark.fault(28)
def test_another_model_is_told_by_the_paths_of_its_leaves(saved):
    def other(state):
        params = {**state["params"], "head": jnp.ones((16, 4)), "bias": jnp.ones(4)}
        return {"params": params, "count": state["count"]}

    state = other(make_state())
    step = autopar.parallelize(lambda state, x: (state, x.sum()), devices=jax.devices()[:2])
    step.plan(state, jnp.ones(8))
    with pytest.raises(CheckpointError, match="params/bias is missing") as refused:
        autopar.restore(saved[0], step)
    assert "key is not in the step's state" in str(refused.value)
    with pytest.raises(ArgumentError, match=r"params/head is float32\[16, 16\], the step's is float32\[16, 4\]"):
        autopar.save(
            saved[0].parent / "other", {**state, "params": {**state["params"], "head": jnp.ones((16, 16))}}, step
        )


def test_a_state_that_was_consumed_and_a_step_without_plan_are_refused(tmp_path):
    step = step_of("zero3")
    state = laid_out(step, make_state())
    step(state, make_batch())
    with pytest.raises(ArgumentError, match="arrays given to scanned_step no longer exist"):
        autopar.save(tmp_path / "one", state, step)
    with pytest.raises(ArgumentError, match="planned"):
        autopar.save(tmp_path / "one", state, autopar.parallelize(scanned_step))


@pytest.mark.fault(33)
def test_a_checkpoint_never_takes_the_place_of_another(saved):
    step = step_of("2_stages")
    with pytest.raises(CheckpointError, match="is there already"):
        autopar.save(saved[0], laid_out(step, make_state()), step)


@pytest.mark.fault(32)
def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path):
    step, blocked = step_of("zero3"), tmp_path / "file"
    blocked.write_text("a file, where a folder would have to be")
    with pytest.raises(CheckpointError, match="cannot be written"):
        autopar.save(blocked / "one", laid_out(step, make_state()), step).wait()
    assert autopar.save(tmp_path / "one", laid_out(step, make_state()), step).wait().is_dir()


@pytest.mark.fault(28)
@pytest.mark.parametrize("version", [0, 99])
def test_a_checkpoint_of_another_version_is_told_as_such(copied, version):
    path = copied / "about" / "metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(
        CheckpointError, match=f"version {version} of autopar's checkpoints, this is autopar with version 1"
    ):
        autopar.restore(copied, step_of("zero3"))


def test_the_last_few_are_kept_and_the_newest_is_restored(tmp_path):
    step = step_of("zero3")
    checkpoints = Checkpoints(tmp_path / "run", step, keep=2)
    for number in (1, 5, 20, 100):
        checkpoints.save(number, laid_out(step, make_state(number)), notes={"at": number})
    checkpoints.wait()
    assert checkpoints.numbers() == [20, 100]
    assert sorted(os.listdir(tmp_path / "run")) == ["100", "20"]
    restored = Checkpoints(tmp_path / "run", step).restore()
    assert (restored.about.number, restored.about.notes) == (100, {"at": 100})
    assert bits(restored.state) == bits(make_state(100))
    assert bits(checkpoints.restore(20).state) == bits(make_state(20))
    with pytest.raises(ArgumentError, match="keep=0"):
        Checkpoints(tmp_path, step, keep=0)
