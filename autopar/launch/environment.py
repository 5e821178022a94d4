"""The environment of a worker: its number, the address of the others, and its duties beside the script.

In: a job, an attempt, a worker's number. Out: environment variables, which `worker.py` and `join.py` read. What can go wrong: a
port that was free is taken before the first worker has it; that attempt fails, and the next one has another port.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from autopar.launch.settings import LaunchSettings, Size

TOKEN = "AUTOPAR_LAUNCH"
"""Of which job a process is: it is in the environment of every process that a worker starts, too."""
RANK, PROCESSES, COORDINATOR, BIND = "AUTOPAR_RANK", "AUTOPAR_PROCESSES", "AUTOPAR_COORDINATOR", "AUTOPAR_BIND"
ATTEMPT, PIPE, SUPERVISOR = "AUTOPAR_ATTEMPT", "AUTOPAR_PIPE", "AUTOPAR_SUPERVISOR"
STALL, METRICS, FAULTS = "AUTOPAR_STALL_SECONDS", "AUTOPAR_METRICS", "AUTOPAR_FAULTS"
VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port of the loopback that is free at the moment."""
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))
        port: int = server.getsockname()[1]
        return port


def variables_of_job(settings: LaunchSettings, size: Size, *, token: str, attempt: int) -> dict[str, str]:
    """Return the variables that all workers of an attempt have."""
    found = {
        **os.environ,
        TOKEN: token,
        SUPERVISOR: str(os.getpid()),
        ATTEMPT: str(attempt),
        PROCESSES: str(size.processes * settings.nodes.count),
        "PYTHONUNBUFFERED": "1",
    }
    coordinator = settings.nodes.coordinator
    if coordinator is None:
        coordinator = f"{LOOPBACK}:{free_port()}"
    found[COORDINATOR] = coordinator
    if coordinator.startswith((LOOPBACK, "localhost")):
        found[BIND] = f"{LOOPBACK}:{coordinator.rpartition(':')[2]}"
    if size.devices is not None:
        found["XLA_FLAGS"] = with_virtual_devices(os.environ.get("XLA_FLAGS", ""), size.devices)
        found.setdefault("JAX_PLATFORMS", "cpu")
    if settings.stall_s is not None:
        found[STALL] = str(settings.stall_s)
    if settings.faults:
        found[FAULTS] = "\n".join(settings.faults)
    return found


def variables_of_worker(job: Mapping[str, str], settings: LaunchSettings, *, rank: int, pipe: int) -> dict[str, str]:
    """Return the variables of one worker; `rank` counts over all machines."""
    found = {**job, RANK: str(rank), PIPE: str(pipe)}
    if settings.metrics is not None:
        found[METRICS] = settings.metrics.replace("{rank}", str(rank))
    return found


def with_virtual_devices(flags: str, count: int) -> str:
    """Return XLA's flags with another number of virtual CPU devices."""
    others = [flag for flag in flags.split() if not flag.startswith(VIRTUAL_DEVICES)]
    return " ".join([*others, f"{VIRTUAL_DEVICES}={count}"])
