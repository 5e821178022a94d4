"""`--json` of every command: one document as its schema says, with the figures of the files and the reports."""

import json
import os

import jsonschema
import pytest

from autopar.commands.parser import read
from autopar.commands.table import COMMANDS
from autopar.cost_model.json_files import schema_at, violations
from autopar.files.checked import PLAN_SCHEMA
from tests.commands.command_line import ROOT, SMALL, STAGES, run
from tests.commands.documents import SCHEMAS, document, schema_of

NO_RESULT = {"launch"}
"""Its workers print what they like."""
WORDS = {"plan": "gpt", "rank": "gpt --clusters h200", "train": "gpt", "cache": "list", "diff": "a b", "bench": "gpt"}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - NO_RESULT))
def test_a_command_takes_the_flag_and_has_a_schema(command):
    words = {"explain": "plan.json", "show": "plan.json", "run": "plan.json gpt", "verify": "gpt"} | WORDS
    assert read([command, *words.get(command, "").split(), "--json"]).json
    schema = json.loads(schema_of(command).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)


def test_plan_and_explain_print_the_plan_that_is_written(tmp_path, capsys):
    for flags, stages in (((), 1), (STAGES, 2)):
        file = tmp_path / "plan.json"
        found = document(capsys, "plan", "mlp", *SMALL, "--devices", "2", *flags, "-o", file)
        assert found["plan"] == json.loads(file.read_text())
        assert violations(found["plan"], schema_at(PLAN_SCHEMA)) == []
        assert (found["stages"], found["devices"], len(found["meshes"])) == (stages, 2, stages)
        assert document(capsys, "explain", file) == document(capsys, "show", file) == found


def test_plan_answers_about_a_leaf_and_about_what_does_not_fit(capsys):
    small = ("mlp", *SMALL, "--devices", "2", "--mesh", "2")
    why = document(capsys, "plan", *small, "--leaf", "state/params/Dense_0/kernel")["why"]
    assert why["leaf"]["path"] == "state/params/Dense_0/kernel"
    assert all(other["step_s"] is None or other["step_s"] >= why["step_s"] for other in why["others"])
    answer = document(capsys, "plan", *small, "--memory-limit", "1KiB", "--conflict", status=1)["conflict"]
    assert answer["limit_bytes"] == 1024


@pytest.mark.parametrize("command", ["plan", "explain", "verify", "train", "bench"])
def test_a_plan_that_fits_nowhere_is_a_document_with_the_limit_and_what_is_needed(command, capsys):
    small = ("mlp", *SMALL, "--devices", "2")
    for flags in ((), ("--mesh", "2"), ("--stages", "2", "--microbatches", "2")):
        assert run(command, *small, *flags, "--memory-limit", "1KiB", "--json") == 2
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert violations(found, schema_at(SCHEMAS / "error.schema.json")) == []
        error = found["error"]
        assert (error["kind"], error["limit_bytes"]) == ("out_of_memory", 1024)
        assert error["needed_bytes"] is None, "the bounds leave nothing to try"
        assert error["bound_bytes"] > 1024
        assert printed.err == f"autopar: {error['message']}\n"


def test_a_failure_of_another_kind_leaves_standard_output_empty(tmp_path, capsys):
    plan, missing = tmp_path / "plan.json", tmp_path / "missing.json"
    assert run("plan", "mlp", *SMALL, "--devices", "2", "-o", plan) == 0
    capsys.readouterr()
    nowhere = tmp_path / "nowhere" / "file"
    failures = {
        "plan": ("mlp", *SMALL, "--output", nowhere),
        "explain": (missing,),
        "diff": (plan, missing),
        "rank": ("mlp", "--clusters", "none-such"),
        "verify": ("mlp", *SMALL, "--devices", "2", "--mesh", "3"),
        "train": ("mlp", *SMALL, "--timeline", nowhere),
        "run": (plan, "mlp", *SMALL, "--hidden", "24"),
        "bench": ("mlp", *SMALL, "--plan", missing),
        "simulate": ("--table", missing),
        "collectives": ("--cluster", "none-such"),
        "calibrate": ("--output", nowhere),
        "doctor": ("--no-such-flag",),
        "demo": ("--no-such-flag",),
    }
    for command, flags in failures.items():
        assert run(command, *flags, "--json") == 2, command
        printed = capsys.readouterr()
        assert (printed.out, printed.err.startswith("autopar: ")) == ("", True), command


def test_simulate_prints_rows_and_a_plan_elsewhere(tmp_path, capsys):
    table = document(capsys, "simulate", "--table", ROOT / "docs" / "examples" / "runs.csv", "--closed-form")
    assert len(table["rows"]) == table["summary"]["rows"] > 0
    file = tmp_path / "plan.json"
    here = document(capsys, "plan", "mlp", *SMALL, "--devices", "2", "-o", file)
    there = document(capsys, "simulate", "--plan", file, "--cluster", "dgx-h100")
    assert there["planned_step_s"] == pytest.approx(here["step_s"])


def test_the_cache_is_listed_and_cleared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    assert run("plan", "mlp", *SMALL, "--devices", "2") == 0
    listed = document(capsys, "cache", "list")
    (plan,) = listed["plans"]
    assert listed["folder"] == document(capsys, "cache", "path")["folder"] == str(tmp_path)
    assert [f"{plan['key']}.plan"] == os.listdir(tmp_path)
    assert document(capsys, "cache", "clear")["removed"] == 1
    assert document(capsys, "cache", "list")["plans"] == []


def test_train_prints_its_losses_beside_those_of_jit(tmp_path, capsys):
    log = tmp_path / "loss.csv"
    flags = ("--devices", "2", "--steps", "3", "--learning-rate", "0.01", "--log", log, "--compare-jit")
    found = document(capsys, "train", "mlp", *SMALL, *flags)
    logged = [float(row.split(",")[1]) for row in log.read_text().splitlines()[1:]]
    assert found["losses"] == pytest.approx(logged, abs=1e-7)
    differences = [abs(a - b) for a, b in zip(found["losses"], found["jit"]["losses"], strict=True)]
    assert found["largest_difference"] == max(differences) < 1e-5
    assert (found["first_step"], found["stopped_by"], len(found["seconds"])) == (1, None, 3)
