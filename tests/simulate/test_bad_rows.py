"""`simulate --table`: rows, columns and cluster files that cannot be used are told, each with its place."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from autopar.__main__ import main
from autopar.errors import ArgumentError
from autopar.simulate.rows import NEEDED, RowError, read_table
from tests.run_tables import GOOD, json_of, table

BAD = [
    ({"tp": "5", "devices": "40"}, "column 'tp' is 5, which does not divide heads = 96: use one of 4, 6, 3, 2"),
    ({"devices": "63"}, "column 'devices' is 63, but dp x tp x pp is 1 x 8 x 8 = 64: make them equal"),
    (
        {"layers": "95"},
        "column 'layers' has 95 layers, which pp x virtual_stages = 8 x 3 = 24 does not divide: use 96 layers",
    ),
    ({"cluster": "dgx-a900"}, "column 'cluster' is 'dgx-a900': no cluster preset 'dgx-a900'"),
    ({"hidden": ""}, "column 'hidden' is empty: it is needed to build the model and its plan; fill it in"),
    ({"layers": "1e9"}, "column 'layers' is '1e9': write a whole number of at most 10_000"),
    ({"vocab": "1e10"}, "column 'vocab' is '1e10': write a whole number of at most 1_000_000_000"),
    ({"hidden": "wide"}, "column 'hidden' is 'wide': write a whole number of at least 1"),
    ({"family": "rnn"}, "column 'family' is 'rnn': use one of gpt, llama, moe, t5, wide_resnet, bert"),
    ({"recompute": "some"}, "column 'recompute' is 'some': use one of none, selective, dots, full"),
    ({"zero_stage": "4"}, "column 'zero_stage' is '4': use one of 0, 1, 2, 3"),
    ({"precision": "fp4"}, "column 'precision' is 'fp4': use one of fp16, bf16, fp32, fp8"),
    (
        {"precision": "fp8"},
        "column 'precision' is 'fp8', but the cluster file of dgx-a100-80gb does not say what A100-SXM4-80GB reaches in it: use "
        "bf16, or one of a3-mega, b200, dgx-h100, dgx-h200, gb200-nvl72, gb300-nvl72, h200, tpu-v7, or state float8 in "
        "peak_flops_per_s",
    ),
    (
        {
            "family": "wide_resnet",
            "layers": "50",
            "hidden": "160",
            "seq_len": "224",
            "virtual_stages": "1",
            "recompute": "none",
            "cluster": "dgx-h100",
            "precision": "fp8",
        },
        "column 'precision' is 'fp8', but convolutions have no price in it: use bf16",
    ),
    (
        {"global_batch": "63", "microbatch": "2"},
        "column 'global_batch' is 63, which dp x microbatch = 1 x 2 = 2 does not divide",
    ),
    (
        {"global_batch": "63"},
        "column 'virtual_stages' is 3: the interleaved schedule needs a number of microbatches that pp = 8",
    ),
    ({"heads": "97", "kv_heads": "97"}, "column 'heads' is 97, which does not divide hidden = 12288"),
    (
        {"stage_kinds": "a100+v100"},
        "column 'stage_kinds' is 'a100+v100': write the kind of node of each of the pp = 8 stages, joined by +; dgx-a100-80gb "
        "has none, all its nodes are alike",
    ),
    (
        {"cluster": "mixed-a100-v100", "stage_kinds": "+".join(["a100"] * 4 + ["v100"] * 4)},
        "column 'stage_kinds' is 'a100+a100+a100+a100+v100+v100+v100+v100': 4 stages of 8 devices on a100, of which there are 16",
    ),
    ({"shard_ranks": "8"}, "column 'shard_ranks' is 8, but zero_stage is 0, which divides nothing"),
    (
        {"context_parallel": "2"},
        "column 'devices' is 64, but dp x tp x pp x context_parallel is 1 x 8 x 8 x 2 = 128: make them equal",
    ),
    (
        {"context_parallel": "3", "devices": "192"},
        "column 'context_parallel' is 3: each rank has one piece of both halves of the sequence, so that causal attention is "
        "even, but 2 x 3 does not divide seq_len = 2048: use one of 2, 4, 1, 8",
    ),
    (
        {"context_parallel": "512", "devices": str(64 * 512)},
        "column 'context_parallel' is 512, which leaves 4 tokens of a sequence to a rank; tp = 8 does not divide them",
    ),
    (
        {"context_parallel": "2", "devices": "128", "context_exchange": "ring", "attention": "unfused"},
        "column 'context_exchange' is 'ring', but attention is unfused: a ring adds up blocks by the sums",
    ),
    ({"context_parallel": "half"}, "column 'context_parallel' is 'half': write a whole number of at least 1"),
    ({"reduce_gradients": "never"}, "column 'reduce_gradients' is 'never': use one of once, each"),
    (
        {"family": "moe", "recompute": "dots"},
        "column 'recompute' is 'dots', which keeps products without batch dimensions; those of experts have one: use none",
    ),
    ({"offload": "weights"}, "column 'offload' is 'weights': use one of none, optimizer"),
    (
        {"cluster": "tpu-v5p", "offload": "optimizer"},
        "column 'offload' is 'optimizer', but the cluster file of tpu-v5p states no device.host_bytes_per_s: leave it empty, use "
        "one of a3-mega, dgx-a100-40gb, dgx-a100-80gb, dgx-h100, dgx-h200, h200, p4d.24xlarge, or state it in a file of yours",
    ),
    ({"context_exchange": "ulysses"}, "column 'context_exchange' is 'ulysses': use one of all-gather, ring"),
    (
        {
            "family": "wide_resnet",
            "layers": "50",
            "hidden": "160",
            "seq_len": "224",
            "virtual_stages": "1",
            "recompute": "none",
            "context_parallel": "2",
            "devices": "128",
        },
        "column 'context_parallel' is 2, but images have no sequence to divide: use 1",
    ),
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


@pytest.fixture(scope="module")
def bad_and_good(tmp_path_factory):
    """(what is found in a table of all bad rows, a good one after each; standard error)."""
    optional = (
        "stage_kinds",
        "shard_ranks",
        "context_parallel",
        "context_exchange",
        "attention",
        "reduce_gradients",
        "offload",
    )
    good = GOOD | dict.fromkeys(optional, "")
    rows = [row for changes, _ in BAD for row in (good | {"id": "bad"} | changes, good)]
    path = table(tmp_path_factory.mktemp("rows") / "rows.csv", *rows)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        assert main(["simulate", "--table", str(path), "--json"]) == 1
    return json.loads(out.getvalue()), errors.getvalue()


@pytest.mark.parametrize("number", range(len(BAD)), ids=[",".join(changes) for changes, _ in BAD])
def test_a_bad_row_is_named_with_its_column_and_a_fix(number, bad_and_good):
    found, errors = bad_and_good
    _, text = BAD[number]
    assert f"rows.csv: row {2 * number + 1} (bad): {text}" in errors
    assert text in found["errors"][number]


def test_the_rows_beside_bad_ones_run(bad_and_good):
    found, errors = bad_and_good
    assert [row["id"] for row in found["rows"]] == ["good"] * len(BAD)
    assert len(found["errors"]) == len(errors.splitlines()) == len(BAD)


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


@pytest.mark.parametrize("column", NEEDED)
def test_a_missing_column_is_named_once(column, tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", *[{key: value for key, value in GOOD.items() if key != column}] * 2)
    assert main(["simulate", "--table", str(rows)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count(" lacks ") == 1
    assert f"rows.csv is not a table of runs: its first line lacks the column {column!r}" in errors


def test_a_renamed_column_is_recognised(tmp_path, capsys):
    rows = table(tmp_path / "rows.csv", {{"hidden": "hiden"}.get(key, key): value for key, value in GOOD.items()})
    with pytest.raises(ArgumentError, match="lacks the column 'hidden'; 'hiden' may be meant for 'hidden': rename it"):
        read_table(rows)


def test_a_file_of_another_kind_is_told_in_one_line_with_all_columns_that_it_lacks(tmp_path, capsys):
    (tmp_path / "step.py").write_text("import jax\n\ndef step(state, batch):\n    return state, {'loss': 1, 'a': 2}\n")
    assert main(["simulate", "--table", str(tmp_path / "step.py")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert (
        "step.py is not a table of runs: its first line lacks 21 of the 21 columns that it needs: cluster, devices,"
        in errors
    )


def test_a_line_with_too_few_cells_is_an_error_of_its_row(tmp_path):
    path = table(tmp_path / "rows.csv", GOOD)
    path.write_text(path.read_text(encoding="utf-8") + "short,dgx-h100\n", encoding="utf-8")
    assert "has fewer cells than the first line names columns" in str(read_table(path)[1])


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


BAD_CLUSTERS = [
    (lambda fields: fields.pop("tiers"), "the file lacks 'tiers'"),
    (lambda fields: fields["device"].pop("memory_bytes"), "device lacks 'memory_bytes'"),
    (lambda fields: fields["device"].update(memory_efficiency=1.5), "device.memory_efficiency is 1.5; at most 1"),
    (lambda fields: fields["device"].update(peak_flop_per_s={}), "did you mean peak_flops_per_s?"),
    (lambda fields: fields["tiers"][0].update(topology="mesh"), 'tiers.0.topology is "mesh"; one of'),
    (lambda fields: fields["overlap"]["hidden"].update(tensor="much"), 'overlap.hidden.tensor is "much"; a number'),
]


def test_bad_cluster_files_are_errors_of_their_rows_with_the_place_in_the_file(tmp_path, capsys):
    source = Path(__file__).parents[2] / "cost_model" / "clusters" / "dgx-h100.json"
    paths = [tmp_path / f"ours_{number}.json" for number in range(len(BAD_CLUSTERS))]
    for path, (change, _) in zip(paths, BAD_CLUSTERS, strict=True):
        fields = json.loads(source.read_text(encoding="utf-8"))
        change(fields)
        path.write_text(json.dumps(fields), encoding="utf-8")
    rows = table(tmp_path / "rows.csv", *(GOOD | {"id": "ours", "cluster": str(path)} for path in paths), GOOD)
    status, found, errors = json_of(["--table", str(rows)], capsys)
    assert (status, [row["id"] for row in found["rows"]]) == (1, ["good"])
    assert len(errors.splitlines()) == len(BAD_CLUSTERS)
    for number, (path, line) in enumerate(zip(paths, errors.splitlines(), strict=True), start=1):
        assert f"rows.csv: row {number} (ours): column 'cluster' is '{path}': {path}" in line
        assert BAD_CLUSTERS[number - 1][1] in line
    assert main(["simulate", "--table", str(rows)]) == 1  # tables as well as JSON
    captured = capsys.readouterr()
    assert "good" in captured.out
    assert captured.err == errors
