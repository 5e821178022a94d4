"""Devices: what one accelerator can do, and what programs reach of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from autopar.cost_model.thread_blocks import ThreadBlocks

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float8": 1}


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpeed:
    """FLOP/s of a kernel that keeps attention's scores on the chip, for heads of one width: best * keys/(keys + half).

    `keys` are those that a query sees in the mean: the whole sequence, or half of it under a causal mask, whose other half the
    kernel skips. Forward and backward are apart: five products and sums in float32 are harder to keep fed than two.
    """

    width: int
    forward_flops_per_s: float
    backward_flops_per_s: float
    forward_half_keys: float = 0.0
    backward_half_keys: float = 0.0

    def flops_per_s(self, keys: float, *, backward: bool) -> float:
        """What the kernel sustains where a query sees so many keys."""
        if backward:
            return self.backward_flops_per_s * keys / (keys + self.backward_half_keys)
        return self.forward_flops_per_s * keys / (keys + self.forward_half_keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: Its name.
        peak_flops_per_s: Peak FLOP/s of matrix products in each number format; others run as float32. `tensorfloat32` is what
            float32 operands are rounded to where a program does not ask for exact products.
        memory_bytes: Its memory.
        memory_bytes_per_s: Peak bandwidth of the memory.
        matrix_efficiency: For each format, the part of peak that matrix products reach.
        memory_efficiency: The part of the bandwidth that large copies reach.
        kernel_efficiency: The part of that which fused kernels reach, of pointwise work and reductions, by the bytes that plans
            count; 1 if not stated.
        reserved_bytes: Memory that the driver and the libraries keep.
        launch_s: Seconds that each operation costs before it starts.
        convolution_efficiency: That of convolutions as matrix products, in formats where it differs from `matrix_efficiency`.
        reorder_s_per_byte: What a product adds for operands that have to be copied with their dimensions in another order.
        random_s_per_byte: What drawing random bits adds to writing them.
        transpose_s_per_byte: What a reduce-scatter or all-gather adds along a dimension other than the first: compilers hand
            it a transposed copy, or take one from it.
        fuses: A chain of pointwise operations and row reductions takes what its one kernel reads and writes. If not, each
            operation takes what it writes, as where arithmetic and not memory is the limit. Programs for it keep in memory
            what XLA's compiler for GPUs keeps, if not, what the one for CPUs does.
        fused_attention: Training runs of the device's time keep attention scores in a kernel on the chip. Only the replay of
            published runs reads it.
        sustained: For each format, the part of what products reach in a short loop that they keep in hours of training, under
            the power limit and on operands that are neither zeros nor constant. 1 if not stated. Read by the replay alone.
        host_bytes_per_s: What large copies between the device and the host's memory reach, one way; 0 if not stated. Read by the
            replay alone.
        attention: What such a kernel sustains, by the width of a head, narrow ones first; without any, what products of its
            shape reach. Read by the replay alone.
        thread_blocks: How its libraries cut products into tiles; None if nothing is known of it.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_efficiency: Mapping[str, MatrixEfficiency] = dataclasses.field(default_factory=dict)
    memory_efficiency: float = 1.0
    kernel_efficiency: float = 1.0
    reserved_bytes: float = 0.0
    launch_s: float = 0.0
    convolution_efficiency: Mapping[str, MatrixEfficiency] = dataclasses.field(default_factory=dict)
    reorder_s_per_byte: float = 0.0
    random_s_per_byte: float = 0.0
    transpose_s_per_byte: float = 0.0
    fuses: bool = False
    fused_attention: bool = True
    sustained: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_bytes_per_s: float = 0.0
    attention: tuple[AttentionSpeed, ...] = ()
    thread_blocks: ThreadBlocks | None = None

    @property
    def is_one_core(self) -> bool:
        """Whether its matrix units belong to one core or two, as those of a TPU do; XLA multiplies groups one by one there."""
        return self.fuses and self.thread_blocks is not None and self.thread_blocks.multiprocessors <= 2

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

    def product_flops_per_s(
        self, dtype: str, m: float, n: float, k: float, *, batch: float = 1.0, convolution: bool = False
    ) -> float:
        """FLOP/s of `batch` products (m, k) x (k, n): what their shape reaches, and no more than whole waves of tiles allow.

        The curve is a mean over shapes, so a product takes the longer of the two and not both after each other. Convolutions
        have kernels of their own, of whose tiles nothing is known.
        """
        curve = self.convolution_efficiency_of(dtype) if convolution else self.efficiency_of(dtype)
        reached, blocks = curve.of(m, n, k), self._blocks_in(dtype)
        if blocks is not None and not convolution:
            whole = blocks.whole_steps(k)
            of_whole_tiles = curve.best * whole / (whole + curve.half[2])
            filled = blocks.filled(m, n, k, batch=batch, enough=reached / of_whole_tiles)
            reached = min(reached, of_whole_tiles * filled)
        return self.peak_of(dtype) * reached

    def padding_s(self, dtype: str, m: float, n: float, k: float, *, batch: float = 1.0) -> float:
        """Seconds in which operands are copied because of rows that tensor cores do not take as they are."""
        blocks, itemsize = self._blocks_in(dtype), _ITEMSIZE.get(dtype, 4)
        copied = 0.0 if blocks is None else blocks.padded_elements(m, n, k, batch=batch, itemsize=itemsize)
        return 2 * itemsize * copied / self.sustained_bytes_per_s

    def _blocks_in(self, dtype: str) -> ThreadBlocks | None:
        blocks = self.thread_blocks
        return blocks if blocks is not None and dtype in blocks.formats else None

    def attention_flops_per_s(self, width: float, keys: float, *, backward: bool) -> float | None:
        """FLOP/s of a fused attention kernel for heads of `width`; None if no such kernel is stated.

        Between two stated widths it is interpolated. A head narrower than the narrowest leaves that part of each tile idle; a
        wider one is taken for the widest.
        """
        if not self.attention:
            return None
        found = [(speed.width, speed.flops_per_s(keys, backward=backward)) for speed in self.attention]
        narrowest, rate = found[0]
        if width <= narrowest:
            return rate * width / narrowest
        for (before, slow), (after, fast) in itertools.pairwise(found):
            if width <= after:
                return slow + (fast - slow) * (width - before) / (after - before)
        return found[-1][1]

    @property
    def sustained_bytes_per_s(self) -> float:
        """Memory bytes/s that large copies reach, reads and writes together."""
        return self.memory_bytes_per_s * self.memory_efficiency

    @property
    def kernel_bytes_per_s(self) -> float:
        """Memory bytes/s that fused kernels reach, by the bytes that plans count."""
        return self.sustained_bytes_per_s * self.kernel_efficiency


def slowest_device(devices: Sequence[Device]) -> Device:
    """The device that lockstep among `devices` amounts to: the worst of each figure, in the formats that all of them list."""
    first = devices[0]
    formats = [dtype for dtype in first.peak_flops_per_s if all(dtype in d.peak_flops_per_s for d in devices)]
    weakest = {dtype: min(devices, key=lambda d: d.flops_per_s_of(dtype)) for dtype in formats}
    tightest = min(devices, key=lambda d: d.memory_bytes - d.reserved_bytes)
    narrowest = min(devices, key=lambda d: d.sustained_bytes_per_s)
    kernels = min(device.kernel_bytes_per_s for device in devices)
    return Device(
        name=" + ".join(device.name for device in devices),
        peak_flops_per_s={dtype: device.peak_of(dtype) for dtype, device in weakest.items()},
        memory_bytes=tightest.memory_bytes,
        memory_bytes_per_s=narrowest.memory_bytes_per_s,
        matrix_efficiency={dtype: device.efficiency_of(dtype) for dtype, device in weakest.items()},
        memory_efficiency=narrowest.memory_efficiency,
        kernel_efficiency=kernels / narrowest.sustained_bytes_per_s,
        reserved_bytes=tightest.reserved_bytes,
        launch_s=max(device.launch_s for device in devices),
        convolution_efficiency={dtype: device.convolution_efficiency_of(dtype) for dtype, device in weakest.items()},
        reorder_s_per_byte=max(device.reorder_s_per_byte for device in devices),
        random_s_per_byte=max(device.random_s_per_byte for device in devices),
        transpose_s_per_byte=max(device.transpose_s_per_byte for device in devices),
        fuses=all(device.fuses for device in devices),
        fused_attention=all(device.fused_attention for device in devices),
        sustained={dtype: device.sustained[dtype] for dtype, device in weakest.items() if dtype in device.sustained},
        host_bytes_per_s=min(device.host_bytes_per_s for device in devices),
        attention=min((device.attention for device in devices), key=_at_width),
        thread_blocks=_blocks_of(weakest),
    )


def _blocks_of(weakest: Mapping[str, Device]) -> ThreadBlocks | None:
    """The tiles of the device that is weakest in the formats that it cuts into tiles, if it is one device."""
    found = {device.thread_blocks for dtype, device in weakest.items() if device._blocks_in(dtype)}
    return found.pop() if len(found) == 1 else None


def fastest_device(devices: Sequence[Device]) -> Device:
    """A device that does nothing slower than any of `devices`: the best of each figure, for bounds, and without tiles."""
    formats = {dtype: None for device in devices for dtype in device.peak_flops_per_s}
    roomiest = max(devices, key=lambda d: d.memory_bytes - d.reserved_bytes)

    def rate(dtype: str, efficiency_of: Callable[[Device, str], MatrixEfficiency]) -> tuple[float, MatrixEfficiency]:
        """What products reach at most, and how small ones may be for it."""
        known = [efficiency_of(device, dtype) for device in devices]
        rates = (device.peak_of(dtype) * one.best for device, one in zip(devices, known, strict=True))
        half_m, half_n, half_k = (min(sizes) for sizes in zip(*(one.half for one in known), strict=True))
        return max(rates), MatrixEfficiency(1.0, (half_m, half_n, half_k))

    products = {dtype: rate(dtype, Device.efficiency_of) for dtype in formats}
    convolutions = {dtype: rate(dtype, Device.convolution_efficiency_of) for dtype in formats}
    peaks = {dtype: max(products[dtype][0], convolutions[dtype][0]) for dtype in formats}
    bandwidth = max(device.sustained_bytes_per_s for device in devices)
    return Device(
        name=" or ".join(device.name for device in devices),
        peak_flops_per_s=peaks,
        memory_bytes=roomiest.memory_bytes,
        memory_bytes_per_s=bandwidth,
        kernel_efficiency=max(device.kernel_bytes_per_s for device in devices) / bandwidth,
        matrix_efficiency={d: dataclasses.replace(one, best=best / peaks[d]) for d, (best, one) in products.items()},
        reserved_bytes=roomiest.reserved_bytes,
        launch_s=min(device.launch_s for device in devices),
        convolution_efficiency={
            d: dataclasses.replace(one, best=best / peaks[d]) for d, (best, one) in convolutions.items()
        },
        reorder_s_per_byte=min(device.reorder_s_per_byte for device in devices),
        random_s_per_byte=min(device.random_s_per_byte for device in devices),
        transpose_s_per_byte=min(device.transpose_s_per_byte for device in devices),
        host_bytes_per_s=max(device.host_bytes_per_s for device in devices),
        fuses=any(device.fuses for device in devices),
        fused_attention=any(device.fused_attention for device in devices),
    )


def _at_width(speeds: Sequence[AttentionSpeed]) -> float:
    """What the widest heads sustain; 0 without a kernel."""
    return speeds[-1].forward_flops_per_s if speeds else 0.0
