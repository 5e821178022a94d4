"""Predicted against published TFLOP/s of training in fp8 with divided sequences: LLaMA 2 7 B, 4 Ki to 1 Mi tokens, on H100.

In: NVIDIA's table (docs/source/performance/performance_long_sequence.md in github.com/NVIDIA/NeMo: DGX H100, container
NeMo 24.03.01, with context parallelism). Out: for each row the closed form's TFLOP/s beside the published one. Nothing is fitted.
What the table leaves open is assumed: 4 Mi tokens a step, as on the same page's later table for LLaMA 3; microbatches of one
sequence; ZeRO 1; a ring; attention as fast as FlashAttention-2 on H100 (FlashAttention-3, arXiv 2407.08608, its figures of speed
for heads of 128: forward 309 and 370, backward 214 and 322 TFLOP/s at 512 and 16 Ki keys). The faster kernels of cuDNN that the
preset has are priced beside it. FLOPs count attention whole, as NeMo's own formula for LLaMA 2 does. What can go wrong: other
choices in the published runs; the kernel matters most.

    python benchmarks/long_sequences.py [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.cost_model.device import AttentionSpeed
from autopar.cost_model.hardware import preset
from autopar.files.whole_file import save
from autopar.simulate.closed_forms.job_prediction import JobPrediction, predict
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

TOKENS = 4096 * 1024
"""Of a step."""
FLASH_ATTENTION_2 = AttentionSpeed(
    width=128,
    forward_flops_per_s=372e12,
    forward_half_keys=105,
    backward_flops_per_s=327e12,
    backward_half_keys=271,
)
"""Through both lengths that are stated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the table; devices are dp x tp x pp x cp."""

    kibi_tokens: int
    tp: int
    pp: int
    dp: int
    cp: int
    tflops: float

    @property
    def job(self) -> TrainingJob:
        """The run, as far as it is published."""
        shape = TransformerShape(
            family="llama", layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=11008, vocab=32_000,
            seq_len=1024 * self.kibi_tokens,
        )  # fmt: skip
        return TrainingJob(
            shape=shape, devices=self.dp * self.tp * self.pp * self.cp, global_batch=TOKENS // shape.seq_len,
            microbatch=1, data_ranks=self.dp, tensor_ranks=self.tp, stages=self.pp, virtual_stages=1, zero_stage=1,
            sequence_parallel=self.tp > 1, precision="fp8", fused_attention=True, context_ranks=self.cp,
            context_exchange="ring",
        )  # fmt: skip


ROWS = (
    Published(kibi_tokens=4, tp=1, pp=1, dp=4, cp=1, tflops=768),
    Published(kibi_tokens=8, tp=1, pp=2, dp=4, cp=1, tflops=730),
    Published(kibi_tokens=16, tp=2, pp=1, dp=8, cp=1, tflops=660),
    Published(kibi_tokens=32, tp=2, pp=1, dp=8, cp=2, tflops=610),
    Published(kibi_tokens=64, tp=4, pp=1, dp=8, cp=2, tflops=574),
    Published(kibi_tokens=128, tp=4, pp=1, dp=8, cp=4, tflops=555),
    Published(kibi_tokens=256, tp=4, pp=1, dp=8, cp=8, tflops=549),
    Published(kibi_tokens=512, tp=8, pp=1, dp=4, cp=16, tflops=549),
    Published(kibi_tokens=1024, tp=8, pp=1, dp=4, cp=32, tflops=536),
)


def predictions(
    attention: AttentionSpeed | None = FLASH_ATTENTION_2,
) -> Iterator[tuple[Published, JobPrediction, float]]:
    """Each row, its prediction with this kernel or else the preset's, and the error of its TFLOP/s."""
    cluster = preset("dgx-h100")
    if attention:
        cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, attention=(attention,)))
    for row in ROWS:
        found = predict(cluster, row.job)
        yield row, found, found.tflops_per_device / row.tflops - 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table there")
    given = parser.parse_args()
    found = list(predictions())
    table = Table(title="LLaMA 2 7 B in fp8 on H100: TFLOP/s of a device", title_justify="left", box=None)
    for column in ("tokens", "tp", "pp", "dp", "cp", "published", "predicted", "error", "context waits", "memory"):
        table.add_column(column, justify="right")
    for row, one, error in found:
        waits = one.step.communication["context"].exposed_s / one.step.step_s
        table.add_row(
            f"{row.kibi_tokens} Ki", *map(str, (row.tp, row.pp, row.dp, row.cp)), f"{row.tflops:.0f}",
            f"{one.tflops_per_device:.0f}", f"{error:+.1%}", f"{waits:.1%}", f"{one.step.memory.peak_bytes / 2**30:.0f} GiB",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    for name, rows in (("FlashAttention-2", found), ("the preset's kernels", list(predictions(None)))):
        errors = [error for _, _, error in rows]
        mean, worst = statistics.fmean(map(abs, errors)), max(errors, key=abs)
        console.print(f"attention by {name}: mean absolute error {mean:.1%}, worst {worst:+.1%}", highlight=False)
    if given.json:
        lines = [{**dataclasses.asdict(row), "predicted": one.tflops_per_device} for row, one, _ in found]
        save(given.json, json.dumps(lines, indent=2) + "\n")


if __name__ == "__main__":
    main()
