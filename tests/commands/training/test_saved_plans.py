"""`run` and `bench`: a saved plan runs what it was made for and says what it does not fit; steps are timed in turns."""

import pytest

from autopar.commands.training import bench
from tests.commands.command_line import SMALL, STAGES, planned, run
from tests.commands.documents import document


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Plans of the small mlp, on one mesh of two devices and in two stages."""
    folder = tmp_path_factory.mktemp("plans")
    assert run("plan", "mlp", *SMALL, "--mesh", "2", "-o", folder / "mesh.json") == 0
    assert run("plan", "mlp", *SMALL, "--layers", "3", *STAGES, "-o", folder / "stages.json") == 0
    return folder


@pytest.mark.sweep
def test_a_saved_plan_runs_as_jit_does(plans, capsys):
    found = document(capsys, "run", plans / "mesh.json", "mlp", *SMALL, "--steps", "3", "--compare-jit")
    assert found["largest_difference"] < 1e-5
    assert len(found["losses"]) == 3
    assert run("run", plans / "stages.json", "mlp", *SMALL, "--layers", "3", "--steps", "2") == 0
    printed = capsys.readouterr().out
    assert "2 stages" in printed
    assert "measured/predicted" in printed


def test_a_plan_for_other_sizes_or_too_many_devices_is_refused_in_words(plans, tmp_path, capsys):
    assert run("run", plans / "mesh.json", "mlp", *SMALL, "--outputs", "12") == 2
    assert f"{plans / 'mesh.json'} does not fit this step: " in capsys.readouterr().err
    planned(tmp_path, "--mesh", "512", "--batch", "512", "--data-parallel")
    capsys.readouterr()
    assert run("run", tmp_path / "plan.json", "mlp", *SMALL, "--batch", "512") == 2
    assert "512 devices are asked for, JAX has 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run nosuch.json mlp", "cannot read nosuch.json: No such file or directory"),
        ("run . mlp", "cannot read .: Is a directory"),
        ("run", "the following arguments are required: FILE, MODEL"),
        ("run plan.json gtp", "no model 'gtp'"),
        ("run plan.json mlp --layrs 3", "run mlp has no argument '--layrs'; did you mean --layers?"),
        ("bench mlp --plan nosuch.json", "cannot read nosuch.json: No such file or directory"),
        ("bench mlp --plan . --mesh 2", "cannot read .: Is a directory"),
        ("bench mlp --rounds 0", "argument --rounds: '0' is not a whole number of at least 1"),
    ],
)
def test_what_cannot_be_run_is_said(command, words, capsys):
    assert run(*command.split()) == 2
    assert words in capsys.readouterr().err


def test_a_plan_decides_what_it_has_decided(plans, capsys):
    assert run("bench", "mlp", *SMALL, "--plan", plans / "mesh.json", "--mesh", "2", "--zero", "3") == 2
    assert "--mesh, --zero would decide what the plan of --plan has decided" in capsys.readouterr().err


def test_steps_of_both_are_timed_in_turns(plans, capsys, monkeypatch):
    order = []
    make_step = bench.Contestant.make_step
    monkeypatch.setattr(
        bench.Contestant, "make_step", lambda self, batch: (order.append(self.name), make_step(self, batch))
    )
    found = document(capsys, "bench", "mlp", *SMALL, "--plan", plans / "mesh.json", "--rounds", "3")
    assert order == ["jax.jit", "autopar", "autopar", "jax.jit"] * 2 + ["jax.jit", "autopar"]
    assert (found["devices"], found["rounds"]) == (2, 3)
    for one in (found["autopar"], found["jit"]):
        assert 0 < one["lower_quartile_s"] <= one["median_step_s"] <= one["upper_quartile_s"]


def test_what_was_measured_is_printed_beside_what_was_predicted(capsys):
    assert run("bench", "mlp", *SMALL, "--mesh", "2", "--data-parallel", "--rounds", "1") == 0
    printed = capsys.readouterr().out
    assert "autopar on 2 devices: median step " in printed
    assert "jax.jit on one device: median step " in printed
    assert "times as fast; predicted " in printed
