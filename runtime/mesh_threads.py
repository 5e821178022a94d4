"""Run each mesh of a step in a thread, and end all threads before returning.

What can go wrong: a thread waits in XLA for another process and cannot be woken. If `watch` raises because another process
has failed, such a thread is left behind; without `watch` no thread ever is. The thread comes back when the other process ends. If
this process were exiting at that time, it would abort. So it waits for the thread before it exits.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import jax

from autopar.runtime.failures import Failure
from autopar.runtime.step_state import A, StepState
from autopar.runtime.thread_settings import settings_here, under
from autopar.runtime.tuning import TUNING


def run_in_threads(
    drive: Callable[[StepState[A], int], list[Failure]],
    step: StepState[A],
    meshes: Sequence[int],
    *,
    watch: Callable[[], None] | None,
) -> list[Failure]:
    """Drive each mesh in a thread of its own, under the caller's settings of JAX. Returns the failures.

    Args:
        drive: Runs one mesh to its end and returns the failures there.
        step: The step, which is ended here if the caller is interrupted.
        meshes: Numbers of the meshes to drive.
        watch: Called at intervals while threads work; raises if another process has failed.
    """
    ended: SimpleQueue[list[Failure]] = SimpleQueue()
    settings = settings_here()

    def target(mesh: int) -> None:
        found_here: list[Failure] = []
        try:
            with under(settings):
                found_here += drive(step, mesh)
        except BaseException as error:  # noqa: BLE001 - the calling thread waits until every mesh has said how it ended
            found_here.append(Failure(mesh, step.meshes[mesh].machine.position, error))
            step.end()
        finally:
            ended.put(found_here)

    threads = [
        threading.Thread(target=target, args=(mesh,), name=f"autopar mesh {mesh}", daemon=True) for mesh in meshes
    ]
    found: list[list[Failure]] = []
    try:
        for thread in threads:
            thread.start()
        while len(found) < len(threads):
            with contextlib.suppress(Empty):
                found.append(ended.get(timeout=TUNING.poll_s))
                continue
            if watch is not None:
                watch()
    finally:
        step.over = step.abandoned = True  # First, and not by a call: a second Ctrl-C may come with any call.
        if len(found) < len(threads):
            step.end()
        _join(threads, None if watch is None else TUNING.leave_s)
    return list(itertools.chain.from_iterable(found))


def _join(threads: Sequence[threading.Thread], wait_s: float | None) -> None:
    """Wait up to `wait_s` seconds for each thread to end. Threads that do not are left behind."""
    for thread in threads:
        if thread.is_alive():
            thread.join(wait_s)
    stuck = [thread for thread in threads if thread.is_alive()]
    if stuck:
        atexit.register(_wait_at_exit, stuck)


def _wait_at_exit(stuck: Sequence[threading.Thread]) -> None:
    """Leave the other processes, and wait for threads that wait for them in XLA.

    Each process waits longer than the one before it. All may have such threads, and the first to end frees those of the others.
    """
    wait_s = min(TUNING.exit_s * (1 + jax.process_index()), TUNING.longest_exit_s)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has ended already
        jax.distributed.shutdown()
    ends = time.monotonic() + wait_s
    for thread in stuck:
        thread.join(max(0.0, ends - time.monotonic()))
