"""Clusters by name: the presets in `clusters/`, and which of them a JAX device is nearest to.

In: a preset's name or alias, a path, or a device's platform and kind. Out: a `Cluster`. Each preset is a cluster file with
the source of every figure; it is read when it is asked for. What can go wrong: an unknown name; the error lists the
nearest ones.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from autopar.cost_model.cluster_files import ClusterFileError, load_cluster
from autopar.cost_model.machine import Cluster, Device, MatrixEfficiency, NodeKind, Overlap

__all__ = [
    "PRESETS",
    "Cluster",
    "ClusterFileError",
    "Device",
    "MatrixEfficiency",
    "NodeKind",
    "Overlap",
    "find_cluster",
    "load_cluster",
    "preset",
    "preset_for_device_kind",
]

_FOLDER = Path(__file__).resolve().parent / "clusters"
_KINDS = {
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "B200": "b200",
    "A100": "dgx-a100-80gb",
    "V100": "p3.16xlarge",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6": "tpu-v6e",
}


class _Presets(Mapping[str, Cluster]):
    """Name or alias -> cluster; files are read on first use."""

    def __getitem__(self, name: str) -> Cluster:
        return _load(_files()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_files())

    def __len__(self) -> int:
        return len(_files())


PRESETS: Mapping[str, Cluster] = _Presets()


def preset(name: str) -> Cluster:
    """The cluster of that name or alias; an unknown name raises ValueError with the names there are."""
    try:
        return PRESETS[name]
    except KeyError:
        close = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)
        nearest = f"; nearest: {', '.join(close)}" if close else ""
        raise ValueError(f"no cluster preset {name!r}; there are: {', '.join(PRESETS)}{nearest}") from None


def find_cluster(name_or_path: str) -> Cluster:
    """A preset, or the cluster in a file if the text is a path (ends in .json or holds a separator).

    Raises ValueError for an unknown preset, ClusterFileError (a ValueError) for a bad file.
    """
    if name_or_path.endswith(".json") or "/" in name_or_path:
        return load_cluster(name_or_path)
    return preset(name_or_path)


def preset_for_device_kind(platform: str, device_kind: str) -> Cluster:
    """The preset nearest to a JAX device's platform and kind (`jax.Device.platform`, `.device_kind`)."""
    if platform == "cpu":
        return PRESETS["cpu"]
    for word, name in _KINDS.items():
        if word in device_kind:
            return PRESETS[name]
    return PRESETS["tpu-v5e" if platform == "tpu" else "dgx-a100-80gb"]


@functools.cache
def _files() -> Mapping[str, Path]:
    """The file of each name and alias; "cpu" first, then names in order, then aliases."""
    names: dict[str, Path] = {"cpu": _FOLDER / "cpu.json"}
    aliases: dict[str, Path] = {}
    for path in sorted(_FOLDER.glob("*.json")):
        fields = json.loads(path.read_text(encoding="utf-8"))
        names[fields["name"]] = path
        aliases.update(dict.fromkeys(fields.get("aliases", ()), path))
    return {**names, **aliases}


@functools.cache
def _load(path: Path) -> Cluster:
    return load_cluster(path)
