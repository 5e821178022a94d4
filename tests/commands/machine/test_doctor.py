"""`doctor`: all is well here, and what is broken on purpose is found and named."""

import jax
import pytest

from autopar.commands.machine import doctor as module
from tests.commands.command_line import run
from tests.commands.documents import document


def findings(capsys, status):
    return {one["name"]: one for one in document(capsys, "doctor", "--devices", "4", status=status)["findings"]}


def test_here_all_is_well(capsys):
    found = findings(capsys, 0)
    assert not [one for one in found.values() if one["state"] == "wrong"]
    assert found["jax"]["text"] == jax.__version__
    assert found["devices"]["text"].startswith("4 of platform cpu")
    assert "over 4 devices" in found["collectives"]["text"]
    assert "predicted" in found["links"]["text"]


def test_what_does_not_work_is_named_and_the_rest_is_looked_at(capsys, monkeypatch):
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: x)

    def raise_an_error(*_, **__):
        raise RuntimeError("no planner today")

    monkeypatch.setattr(module.autopar, "parallelize", raise_an_error)
    monkeypatch.setattr(module, "PACKAGES", ("jax", "no-such-package"))
    found = findings(capsys, 1)
    wrong = {name for name, one in found.items() if one["state"] == "wrong"}
    assert wrong == {"collectives", "a step", "no-such-package"}
    assert found["collectives"]["text"] == "wrong numbers from: permute"
    assert "no planner today" in found["a step"]["text"]


@pytest.mark.parametrize("argv", [("--devices", "0"), ("--devices", "1000")])
def test_devices_that_are_not_there_are_refused_or_found_wrong(argv, capsys):
    status = run("doctor", *argv)
    output = capsys.readouterr()
    assert status == (2 if argv[1] == "0" else 1)
    assert "1000 devices are asked for" in output.out or "'0' is not a whole number" in output.err


def test_devices_that_are_not_there_are_told_once_without_a_line_of_autopar(capsys):
    found = {one["name"]: one for one in document(capsys, "doctor", "--devices", "99", status=1)["findings"]}
    assert found["devices"]["text"].startswith("99 devices are asked for")
    assert ".py:" not in found["devices"]["text"]
    assert {found[name]["text"] for name in ("collectives", "links", "a step")} == {"as devices"}
