"""`diff`: equal plans decide the same, and what differs is what the plans say."""

import pytest

from tests.commands.command_line import SMALL, planned, run
from tests.commands.documents import document

MAY_BE_ONE_STEP = "The plans are for different programs, or for one step that is cut differently: "


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Plans of one mesh, of the same with ZeRO 3, of stages, and of another program."""
    folder = tmp_path_factory.mktemp("plans")
    ways = {
        "whole": ("--data-parallel",),
        "zero": ("--zero", "3"),
        "stages": ("--stages", "2", "--mesh", "2", "--microbatches", "4"),
        "other": ("--outputs", "12"),
    }
    for name, flags in ways.items():
        assert run("plan", "mlp", *SMALL, "--cluster", "dgx-h100", *flags, "-o", folder / f"{name}.json") == 0
    return folder


def differences(capsys, before, after):
    return document(capsys, "diff", before, after)


@pytest.mark.sweep
def test_a_plan_decides_the_same_as_itself(files, capsys):
    found = differences(capsys, files / "zero.json", files / "zero.json")
    assert found["same_program"]
    assert not found["decisions"] + found["leaves"] + found["collectives"]
    assert all(change["before"] == change["after"] for change in found["predictions"])
    assert run("diff", files / "stages.json", files / "stages.json") == 0
    assert "The plans decide the same." in capsys.readouterr().out


@pytest.mark.sweep
def test_leaves_differ_where_their_layouts_do(files, capsys, tmp_path):
    found = differences(capsys, files / "whole.json", files / "zero.json")
    before = planned(tmp_path, "--cluster", "dgx-h100", "--data-parallel")
    after = planned(tmp_path, "--cluster", "dgx-h100", "--zero", "3")
    expected = {value.path for value in before.inputs if after.input(value.path).spec != value.spec}
    assert {change["name"] for change in found["leaves"]} == expected
    assert any(change["name"].startswith("state/params") for change in found["leaves"])
    assert not any(change["name"].startswith("batch") for change in found["leaves"])


def test_a_mesh_and_stages_are_compared(files, capsys):
    found = differences(capsys, files / "whole.json", files / "stages.json")
    decided = {change["name"]: (change["before"], change["after"]) for change in found["decisions"]}
    assert decided["stages"] == ("1", "2")
    assert decided["microbatches"] == ("1", "4")
    assert decided["devices"] == ("8", "4")
    assert decided["mesh"] == ("x=8", "x=2 in stages 0 to 1")
    assert run("diff", files / "whole.json", files / "stages.json") == 0
    assert "[x" in capsys.readouterr().out  # a layout, not markup of the terminal


def test_each_figure_has_its_difference_and_both_kinds_of_plans_have_the_same_figures(files, capsys, tmp_path):
    found = differences(capsys, files / "whole.json", files / "stages.json")
    known = {change["name"]: change for change in found["predictions"]}
    for name in ("step", "compute", "communication", "hidden behind compute", "peak memory per device"):
        assert known[name]["before"]
        assert known[name]["after"]
        assert known[name]["difference"].endswith((" more", " less", "the same"))
    assert "(" in known["step"]["difference"]
    assert found["costs"].startswith(f"The second plan's step takes {known['step']['difference']}")
    assert run("diff", files / "whole.json", files / "stages.json") == 0
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert known["step"]["difference"] in printed


def test_what_a_change_costs_is_said_of_two_plans_of_one_mesh(files, capsys):
    found = differences(capsys, files / "whole.json", files / "zero.json")
    assert " more: it adds " in found["costs"]
    assert "all-gather over x" in found["costs"]
    same = differences(capsys, files / "zero.json", files / "zero.json")
    assert same["costs"] == "The second plan's step takes as long."


def test_plans_for_different_programs_are_said_to_be_so(files, capsys):
    assert not differences(capsys, files / "whole.json", files / "other.json")["same_program"]
    assert run("diff", files / "whole.json", files / "other.json") == 0
    assert capsys.readouterr().out.startswith("The plans are for different programs.")


def test_plans_that_may_be_of_one_step_cut_differently_are_said_to_be_so(files, capsys, tmp_path):
    planned(tmp_path, "--cluster", "dgx-h100", "--devices", "4", "--data-parallel", "--microbatches", "4")
    cut = "1 microbatch in the first plan, 4 microbatches in the second."
    for before, starts in (("whole", f"{MAY_BE_ONE_STEP}{cut}"), ("other", "The plans are for different programs.\n")):
        capsys.readouterr()
        assert run("diff", files / f"{before}.json", tmp_path / "plan.json") == 0
        assert capsys.readouterr().out.startswith(starts)
    assert run("diff", files / "stages.json", files / "whole.json") == 0
    assert "different programs" not in capsys.readouterr().out


def test_a_file_that_is_no_plan_is_named(files, capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert run("diff", files / "whole.json", bad) == 2
    assert str(bad) in capsys.readouterr().err
    assert run("diff", files / "whole.json", tmp_path / "none.json") == 2
    assert "No such file" in capsys.readouterr().err
