"""Cluster files: JSON to `Cluster` and back.

In: a path, or the JSON as a dictionary. Out: a `Cluster`. A file is checked against `cluster.schema.json` and then for what a
schema cannot say: tiers that grow from the inside out, link tables that fit their group. What can go wrong is a
`ClusterFileError`, which names the file, the place in it, what stands there and what is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from autopar.cost_model.machine import Cluster, Device, MatrixEfficiency, NodeKind, Overlap, slowest_device
from autopar.cost_model.topology import MeasuredCollective, Tier

FORMAT = "autopar-cluster-1"
SCHEMA_FILE = Path(__file__).resolve().parent / "cluster.schema.json"


class ClusterFileError(ValueError):
    """A cluster file cannot be used: where, what stands there, what is expected."""


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a file. Raises ClusterFileError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ClusterFileError(
            f"cluster file {path}: {reason}; `python -m autopar calibrate -o FILE` writes one"
        ) from None
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterFileError(f"cluster file {path}: line {error.lineno} is not JSON: {error.msg}") from None
    return cluster_from(fields, origin=str(path))


def cluster_from(fields: Any, *, origin: str) -> Cluster:
    """The cluster that a file's JSON states; `origin` names the file in errors. Raises ClusterFileError."""
    _check_schema(fields, origin)
    compiler = fields.get("compiler", {})
    overlap = fields.get("overlap", {})
    kinds = tuple(_node_kind(kind, f"node_kinds.{i}", origin) for i, kind in enumerate(fields.get("node_kinds", ())))
    inner = _slowest_tiers(kinds) if kinds else ()
    tiers = (*inner, *(_tier(tier) for tier in fields["tiers"]))
    _check_tiers(tiers, "tiers", origin, skipped=len(inner))
    device = slowest_device([kind.device for kind in kinds]) if kinds else _device(fields["device"])
    return Cluster(
        fields["name"],
        device,
        tiers,
        Overlap(overlap.get("hidden", {}), overlap.get("interference", 0.0)),
        kinds,
        joint_reductions=compiler.get("joint_reductions", True),
        all_reduce_latency=compiler.get("all_reduce_latency", 1.0),
        call_s=compiler.get("call_s", 0.0),
        call_s_per_array=compiler.get("call_s_per_array", 0.0),
    )


