"""Tables of training runs: a CSV row to a `TrainingJob` with what was measured, or what is wrong with it.

In: a CSV file with the columns of the published steps. Out: for each row a `Row`, or a `RowError` that names row, column
and fix; one bad row does not stop the others. An empty cell says "not published": that is allowed for what was measured, for
microbatch and virtual_stages (the fastest that fits is taken), and where a family has no such size. More columns may say
what these leave open: experts, expert_group, expert_every, experts_per_token, shared_experts, head_width, gated,
decoder_layers, width_factor, attention (fused or unfused), optimizer (adam, momentum or adafactor), gradients (fp32 or half: the
format they are added up in), stage_layers (such as 3+3+2: the layers of each stage), stage_kinds (such as a100+v100: of a mixed
cluster), shard_ranks (the data ranks among which ZeRO divides states; all if empty), context_parallel (the ranks among which each
sequence is divided; 1 if empty), context_exchange (all-gather or ring: how these see each other's keys and values),
reduce_gradients (once a step, or in each microbatch, as under ZeRO 2 and 3 if it is empty), offload (optimizer: its states lie in
the host's memory; none if empty), overlap (blocking, none, gradients, tensor or all: what the run's framework let hide; else as
the cluster file says), bucket_MiB (of gradients that are reduced together, in the order of the backward pass).

For wide_resnet, layers is the depth, hidden the base channels, seq_len the image size, vocab the classes, and ffn_hidden
the width factor (or hidden times it). What can go wrong: a table of another meaning under these names.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from autopar.cost_model.hardware import PRESETS, Cluster, find_cluster
from autopar.errors import ArgumentError
from autopar.simulate.closed_forms.prices import NARROW, multiplies_narrow
from autopar.simulate.closed_forms.residual_network import ResidualNetworkShape
from autopar.simulate.closed_forms.stage_work import OverlapOption
from autopar.simulate.closed_forms.training_job import KNOWN_DEPTHS, StageLayout, TrainingJob, problems
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

FAMILIES = ("gpt", "llama", "moe", "t5", "wide_resnet", "bert")
MEASURED = ("step_s", "model_tflops_per_device", "peak_mem_GB")
NEEDED = (
    "cluster", "devices", "family", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "global_batch", "microbatch", "dp", "tp", "pp", "virtual_stages", "ep", "zero_stage", "recompute",
    "sequence_parallel", "precision",
)  # fmt: skip
_MAY_BE_EMPTY = ("microbatch", "virtual_stages", "kv_heads")
_NOT_OF_IMAGES = ("heads", "kv_heads", "ffn_hidden", "sequence_parallel", "ep")
_DEFAULT_EXPERTS = 8
LARGEST = 10**9
"""Of any size; larger ones are slips."""
MOST_LAYERS = 10_000
"""Each layer is looked at; models have had some hundred."""
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class RowError(ValueError):
    """A row cannot be priced; the text names row, column and fix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row that can be priced. What was measured is None where it was not published."""

    number: int
    id: str
    source: str
    cluster_name: str
    cluster: Cluster
    job: TrainingJob
    step_s: float | None
    model_tflops_per_device: float | None
    peak_mem_GB: float | None
    out_of_memory: bool = False


def read_table(path: Path) -> list[Row | RowError]:
    """Every row, in order. Raises ArgumentError if the file is no table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            header, records = reader.fieldnames, list(reader)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path} is not a CSV table: {error}") from None
    if not header or not records:
        raise ArgumentError(f"{path} has no rows: the first line names the columns, each further line is a run")
    names = {name.strip() for name in header if name}
    missing = [column for column in NEEDED if column not in names]
    if missing:
        raise ArgumentError(f"{path} is not a table of runs: its first line lacks {_describe_missing(missing, names)}")
    return [_row_or_error(number, record) for number, record in enumerate(records, start=1)]


def _row_or_error(number: int, record: Mapping[str | None, str | list[str] | None]) -> Row | RowError:
    cells = {key.strip(): value.strip() for key, value in record.items() if key and isinstance(value, str)}
    name = f"row {number} ({cells.get('id') or 'without id'})"
    if None in record:
        return RowError(f"{name}: has more cells than the first line names columns: quote cells that hold a comma")
    try:
        return _row(number, cells)
    except ValueError as error:
        return RowError(f"{name}: {error}")


