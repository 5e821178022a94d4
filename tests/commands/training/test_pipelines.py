"""Pipelines on the command line: plans and their pictures, training, the timeline of a step."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from autopar import RecordedRun
from autopar.checkpoints import folder
from autopar.commands.training import recording, train
from autopar.cost_model.cluster_files import load_cluster
from autopar.cost_model.hardware import preset
from autopar.explain import explain
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.reports.report import draw_schedule, show
from tests.commands.command_line import SMALL, STAGES, planned, run


def planned_pipeline(tmp_path: Path, *argv: str) -> PipelinePlan:
    """The plan that `plan mlp --layers 3 ARGV -o` writes."""
    file = tmp_path / "plan.json"
    assert run("plan", "mlp", *SMALL, "--layers", "3", *argv, "-o", file) == 0
    plan = plan_from_json(file.read_text())
    assert isinstance(plan, PipelinePlan)
    return plan


def test_a_pipeline_is_planned_printed_with_its_schedule_written_and_shown_again(tmp_path, capsys):
    plan = planned_pipeline(tmp_path, *STAGES, "--schedule", "gpipe")
    assert (plan.num_stages, plan.num_microbatches, plan.schedule, plan.virtual_stages) == (2, 4, "gpipe", 1)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[0] == "2 stages x 1 device (2 devices) on cluster cpu"
    assert printed[1] == "4 microbatches, schedule gpipe"
    picture = draw_schedule(plan)
    assert picture.startswith("mesh 0 | F0 F1 F2 F3 ")
    report = explain(plan, schedule_grid=picture).splitlines()
    assert printed[: len(report)] == report
    assert run("show", tmp_path / "plan.json", "--full") == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    report = explain(plan, full=True, schedule_grid=picture).splitlines()
    assert shown[: len(report)] == report


@pytest.mark.sweep
@pytest.mark.parametrize("flags", ["--mesh 1,2/2,1", "--mesh 1,2 --mesh 2,1", "--mesh 1,2/2,1 --stages 2 --devices 4"])
def test_each_stage_may_have_a_mesh_of_its_own(flags, tmp_path):
    plan = planned_pipeline(tmp_path, *flags.split(), "--microbatches", "2")
    assert [stage.plan.mesh_shape for stage in plan.stages] == [(1, 2), (2, 1)]
    assert [stage.first_device for stage in plan.stages] == [0, 2]


def test_virtual_stages_share_meshes_and_the_picture_names_them(tmp_path):
    plan = planned_pipeline(tmp_path, "--layers", "6", "--virtual-stages", "2", *STAGES)
    assert (plan.schedule, plan.num_stages, [stage.mesh for stage in plan.stages]) == ("interleaved", 4, [0, 1, 0, 1])
    assert "F0b" in draw_schedule(plan)


def test_a_schedule_that_is_too_long_for_a_line_is_not_drawn_and_the_report_says_what_it_needs(tmp_path, capsys):
    plan = planned_pipeline(tmp_path, *STAGES)
    capsys.readouterr()
    show(plan)
    assert "F0 is the forward" in capsys.readouterr().out
    long = dataclasses.replace(plan, num_microbatches=64)
    columns = max(map(len, draw_schedule(long).splitlines()))
    show(long)
    assert f"The picture of the schedule needs {columns} columns" in capsys.readouterr().out
    show(dataclasses.replace(plan, num_microbatches=512))
    assert "The picture of the schedule is too wide" in capsys.readouterr().out


def test_a_backward_is_drawn_as_long_as_it_takes(tmp_path):
    plan = planned_pipeline(tmp_path, "--schedule", "1f1b", *STAGES)
    for seconds, cell in ((1e-3, "B0"), (2e-3, "B0 -"), (9e-3, "B0 -  -")):
        stages = tuple(dataclasses.replace(s, forward_s=1e-3, backward_s=seconds) for s in plan.stages)
        line = draw_schedule(dataclasses.replace(plan, stages=stages)).splitlines()[1]
        assert line.startswith(f"mesh 1 | .  F0 {cell}  F1" if cell.endswith("-") else f"mesh 1 | .  F0 {cell} F1")


def test_microbatches_without_stages_are_one_mesh(tmp_path, capsys):
    assert planned(tmp_path, "--mesh", "2", "--microbatches", "4").num_microbatches == 4
    assert "mesh x=2 (2 devices) on cluster cpu, in 4 microbatches\n" in capsys.readouterr().out


def test_train_runs_a_pipeline_as_jit_does_and_records_a_step(tmp_path, capsys):
    log, trace = tmp_path / "loss.csv", tmp_path / "trace.json"
    flags = (*STAGES, "--steps", "12", "--seed", "3", "--log", log, "--compare-jit", "--timeline", trace)
    assert run("train", "mlp", *SMALL, "--learning-rate", "0.01", *flags) == 0
    printed = capsys.readouterr().out
    losses = [float(row["loss"]) for row in csv.DictReader(log.read_text().splitlines())]
    assert re.match(r"2 stages x 1 device \(2 devices\) on cluster cpu\n4 microbatches, schedule \S+\n", printed)
    assert f"first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}; " in printed
    assert re.search(r"median step \S+ .?s measured, \S+ .?s predicted \(measured/predicted \S+\)", printed)
    difference = re.search(r"largest difference from jax.jit on one device over 12 steps: (\S+) in the loss", printed)
    assert float(difference[1]) < 1e-5
    assert losses[-1] < losses[0]
    assert f"timeline of step 2 written to {trace}, for https://ui.perfetto.dev" in printed.replace("\n", " ")
    assert re.search(r"^bubble +\S+ .?s +\S+ .?s", printed, flags=re.MULTILINE)
    events = json.loads(trace.read_text())["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["cat"] == "forward"]
    assert sorted((e["tid"], e["name"]) for e in tasks) == [(t, f"forward {k}") for t in (0, 1) for k in range(4)]


def test_a_cluster_is_refitted_from_the_timeline_of_a_pipeline(tmp_path, capsys):
    trace, cluster = tmp_path / "trace.json", tmp_path / "refitted.json"
    flags = ("--mesh", "2", "--stages", "2", "--microbatches", "4", "--data-parallel")
    assert run("train", "mlp", *SMALL, *flags, "--steps", "3", "--timeline", trace) == 0
    assert "all-reduce" in capsys.readouterr().out
    rows = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert rows >= {f"mesh {mesh}, device {device}, collectives" for mesh in range(2) for device in range(2)}
    assert run("calibrate", "--from", trace, "-o", cluster) == 0
    assert "fitted: all compute takes " in capsys.readouterr().out
    assert load_cluster(cluster).device != preset("cpu").device


def test_a_timeline_of_one_mesh_has_its_operations(capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert run("train", "mlp", *SMALL, "--mesh", "2", "--steps", "3", "--timeline", trace) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^compute +\S+ .?s +\S+ .?s +\S+  mean of devices", printed, flags=re.MULTILINE)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"device 0", "device 1"}
    assert RecordedRun.load(trace).data.detailed == (2,)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "1", "--timeline", "trace.json"], "--timeline looks into step 2, and --steps is 1: give more"),
        (["--timeline", "nosuch/trace.json"], "cannot write nosuch/trace.json: there is no folder nosuch"),
        (["--checkpoints", "file", "--save-every", "1"], "--checkpoints file is a file: name a folder"),
        (["--checkpoints", "file", "--resume"], "--checkpoints file is a file: name a folder"),
        (["--checkpoints", "nosuch/kept", "--save-every", "1"], "--checkpoints nosuch/kept: there is no folder"),
        (["--checkpoints", "/proc/kept", "--save-every", "1"], "no file can be made in /proc; name a folder elsewhere"),
        (["--log", "nosuch/log.csv"], "cannot write nosuch/log.csv: there is no folder nosuch"),
        (["--log", "/proc/log.csv"], "cannot write /proc/log.csv: no file can be made in /proc"),
        (["--checkpoints", "old", "--save-every", "1"], "old has checkpoints, of step 3 the last"),
    ],
)
def test_where_a_run_writes_is_looked_at_before_a_plan_is_sought(capsys, monkeypatch, tmp_path, flags, said):
    def search(*_):
        raise AssertionError("a plan was sought")

    monkeypatch.setattr(train, "plan_step", search)
    monkeypatch.setattr(folder, "complete_numbers", lambda path: [3] if path.name == "old" else [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run("train", "mlp", *SMALL, "--mesh", "2", *flags) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_run_that_was_stopped_before_the_recorded_step_has_no_timeline(tmp_path):
    console = Console(record=True)
    recording.Recorder(step=None).write(tmp_path / "trace.json", console)
    assert console.export_text() == "no timeline: the run was stopped before step 2\n"
    assert not (tmp_path / "trace.json").exists()
