"""`verify`: what is compiled is held against the plan; the exit status says whether it is the same."""

import json

import pytest

from autopar.files.checked import VERIFICATION_SCHEMA, check_fields
from autopar.intra_op.lowering import per_device
from autopar.verification import Verification
from tests.commands.command_line import SMALL, STAGES, run
from tests.verify.steps import arguments, shapes, train_step

TINY = ("verify", "mlp", *SMALL)


def step_of_shapes():
    return (train_step, *shapes())


def step_of_arrays():
    return (train_step, *arguments())


def test_a_model_is_verified_and_its_programs_are_written(capsys, tmp_path):
    program, modules, page = (tmp_path / name for name in ("program.txt", "modules.txt", "plan.html"))
    assert (
        run(*TINY, "--zero", "3", "--mesh", "2", "--json", "--program", program, "--hlo", modules, "--html", page) == 0
    )
    printed = capsys.readouterr().out
    check_fields(json.loads(printed), VERIFICATION_SCHEMA, "a verification")
    found = Verification.from_json(printed)
    assert found.ok
    assert (found.num_devices, found.step) == (2, "train_step")
    assert ">> v1: float32[" in program.read_text()
    assert "<h2>Verified</h2>" in page.read_text()
    assert modules.read_text().startswith("// train_step\nHloModule")


def test_stages_are_verified_with_values(capsys):
    assert run(*TINY, *STAGES, "--values") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Verified: train_step as compiled for 2 cpu devices")
    assert "stage 0 to stage 1, all microbatches" in printed
    assert "results of float32" in printed


def test_the_status_is_1_where_something_differs(capsys, monkeypatch):
    perform_move = per_device.perform_move

    def twice(move, array, mesh):
        return perform_move(move, perform_move(move, array, mesh) if move.kind == "all-reduce" else array, mesh)

    monkeypatch.setattr(per_device, "perform_move", twice)
    assert run(*TINY, "--data-parallel", "--mesh", "2") == 1
    assert capsys.readouterr().out.startswith("NOT AS PLANNED: train_step")


def test_a_users_step_is_verified_and_values_need_arrays(capsys):
    name = "tests.commands.plans.test_verify:step_of"
    assert run("verify", f"{name}_shapes", "--mesh", "2", "--zero", "3") == 0
    assert run("verify", f"{name}_arrays", "--mesh", "2", "--zero", "3", "--values") == 0
    assert "results of float32" in capsys.readouterr().out
    assert run("verify", f"{name}_shapes", "--values") == 2
    assert "--values runs the step, and" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--program", "--hlo"])
def test_a_folder_that_is_not_there_is_refused_before_planning(flag, capsys, tmp_path):
    assert run(*TINY, flag, tmp_path / "nowhere" / "file") == 2
    assert "nowhere" in capsys.readouterr().err
