"""What a cluster is: devices, tiers of links, and how far communication hides behind compute.

In: figures, usually from a cluster file (`cluster_files`). Out: frozen values, and from a `Cluster` the `MeshCosts` of a logical
mesh. Devices are numbered row-major: neighbours on the last mesh axis are neighbours in the machine. Tier 0 joins devices to
a group (a node), tier 1 joins those groups, and so on; the last tier may join any number. What can go wrong: a mesh larger
than a machine whose last tier is bounded; `mesh_costs` raises ValueError with both numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from autopar.cost_model.collectives import AxisLink, MeshCosts
from autopar.cost_model.topology import Dimension, Tier, check_size, levels_of

Hidden = Literal["data_parallel", "zero3", "tensor", "pipeline"]


@dataclasses.dataclass(frozen=True)
class MatrixEfficiency:
    """The part of peak that a matrix product (m, k) x (k, n) reaches: best * m/(m+hm) * n/(n+hn) * k/(k+hk).

    `half` is (hm, hn, hk): the length at which that dimension alone halves the efficiency.
    """

    best: float = 1.0
    half: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def of(self, m: float, n: float, k: float) -> float:
        """The part of peak, between 0 and `best`."""
        hm, hn, hk = self.half
        return self.best * (m / (m + hm)) * (n / (n + hn)) * (k / (k + hk))


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator: peak FLOP/s per number format, memory bytes and bytes/s, and what of them programs reach.

    A format that is not listed runs as float32. `convolution_efficiency` is that of convolutions as matrix products, where it
    differs from `matrix_efficiency`. `memory_efficiency` is the part of the bandwidth that large copies reach,
    `reserved_bytes` what the driver and the libraries keep, `launch_s` what each operation costs before it starts.
    `reorder_s_per_byte` is what a product adds for operands that have to be copied with their dimensions in another order,
    `random_s_per_byte` what drawing random bits adds to writing them.
    `transpose_s_per_byte` is what a reduce-scatter or all-gather adds along another dimension than the first: compilers hand it
    a transposed copy, or take one from it.
    `fuses`: a chain of pointwise operations and row reductions takes what its one kernel reads and writes; if not, each operation
    takes what it writes, as where arithmetic and not memory is the limit.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_efficiency: Mapping[str, MatrixEfficiency] = dataclasses.field(default_factory=dict)
    memory_efficiency: float = 1.0
    reserved_bytes: float = 0.0
    launch_s: float = 0.0
    convolution_efficiency: Mapping[str, MatrixEfficiency] = dataclasses.field(default_factory=dict)
    reorder_s_per_byte: float = 0.0
    random_s_per_byte: float = 0.0
    transpose_s_per_byte: float = 0.0
    fuses: bool = False

    def efficiency_of(self, dtype: str) -> MatrixEfficiency:
        """The efficiency of matrix products in `dtype`."""
        known = self.matrix_efficiency
        return known.get(dtype) or known.get("float32") or MatrixEfficiency()

    def convolution_efficiency_of(self, dtype: str) -> MatrixEfficiency:
        """The efficiency of convolutions in `dtype`, each as the product (pixels, window x channels) x (.., channels)."""
        return self.convolution_efficiency.get(dtype) or self.efficiency_of(dtype)

    def peak_of(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in `dtype`."""
        return self.peak_flops_per_s.get(dtype, self.peak_flops_per_s["float32"])

    def flops_per_s_of(self, dtype: str) -> float:
        """Sustained FLOP/s of large matrix products in `dtype`."""
        return self.peak_of(dtype) * self.efficiency_of(dtype).best

    @property
    def sustained_bytes_per_s(self) -> float:
        """Memory bytes/s that large copies reach, reads and writes together."""
        return self.memory_bytes_per_s * self.memory_efficiency


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Which part of each kind of communication can hide behind compute, and what that costs the compute.

    `hidden`: for data-parallel gradient reductions, ZeRO-3 parameter gathers, tensor-parallel collectives, pipeline sends;
    0 is none. `interference`: compute that runs beside communication takes (1 + interference) as long.
    """

    hidden: Mapping[Hidden, float] = dataclasses.field(default_factory=dict)
    interference: float = 0.0

    def hidden_part(self, kind: Hidden) -> float:
        """The part of this kind's time that compute may hide; 0 for a kind that is not listed."""
        return self.hidden.get(kind, 0.0)

    def exposed_s(self, kind: Hidden, *, comm_s: float, compute_s: float) -> float:
        """Seconds that `comm_s` adds to `compute_s` beside it: what cannot hide, and the slowing of the compute."""
        hidden_s = min(self.hidden_part(kind) * comm_s, compute_s)
        return comm_s - hidden_s + self.interference * hidden_s