def _row(number: int, cells: Mapping[str, str]) -> Row:
    short = [column for column in NEEDED if column not in cells]
    if short:
        raise RowError(f"has fewer cells than the first line names columns: {', '.join(short)} are not there")
    family = cells["family"].lower()
    if family not in FAMILIES:
        raise RowError(_join_problems([("family", f"is {cells['family']!r}: use one of {', '.join(FAMILIES)}")]))
    optional = (*_MAY_BE_EMPTY, *(_NOT_OF_IMAGES if family == "wide_resnet" else ()))
    empty = [column for column in NEEDED if not cells[column] and column not in optional]
    if empty:
        raise RowError(
            _join_problems(
                (column, "is empty: it is needed to build the model and its plan; fill it in") for column in empty
            )
        )
    reader = _Cells(cells)
    cluster = _cluster(reader)
    job = _job(reader, family, cluster)
    reader.raise_problems()
    wrong = list(problems(job))
    if wrong:
        raise RowError(_join_problems(wrong))
    step_s, tflops, peak = (reader.number_or_none(column) for column in MEASURED)
    reader.raise_problems()
    return Row(
        number=number,
        id=cells.get("id") or f"row-{number}",
        source=cells.get("source", ""),
        cluster_name=cells["cluster"],
        cluster=cluster,
        job=job,
        step_s=_if_measured(step_s),
        model_tflops_per_device=_if_measured(tflops),
        peak_mem_GB=_if_measured(peak),
        out_of_memory=any(value is not None and value < 0 for value in (step_s, tflops, peak)),
    )


def _if_measured(value: float | None) -> float | None:
    """None for what was not published, or is -1 because the run ran out of memory."""
    return value if value and value > 0 else None


def _join_problems(found: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"column {column!r} {text}" for column, text in found)


def _describe_missing(missing: Sequence[str], names: Iterable[str]) -> str:
    """Columns that a table lacks, and those of its own that may be meant for them."""
    what = f"{len(missing)} of the {len(NEEDED)} columns that it needs: {', '.join(missing)}"
    near = ((_near(column, names), column) for column in missing)
    hints = "".join(f"; {name!r} may be meant for {column!r}: rename it" for name, column in near if name)
    return f"{what if len(missing) > 1 else f'the column {missing[0]!r}'}{hints}"


def _near(column: str, names: Iterable[str]) -> str | None:
    """A column's name that is none of those that are needed, and may be meant for one; None if there is none."""
    return next((name for name in difflib.get_close_matches(column, names, n=1) if name not in NEEDED), None)


def _cluster(reader: _Cells) -> Cluster:
    try:
        return find_cluster(reader.cells["cluster"])
    except ValueError as error:
        raise RowError(
            _join_problems(
                [("cluster", f"is {reader.cells['cluster']!r}: {error}; or give the path of a cluster file")]
            )
        ) from None


