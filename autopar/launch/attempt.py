"""One start of all workers, watched until all of them have ended.

In: a job, its size, signals. Out: an `Outcome`. The first bad ending ends the attempt. The supervisor waits a moment for further
endings, reports the cause, and asks the survivors to end. The first worker comes last, because it runs JAX's coordination
service. After a time of grace it kills them and all that they have started.

What can go wrong: survivors wait in XLA for the worker that is gone, and no signal that Python handles reaches them. The grace
bounds this wait.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.launch import leftovers
from autopar.launch.endings import Ending, cause_of, signal_name
from autopar.launch.environment import variables_of_job, variables_of_worker
from autopar.launch.process import WorkerProcess
from autopar.launch.settings import LaunchSettings, Size
from autopar.launch.signals import Signals
from autopar.launch.size_file import SizeFile
from autopar.launch.tuning import TUNING


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of an attempt.

    Attributes:
        kind: All workers came to their end; one failed; a signal asked to stop; the job is to have another size.
        cause: The ending that caused the others, after a failure.
        signal: The signal that asked to stop.
        size: The size that the job has from now on.
    """

    kind: Literal["done", "failed", "stopped", "resized"]
    size: Size
    cause: Ending | None = None
    signal: int = 0


class Attempt:
    """The workers of one start. `run` returns when none of them is left."""

    def __init__(
        self,
        settings: LaunchSettings,
        size: Size,
        *,
        token: str,
        number: int,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        """Prepare a start. `number` counts the starts, and `say` tells the user."""
        self._settings, self._size, self._token, self._number = settings, size, token, number
        self._signals, self._say = signals, say
        self._loop = signals.loop
        self._size_file = SizeFile(settings.size_file, say)
        self._workers: list[WorkerProcess] = []
        self._looked_s = time.monotonic()

    def run(self) -> Outcome:
        """Start the workers, watch them, end them."""
        try:
            self._start()
            return self._watch()
        finally:
            self._end_all(())
            found = leftovers.kill(self._token)
            if found:
                what = "1 process" if len(found) == 1 else f"{len(found)} processes"
                self._say(f"{what} that the workers had left behind {'is' if len(found) == 1 else 'are'} killed")

    def _start(self) -> None:
        job = variables_of_job(self._settings, self._size, token=self._token, attempt=self._number)
        command = [sys.executable, "-m", "autopar.launch.worker", *self._settings.command]
        first = self._settings.nodes.rank * self._size.processes
        for rank in range(first, first + self._size.processes):
            self._workers.append(
                WorkerProcess(
                    rank,
                    command,
                    lambda pipe, rank=rank: variables_of_worker(job, self._settings, rank=rank, pipe=pipe),  # type: ignore[misc]
                    self._loop,
                )
            )

    def _watch(self) -> Outcome:
        """Wait for what ends the attempt."""
        while True:
            self._look()
            if any(worker.ending is not None and not worker.ending.is_good for worker in self._workers):
                return self._fail()
            if all(worker.has_ended for worker in self._workers):
                return Outcome(kind="done", size=self._size)
            if self._signals.stops:
                return self._stop(self._signals.stops.popleft())
            wanted = self._size_file.read(self._size)
            if wanted != self._size:
                self._say(f"the job is to have {wanted} in place of {self._size}: it saves, ends and starts again")
                self._end_all([signal.SIGTERM], self._settings.grace_s)
                return Outcome(kind="resized", size=wanted)

    def _fail(self) -> Outcome:
        """Report the cause, and end the survivors."""
        self._look_for(TUNING.settle_s, until=lambda: all(worker.ending is not None for worker in self._workers))
        endings = [worker.ending for worker in self._workers if worker.ending is not None]
        cause = cause_of(endings)
        for ending in endings if cause.kind == "stalled" else [cause]:
            if ending.kind == cause.kind:
                self._say(ending.describe())
        alive = [worker.rank for worker in self._workers if not worker.has_ended and worker.rank != cause.rank]
        if alive:
            names = f"worker{'s' * (len(alive) > 1)} {', '.join(map(str, alive))}"
            self._say(f"{names} cannot go on without it, and {'are' if len(alive) > 1 else 'is'} ended")
        others, first = self._workers[1:], self._workers[:1]
        self._ask(others, signal.SIGTERM)
        self._look_for(TUNING.failure_grace_s / 2, until=lambda: all(worker.has_ended for worker in others))
        self._ask(first, signal.SIGTERM)
        self._look_for(TUNING.failure_grace_s / 2, until=lambda: all(worker.has_ended for worker in self._workers))
        return Outcome(kind="failed", size=self._size, cause=cause)

    def _stop(self, number: int) -> Outcome:
        """Pass a signal on to the workers, which may save; a second one ends them at once."""
        self._say(
            f"{signal_name(number)} is passed on to the workers, which have {self._settings.grace_s:.0f} s to save and end; a "
            "second signal ends them at once"
        )
        self._end_all([number], self._settings.grace_s)
        return Outcome(kind="stopped", size=self._size, signal=number)

    def _end_all(self, numbers: Iterable[int], grace_s: float = 0.0) -> None:
        """Send signals, wait for the workers to end, kill those that do not, and read what they have written."""
        for number in numbers:
            self._ask(self._workers, number)
        self._look_for(
            grace_s, until=lambda: all(worker.has_ended for worker in self._workers) or bool(self._signals.stops)
        )
        for worker in self._workers:
            worker.kill()
        self._look_for(TUNING.drain_s, until=lambda: all(worker.is_drained for worker in self._workers))
        for worker in self._workers:
            worker.close()

    def _ask(self, workers: Iterable[WorkerProcess], number: int) -> None:
        """Send a signal to workers; one that stands still is woken, so that it can follow."""
        for worker in workers:
            worker.signal(number)
            worker.signal(signal.SIGCONT)

    def _look_for(self, seconds: float, *, until: Callable[[], bool]) -> None:
        """Look at the workers for this long, or until `until` holds."""
        ends = time.monotonic() + seconds
        while not until() and time.monotonic() < ends:
            self._look()

    def _look(self) -> None:
        """Wait for something to happen, a moment at the most; read what is there, and see who has ended."""
        for key, _ in self._loop.select(TUNING.look_s):
            key.data()
        now_s = time.monotonic()
        if now_s - self._looked_s > TUNING.nap_s:
            for worker in self._workers:
                worker.forgive(now_s - self._looked_s)
        self._looked_s = now_s
        while self._signals.passed_on:
            number = self._signals.passed_on.popleft()
            for worker in self._workers:
                worker.signal(number)
        for worker in self._workers:
            worker.look(now_s, silence_s=self._settings.silence_s)