def cluster_to_json(cluster: Cluster, *, about: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """What a file of this cluster holds; fields at their defaults are left out. Only for clusters with tiers."""
    network = cluster.tiers
    fields: dict[str, Any] = {"format": FORMAT, "name": cluster.name, "about": about}
    if cluster.node_kinds:
        network = cluster.tiers[len(cluster.node_kinds[0].tiers) :]
        fields["node_kinds"] = [_plain(kind) for kind in cluster.node_kinds]
    else:
        fields["device"] = _plain(cluster.device)
    fields["tiers"] = [_plain(tier) for tier in network]
    fields["overlap"] = {"hidden": dict(cluster.overlap.hidden), "interference": cluster.overlap.interference}
    fields["compiler"] = {
        "joint_reductions": cluster.joint_reductions,
        "all_reduce_latency": cluster.all_reduce_latency,
        "call_s": cluster.call_s,
        "call_s_per_array": cluster.call_s_per_array,
    }
    return {**fields, "sources": dict(sources)}


def save_cluster(path: str | Path, cluster: Cluster, *, about: str, sources: Mapping[str, str]) -> None:
    """Write a cluster file that `load_cluster` reads back as an equal cluster."""
    text = json.dumps(cluster_to_json(cluster, about=about, sources=sources), indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> dict[str, Any]:
    """A frozen dataclass as a dictionary without the fields that have their default value."""
    fields = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.default is not dataclasses.MISSING and content == field.default:
            continue
        if field.default_factory is not dataclasses.MISSING and content == field.default_factory():
            continue
        fields[field.name] = _plain_content(content)
    return fields


def _plain_content(content: Any) -> Any:
    if dataclasses.is_dataclass(content):
        return _plain(content)
    if isinstance(content, Mapping):
        return {key: _plain_content(item) for key, item in content.items()}
    if isinstance(content, tuple):
        return [_plain_content(item) for item in content]
    return content


def _device(fields: Mapping[str, Any]) -> Device:
    curves = {name: _curves(fields.get(name, {})) for name in ("matrix_efficiency", "convolution_efficiency")}
    return Device(**{**fields, **curves})


def _curves(fields: Mapping[str, Any]) -> dict[str, MatrixEfficiency]:
    return {
        dtype: MatrixEfficiency(curve.get("best", 1.0), tuple(curve.get("half", (0.0, 0.0, 0.0))))
        for dtype, curve in fields.items()
    }


def _tier(fields: Mapping[str, Any]) -> Tier:
    counts = tuple(tuple(row) for row in fields.get("link_counts", ()))
    measured = {kind: MeasuredCollective(**figures) for kind, figures in fields.get("measured", {}).items()}
    return Tier(**{**fields, "link_counts": counts, "measured": measured})


def _node_kind(fields: Mapping[str, Any], place: str, origin: str) -> NodeKind:
    tiers = tuple(_tier(tier) for tier in fields["tiers"])
    _check_tiers(tiers, f"{place}.tiers", origin)
    if tiers[-1].devices is None:
        raise ClusterFileError(
            f"{origin}: {place}.tiers.{len(tiers) - 1}.devices is null; the outermost tier of a node says how many devices "
            "the node has"
        )
    return NodeKind(fields["name"], fields["count"], _device(fields["device"]), tiers)


def _slowest_tiers(kinds: Sequence[NodeKind]) -> tuple[Tier, ...]:
    """The tiers inside the kind of node whose own links are slowest, with as many devices as the smallest node."""
    weakest = min(kinds, key=lambda kind: min(tier.sustained_bytes_per_s for tier in kind.tiers))
    fewest = min(kind.devices_per_node for kind in kinds)
    return (*weakest.tiers[:-1], dataclasses.replace(weakest.tiers[-1], devices=fewest))


def _check_tiers(tiers: Sequence[Tier], place: str, origin: str, *, skipped: int = 0) -> None:
    below = 1
    for number, tier in enumerate(tiers):
        here = f"{origin}: {place}.{number - skipped}"
        if tier.devices is None and number < len(tiers) - 1:
            raise ClusterFileError(f"{here}.devices is null; only the outermost tier may join any number of devices")
        if tier.devices is not None and (tier.devices < below or tier.devices % below):
            raise ClusterFileError(
                f"{here}.devices is {tier.devices}; a multiple of the {below} devices of the tier below is expected"
            )
        side = tier.devices or 0
        if tier.topology == "hybrid-cube-mesh":
            if len(tier.link_counts) != side or any(len(row) != side for row in tier.link_counts):
                raise ClusterFileError(
                    f"{here}.link_counts: {side} rows of {side} numbers of links are expected, as the group has {side} devices"
                )
            if tier.fallback_bytes_per_s <= 0:
                raise ClusterFileError(
                    f"{here}.fallback_bytes_per_s is missing; a hybrid cube mesh needs it for devices without a link"
                )
        below = tier.devices or below


def _check_schema(fields: Any, origin: str) -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(fields), key=lambda e: list(map(str, e.path)))
    if errors:
        raise ClusterFileError("; ".join(f"{origin}: {_explained(error)}" for error in errors[:5]))


def _explained(error: Any) -> str:
    """One schema violation as place, value, expected."""
    place = ".".join(map(str, error.absolute_path)) or "the file"
    shown = json.dumps(error.instance)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    match error.validator:
        case "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            return f"{place} lacks {', '.join(map(repr, missing))}"
        case "additionalProperties":
            known = sorted(error.schema.get("properties", ()))
            unknown = sorted(set(error.instance) - set(known))
            close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
            hint = f"did you mean {', '.join(close)}?" if close else f"it takes {', '.join(known)}"
            return f"{place} has unknown {', '.join(map(repr, unknown))}; {hint}"
        case "oneOf":
            return f"{place} needs either 'device' or, for a mixed cluster, 'node_kinds'"
        case "enum":
            return f"{place} is {shown}; one of {', '.join(map(repr, error.validator_value))} is expected"
        case "const":
            return f"{place} is {shown}; {error.validator_value!r} is expected"
        case "type":
            kinds = error.validator_value
            return f"{place} is {shown}; {' or '.join([kinds] if isinstance(kinds, str) else kinds)} is expected"
        case "minimum" | "exclusiveMinimum" | "maximum":
            words = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}[error.validator]
            return f"{place} is {shown}; {words} {error.validator_value} is expected"
    return f"{place} is {shown}: {error.message}"
