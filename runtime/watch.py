"""Tells the other processes of a failure here, and this one of failures elsewhere.

In: the processes that run one program together. Out: a note in JAX's coordination service when this one fails, and a
`PipelineError` with the note's words in those that look. The idea: a process that waits for another one waits inside XLA,
without end and without a sign; so waiting is done here, with a look for notes now and then. What can go wrong: what waits inside
XLA cannot be cancelled, so after a note the processes have lost step, and all have to be started again. The notes stay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import jax

from autopar.compat import Coordination
from autopar.errors import PipelineError
from autopar.runtime.processes import wait_until_ready

LOOK_S = 0.5
MAX_NOTE = 2000


class Watch:
    """One process's view of the others; made by each of `processes`."""

    def __init__(self, processes: Sequence[int], service: Coordination) -> None:
        self._service = service
        self._processes = tuple(sorted(processes))
        self._topic = f"autopar/failed/{'-'.join(map(str, self._processes))}/"
        self._lost: str | None = None

    def post(self, error: BaseException) -> None:
        """Tell the others that this process has failed; the first failure counts."""
        if self._lost is None:
            first = str(error).partition("\n")[0]
            self._lost = f"process {jax.process_index()} failed: {type(error).__name__}: {first}"[:MAX_NOTE]
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone: JAX tells the others
                self._service.key_value_set_bytes(f"{self._topic}{jax.process_index()}", self._lost.encode())

    def refuse_if_lost(self) -> None:
        """Raise PipelineError if this process has failed before, or heard of a failure."""
        if self._lost is not None:
            raise PipelineError(self._lost_words())

    def look(self) -> None:
        """Raise PipelineError if a process has failed."""
        for _, note in self._service.key_value_dir_get_bytes(self._topic):
            self._lost = note.decode()
            raise PipelineError(self._lost_words())

    def wait(self, arrays: Sequence[jax.Array]) -> None:
        """Wait until arrays are computed; PipelineError if a process fails before."""
        for array in arrays:
            while not wait_until_ready(array, self._time_to_look()):
                self.look()
        jax.block_until_ready(arrays)

    def _time_to_look(self) -> Callable[[], bool]:
        began = time.monotonic()
        return lambda: time.monotonic() - began > LOOK_S

    def _lost_words(self) -> str:
        listed = ", ".join(map(str, self._processes))
        return (
            f"{self._lost}\nThe step runs on processes {listed} together, and they have lost step with each other: what waits "
            "for another process cannot be cancelled. End all of them, and start again from saved state."
        )
