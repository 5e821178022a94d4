"""Devices to train on: accelerators if there are any, else virtual CPU devices.

XLA makes virtual CPU devices only if its flags ask for them when JAX first touches a device. So the flag is set here,
from a command, and never on import; a flag that the user has set is left alone. What can go wrong: fewer devices than
asked for; the error says how many there are and why, or how many there can be.
"""

from __future__ import annotations

import os

import jax

from autopar.errors import ArgumentError

DEFAULT_DEVICES = 8
MOST_VIRTUAL_DEVICES = 2048
"""Of a process. XLA's client for CPUs takes the bits of a device's number from the eleventh on for the number of its process, so
that device 2048 belongs to another process, on which nothing runs. Measured with jax 0.10.2: 2048 devices add up an array, and of
2049 the last says that "Multiprocess computations aren't implemented on the CPU backend"."""
_FLAG = "--xla_force_host_platform_device_count"


def ask_for_virtual_devices(count: int) -> None:
    """Make XLA split the CPU into `count` devices, unless its flags say otherwise or the platform is another."""
    platforms: str = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    flags = os.environ.get("XLA_FLAGS", "")
    count = min(count, MOST_VIRTUAL_DEVICES)  # `find_devices` refuses more, which take XLA a minute to make
    if _FLAG not in flags and (not platforms or "cpu" in platforms.split(",")):
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()


def find_devices(count: int | None) -> list[jax.Device]:
    """Take the first `count` devices; without a number all accelerators, or 8 devices of a CPU."""
    available = jax.devices()
    platform = available[0].platform
    wanted = count or (DEFAULT_DEVICES if platform == "cpu" else len(available))
    if platform == "cpu" and wanted > MOST_VIRTUAL_DEVICES:
        raise ArgumentError(
            f"{wanted} devices are asked for, and XLA runs at most {MOST_VIRTUAL_DEVICES} virtual CPU devices: ask for no "
            "more than these; `autopar plan` plans for any number"
        )
    if wanted > len(available):
        why = f"XLA_FLAGS is {os.environ.get('XLA_FLAGS', '')!r}"
        way_out = why if platform == "cpu" else "JAX_PLATFORMS=cpu gives virtual CPU devices instead"
        raise ArgumentError(
            f"{wanted} devices are asked for, JAX has {len(available)} of platform {platform}; {way_out}"
        )
    return available[:wanted]
