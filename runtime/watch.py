"""Tell other processes of a failure here, and this one of failures elsewhere.

A process that fails leaves a note in JAX's coordination service, and the others raise `PipelineError` with the note's words
when they look. A process that waits for another one inside XLA waits without end and without a sign. So it waits here
instead, and looks for notes at intervals.

What can go wrong: a wait inside XLA cannot be cancelled. After a note the processes are out of step, and all have to be
started again. The notes stay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import jax

from autopar.compat import Coordination
from autopar.errors import PipelineError
from autopar.runtime.processes import wait_until_ready
from autopar.runtime.tuning import TUNING

MAX_NOTE = 2000
"""The most characters of a note."""


class Watch:
    """One process's view of the others."""

    def __init__(self, processes: Sequence[int], service: Coordination) -> None:
        """Watch `processes`, which run one program together; each of them makes a `Watch` of its own."""
        self._service = service
        self._processes = tuple(sorted(processes))
        self._topic = f"autopar/failed/{'-'.join(map(str, self._processes))}/"
        self._lost: str | None = None

    def post(self, error: BaseException) -> None:
        """Tell the others that this process has failed. Only the first failure counts."""
        if self._lost is None:
            lines = 2 if isinstance(error, PipelineError) else 1
            cause_and_place = " ".join(str(error).splitlines()[:lines])
            self._lost = f"process {jax.process_index()} failed: {type(error).__name__}: {cause_and_place}"[:MAX_NOTE]
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone: JAX tells the others
                self._service.key_value_set_bytes(f"{self._topic}{jax.process_index()}", self._lost.encode())

    def refuse_if_lost(self) -> None:
        """Raise PipelineError if this process has failed before, or has heard of a failure."""
        if self._lost is not None:
            raise PipelineError(self._describe_loss())

    def look(self) -> None:
        """Raise PipelineError if a process has failed."""
        for _, note in self._service.key_value_dir_get_bytes(self._topic):
            self._lost = note.decode()
            raise PipelineError(self._describe_loss())

    def wait(self, arrays: Sequence[jax.Array]) -> None:
        """Wait until arrays are computed. Raises PipelineError if a process fails before."""
        for array in arrays:
            while not wait_until_ready(array, self._make_alarm()):
                self.look()
        jax.block_until_ready(arrays)

    def _make_alarm(self) -> Callable[[], bool]:
        """Make a function that says whether it is time to look."""
        began = time.monotonic()
        return lambda: time.monotonic() - began > TUNING.look_s

    def _describe_loss(self) -> str:
        listed = ", ".join(map(str, self._processes))
        return (
            f"{self._lost}\nThe step runs on processes {listed} together, and they are out of step: what waits "
            "for another process cannot be cancelled. End all of them, and start again from saved state."
        )
