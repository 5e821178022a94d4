"""Cluster files: JSON to `Cluster` and back.

In: a path, or the JSON as a dictionary. Out: a `Cluster`. What can go wrong is a `ClusterFileError`, which names the file, the
place in it, what stands there and what is expected.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from autopar.cost_model.cluster_schema import ClusterFileError, check_fields, check_tiers
from autopar.cost_model.device import AttentionSpeed, Device, MatrixEfficiency, slowest_device
from autopar.cost_model.json_files import JsonError, parse_json
from autopar.cost_model.machine import Cluster, NodeKind, Overlap
from autopar.cost_model.thread_blocks import ThreadBlocks
from autopar.cost_model.tiers import MeasuredCollective, Tier

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = "autopar-cluster-1"
_OF_A_PLAN = "fingerprint"
"""A name that the file of a plan has, and that of a cluster has not."""
Fields: TypeAlias = Mapping[str, Any]
"""JSON that the schema has checked: the names are the parameters of the dataclasses, the values of their types."""

__all__ = ["ClusterFileError", "cluster_from_json", "cluster_text", "cluster_to_json", "load_cluster"]


def load_cluster(path: str | Path) -> Cluster:
    """Read the cluster in a file. Raises ClusterFileError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ClusterFileError(
            f"cluster file {path}: {reason}; `python -m autopar calibrate -o FILE` writes one"
        ) from None
    try:
        fields = parse_json(text)
    except JsonError as error:
        raise ClusterFileError(f"cluster file {path}: {error}") from None
    if isinstance(fields, dict) and _OF_A_PLAN in fields:
        raise ClusterFileError(
            f"cluster file {path}: this is a plan, not a cluster file; `python -m autopar calibrate -o FILE` writes one"
        )
    return cluster_from_json(fields, origin=str(path))


def cluster_from_json(fields: object, *, origin: str) -> Cluster:
    """The cluster that a file's JSON states; `origin` names the file in errors. Raises ClusterFileError."""
    check_fields(fields, origin)
    return _cluster(cast(Fields, fields), origin)


def _cluster(fields: Fields, origin: str) -> Cluster:
    """The cluster of fields that follow the schema."""
    compiler = fields.get("compiler", {})
    overlap = fields.get("overlap", {})
    kinds = tuple(_node_kind(kind, f"node_kinds.{i}", origin) for i, kind in enumerate(fields.get("node_kinds", ())))
    inner = _slowest_tiers(kinds) if kinds else ()
    tiers = (*inner, *(_tier(tier) for tier in fields["tiers"]))
    check_tiers(tiers, "tiers", origin, skipped=len(inner))
    device = slowest_device([kind.device for kind in kinds]) if kinds else _device(fields["device"])
    return Cluster(
        name=fields["name"],
        device=device,
        tiers=tiers,
        overlap=Overlap(**overlap),
        node_kinds=kinds,
        joint_reductions=compiler.get("joint_reductions", True),
        all_reduce_latency=compiler.get("all_reduce_latency", 1.0),
        call_s=compiler.get("call_s", 0.0),
        call_s_per_array=compiler.get("call_s_per_array", 0.0),
        call_s_per_byte=compiler.get("call_s_per_byte", 0.0),
        sent_s_per_array=compiler.get("sent_s_per_array", 0.0),
        shares_host=compiler.get("shares_host", False),
        usd_per_device_hour=fields.get("usd_per_device_hour"),
    )


def cluster_to_json(cluster: Cluster, *, about: str, sources: Mapping[str, str]) -> dict[str, object]:
    """What a file of this cluster holds; fields at their defaults are left out. Only for clusters with tiers."""
    network = cluster.tiers
    fields: dict[str, object] = {"format": FORMAT, "name": cluster.name, "about": about}
    if cluster.node_kinds:
        network = cluster.tiers[len(cluster.node_kinds[0].tiers) :]
        fields["node_kinds"] = [_plain(kind) for kind in cluster.node_kinds]
    else:
        fields["device"] = _plain(cluster.device)
    fields["tiers"] = [_plain(tier) for tier in network]
    if cluster.usd_per_device_hour is not None:
        fields["usd_per_device_hour"] = cluster.usd_per_device_hour
    fields["overlap"] = {"hidden": {}, "interference": 0.0, **_plain(cluster.overlap)}
    fields["compiler"] = {
        "joint_reductions": cluster.joint_reductions,
        "all_reduce_latency": cluster.all_reduce_latency,
        "call_s": cluster.call_s,
        "call_s_per_array": cluster.call_s_per_array,
        "call_s_per_byte": cluster.call_s_per_byte,
        "sent_s_per_array": cluster.sent_s_per_array,
        "shares_host": cluster.shares_host,
    }
    return {**fields, "sources": dict(sources)}


def cluster_text(cluster: Cluster, *, about: str, sources: Mapping[str, str]) -> str:
    """The text of a cluster file that `load_cluster` reads back as an equal cluster."""
    return json.dumps(cluster_to_json(cluster, about=about, sources=sources), indent=2) + "\n"


def _plain(value: DataclassInstance) -> dict[str, object]:
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


def _plain_content(content: object) -> object:
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        return _plain(content)
    if isinstance(content, Mapping):
        return {key: _plain_content(item) for key, item in content.items()}
    if isinstance(content, tuple):
        return [_plain_content(item) for item in content]
    return content


def _device(fields: Fields) -> Device:
    curves = {name: _curves(fields.get(name, {})) for name in ("matrix_efficiency", "convolution_efficiency")}
    attention = tuple(AttentionSpeed(**speed) for speed in fields.get("attention", ()))
    return Device(**{**fields, **curves, "attention": attention, "thread_blocks": _blocks(fields.get("thread_blocks"))})


def _blocks(fields: Fields | None) -> ThreadBlocks | None:
    if fields is None:
        return None
    tiles = tuple((rows, columns) for rows, columns in fields["tiles"])
    return ThreadBlocks(**{**fields, "tiles": tiles, "formats": tuple(fields["formats"])})


def _curves(fields: Fields) -> dict[str, MatrixEfficiency]:
    return {
        dtype: MatrixEfficiency(curve.get("best", 1.0), tuple(curve.get("half", (0.0, 0.0, 0.0))))
        for dtype, curve in fields.items()
    }


def _tier(fields: Fields) -> Tier:
    counts = tuple(tuple(row) for row in fields.get("link_counts", ()))
    measured = {kind: MeasuredCollective(**figures) for kind, figures in fields.get("measured", {}).items()}
    return Tier(**{**fields, "link_counts": counts, "measured": measured})


def _node_kind(fields: Fields, place: str, origin: str) -> NodeKind:
    tiers = tuple(_tier(tier) for tier in fields["tiers"])
    check_tiers(tiers, f"{place}.tiers", origin)
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
