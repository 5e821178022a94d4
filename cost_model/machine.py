"""Clusters: devices, tiers of links, and how far communication hides behind compute.

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
from autopar.cost_model.device import Device
from autopar.cost_model.tiers import Dimension, Tier
from autopar.cost_model.topology import check_size, levels_of, link_of_pairs, shape_that_crosses

Hidden = Literal["data_parallel", "zero3", "tensor", "pipeline", "context"]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Which part of each kind of communication can hide behind compute, and what that costs the compute.

    Attributes:
        hidden: The part that hides of data-parallel gradient reductions, ZeRO-3 parameter gathers, tensor-parallel
            collectives and pipeline sends; 0 is none.
        interference: Compute that runs beside communication takes (1 + interference) as long.
        bucket_bytes: Gradients are reduced, and new parameters gathered, in buckets of so many bytes, in the order in which the
            backward pass makes them, each as soon as it is full. All of `data_parallel` may then hide but for what the order and
            the compute leave, unless its part in `hidden` is 0, which says that launches block. 0 if it is not stated.
    """

    hidden: Mapping[Hidden, float] = dataclasses.field(default_factory=dict)
    interference: float = 0.0
    bucket_bytes: float = 0.0

    def hidden_part(self, kind: Hidden) -> float:
        """The part of this kind's time that compute may hide; 0 for a kind that is not listed."""
        part = self.hidden.get(kind, 0.0)
        return 1.0 if part and self.bucket_bytes and kind == "data_parallel" else part

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine.

    Attributes:
        name: Its name.
        device: Its device; of a mixed cluster the slowest in every figure, which is what a program in lockstep sees.
        tiers: Its tiers of links, from the inside out.
        overlap: How far communication hides behind compute.
        node_kinds: The kinds of node of a mixed cluster.
        axis_links: When given, states the link of each logical mesh axis outright; the tiers are then not consulted.
        joint_reductions: One collective may span several mesh axes at once. If not, each axis pays in full.
        all_reduce_latency: The part of its latency that one of many all-reduces pays where the compiler merges them.
        call_s: Seconds of a call of a compiled step on the host.
        call_s_per_array: Seconds that each array adds to a call, in and out.
        call_s_per_byte: Seconds that each byte of a device adds to a call of a pipeline's task that reads or writes it: arrays
            between calls lie in memory, and values of one program in caches. 0 where kernels are priced by their traffic.
        sent_s_per_array: Seconds of the host that each array adds to a transfer from one mesh to another.
        shares_host: The devices compute on the cores of the host, as virtual ones do, so that a call takes their time, and so
            does what a mesh sends. If not, the host calls tasks ahead of the devices, and links carry what is sent beside them.
        usd_per_device_hour: What a device costs, in US dollars per hour; None if unknown. No plan depends on it.
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
    call_s_per_byte: float = 0.0
    sent_s_per_array: float = 0.0
    shares_host: bool = False
    usd_per_device_hour: float | None = dataclasses.field(default=None, repr=False, compare=False)

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
        device = Device(
            name="uniform",
            peak_flops_per_s={"float32": flops_per_s},
            memory_bytes=memory_bytes,
            memory_bytes_per_s=memory_bytes_per_s,
        )
        return cls(name="uniform", device=device, tiers=(), axis_links=links, joint_reductions=False)

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
        return tuple(_slowest_link(self.levels_of(mesh_shape, (axis,))) for axis in range(len(mesh_shape)))

    def transfer_s(self, size_bytes: float, *, source: range, target: range, arrays: int = 1) -> float:
        """Seconds to bring arrays from one mesh to another.

        Each device of the smaller mesh carries an equal share over the links that join the two: alpha + size / devices * beta,
        and the host has work for each array. Meshes of one node have the node's links; to another node the devices that send
        share what leaves their node.

        Args:
            size_bytes: bytes of all arrays, each as a whole.
            source: the devices of the one mesh, by their places in the machine.
            target: those of the other.
            arrays: their number.
        """
        devices = min(len(source), len(target))
        link = self._link_between(source, target, devices)
        return link.alpha_s + size_bytes / devices * link.beta_s_per_byte + self.sent_s_per_array * arrays

    def _link_between(self, source: range, target: range, devices: int) -> AxisLink:
        """Of each of so many pairs of devices, which all send at once."""
        if self.axis_links is not None:
            return self.links_of((2, devices) if devices > 1 else (2,))[0]
        direct = link_of_pairs(self.tiers, tuple(zip(source, target, strict=False)))
        levels = (direct,) if direct else self.levels_of(shape_that_crosses(self.tiers, source, target), (0,))
        bandwidth = min(min(level.ring_bytes_per_s, level.sender_bytes_per_s) for level in levels)
        return AxisLink(max(level.latency_s for level in levels), 1 / bandwidth)

    def mesh_costs(self, mesh_shape: Sequence[int]) -> MeshCosts:
        """The seconds of every collective on a row-major logical mesh of this machine.

        Raises ValueError if the mesh has more devices than the machine, or more axes than links are stated for.
        """
        shape = tuple(mesh_shape)
        if self.axis_links is None:
            check_size(self.tiers, shape, self.name)
        return MeshCosts(
            sizes=shape,
            links=self.links_of(shape),
            joint_reductions=self.joint_reductions,
            all_reduce_latency=self.all_reduce_latency,
            tiers=self.tiers,
        )

    def dispatch_s(self, arrays: float) -> float:
        """Seconds of a call of a compiled step with so many arrays, each of which comes back."""
        return self.call_s + self.call_s_per_array * arrays

    def called_s(self, device_s: float, arrays: float, handed_bytes: float = 0.0) -> float:
        """Seconds of one of many calls in a row: work of the devices that takes `device_s`, and the call of `arrays` on the host.

        The host calls ahead, so devices of their own only wait for it where their work is shorter than the call: they starve.
        `handed_bytes`: what each device reads of other calls' results and writes for others.
        """
        call_s = self.dispatch_s(arrays)
        device_s += self.call_s_per_byte * handed_bytes
        return device_s + call_s if self.shares_host else max(device_s, call_s)

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


def _slowest_link(levels: Sequence[Dimension]) -> AxisLink:
    if not levels:
        return AxisLink(0.0, 0.0)
    return AxisLink(max(level.latency_s for level in levels), max(1 / level.ring_bytes_per_s for level in levels))