@dataclasses.dataclass(frozen=True)
class NodeKind:
    """One kind of node in a mixed cluster: how many there are, their device, and the tiers inside a node."""

    name: str
    count: int
    device: Device
    tiers: tuple[Tier, ...]

    @property
    def devices_per_node(self) -> int:
        """Devices in one node: the size of its outermost tier."""
        size = self.tiers[-1].devices
        assert size is not None
        return size


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A machine: its device, its tiers of links from the inside out, its overlap.

    `axis_links`, when given, states the link of each logical mesh axis outright and the tiers are not consulted.
    `joint_reductions` says whether one collective may span several mesh axes at once; if not, each axis pays in full.
    `all_reduce_latency` is the part of its latency that one of many all-reduces pays where the compiler merges them. `call_s` and
    `call_s_per_array` are what a call of a compiled step costs on the host, and each array in and out of it. A mixed cluster
    lists its `node_kinds`; `device` is then the slowest in every figure, which is what a program in lockstep sees.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    overlap: Overlap = dataclasses.field(default_factory=Overlap)
    node_kinds: tuple[NodeKind, ...] = ()
    axis_links: tuple[AxisLink, ...] | None = None
    joint_reductions: bool = True
    all_reduce_latency: float = 1.0
    call_s: float = 0.0
    call_s_per_array: float = 0.0

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
        return cls("uniform", device, (), axis_links=links, joint_reductions=False)

    @property
    def operation_s(self) -> float:
        """What an operation costs before it starts."""
        return self.device.launch_s

    @property
    def devices_per_node(self) -> int | None:
        """Devices in a group of the first tier; None if that tier joins any number."""
        return self.tiers[0].devices if self.tiers else None

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes of a device that programs may use."""
        return self.device.memory_bytes - self.device.reserved_bytes

    def levels_of(self, mesh_shape: Sequence[int], axes: Sequence[int]) -> tuple[Dimension, ...]:
        """The levels of the machine that groups along `axes` of a row-major mesh cross, from the inside out."""
        return levels_of(self.tiers, mesh_shape, axes)

    def links_of(self, mesh_shape: Sequence[int]) -> tuple[AxisLink, ...]:
        """Latency and inverse bandwidth along each axis of a row-major logical mesh: those of the slowest level crossed."""
        if self.axis_links is not None:
            if len(mesh_shape) > len(self.axis_links):
                raise ValueError(
                    f"cluster {self.name!r} states {len(self.axis_links)} axis links, the mesh {tuple(mesh_shape)} has "
                    f"{len(mesh_shape)} axes; give one alpha and beta per axis"
                )
            return self.axis_links[: len(mesh_shape)]
        return tuple(_slowest(self.levels_of(mesh_shape, (axis,))) for axis in range(len(mesh_shape)))

    def transfer_s(self, size_bytes: float, *, meshes: int, devices: int) -> float:
        """Seconds to bring a value from one of several meshes to another, `devices` being those of the smaller of the two.

        Each of these carries an equal share over the slowest link that joins the meshes: alpha + size / devices * beta.
        """
        link = self.links_of((max(2, meshes), devices) if devices > 1 else (max(2, meshes),))[0]
        return link.alpha_s + size_bytes / devices * link.beta_s_per_byte

    def mesh_costs(self, mesh_shape: Sequence[int]) -> MeshCosts:
        """The seconds of every collective on a row-major logical mesh of this machine.

        Raises ValueError if the mesh has more devices than the machine, or more axes than links are stated for.
        """
        shape = tuple(mesh_shape)
        if self.axis_links is None:
            check_size(self.tiers, shape, self.name)
        return MeshCosts(shape, self.links_of(shape), self.joint_reductions, self.all_reduce_latency, self.tiers)

    def dispatch_s(self, arrays: int) -> float:
        """Seconds of calling a compiled step with so many arrays, each of which comes back."""
        return self.call_s + self.call_s_per_array * arrays

    def of_kind(self, name: str) -> Cluster:
        """The nodes of one kind of a mixed cluster, as a cluster of their own. Raises ValueError for an unknown kind."""
        for kind in self.node_kinds:
            if kind.name == name:
                network = self.tiers[len(kind.tiers) :]
                return dataclasses.replace(
                    self, name=f"{self.name}/{name}", device=kind.device, tiers=(*kind.tiers, *network), node_kinds=()
                )
        names = ", ".join(kind.name for kind in self.node_kinds) or "none, all its nodes are alike"
        raise ValueError(f"cluster {self.name!r} has no kind of node {name!r}; it has: {names}")

    def fingerprint(self) -> str:
        """A text that two clusters share exactly if they cost everything alike."""
        return repr(self)


def slowest_device(devices: Sequence[Device]) -> Device:
    """The device that lockstep among `devices` amounts to: the least of each figure, in the formats that all list."""
    first = devices[0]
    formats = [dtype for dtype in first.peak_flops_per_s if all(dtype in d.peak_flops_per_s for d in devices)]
    weakest = {dtype: min(devices, key=lambda d: d.flops_per_s_of(dtype)) for dtype in formats}
    tightest = min(devices, key=lambda d: d.memory_bytes - d.reserved_bytes)
    narrowest = min(devices, key=lambda d: d.sustained_bytes_per_s)
    return Device(
        " + ".join(device.name for device in devices),
        {dtype: device.peak_of(dtype) for dtype, device in weakest.items()},
        tightest.memory_bytes,
        narrowest.memory_bytes_per_s,
        {dtype: device.efficiency_of(dtype) for dtype, device in weakest.items()},
        narrowest.memory_efficiency,
        tightest.reserved_bytes,
        max(device.launch_s for device in devices),
        {dtype: device.convolution_efficiency_of(dtype) for dtype, device in weakest.items()},
        max(device.reorder_s_per_byte for device in devices),
        max(device.random_s_per_byte for device in devices),
        max(device.transpose_s_per_byte for device in devices),
        all(device.fuses for device in devices),
    )


def _slowest(levels: Sequence[Dimension]) -> AxisLink:
    if not levels:
        return AxisLink(0.0, 0.0)
    return AxisLink(max(level.latency_s for level in levels), max(1 / level.ring_bytes_per_s for level in levels))
