"""Tables of runs for the tests of `simulate`: a good row, models as rows, and what the command prints as JSON."""

import csv
import json
from pathlib import Path

import pytest

from autopar.__main__ import main

PUBLISHED = Path(__file__).parent / "data" / "yardstick" / "published_steps.csv"
GOOD = {
    "source": "a table", "id": "good", "cluster": "dgx-a100-80gb", "devices": "64", "family": "gpt", "layers": "96",
    "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn_hidden": "49152", "vocab": "51200", "seq_len": "2048",
    "global_batch": "64", "microbatch": "1", "dp": "1", "tp": "8", "pp": "8", "virtual_stages": "3", "ep": "1",
    "zero_stage": "0", "recompute": "selective", "sequence_parallel": "1", "precision": "fp16", "step_s": "13.75",
    "model_tflops_per_device": "", "peak_mem_GB": "", "note": "",
}  # fmt: skip


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