class _Cells:
    """Cells read as numbers and words; what cannot be read is gathered and raised together by `done`."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells = cells
        self._wrong: list[tuple[str, str]] = []

    def whole(self, column: str, *, least: int = 1, most: int = LARGEST, empty: int | None = None) -> int:
        text = self.cells.get(column, "")
        if not text and empty is not None:
            return empty
        try:
            number = float(text)
        except ValueError:
            number = least - 1.0
        if not math.isfinite(number) or number != int(number) or number < least:
            self._wrong.append((column, f"is {text!r}: write a whole number of at least {least}"))
            return max(1, least)
        if number > most:
            self._wrong.append((column, f"is {text!r}: write a whole number of at most {most:_}"))
            return max(1, least)
        return int(number)

    def whole_or_none(self, column: str) -> int | None:
        return self.whole(column) if self.cells.get(column) else None

    def word(self, column: str, words: Sequence[str], *, empty: str | None = None) -> str:
        text = self.cells.get(column, "").lower()
        if not text and empty is not None:
            return empty
        if text not in words:
            self._wrong.append((column, f"is {text!r}: use one of {', '.join(words)}"))
            return words[0]
        return text

    def number_or_none(self, column: str) -> float | None:
        text = self.cells.get(column, "")
        try:
            number = float(text or "0")
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self._wrong.append((column, f"is {text!r}: write a number, or leave it empty if it was not published"))
            return None
        return number if text else None

    def raise_problems(self) -> None:
        if self._wrong:
            raise RowError(_join_problems(self._wrong))


def _job(reader: _Cells, family: str, cluster: Cluster) -> TrainingJob:
    shape = _images(reader) if family == "wide_resnet" else _transformer(reader, family)
    precision = reader.word("precision", ("fp16", "bf16", "fp32", "fp8"))
    usual_attention = "fused" if cluster.device.fused_attention else "unfused"
    attention = reader.word("attention", ("fused", "unfused"), empty=usual_attention)
    usual = "momentum" if family == "wide_resnet" else "adam"
    data_ranks, tensor_ranks, stages = reader.whole("dp"), reader.whole("tp"), reader.whole("pp")
    context_ranks = reader.whole("context_parallel", empty=1)
    layers = _stage_layers(reader, len(shape.blocks), stages)
    stage_kinds = _stage_kinds(reader, cluster, stages, data_ranks * tensor_ranks * context_ranks)
    if precision == "fp8":
        _check_narrow([cluster.of_kind(kind) for kind in stage_kinds] or [cluster])
    offload = reader.word("offload", ("none", "optimizer"), empty="none")
    if offload != "none":
        _check_host_links([cluster.of_kind(kind) for kind in stage_kinds] or [cluster])
    return TrainingJob(
        shape=shape,
        devices=reader.whole("devices"),
        global_batch=reader.whole("global_batch"),
        microbatch=reader.whole_or_none("microbatch"),
        data_ranks=data_ranks,
        tensor_ranks=tensor_ranks,
        stages=stages,
        stage_layouts=tuple(StageLayout(count, data_ranks, tensor_ranks) for count in layers),
        stage_kinds=stage_kinds,
        shard_ranks=reader.whole_or_none("shard_ranks"),
        context_ranks=context_ranks,
        context_exchange=reader.word("context_exchange", ("all-gather", "ring"), empty="all-gather"),  # type: ignore[arg-type]
        virtual_stages=reader.whole_or_none("virtual_stages"),
        expert_ranks=reader.whole("ep", empty=1),
        reduce_gradients=reader.word("reduce_gradients", ("once", "each"), empty="usual"),  # type: ignore[arg-type]
        offload=offload,  # type: ignore[arg-type]
        bucket_bytes=2.0**20 * reader.whole("bucket_MiB", empty=0),
        zero_stage=int(reader.word("zero_stage", ("0", "1", "2", "3"))),
        recompute=reader.word("recompute", ("none", "selective", "dots", "full")),  # type: ignore[arg-type]
        sequence_parallel=reader.word("sequence_parallel", (*_NO, *_YES), empty="0") in _YES,
        precision=precision,  # type: ignore[arg-type]
        fused_attention=attention == "fused",
        accumulate_fp32=reader.word("gradients", ("fp32", "half"), empty="fp32") == "fp32",
        overlap=reader.word("overlap", get_args(OverlapOption), empty="usual"),  # type: ignore[arg-type]
        optimizer=reader.word("optimizer", ("adam", "momentum", "adafactor"), empty=usual),  # type: ignore[arg-type]
    )


def _check_narrow(clusters: Iterable[Cluster]) -> None:
    """Raise RowError for a cluster whose file does not say what 8-bit products reach."""
    for cluster in clusters:
        if not multiplies_narrow(cluster):
            known = ", ".join(dict.fromkeys(other.name for other in PRESETS.values() if multiplies_narrow(other)))
            text = f"is 'fp8', but the cluster file of {cluster.name} does not say what {cluster.device.name} reaches in it: use "
            fix = f"bf16, or one of {known}, or state {NARROW} in peak_flops_per_s and matrix_efficiency of a file of yours"
            raise RowError(_join_problems([("precision", text + fix)]))


def _check_host_links(clusters: Iterable[Cluster]) -> None:
    """Raise RowError for a cluster whose file does not say how fast its devices reach the host's memory."""
    for cluster in clusters:
        if not cluster.device.host_bytes_per_s:
            known = ", ".join(dict.fromkeys(other.name for other in PRESETS.values() if other.device.host_bytes_per_s))
            fact = f"is 'optimizer', but the cluster file of {cluster.name} states no device.host_bytes_per_s"
            raise RowError(
                _join_problems(
                    [("offload", f"{fact}: leave it empty, use one of {known}, or state it in a file of yours")]
                )
            )


