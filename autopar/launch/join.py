"""A script joins the other workers of its job: `jax.distributed.initialize` with what the supervisor says."""

from __future__ import annotations

import os

from autopar.launch.environment import BIND, COORDINATOR, PROCESSES, RANK

START_LIMIT_S, SILENCE_LIMIT_S, END_LIMIT_S = 300, 100, 60
"""Seconds that JAX waits for workers to come, to say that they live, and to end; the supervisor notices most of it earlier."""


def join() -> None:
    """Join the other workers of the job, so that JAX sees all devices. Call this before the first use of a device.

    A script that runs alone, without a supervisor, has no others: this does nothing. The coordination service of a job on one
    machine listens on its loopback only.
    """
    processes = int(os.environ.get(PROCESSES, "1"))
    if processes == 1:
        return
    import jax

    jax.distributed.initialize(
        os.environ[COORDINATOR],
        num_processes=processes,
        process_id=int(os.environ[RANK]),
        coordinator_bind_address=os.environ.get(BIND),
        initialization_timeout=START_LIMIT_S,
        heartbeat_timeout_seconds=SILENCE_LIMIT_S,
        shutdown_timeout_seconds=END_LIMIT_S,
    )
