"""A report says that its machine was assumed, where nobody named one and there was none to look at."""

import copy

import jax
import pytest

import autopar
from tests.commands.command_line import run
from tests.perceptron_step import make_batch, make_state, train_step

SAID = "- planned for the preset cpu, which was assumed: cluster= names the machine\n"


def planned(**options):
    return autopar.parallelize(train_step, **options).plan(make_state(), make_batch())


@pytest.mark.parametrize("options", [{}, {"num_stages": 2}], ids=["one mesh", "stages"])
def test_a_number_of_devices_alone_is_planned_for_a_preset_and_said_so(options, capsys, tmp_path):
    plan = planned(devices=2, **options)
    plan.show()
    assert capsys.readouterr().out.count(SAID) == str(plan).count(SAID) == 1
    pytest.importorskip("matplotlib")
    assert "planned for the preset cpu, which was assumed" in plan.html(tmp_path / "page.html")


@pytest.mark.parametrize("options", [{"devices": 2, "cluster": "cpu"}, {"devices": jax.devices()[:2]}, {}], ids=str)
def test_a_machine_that_is_named_or_at_hand_is_not_assumed(options):
    assert "preset" not in str(planned(**options))


def test_what_was_assumed_is_no_part_of_a_plan():
    plan = planned(devices=2)
    assert copy.copy(plan) == plan == planned(devices=2, cluster="cpu", plan=plan)
    assert not copy.copy(plan).is_cluster_assumed
    assert "preset" not in str(planned(devices=2, plan=plan))


def test_the_command_line_says_it_once_and_names_its_flag(capsys):
    assert run("plan", "mlp", "--layers", "1", "--devices", "2") == 0
    printed = capsys.readouterr().out
    assert "planned for virtual CPU devices, the preset cpu; --cluster names another machine" in printed
    assert printed.count("preset") == 1
