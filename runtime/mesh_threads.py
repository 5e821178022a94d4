"""Runs the meshes of a step in one thread each, and ends them all before it returns.

What can go wrong: a thread waits in XLA for another process and cannot be woken. If `watch` raises, because another process
has failed, such a thread is left behind; without `watch` no thread ever is.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

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
    """Drive each mesh in a thread of its own, under the caller's settings of JAX; returns what failed.

    Args:
        drive: Runs one mesh to its end and returns what failed there.
        step: The step; it is ended here if the caller is interrupted.
        meshes: Numbers of the meshes to drive.
        watch: Called now and then while threads work; raises if another process has failed.
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
        for thread in threads:
            if thread.is_alive():
                thread.join(None if watch is None else TUNING.leave_s)
    return list(itertools.chain.from_iterable(found))
