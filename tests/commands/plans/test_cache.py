"""`autopar cache`, and the plan cache as a user of the command line meets it."""

import re

import pytest

from tests.commands.command_line import SMALL, run, start


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


def test_a_second_process_prints_the_same_plan_without_a_search(tmp_path):
    reports = []
    for _ in range(2):
        command = ("plan", "mlp", *SMALL, "--devices", "4", "-v")
        output, log = start(*command, AUTOPAR_CACHE=str(tmp_path)).communicate(timeout=120)
        reports.append((output, "INFO planning on one mesh" in log, "INFO the plan is that of an earlier run" in log))
    (first, *searched), (second, *recalled) = reports
    assert first == second
    assert (searched, recalled) == ([True, False], [False, True])


def test_the_cache_is_listed_and_cleared(folder, capsys):
    assert run("cache", "path") == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert run("cache", "list") == 0
    assert capsys.readouterr().out.startswith("0 plans, 0 B of at most 256.0 MiB, in ")
    assert run("plan", "mlp", *SMALL, "--devices", "2") == 0
    assert run("plan", "mlp", *SMALL, "--devices", "4", "--no-plan-cache") == 0
    (folder / f"{'a' * 64}.plan").write_text("not a plan")
    capsys.readouterr()
    assert run("cache", "list") == 0
    listed = capsys.readouterr().out
    assert re.search(r"ago +\S+ KiB  all +batch/inputs float32\[16, 16\], .*; 2 devices of cpu: mesh \(2,\)", listed)
    assert "cannot be read: damaged, or no entry of the cache" in listed
    assert "2 plans, " in listed
    assert run("cache", "clear") == 0
    assert capsys.readouterr().out == f"2 plans removed from {folder}\n"
    assert list(folder.iterdir()) == []


def test_without_a_cache_there_is_nothing_to_list(monkeypatch, capsys):
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    for action in ("list", "clear", "path"):
        assert run("cache", action) == 2
        assert capsys.readouterr().err.startswith("autopar: there is no plan cache: AUTOPAR_CACHE is 'off'")
    assert run("cache", "burn") == 2
    assert "'burn'" in capsys.readouterr().err
