"""`python -m autopar simulate`: tables of runs, their errors, and plans on other clusters."""

import csv
import json
from pathlib import Path

import jax
import pytest

import autopar
from autopar.__main__ import main
from autopar.commands.error_summary import rank_correlation
from autopar.commands.rows import NEEDED, Row, RowError, read_table
from autopar.cost_model.hardware import preset
from autopar.cost_model.job_prediction import predict
from autopar.cost_model.training_job import TrainingJob
from autopar.errors import ArgumentError
from autopar.models import build

PUBLISHED = Path(__file__).parent / "data" / "yardstick" / "published_steps.csv"
GOOD = {
    "source": "a table", "id": "good", "cluster": "dgx-a100-80gb", "devices": "64", "family": "gpt", "layers": "96",
    "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn_hidden": "49152", "vocab": "51200", "seq_len": "2048",
    "global_batch": "64", "microbatch": "1", "dp": "1", "tp": "8", "pp": "8", "virtual_stages": "3", "ep": "1",
    "zero_stage": "0", "recompute": "selective", "sequence_parallel": "1", "precision": "fp16", "step_s": "13.75",
    "model_tflops_per_device": "", "peak_mem_GB": "", "note": "",
}  # fmt: skip
KEYS = [
    "id", "source", "cluster", "step_s", "predicted_step_s", "model_tflops_per_device",
    "predicted_model_tflops_per_device", "peak_mem_GB", "predicted_peak_mem_GB", "fits",
]  # fmt: skip


