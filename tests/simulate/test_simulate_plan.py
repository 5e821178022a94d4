"""`simulate --plan`: a saved plan on other clusters, its overlap, and arguments that do not go together."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

import autopar
from autopar.__main__ import main
from autopar.cost_model.hardware import preset
from autopar.explain.figures import figures_of
from autopar.models import build
from autopar.simulate.reprice import reprice
from tests.run_tables import json_of


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a small GPT for eight devices of a DGX A100."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    sizes = ["--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16"]
    assert main(["plan", "gpt", *sizes, "--mesh", "2,4", "--cluster", "dgx-a100-80gb", "-o", str(path)]) == 0
    return path


@pytest.mark.sweep
def test_a_plan_is_priced_on_another_cluster(plan_file, capsys):
    _, there, _ = json_of(["--plan", str(plan_file), "--cluster", "dgx-h100"], capsys)
    _, here, _ = json_of(["--plan", str(plan_file), "--cluster", "dgx-a100-80gb"], capsys)
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    assert here["compute_s"] == pytest.approx(plan["compute_s"], rel=1e-9)
    assert here["hidden_s"] == pytest.approx(plan["hidden_s"], rel=1e-9)
    assert plan["hidden_s"] > 0
    assert here["step_s"] == pytest.approx(plan["compute_s"] + plan["comm_s"] - plan["hidden_s"], rel=1e-9)
    assert there["compute_s"] < here["compute_s"]
    assert here["peak_bytes"] == there["peak_bytes"] == plan["peak_bytes"]
    kinds = {kind["kind"]: kind for kind in here["communication"]}
    assert set(kinds) == {item["kind"] for item in plan["collectives"]}
    for name, kind in kinds.items():
        assert kind["bytes"] == sum(
            item["count"] * item["bytes"] for item in plan["collectives"] if item["kind"] == name
        )
        assert kind["seconds"] == pytest.approx(kind["planned_s"])


def test_a_call_is_that_of_the_cluster(plan_file):
    """A plan for virtual devices, whose calls take their time, and on another machine, whose host calls ahead."""
    there, plan = preset("dgx-a100-80gb"), autopar.plan_from_json(plan_file.read_text(encoding="utf-8"))
    called = dataclasses.replace(there, call_s=1.0, call_s_per_array=0.01)
    call_s = called.dispatch_s(len(plan.inputs))
    assert reprice(plan, called, planned_for=there).step_s == pytest.approx(plan.step_s + call_s)
    slow = dataclasses.replace(plan, compute_s=plan.compute_s + call_s)
    assert reprice(slow, there, planned_for=called).step_s == pytest.approx(plan.step_s)


@pytest.mark.sweep
def test_a_plan_for_a_calibrated_cluster_needs_its_file(plan_file, tmp_path, capsys):
    fields = json.loads(plan_file.read_text(encoding="utf-8")) | {"cluster": "ours"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(fields), encoding="utf-8")
    assert main(["simulate", "--plan", str(plan), "--cluster", "dgx-h100"]) == 2
    assert (
        "made for cluster 'ours', which is no preset: give its file with --planned-for FILE" in capsys.readouterr().err
    )
    arguments = ["--cluster", "dgx-h100", "--planned-for", "dgx-a100-80gb"]
    _, given, _ = json_of(["--plan", str(plan), *arguments], capsys)
    _, named, _ = json_of(["--plan", str(plan_file), "--cluster", "dgx-h100"], capsys)
    assert given["step_s"] == named["step_s"]


def test_a_pipeline_is_priced_stage_by_stage(tmp_path, capsys):
    model = build("gpt", layers=2, hidden=32, heads=2, seq=16, batch=16, vocab=256)
    state = jax.eval_shape(lambda: model.create_state(jax.random.key(0)))
    step = autopar.parallelize(
        model.train_step, devices=4, num_stages=2, num_microbatches=4, mesh_shape=(2,), cluster="dgx-a100-80gb"
    )
    plan = step.plan(state, model.batch_shape())
    path = tmp_path / "pipeline.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    _, here, _ = json_of(["--plan", str(path), "--cluster", "dgx-a100-80gb"], capsys)
    _, there, _ = json_of(["--plan", str(path), "--cluster", "dgx-h100"], capsys)
    assert here["step_s"] == pytest.approx(plan.step_s, rel=0.01)
    assert there["step_s"] < here["step_s"]
    (sent,) = [kind for kind in here["communication"] if kind["kind"] == "transfer"]
    assert sent["bytes"] == sum(item.count * item.bytes for item in plan.transfers)
    assert sent["seconds"] == pytest.approx(sent["planned_s"])
    assert here["peak_bytes"] == plan.peak_bytes
    (sends,) = [kind for kind in here["overlap"] if kind["kind"] == "pipeline"]
    assert sends["seconds"] == pytest.approx(sent["seconds"])
    assert sends["exposed_s"] == here["waited_s"] == pytest.approx(figures_of(plan).waited_s), "as the report says"
    assert 0 < sends["overlap_ratio"] < 1
    assert there["waited_s"] > 0
    assert f"of which the schedule {plan.schedule} hides transfers beside compute" in here["basis"]


@pytest.mark.sweep
def test_a_priced_plan_is_shown_against_the_memory_of_the_device(plan_file, capsys):
    assert main(["simulate", "--plan", str(plan_file), "--cluster", "p3.16xlarge"]) == 0
    text = capsys.readouterr().out
    assert "The plan on p3.16xlarge, planned for dgx-a100-80gb" in text
    assert "14.4 GiB usable on each device" in text
    assert "fits" in text
    assert "compute is scaled by" in text
    assert "For the seconds of this step there, plan it: autopar plan ... --cluster p3.16xlarge" in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "simulate takes a table of runs (--table rows.csv) or a saved plan"),
        (["--table", "rows.csv", "--plan", "plan.json"], "simulate takes a table of runs"),
        (["--plan", "plan.json"], "--plan needs --cluster"),
        (["--table", "rows.csv", "--cluster", "cpu"], "the rows of a table name their clusters"),
        (["--table", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--table", "rows.csv", "--csv", "nowhere/out.csv"], "there is no folder nowhere"),
    ],
)
def test_arguments_that_do_not_go_together_are_told(arguments, text, capsys):
    assert main(["simulate", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_an_unknown_cluster_for_a_plan_lists_the_presets(plan_file, capsys):
    assert main(["simulate", "--plan", str(plan_file), "--cluster", "dgx-h10"]) == 2
    assert "no cluster preset 'dgx-h10'; there are: cpu," in capsys.readouterr().err


def test_the_four_overlap_ratios_of_a_plan_are_reported(tmp_path, capsys):
    """Data parallel, ZeRO-3 and tensor parallel on one mesh; a third of the gradient's time is exposed where 0.7 may hide."""
    model = build("mlp", layers=2, inputs=4096, hidden=4096, outputs=4096, batch=8192)
    state = jax.eval_shape(lambda: model.create_state(jax.random.key(0)))
    cluster = preset("dgx-a100-80gb")
    found = {}
    for name, constraints in {"plain": autopar.data_parallel("x"), "zero3": autopar.zero3("x")}.items():
        step = autopar.parallelize(
            model.train_step, devices=4, mesh_shape=(4,), constraints=constraints, cluster=cluster
        )
        path = tmp_path / f"{name}.json"
        path.write_text(step.plan(state, model.batch_shape()).to_json(), encoding="utf-8")
        _, priced, _ = json_of(["--plan", str(path), "--cluster", "dgx-a100-80gb"], capsys)
        assert [kind["kind"] for kind in priced["overlap"]] == ["data_parallel", "zero3", "tensor", "pipeline"]
        found[name] = {kind["kind"]: kind for kind in priced["overlap"]}
    plain, zero3 = found["plain"], found["zero3"]
    assert 0.5 < plain["data_parallel"]["overlap_ratio"] <= 0.7
    assert plain["data_parallel"]["exposed_s"] < plain["data_parallel"]["seconds"]
    assert [plain[kind]["overlap_ratio"] for kind in ("zero3", "tensor", "pipeline")] == [None, None, None]
    assert 0.5 < zero3["zero3"]["overlap_ratio"] <= 0.7
    assert zero3["data_parallel"]["seconds"] < plain["data_parallel"]["seconds"]


def test_a_tensor_parallel_plan_hides_what_its_cluster_lets_it(plan_file, capsys):
    _, priced, _ = json_of(["--plan", str(plan_file), "--cluster", "tpu-v5p"], capsys)
    ratios = {kind["kind"]: kind["overlap_ratio"] for kind in priced["overlap"]}
    assert 0 < ratios["tensor"] <= 0.5
    assert main(["show", str(plan_file)]) == 0
    text = capsys.readouterr().out
    assert "Time of the step" in text
    assert "tensor parallel" in text
