"""`simulate --table`: published runs, their errors, and what of a run is predicted."""

import csv
import itertools
import json
from pathlib import Path

import pytest

from autopar.__main__ import main
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.error_summary import rank_correlation
from autopar.simulate.rows import Row, read_table
from tests.run_tables import FAMILIES, GOOD, PUBLISHED, SMALL_PLAN, json_of, table

KEYS = [
    "id", "source", "cluster", "step_s", "predicted_step_s", "model_tflops_per_device",
    "predicted_model_tflops_per_device", "peak_mem_GB", "predicted_peak_mem_GB", "fits",
]  # fmt: skip
SIX_PRESETS = ("cpu", "p3.16xlarge", "dgx-h200", "b200", "a100-omnipath", "tpu-v5p")


def test_published_runs_are_predicted_and_compared(capsys):
    status, found, errors = json_of(["--table", str(PUBLISHED), "--closed-form"], capsys)
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


@pytest.mark.sampled(4)
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
    _, found, _ = json_of(["--table", str(PUBLISHED), "--closed-form"], capsys)
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


def test_the_parts_of_a_step_add_up(capsys):
    _, found, _ = json_of(["--table", str(PUBLISHED), "--closed-form"], capsys)
    for row in found["rows"]:
        parts = row["compute_s"] + row["exposed_comm_s"] + row["bubble_s"] + row["optimizer_s"]
        assert parts == pytest.approx(row["predicted_step_s"]), row["id"]


def rows_of(*families_on_presets):
    return [
        GOOD | SMALL_PLAN | {"id": f"{family} on {preset}", "family": family, "cluster": preset} | FAMILIES[family]
        for family, preset in families_on_presets
    ]


def test_every_family_is_priced_in_closed_form_on_any_preset(tmp_path, capsys):
    rows = rows_of(*itertools.product(FAMILIES, SIX_PRESETS))
    status, found, errors = json_of(["--table", str(table(tmp_path / "rows.csv", *rows)), "--closed-form"], capsys)
    assert (status, errors) == (0, "")
    assert [row["id"] for row in found["rows"]] == [row["id"] for row in rows]
    for priced in found["rows"]:
        assert priced["predicted_step_s"] > 0
        assert priced["predicted_peak_mem_GB"] > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(FAMILIES)))
def test_plans_of_every_family_and_preset_are_near_the_closed_form(number, shift, tmp_path, capsys):
    """Each shift pairs each family with another preset; no part falls back to its closed form."""
    family, preset = list(FAMILIES)[number], SIX_PRESETS[(number + shift) % len(SIX_PRESETS)]
    path = table(tmp_path / "rows.csv", *rows_of((family, preset)))
    status, found, errors = json_of(["--table", str(path)], capsys)
    assert (status, errors) == (0, "")
    assert len(found["rows"]) == found["summary"]["planned"] == 1
    (priced,) = found["rows"]
    assert priced["not_planned"] == ""
    assert -0.05 < priced["apart"] < 0.41  # the most: Llama on B200, whose plan adds up rows' gradients in float32
    assert priced["predicted_peak_mem_GB"] > 0


def test_a_cluster_may_be_a_file(tmp_path, capsys):
    source = Path(__file__).parents[2] / "cost_model" / "clusters" / "dgx-h100.json"
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


def test_a_row_says_how_its_stages_experts_and_gradients_differ_from_the_usual(tmp_path):
    """Uneven stages take as long as the longest; experts in every layer, and gradients in half the bytes, count in memory."""
    plain = GOOD | SMALL_PLAN | {"devices": "4", "dp": "1", "tp": "2", "pp": "2"}
    uneven = plain | {"stage_layers": "6+18"}
    half = plain | {"gradients": "half"}
    experts = plain | {"family": "moe", "experts": "8", "expert_every": "1", "experts_per_token": "1"}
    columns = dict.fromkeys(("stage_layers", "gradients", "experts", "expert_every", "experts_per_token"), "")
    rows = read_table(table(tmp_path / "rows.csv", *(columns | row for row in (plain, uneven, half, experts))))
    assert [row for row in rows if not isinstance(row, Row)] == []
    even, longer, narrow, mixed = (predict(row.cluster, row.job).step for row in rows)
    assert 1.3 * even.step_s < longer.step_s < 1.5 * even.step_s  # 18 layers in place of 12, and the ends
    assert narrow.memory.states_bytes == pytest.approx(even.memory.states_bytes * 16 / 18)
    assert mixed.memory.states_bytes > 4 * even.memory.states_bytes
    assert rows[3].job.shape.blocks == ("expert",) * 24


@pytest.mark.parametrize("text", ["12", "6+17", "12+12+0", "six+18"])
def test_layers_of_stages_that_do_not_add_up_are_refused(text, tmp_path):
    row = GOOD | SMALL_PLAN | {"devices": "4", "dp": "1", "tp": "2", "pp": "2", "stage_layers": text}
    (problem,) = read_table(table(tmp_path / "rows.csv", row))
    assert f"column 'stage_layers' is {text!r}: write the layers of each of the pp = 2 stages, such as 1+23" in str(
        problem
    )
