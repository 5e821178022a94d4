"""Devices that exist for XLA's compiler alone: to compile and verify a step for a machine that is not there.

In: a kind of GPU and how many. Out: JAX devices that take programs for compilation and no arrays. The compiler is that of JAX's
plugin for CUDA, which needs no GPU to compile: it is told what a GPU is (`_GPUS`). The packages are `jax-cuda12-plugin`,
`jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12`. What can go wrong: they are missing, or those of another version of JAX; nothing is
tuned on a device that is not there, so kernels may be others than on the machine. TPUs are left out: their compiler makes other
operations of products and collectives, which `verify` cannot lead back.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax
from jax.experimental import topologies

from autopar.errors import ArgumentError

_FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
"""Nothing is tuned, and products are cuBLAS's: XLA would take Triton for all of them where it cannot try which is faster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpu:
    """What XLA asks of a GPU. Sources: NVIDIA's architecture white papers and data sheets of V100, A100 and H100 SXM, and the
    tables of compute capabilities in the CUDA C++ programming guide.

    Attributes:
        name: as the driver calls it.
        capability: the major number of its compute capability.
        multiprocessors: their number.
        lanes: float32 lanes of each.
        shared_bytes: shared memory of each multiprocessor, in bytes.
        shared_bytes_of_block: the most that a block of threads may ask for, in bytes.
        memory_bytes: device memory.
        memory_bytes_per_s: its bandwidth.
        cache_bytes: of the level-2 cache.
        clock_ghz: at boost.
    """

    name: str
    capability: int
    multiprocessors: int
    lanes: int
    shared_bytes: int
    shared_bytes_of_block: int
    memory_bytes: int
    memory_bytes_per_s: int
    cache_bytes: int
    clock_ghz: float

    def describe(self) -> str:
        """The text that XLA's option `target_config` takes."""
        limits = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49_152,
            "shared_memory_per_core": self.shared_bytes,
            "threads_per_core_limit": 2048,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.lanes,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65_535,
            "block_dim_limit_z": 65_535,
            "memory_bandwidth": self.memory_bytes_per_s,
            "l2_cache_size": self.cache_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "shared_memory_per_block_optin": self.shared_bytes_of_block,
            "registers_per_core_limit": 65_536,
            "registers_per_block_limit": 65_536,
        }
        fields = " ".join(f"{name}: {value}" for name, value in limits.items())
        device = f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {self.capability} }} }}"
        libraries = "runtime_version { major: 12 minor: 8 } dnn_version_info { major: 9 minor: 7 }"
        return f'{device} {libraries} platform_name: "CUDA" device_description_str: "{self.name}"'


_GPUS: Mapping[str, _Gpu] = {
    "v100": _Gpu(
        name="Tesla V100-SXM2-16GB",
        capability=7,
        multiprocessors=80,
        lanes=64,
        shared_bytes=96 * 2**10,
        shared_bytes_of_block=96 * 2**10,
        memory_bytes=16 * 2**30,
        memory_bytes_per_s=900 * 10**9,
        cache_bytes=6 * 2**20,
        clock_ghz=1.53,
    ),
    "a100": _Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        multiprocessors=108,
        lanes=64,
        shared_bytes=164 * 2**10,
        shared_bytes_of_block=163 * 2**10,
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=2_039 * 10**9,
        cache_bytes=40 * 2**20,
        clock_ghz=1.41,
    ),
    "h100": _Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=9,
        multiprocessors=132,
        lanes=128,
        shared_bytes=228 * 2**10,
        shared_bytes_of_block=227 * 2**10,
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=3_350 * 10**9,
        cache_bytes=50 * 2**20,
        clock_ghz=1.98,
    ),
}
_PACKAGES = "jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12"


def compile_only_devices(kind: str, count: int) -> list[jax.Device]:
    """Devices for XLA's compiler alone: steps can be planned, compiled and verified for them, and not run.

    Args:
        kind: `v100`, `a100` or `h100`.
        count: how many.

    Returns:
        JAX devices, as `parallelize(devices=...)` takes them.

    Raises:
        ArgumentError: the kind is unknown, or the compiler's packages are not installed.
    """
    if kind not in _GPUS:
        raise ArgumentError(f"nothing is compiled for devices of kind {kind!r}; known are {', '.join(_GPUS)}")
    given = os.environ.get("XLA_FLAGS", "")
    flags = [flag for flag in _FLAGS if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *flags])  # the plugin reads it when it compiles first
    options = {"target_config": _GPUS[kind].describe(), "topology": f"1x1x{count}"}
    try:
        return list(topologies.get_topology_desc(kind, "cuda", **options).devices)
    except (NotImplementedError, RuntimeError) as error:
        words = (str(error).splitlines() or ["-"])[0]
        raise ArgumentError(
            f"no compiler for GPUs answers ({words}); install {_PACKAGES}, those for JAX {jax.__version__}, and set "
            "JAX_PLATFORMS=cpu where there is no GPU"
        ) from error
