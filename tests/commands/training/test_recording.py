"""`train --timeline`: where there is none, the reason is the true one."""

import io

import pytest
from rich.console import Console

from autopar import RecordedRun
from autopar.commands.training.recording import Recorder
from autopar.measuring.recorder import OTHER_PLAN
from tests.recording.recordings import CALLS, on_one_mesh


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ((), "the run was stopped before step 2"),
        ((OTHER_PLAN,), "step 2 got a state of other types than the first one"),
    ],
)
def test_a_run_without_a_timeline_says_why(missing, words, tmp_path):
    said = io.StringIO()
    run = RecordedRun(on_one_mesh(calls=CALLS[:1], operations=(), missing=missing))
    Recorder(step=None, run=run).write(tmp_path / "run.json", Console(file=said))
    assert said.getvalue().startswith(f"no timeline: {words}")
    assert not (tmp_path / "run.json").exists()
