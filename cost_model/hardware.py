"""What a machine can do: a device's arithmetic and memory, and the links between devices.

In: a preset's name, or the figures themselves. Out: a `Cluster`, and from it the `MeshCosts` of a logical mesh: the
latency and bandwidth that a collective sees along each mesh axis. The model is alpha-beta-roofline: a collective costs
a latency plus a time per byte, an operation the larger of its arithmetic and its memory traffic. What can go wrong:
a mesh larger than the machine, which the caller checks; figures are peak figures times a stated efficiency.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar.cost_model.collectives import AxisLink


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator: sustained FLOP/s per number format, memory bytes and memory bytes/s."""

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float

    def flops_per_s_of(self, dtype: str) -> float:
        """Sustained FLOP/s for matrix products in `dtype`; a format that is not listed runs as float32."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices: a fast link inside a node, a slower one between nodes.

    `axis_links`, when given, states the link of each logical mesh axis outright and the tiers are not consulted.
    `joint_reductions` says whether one collective may span several mesh axes at hierarchical cost; if not, each axis
    pays in full. `all_reduce_latency` is the part of its latency that one of many all-reduces pays where the compiler merges
    them.
    """

    name: str
    device: Device
    devices_per_node: int
    intra_node: AxisLink
    inter_node: AxisLink
    operation_s: float = 0.0
    axis_links: tuple[AxisLink, ...] | None = None
    joint_reductions: bool = True
    all_reduce_latency: float = 1.0

    @classmethod
    def uniform(
        cls,
        alpha: Sequence[float] = (1.0,),
        beta: Sequence[float] = (1.0,),
        *,
        flops_per_s: float = 1e30,
        memory_bytes_per_s: float = 1e30,
        memory_bytes: float = math.inf,
    ) -> Cluster:
        """A machine with the given latency (s) and inverse bandwidth (s/byte) per mesh axis; compute is almost free."""
        links = tuple(AxisLink(a, b) for a, b in zip(alpha, beta, strict=True))
        device = Device("uniform", {"float32": flops_per_s}, memory_bytes, memory_bytes_per_s)
        return cls("uniform", device, 1 << 30, links[0], links[0], axis_links=links, joint_reductions=False)

    def links_of(self, mesh_shape: Sequence[int]) -> tuple[AxisLink, ...]:
        """The link along each axis of a row-major logical mesh; an axis that leaves a node uses the slower link."""
        if self.axis_links is not None:
            if len(mesh_shape) > len(self.axis_links):
                raise ValueError(
                    f"cluster {self.name!r} states {len(self.axis_links)} axis links, the mesh {tuple(mesh_shape)} has "
                    f"{len(mesh_shape)} axes; give one alpha and beta per axis"
                )
            return self.axis_links[: len(mesh_shape)]
        links = []
        for axis in range(len(mesh_shape)):
            span = math.prod(mesh_shape[axis:])
            links.append(self.intra_node if span <= self.devices_per_node else self.inter_node)
        return tuple(links)

    def fingerprint(self) -> str:
        """A text that two clusters share exactly if they cost everything alike."""
        return repr(self)


def _tflops(**per_format: float) -> dict[str, float]:
    return {name: value * 1e12 for name, value in per_format.items()}


# Sustained figures: peak times the efficiency that large matrix products reach (yardstick table, "achieved ceilings").
PRESETS: Mapping[str, Cluster] = {
    # Two cores shared by eight virtual devices: every figure is an eighth of what this class of machine sustains.
    # Collectives of eight in-process devices, microseconds for 1 KB / 64 KB / 1 MB: all-reduce 170/163/1222, reduce-scatter
    # 139/175/964, all-to-all 173/185/2093; all-gather 174/370 for 8/512 KB. Four devices: 100 for 1 KB, two: 75. The least times
    # of two runs. XLA merges all-reduces here, and no other kind: of 55 planned for a Wide-ResNet step 17 ran.
    "cpu": Cluster(
        "cpu",
        Device("cpu", {"float32": 12e9}, 3e9, 2.0e9),
        1 << 30,
        AxisLink(1.7e-4, 1e-9),
        AxisLink(1.7e-4, 1e-9),
        operation_s=2e-6,
        all_reduce_latency=0.3,
    ),
    "p3.16xlarge": Cluster(
        "p3.16xlarge",
        Device("V100-16GB", _tflops(float16=100, bfloat16=14, float32=14), 16e9, 800e9),
        8,
        AxisLink(1e-5, 1 / 40e9),
        AxisLink(3e-5, 1 / 3.1e9),
        operation_s=4e-6,
    ),
    "dgx-a100": Cluster(
        "dgx-a100",
        Device("A100-80GB", _tflops(float16=271, bfloat16=271, float32=19.5), 80e9, 1800e9),
        8,
        AxisLink(8e-6, 1 / 240e9),
        AxisLink(2e-5, 1 / 22e9),
        operation_s=4e-6,
    ),
    "dgx-h100": Cluster(
        "dgx-h100",
        Device("H100-80GB", _tflops(float16=794, bfloat16=794, float32=60), 80e9, 3000e9),
        8,
        AxisLink(8e-6, 1 / 360e9),
        AxisLink(2e-5, 1 / 45e9),
        operation_s=4e-6,
    ),
    "h200": Cluster(
        "h200",
        Device("H200-141GB", _tflops(float16=788, bfloat16=788, float32=60), 141e9, 4300e9),
        8,
        AxisLink(8e-6, 1 / 360e9),
        AxisLink(2e-5, 1 / 45e9),
        operation_s=4e-6,
    ),
}


def preset(name: str) -> Cluster:
    """The named cluster; an unknown name raises ValueError with the names there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"no cluster preset {name!r}; there are: {', '.join(sorted(PRESETS))}") from None


def preset_for_device_kind(platform: str, device_kind: str) -> Cluster:
    """The preset nearest to a JAX device's platform and kind (`jax.Device.platform`, `.device_kind`)."""
    kinds = {"V100": "p3.16xlarge", "A100": "dgx-a100", "H100": "dgx-h100", "H200": "h200"}
    if platform != "cpu":
        for word, name in kinds.items():
            if word in device_kind:
                return PRESETS[name]
        return PRESETS["dgx-a100"]
    return PRESETS["cpu"]