def table(path: Path, *rows: dict[str, str]) -> Path:
    """A CSV table of rows; each may leave out columns of the first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def json_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object], str]:
    status = main(["simulate", *arguments, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def test_published_runs_are_predicted_and_compared(capsys):
    status, found, errors = json_of(["--table", str(PUBLISHED)], capsys)
    assert (status, errors) == (0, "")
    assert len(found["rows"]) == 39
    assert [list(row)[: len(KEYS)] for row in found["rows"]] == [KEYS] * 39
    row = next(row for row in found["rows"] if row["id"] == "korth-175B-selective")
    assert (row["source"], row["cluster"], row["step_s"]) == ("Korthikanti 2022", "dgx-a100-80gb", 13.75)
    assert row["model_tflops_per_device"] is None
    assert row["fits"] is True
    assert row["predicted_step_s"] == pytest.approx(13.75, rel=0.05)
    flops = 72 * 64 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert row["predicted_model_tflops_per_device"] == pytest.approx(flops / row["predicted_step_s"] / 64 / 1e12)
    assert found["summary"]["rank_correlation"] > 0.95
    assert found["summary"]["mean_absolute_error"] < 0.08


@pytest.mark.parametrize(
    ("source", "mean", "largest"),
    [
        ("Korthikanti 2022", 0.05, 0.06),
        ("Megatron-LM SC21 Table 1", 0.08, 0.15),
        ("Megatron-Core r0.8 README", 0.10, 0.30),
        ("Megatron-LM 2020 TP scaling", 0.10, 0.30),
    ],
)
def test_errors_stay_within_their_targets(source, mean, largest, capsys):
    _, found, _ = json_of(["--table", str(PUBLISHED)], capsys)
    errors = [abs(row["error"]) for row in found["rows"] if row["source"] == source]
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= largest


def test_tables_are_printed_with_a_summary(tmp_path, capsys):
    small = table(tmp_path / "rows.csv", GOOD)
    assert main(["simulate", "--table", str(small)]) == 0
    text = capsys.readouterr().out
    assert "Predicted against measured" in text
    assert "good" in text
    assert "13.8 s" in text
    assert "1 rows priced, 1 of them with a measurement to compare" in text
    assert "mean absolute" in text


def test_csv_holds_what_json_holds(tmp_path, capsys):
    small, out = table(tmp_path / "rows.csv", GOOD), tmp_path / "out.csv"
    _, found, _ = json_of(["--table", str(small), "--csv", str(out)], capsys)
    with out.open(encoding="utf-8", newline="") as file:
        (record,) = csv.DictReader(file)
    assert list(record)[: len(KEYS)] == KEYS
    assert float(record["predicted_step_s"]) == found["rows"][0]["predicted_step_s"]
    assert record["peak_mem_GB"] == ""


def test_the_four_overlap_ratios_are_reported(tmp_path, capsys):
    sharded = GOOD | {"cluster": "dgx-h100", "dp": "8", "devices": "512", "global_batch": "512", "zero_stage": "3"}
    _, found, _ = json_of(["--table", str(table(tmp_path / "rows.csv", sharded))], capsys)
    (row,) = found["rows"]
    kinds = ("data_parallel", "zero3", "tensor", "pipeline")
    ratios = [row[f"{kind}_overlap_ratio"] for kind in kinds]
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert row["zero3_overlap_ratio"] > 0
    _, found, _ = json_of(["--table", str(table(tmp_path / "rows.csv", GOOD))], capsys)
    assert found["rows"][0]["zero3_overlap_ratio"] is None


BAD = [
    ({"tp": "5", "devices": "40"}, "column 'tp' is 5, which does not divide heads = 96: use one of 4, 6, 3, 2"),
    ({"devices": "63"}, "column 'devices' is 63, but dp x tp x pp is 1 x 8 x 8 = 64: make them equal"),
    (
        {"layers": "95"},
        "column 'layers' has 95 layers, which pp x virtual_stages = 8 x 3 = 24 does not divide: use 96 layers",
    ),
    ({"cluster": "dgx-a900"}, "column 'cluster' is 'dgx-a900': no cluster preset 'dgx-a900'"),
    ({"hidden": ""}, "column 'hidden' is empty: it is needed to build the model and its plan; fill it in"),
    ({"hidden": "wide"}, "column 'hidden' is 'wide': write a whole number of at least 1"),
    ({"family": "rnn"}, "column 'family' is 'rnn': use one of gpt, llama, moe, t5, wide_resnet, bert"),
    ({"recompute": "some"}, "column 'recompute' is 'some': use one of none, selective, full"),
    ({"zero_stage": "4"}, "column 'zero_stage' is '4': use one of 0, 1, 2, 3"),
    ({"precision": "fp8"}, "column 'precision' is 'fp8': use one of fp16, bf16, fp32"),
    (
        {"global_batch": "63", "microbatch": "2"},
        "column 'global_batch' is 63, which dp x microbatch = 1 x 2 = 2 does not divide",
    ),
    (
        {"global_batch": "63"},
        "column 'virtual_stages' is 3: the interleaved schedule needs a number of microbatches that pp = 8",
    ),
    ({"heads": "97", "kv_heads": "97"}, "column 'heads' is 97, which does not divide hidden = 12288"),
    ({"kv_heads": "36"}, "column 'kv_heads' is 36, which does not divide heads = 96"),
    ({"ep": "3"}, "column 'ep' is 3; expert ranks are some of the dp = 1 ranks: use one of its divisors"),
    ({"seq_len": "2050"}, "column 'sequence_parallel' is 1, but tp = 8 does not divide seq_len = 2050"),
    ({"step_s": "fast"}, "column 'step_s' is 'fast': write a number, or leave it empty if it was not published"),
    (
        {"family": "wide_resnet", "layers": "49"},
        "column 'layers' is 49: a residual network has a depth of 26, 50, 101, 152",
    ),
    (
        {
            "family": "wide_resnet",
            "layers": "50",
            "hidden": "160",
            "recompute": "none",
            "seq_len": "224",
            "tp": "64",
            "pp": "1",
            "virtual_stages": "1",
            "sequence_parallel": "0",
        },
        "column 'tp' is 64, which does not divide the base channels, hidden = 160: use one of 80, 40, 32, 20",
    ),
    (
        {"family": "wide_resnet", "layers": "50", "hidden": "160", "seq_len": "224", "virtual_stages": "1"},
        "column 'recompute' is 'selective', but a residual network has no attention to recompute: use none or full",
    ),
    (
        {
            "family": "wide_resnet",
            "layers": "26",
            "hidden": "160",
            "recompute": "none",
            "seq_len": "224",
            "pp": "64",
            "tp": "1",
            "virtual_stages": "1",
        },
        "column 'pp' is 64, but the network has 8 blocks: use at most 8",
    ),
    (
        {"ffn_hidden": "49151"},
        "column 'tp' is 8, which does not divide ffn_hidden = 49151: use one of 1, 23, 2137, 49151",
    ),
    (
        {"pp": "1", "devices": "8"},
        "column 'virtual_stages' is 3, but there is one pipeline stage: use 1, or more stages",
    ),
    (
        {"family": "moe", "note": "6 experts", "dp": "4", "ep": "4", "devices": "256"},
        "column 'ep' is 4, which does not divide the 6 experts: use one of 3, 2, 6, 1",
    ),
    (
        {"cluster": "nowhere/ours.json"},
        "column 'cluster' is 'nowhere/ours.json': cluster file nowhere/ours.json: No such file",
    ),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_a_bad_row_is_named_with_its_column_and_a_fix_and_the_others_run(changes, text, tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", GOOD | {"id": "bad"} | changes, GOOD)
    status, found, errors = json_of(["--table", str(rows)], capsys)
    assert status == 1
    assert [row["id"] for row in found["rows"]] == ["good"]
    assert f"rows.csv: row 1 (bad): {text}" in errors
    assert text in found["errors"][0]


@pytest.mark.parametrize("number", ["inf", "nan", "-1", "96.5", "1e400"])
def test_what_is_no_size_is_told(number, tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", GOOD | {"layers": number})
    _, _, errors = json_of(["--table", str(rows)], capsys)
    assert f"column 'layers' is '{number}': write a whole number of at least 1" in errors


def test_more_devices_than_the_cluster_joins_are_an_error_of_the_row(tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", GOOD | {"cluster": "h200"}, GOOD)
    status, found, errors = json_of(["--table", str(rows)], capsys)
    assert (status, len(found["rows"])) == (1, 1)
    assert "row 1 (good): column 'cluster' is 'h200'" in errors
    assert "64 devices, cluster 'h200' has at most 8" in errors


def test_the_parts_of_a_step_add_up(capsys):
    _, found, _ = json_of(["--table", str(PUBLISHED)], capsys)
    for row in found["rows"]:
        parts = row["compute_s"] + row["exposed_comm_s"] + row["bubble_s"] + row["optimizer_s"]
        assert parts == pytest.approx(row["predicted_step_s"]), row["id"]


@pytest.mark.parametrize("column", NEEDED)
def test_a_missing_column_is_named_in_every_row(column, tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", {key: value for key, value in GOOD.items() if key != column})
    status, found, errors = json_of(["--table", str(rows)], capsys)
    assert (status, found["rows"]) == (1, [])
    assert f"row 1 (good): column '{column}' is missing: add it" in errors


def test_a_renamed_column_is_recognised(tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", {{"hidden": "hiden"}.get(key, key): value for key, value in GOOD.items()})
    _, _, errors = json_of(["--table", str(rows)], capsys)
    assert "column 'hidden' is missing: add it, or rename 'hiden'" in errors


def test_several_faults_of_a_row_are_told_together(tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", GOOD | {"tp": "5", "zero_stage": "7", "hidden": "x"})
    _, _, errors = json_of(["--table", str(rows)], capsys)
    assert "column 'hidden'" in errors
    assert "column 'zero_stage'" in errors


@pytest.mark.parametrize(
    ("content", "text"),
    [("", "has no rows"), ("id,cluster\n", "has no rows"), (None, "cannot read")],
)
def test_what_is_no_table_is_one_error(content, text, tmp_path):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ArgumentError, match=text):
        read_table(path)


def test_a_line_with_too_many_cells_is_an_error_of_its_row(tmp_path):
    path = table(tmp_path / "rows.csv", GOOD)
    path.write_text(path.read_text(encoding="utf-8").rstrip() + ",more,cells\n", encoding="utf-8")
    (row,) = read_table(path)
    assert isinstance(row, RowError)
    assert "row 1 (good): has more cells than the first line names columns" in str(row)


SMALL_PLAN = {
    "devices": "8", "layers": "24", "hidden": "1024", "heads": "16", "kv_heads": "16", "ffn_hidden": "4096",
    "seq_len": "512", "global_batch": "64", "microbatch": "4", "dp": "4", "tp": "2", "pp": "1", "virtual_stages": "1",
    "sequence_parallel": "0", "step_s": "",
}  # fmt: skip
FAMILIES = {
    "gpt": {},
    "bert": {"vocab": "30522"},
    "llama": {"kv_heads": "4", "ffn_hidden": "2816", "vocab": "32000"},
    "t5": {"vocab": "32128"},
    "moe": {"ep": "4", "note": "8 experts"},
    "wide_resnet": {
        "layers": "50", "hidden": "160", "ffn_hidden": "2", "seq_len": "224", "vocab": "1024", "heads": "", "kv_heads": "",
        "precision": "fp32", "recompute": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cluster", ["cpu", "p3.16xlarge", "dgx-h200", "b200", "a100-omnipath", "tpu-v5p"])
def test_every_family_runs_on_any_preset(family, cluster, tmp_path, capsys):
    row = GOOD | SMALL_PLAN | {"family": family, "cluster": cluster} | FAMILIES[family]
    status, found, errors = json_of(["--table", str(table(tmp_path / "rows.csv", row))], capsys)
    assert (status, errors) == (0, "")
    (priced,) = found["rows"]
    assert priced["predicted_step_s"] > 0
    assert priced["predicted_peak_mem_GB"] > 0


def test_a_cluster_may_be_a_file(tmp_path, capsys):
    source = Path(__file__).parent.parent / "cost_model" / "clusters" / "dgx-h100.json"
    fields = json.loads(source.read_text(encoding="utf-8")) | {"name": "ours"}
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    rows = table(tmp_path / "rows.csv", GOOD | {"cluster": str(path)}, GOOD | {"cluster": "dgx-h100"})
    _, found, _ = json_of(["--table", str(rows)], capsys)
    assert found["rows"][0]["predicted_step_s"] == found["rows"][1]["predicted_step_s"]
    path.write_text("{", encoding="utf-8")
    status, found, errors = json_of(["--table", str(rows)], capsys)
    assert (status, len(found["rows"])) == (1, 1)
    assert "column 'cluster'" in errors
    assert "is not JSON" in errors


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda fields: fields.pop("tiers"), "the file lacks 'tiers'"),
        (lambda fields: fields["device"].pop("memory_bytes"), "device lacks 'memory_bytes'"),
        (lambda fields: fields["device"].update(memory_efficiency=1.5), "device.memory_efficiency is 1.5; at most 1"),
        (lambda fields: fields["device"].update(peak_flop_per_s={}), "did you mean peak_flops_per_s?"),
        (lambda fields: fields["tiers"][0].update(topology="mesh"), 'tiers.0.topology is "mesh"; one of'),
        (lambda fields: fields["overlap"]["hidden"].update(tensor="much"), 'overlap.hidden.tensor is "much"; number'),
    ],
)
def test_a_bad_cluster_file_is_an_error_of_its_rows_with_the_place_in_the_file(change, text, tmp_path, capsys):
    source = Path(__file__).parent.parent / "cost_model" / "clusters" / "dgx-h100.json"
    fields = json.loads(source.read_text(encoding="utf-8"))
    change(fields)
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    rows = table(tmp_path / "rows.csv", GOOD | {"id": "ours", "cluster": str(path)}, GOOD)
    status, found, errors = json_of(["--table", str(rows)], capsys)
    assert (status, [row["id"] for row in found["rows"]]) == (1, ["good"])
    assert f"rows.csv: row 1 (ours): column 'cluster' is '{path}': {path}" in errors
    assert text in errors
    assert main(["simulate", "--table", str(rows)]) == 1  # tables as well as JSON
    captured = capsys.readouterr()
    assert "good" in captured.out
    assert "row 1 (ours)" in captured.err


def test_runs_that_ran_out_of_memory_are_flagged_or_not(tmp_path, capsys):
    """-1 s is a run that did not fit; one of 175 billion parameters on eight devices cannot."""
    too_large = GOOD | {"id": "too-large", "devices": "8", "pp": "1", "virtual_stages": "1", "step_s": "-1"}
    fitting = GOOD | {"id": "fitting", "step_s": "-1"}
    alarm = GOOD | {"id": "alarm", "devices": "8", "pp": "1", "virtual_stages": "1"}
    _, found, _ = json_of(["--table", str(table(tmp_path / "rows.csv", GOOD, too_large, fitting, alarm))], capsys)
    assert [row["fits"] for row in found["rows"]] == [True, False, True, False]
    assert found["summary"]["out_of_memory_recall"] == 0.5
    assert found["summary"]["false_alarms"] == 1
    assert found["summary"]["compared"] == 2


def test_an_unpublished_microbatch_is_the_fastest_that_fits(tmp_path, capsys):
    unknown = GOOD | {"microbatch": "", "virtual_stages": ""}
    _, found, _ = json_of(["--table", str(table(tmp_path / "rows.csv", unknown, GOOD))], capsys)
    free, stated = found["rows"]
    assert free["predicted_step_s"] <= stated["predicted_step_s"]
    assert free["fits"] is True


def test_layers_with_embedding_and_head_may_share_stages_evenly(tmp_path):
    """70 layers and both ends of a large vocabulary on 12 stages: six each, five and an end on the first and the last."""
    bloom = GOOD | {
        "layers": "70", "hidden": "14336", "heads": "112", "kv_heads": "112", "ffn_hidden": "57344", "vocab": "250880",
        "tp": "4", "pp": "12", "virtual_stages": "1", "devices": "48", "sequence_parallel": "0",
    }  # fmt: skip
    (row,) = read_table(table(tmp_path / "rows.csv", bloom))
    assert isinstance(row, Row)
    assert predict(row.cluster, row.job).step.step_s > 0
    (small,) = read_table(table(tmp_path / "rows.csv", bloom | {"vocab": "51200"}))
    assert "column 'layers' has 70 layers, which pp x virtual_stages = 12 x 1 = 12 does not divide" in str(small)


def test_thousands_of_devices_take_no_longer(tmp_path):
    rows = {row.id: row for row in read_table(PUBLISHED) if isinstance(row, Row)}
    job = rows["sc21-1008.0B"].job
    assert isinstance(job, TrainingJob)
    assert job.devices == 3072
    assert predict(rows["sc21-1008.0B"].cluster, job).step.step_s == pytest.approx(102.63, rel=0.15)


def test_ranks_are_compared_with_ties_shared():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1.0
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == -1.0
    assert rank_correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation([1, 1], [1, 2]) is None


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a small GPT for eight devices of a DGX A100."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    sizes = ["--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16"]
    assert main(["plan", "gpt", *sizes, "--mesh", "2,4", "--cluster", "dgx-a100-80gb", "-o", str(path)]) == 0
    return path


def test_a_plan_is_priced_on_another_cluster(plan_file, capsys):
    _, there, _ = json_of(["--plan", str(plan_file), "--cluster", "dgx-h100"], capsys)
    _, here, _ = json_of(["--plan", str(plan_file), "--cluster", "dgx-a100-80gb"], capsys)
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    assert here["compute_s"] == pytest.approx(plan["compute_s"], rel=0.01)
    assert here["step_s"] == pytest.approx(plan["compute_s"] + plan["comm_s"], rel=1e-6)
    assert there["compute_s"] < here["compute_s"]
    assert here["peak_bytes"] == there["peak_bytes"] == plan["peak_bytes"]
    kinds = {kind["kind"]: kind for kind in here["communication"]}
    assert set(kinds) == {item["kind"] for item in plan["collectives"]}
    for name, kind in kinds.items():
        assert kind["bytes"] == sum(
            item["count"] * item["bytes"] for item in plan["collectives"] if item["kind"] == name
        )
        assert kind["seconds"] == pytest.approx(kind["planned_s"])


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
    assert 0 < sends["overlap_ratio"] <= 0.5
    assert "the step waits for the transfers of one microbatch, those of the others run beside compute" in here["basis"]


def test_a_priced_plan_is_shown_against_the_memory_of_the_device(plan_file, capsys):
    assert main(["simulate", "--plan", str(plan_file), "--cluster", "p3.16xlarge"]) == 0
    text = capsys.readouterr().out
    assert "The plan on p3.16xlarge, planned for dgx-a100-80gb" in text
    assert "14.4 GiB usable on each device" in text
    assert "fits" in text
    assert "compute is scaled by" in text


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
    assert "Overlap with compute" in text
    assert "tensor parallel" in text
