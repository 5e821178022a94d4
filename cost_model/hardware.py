"""Clusters by name: the presets in `clusters/`, and which of them is nearest to a JAX device.

Each preset is a cluster file with the source of every figure; it is read when it is asked for. What can go wrong: an unknown
name; the error lists the nearest ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from autopar.cost_model.cluster_files import ClusterFileError, load_cluster
from autopar.cost_model.device import Device, MatrixEfficiency
from autopar.cost_model.machine import Cluster, NodeKind, Overlap

__all__ = [
    "PRESETS",
    "Cluster",
    "ClusterFileError",
    "Device",
    "MatrixEfficiency",
    "NearestPreset",
    "NodeKind",
    "Overlap",
    "find_cluster",
    "find_preset",
    "load_cluster",
    "preset",
]

_FOLDER = Path(__file__).resolve().parent / "clusters"
_KINDS: Mapping[str, str] = {
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "GB300": "gb300-nvl72",
    "GB200": "gb200-nvl72",
    "B200": "b200",
    "A100": "dgx-a100-80gb",
    "V100-PCIE": "v100-pcie",
    "V100": "p3.16xlarge",
    "T4": "g4dn.12xlarge",
    "L4": "g2-standard-96",
    "MI300X": "mi300x",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6": "tpu-v6e",
    "TPU7x": "tpu-v7",
    "TPU v7": "tpu-v7",
}
"""The preset of each kind of device, by a whole word of `jax.Device.device_kind`; the first that occurs counts."""
_UNKNOWN = {"tpu": "tpu-v5e", "gpu": "dgx-a100-80gb"}
"""The preset of kinds that are not listed."""


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


@dataclasses.dataclass(frozen=True)
class NearestPreset:
    """The preset taken for a device, and whether the device's kind is one that a preset is made for."""

    cluster: Cluster
    device_kind: str
    is_known: bool

    @property
    def guess(self) -> str | None:
        """What was guessed and what to do about it, in words for a warning; None for a known kind."""
        if self.is_known:
            return None
        return (
            f"there is no cluster preset for devices of kind {self.device_kind!r}: they are priced as {self.cluster.name!r}, so "
            "predicted seconds and the memory limit may be far off. Measure them with `python -m autopar calibrate -o FILE` and "
            "pass cluster=FILE, or name the nearest preset: cluster='NAME'"
        )


def find_preset(platform: str, device_kind: str) -> NearestPreset:
    """The preset nearest to a JAX device (`jax.Device.platform`, `.device_kind`)."""
    if platform == "cpu":
        return NearestPreset(PRESETS["cpu"], device_kind, is_known=True)
    for word, name in _KINDS.items():
        if re.search(rf"\b{word}(?![0-9])", device_kind):
            return NearestPreset(PRESETS[name], device_kind, is_known=True)
    return NearestPreset(PRESETS[_UNKNOWN.get(platform, _UNKNOWN["gpu"])], device_kind, is_known=False)


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
