"""`rank`: its rows are what `plan` finds for each cluster and number of devices, in order, with their prices."""

import json
import signal

import pytest

from autopar.commands.plans import rank
from autopar.cost_model.cluster_files import cluster_to_json
from autopar.cost_model.hardware import find_cluster
from autopar.explain.units import seconds_text
from tests.commands.command_line import SMALL, planned, run
from tests.commands.documents import document

CLUSTERS, DEVICES = ("p3.16xlarge", "dgx-h100"), (2, 4)


def ranked(capsys, *argv, status=0):
    return document(capsys, "rank", "mlp", *SMALL, *argv, status=status)["rows"]


def test_rows_are_the_plans_of_each_pair_fastest_first(capsys, tmp_path):
    rows = ranked(capsys, "--clusters", ",".join(CLUSTERS), "--devices", "2,4,2")
    assert sorted((row["cluster"], row["devices"]) for row in rows) == sorted((c, d) for c in CLUSTERS for d in DEVICES)
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    for row in rows:
        plan = planned(tmp_path, "--cluster", row["cluster"], "--devices", str(row["devices"]))
        assert (row["step_s"], row["peak_bytes"]) == (plan.step_s, plan.peak_bytes)
        assert row["device_s"] == plan.step_s * row["devices"]
        assert row["usd_per_1000_steps"] is None


def with_price(tmp_path, name, usd):
    """A cluster file of a preset that states a price."""
    preset = find_cluster(name)
    file = tmp_path / f"{name}-{usd}.json"
    fields = cluster_to_json(preset, about="a preset with a price", sources={})
    file.write_text(json.dumps({**fields, "usd_per_device_hour": usd}))
    assert find_cluster(str(file)).usd_per_device_hour == usd
    assert find_cluster(str(file)).fingerprint() == preset.fingerprint()
    return str(file)


def test_the_cheapest_is_that_of_the_prices_in_the_files(capsys, tmp_path):
    dear, cheap = with_price(tmp_path, "dgx-h100", 36.0), with_price(tmp_path, "dgx-h100", 3.6)
    rows = ranked(capsys, "--clusters", f"{dear},{cheap}", "--devices", "2")
    prices = {row["cluster"]: row["usd_per_1000_steps"] for row in rows}
    assert prices[cheap] == pytest.approx(1000 * rows[0]["device_s"] * 3.6 / 3600)
    assert prices[dear] == pytest.approx(10 * prices[cheap])
    assert run("rank", "mlp", *SMALL, "--clusters", f"{dear},{cheap}", "--devices", "2") == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert "USD / 1,000 steps" in printed
    assert f"cheapest: 2 devices of {cheap}" in printed


def test_where_nothing_fits_the_row_says_why_and_the_status_that_none_does(capsys):
    rows = ranked(capsys, "--clusters", "dgx-h100", "--devices", "2", "--memory-limit", "1KiB", status=1)
    assert rows[0]["step_s"] is None
    assert "memory" in rows[0]["reason"]
    assert run("rank", "mlp", *SMALL, "--clusters", "dgx-h100", "--devices", "2", "--memory-limit", "1KiB") == 1
    printed = capsys.readouterr().out
    assert "fits none of them" in printed
    assert "  no plan fits 1.0 KiB per device on 2 devices: the state alone takes" in printed
    assert "no plan: no plan" not in printed
    assert "largest tensors" not in printed, "the row is a sentence; the JSON has all"
    assert "`autopar explain MODEL --cluster dgx-h100 --devices 2 --conflict`" in printed


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--clusters"),
        (("--clusters", "dgx-h99"), "nearest: dgx-h200, dgx-h100"),
        (("--clusters", "auto"), "auto is no cluster"),
        (("--clusters", "dgx-h100", "--devices", "2,none"), "'none' is not a whole number"),
        (
            ("--clusters", "dgx-h100", "--devices", "2", "--nodes", "1"),
            "--devices and --nodes say the same in two ways",
        ),
        (("--clusters", "cpu", "--nodes", "1"), "cluster cpu joins any number of devices and has no machines to count"),
        (("--clusters", "dgx-h100", "--devices", "12", "--mesh", "8"), "--mesh has 8 devices and --devices is 12"),
        (("--clusters", "dgx-h100", "--cluster", "dgx-h100"), "did you mean --clusters"),
    ],
)
def test_what_cannot_be_compared_is_refused(argv, words, capsys):
    assert run("rank", "mlp", *argv) == 2
    assert words in capsys.readouterr().err


def test_small_prices_have_digits_and_times_have_units(capsys, tmp_path):
    argv = ("--clusters", with_price(tmp_path, "dgx-h100", 3.6), "--mesh", "2")
    row = ranked(capsys, *argv)[0]
    assert row["devices"] == 2, "those of the mesh"
    assert row["usd_per_1000_steps"] < 0.005
    assert run("rank", "mlp", *SMALL, *argv) == 0
    printed = capsys.readouterr().out
    assert f" {row['usd_per_1000_steps']:.2}" in printed
    assert " 0.00 " not in printed
    assert f" {seconds_text(row['device_s'])} " in printed


@pytest.mark.sweep
def test_nodes_are_as_many_devices_as_each_cluster_has_in_one(capsys):
    rows = ranked(capsys, "--clusters", "dgx-h100,dgx2-v100-32gb", "--nodes", "1", "--data-parallel")
    assert {row["cluster"]: row["devices"] for row in rows} == {"dgx-h100": 8, "dgx2-v100-32gb": 16}


def test_without_a_price_it_says_how_to_give_one(capsys, tmp_path):
    file = with_price(tmp_path, "dgx-h100", 3.6)
    for clusters, is_known in (("dgx-h100", False), (f"dgx-h100,{file}", True)):
        assert run("rank", "mlp", *SMALL, "--clusters", clusters, "--devices", "2") == 0
        printed = capsys.readouterr().out
        assert ('no price is known: "usd_per_device_hour": 2.5 in a cluster file' in printed) != is_known


def test_the_log_counts_the_combinations(capsys):
    assert run("rank", "mlp", *SMALL, "--clusters", ",".join(CLUSTERS), "--devices", "1,2", "-v") == 0
    said = [line.partition(" INFO ")[2] for line in capsys.readouterr().err.splitlines()]
    assert "1 device of p3.16xlarge, 1 of 4" in said
    assert "2 devices of dgx-h100, 4 of 4" in said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_rows_that_were_planned(number, status, capsys, monkeypatch):
    plan_step, calls = rank.plan_step, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            signal.raise_signal(number)
        return plan_step(*args)

    monkeypatch.setattr(rank, "plan_step", interrupted)
    argv = ("rank", "mlp", *SMALL, "--clusters", "dgx-h100", "--devices", "1,2,4", "--json")
    try:
        ended = run(*argv)
    except SystemExit as ending:
        ended = ending.code
    printed = capsys.readouterr()
    assert ended == status
    assert sorted(row["devices"] for row in json.loads(printed.out)["rows"]) == [1, 2]
    assert "2 of 3 combinations were planned" in printed.err


def test_a_signal_before_a_row_leaves_nothing(capsys, monkeypatch):
    monkeypatch.setattr(rank, "make_parallel", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run("rank", "mlp", *SMALL, "--clusters", "dgx-h100", "--devices", "1,2", "--json") == 130
    assert capsys.readouterr().out == ""
