"""What newcomers missed on the command line is there, and what they met without a word is said."""

import dataclasses
from pathlib import Path

import pytest

from autopar.commands.machine import doctor
from autopar.commands.parser import read
from autopar.cost_model.hardware import find_preset
from autopar.schedules.schedules import NAMED_SCHEDULES, SCHEDULES
from tests.commands.command_line import SMALL, planned, run


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("plan gpt --recompute layer", "recompute", "layer"),
        ("plan gpt --collectives all-reduce,all-gather", "collectives", ("all-reduce", "all-gather")),
        ("train my.module:step", "model", "my.module:step"),
        ("rank my.module:step --clusters h200", "model", "my.module:step"),
        ("bench my.module:step", "model", "my.module:step"),
        ("run plan.json my.module:step", "model", "my.module:step"),
        ("plan gpt --json", "json", True),
        ("show plan.json --json", "json", True),
        ("explain plan.json --html page.html", "html", "page.html"),
        ("train gpt --dtype bfloat16", "sizes", {"dtype": "bfloat16"}),
        ("plan gpt --optimizer adafactor", "sizes", {"optimizer": "adafactor"}),
        ("train gpt --save-every 5 --resume", "save_every", 5),
        ("plan gpt --leaf state/params/block_0/ffn/up/kernel", "leaf", "state/params/block_0/ffn/up/kernel"),
        ("verify gpt --hlo modules.txt", "hlo", "modules.txt"),
        ("verify gpt --program program.txt", "program", "program.txt"),
        ("diff a.json b.json", "after", "b.json"),
        ("doctor", "command", "doctor"),
    ],
)
def test_a_flag_that_was_missed_is_there(command, option, value):
    found = getattr(read(command.split()), option)
    assert (found if isinstance(value, (tuple, dict, bool, int)) else str(found)) == value


def test_help_lists_every_command_that_the_front_page_left_out(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    printed = capsys.readouterr().out
    assert all(f"    {name} " in printed for name in ("demo", "run", "bench", "doctor", "rank", "diff"))


def test_the_help_names_all_schedules_that_run_several_stages_on_a_mesh(capsys):
    with pytest.raises(SystemExit):
        run("plan", "mlp", "--help")
    said = " ".join(capsys.readouterr().out.split()).rpartition("--virtual-stages N")[2].partition(";")[0]
    several = {name for name, one in NAMED_SCHEDULES.items() if one.chunks != "one"}
    assert {name for name in SCHEDULES if name in said} == several


def test_a_cluster_file_in_place_of_a_plan_is_told_as_what_it_is(capsys):
    assert run("show", Path(__file__).parents[2] / "cost_model" / "clusters" / "dgx-h100.json") == 2
    assert (
        "dgx-h100.json: this is a cluster file, which --cluster takes, not a plan; `autopar plan"
        in capsys.readouterr().err
    )


def test_a_plan_without_a_cluster_says_for_which_machine_it_is(capsys):
    words = "planned for virtual CPU devices, the preset cpu; --cluster names another machine"
    for flags, said in (((), True), (("--cluster", "dgx-h100"), False)):
        assert run("plan", "mlp", *SMALL, "--devices", "2", *flags) == 0
        assert (words in capsys.readouterr().out) == said


@pytest.fixture
def strange(monkeypatch):
    """Devices of a kind that no preset knows."""
    nearest = dataclasses.replace(find_preset("cpu", "cpu"), device_kind="NVIDIA Z9", is_known=False)
    monkeypatch.setattr("autopar.settings.find_preset", lambda platform, kind: nearest)
    monkeypatch.setattr(doctor, "find_preset", lambda platform, kind: nearest)
    return "there is no cluster preset for devices of kind 'NVIDIA Z9': they are priced as 'cpu'"


@pytest.mark.filterwarnings("default::autopar.AutoparWarning")
def test_devices_of_an_unknown_kind_are_priced_with_a_warning(strange, capsys):
    assert run("train", "mlp", *SMALL, "--mesh", "2", "--data-parallel", "--steps", "1") == 0
    assert f"autopar: warning: {strange}" in capsys.readouterr().err
    (found,) = (one for one in doctor._devices(2) if one.name == "cluster")
    assert (found.state, strange in found.text) == ("note", True)


def test_a_plan_of_a_known_machine_gives_no_warning(tmp_path, capsys):
    planned(tmp_path, "--cluster", "dgx-h100", "--devices", "2")
    assert capsys.readouterr().err == ""