def _stage_layers(reader: _Cells, layers: int, stages: int) -> tuple[int, ...]:
    """The column `stage_layers`; nothing where stages are even."""
    text = reader.cells.get("stage_layers", "")
    if not text:
        return ()
    counts = tuple(int(part) for part in text.split("+")) if re.fullmatch(r"\d+(\+\d+)*", text) else ()
    if len(counts) != stages or sum(counts) != layers or 0 in counts or reader.whole("virtual_stages", empty=1) > 1:
        example = "+".join(["1"] * (stages - 1) + [str(max(1, layers - stages + 1))])
        fix = f"write the layers of each of the pp = {stages} stages, such as {example}, {layers} in all, without virtual stages"
        raise RowError(_join_problems([("stage_layers", f"is {text!r}: {fix}")]))
    return counts


def _stage_kinds(reader: _Cells, cluster: Cluster, stages: int, devices: int) -> tuple[str, ...]:
    """The column `stage_kinds`: the kind of node of each stage, of so many devices; nothing where nodes are alike."""
    text = reader.cells.get("stage_kinds", "")
    if not text:
        return ()
    kinds, known = tuple(text.split("+")), {kind.name: kind for kind in cluster.node_kinds}
    there = ", ".join(known) or "none, all its nodes are alike"
    fix = f"write the kind of node of each of the pp = {stages} stages, joined by +; {cluster.name} has {there}"
    if len(kinds) != stages or not known.keys() >= {*kinds}:
        raise RowError(_join_problems([("stage_kinds", f"is {text!r}: {fix}")]))
    for name in dict.fromkeys(kinds):
        most = known[name].count * known[name].devices_per_node
        if kinds.count(name) * devices > most:
            fact = f"is {text!r}: {kinds.count(name)} stages of {devices} devices on {name}, of which there are {most}"
            raise RowError(_join_problems([("stage_kinds", f"{fact}: use fewer or smaller stages there")]))
    return kinds


def _transformer(reader: _Cells, family: str) -> TransformerShape:
    heads = reader.whole("heads")
    return TransformerShape(
        family=family,  # type: ignore[arg-type]
        layers=reader.whole("layers", most=MOST_LAYERS),
        hidden=reader.whole("hidden"),
        heads=heads,
        kv_heads=reader.whole("kv_heads", empty=heads),
        ffn_hidden=reader.whole("ffn_hidden"),
        vocab=reader.whole("vocab"),
        seq_len=reader.whole("seq_len"),
        experts=_experts(reader) if family == "moe" else 1,
        expert_group=reader.whole("expert_group", least=0, empty=0),
        expert_every=reader.whole("expert_every", empty=2),
        experts_per_token=reader.whole("experts_per_token", empty=2),
        shared_experts=reader.whole("shared_experts", least=0, empty=0) if family == "moe" else 0,
        head_width=reader.whole_or_none("head_width"),
        gating=reader.word("gated", (*_NO, *_YES)) in _YES if reader.cells.get("gated") else None,
        decoder_layers=reader.whole_or_none("decoder_layers") if family == "t5" else None,
    )


def _experts(reader: _Cells) -> int:
    """The column `experts`, else "N experts" or "experts N" in the note, else 8, or as many as there are expert ranks.

    The note is prose, and the published table has the number of experts nowhere else. A note that speaks of another run's
    experts, or spells the number out, misleads this reading; the column `experts` overrides it.
    """
    if reader.cells.get("experts"):
        return reader.whole("experts")
    noted = re.search(r"(\d+)\s*experts|experts\D{0,3}(\d+)", reader.cells.get("note", ""))
    if noted:
        return int(noted[1] or noted[2])
    return max(_DEFAULT_EXPERTS, reader.whole("ep", empty=1))


def _images(reader: _Cells) -> ResidualNetworkShape:
    channels, depth = reader.whole("hidden"), reader.whole("layers")
    if depth not in KNOWN_DEPTHS:
        raise RowError(
            _join_problems(
                [("layers", f"is {depth}: a residual network has a depth of {', '.join(map(str, KNOWN_DEPTHS))}")]
            )
        )
    width = reader.whole("width_factor", empty=reader.whole("ffn_hidden", empty=2))
    return ResidualNetworkShape(
        depth=depth,
        channels=channels,
        width_factor=width // channels if width >= channels else width,
        image_size=reader.whole("seq_len", least=32),
        classes=reader.whole("vocab"),
    )
