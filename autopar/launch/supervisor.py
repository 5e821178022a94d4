"""Run a job on one machine: start its workers, watch them, and start them again when one is lost.

In: `LaunchSettings`. Out: an exit status; and no process that the job has started. Checkpoints are the script's: each start runs
the same script, which looks for its last complete checkpoint. The supervisor is outside of all workers, so it can say what
happened when JAX's coordination service, which is in one of them, no longer can.

What can go wrong: the supervisor itself is killed. The kernel then kills its workers, and a small process beside it what these
have left behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator

from autopar.launch import leftovers
from autopar.launch.attempt import Attempt, Outcome
from autopar.launch.endings import Ending, signal_name
from autopar.launch.environment import TOKEN
from autopar.launch.output import write_through
from autopar.launch.settings import LaunchSettings, Size
from autopar.launch.signals import Signals
from autopar.launch.tuning import TUNING


def supervise(settings: LaunchSettings) -> int:
    """Run a job to its end. Returns the exit status.

    It is 0 if all workers came to their end, 128 and the signal's number if a signal asked the job to stop, and otherwise that of
    the worker that failed first: its own status, 128 and the number of the signal that ended it, or 124 for one that stood still.
    """
    token = f"{os.environ.get(TOKEN, '')}/{secrets.token_hex(8)}"
    with selectors.DefaultSelector() as loop, Signals(loop) as signals, beside(token):
        return _Supervisor(settings, token, signals).run()


class _Supervisor:
    """The attempts of one job."""

    def __init__(self, settings: LaunchSettings, token: str, signals: Signals) -> None:
        self._settings, self._token, self._signals = settings, token, signals
        self._size, self._restarts = settings.size, 0
        self._last: Ending | None = None

    def run(self) -> int:
        number = 0
        while True:
            outcome = Attempt(
                self._settings, self._size, token=self._token, number=number, signals=self._signals, say=say
            ).run()
            number += 1
            if outcome.kind == "done":
                return 0
            if outcome.kind == "failed":
                outcome = self._start_again(outcome)
            self._size = outcome.size
            if outcome.kind == "failed":
                assert outcome.cause is not None
                return outcome.cause.exit_status
            if outcome.kind == "stopped":
                say(f"stopped by {signal_name(outcome.signal)}; no worker is left")
                return 128 + outcome.signal

    def _start_again(self, outcome: Outcome) -> Outcome:
        """Decide what follows from a failure: another start, the failure itself, or a signal that came meanwhile."""
        cause, before, self._last = outcome.cause, self._last, outcome.cause
        assert cause is not None
        if self._restarts >= self._settings.max_restarts:
            say(
                f"the job has been started again {self._restarts} times (--max-restarts), and is given up"
                if self._restarts
                else "the job is given up; with --max-restarts it would be started again"
            )
            return outcome
        if is_certain(cause, before):
            say("the same error has come twice without a step in between: it is in the script, and the job is given up")
            return outcome
        self._restarts += 1
        size = self._smaller(cause, before)
        say(f"{size} start again from the last checkpoint (restart {self._restarts} of {self._settings.max_restarts})")
        number = self._pause(self._settings.restart_pause_s)
        return Outcome(kind="stopped" if number else "resized", size=size, signal=number)

    def _smaller(self, cause: Ending, before: Ending | None) -> Size:
        """Return a size with one worker less, if workers are lost again and again and the job may go on without it."""
        least = self._settings.min_processes
        is_lost_again = cause.is_loss and before is not None and before.is_loss
        if least is None or not is_lost_again or self._size.processes <= least:
            return self._size
        self._last = None
        return Size(self._size.processes - 1, self._size.devices)

    def _pause(self, seconds: float) -> int:
        """Wait. Returns the signal that asks the job to stop, or 0."""
        ends = time.monotonic() + seconds
        while not self._signals.stops and time.monotonic() < ends:
            for key, _ in self._signals.loop.select(min(seconds, TUNING.look_s)):
                key.data()
        return self._signals.stops.popleft() if self._signals.stops else 0


def is_certain(cause: Ending, before: Ending | None) -> bool:
    """Whether another attempt would fail like the last two: with the same error, and no step done in between."""
    same = before is not None and (cause.kind, cause.status, cause.words) == (before.kind, before.status, before.words)
    return same and cause.kind == "exit" and bool(cause.words) and cause.steps == 0


@contextlib.contextmanager
def beside(token: str) -> Iterator[None]:
    """Open a context with a process beside this one, which kills the job's processes if this one is killed."""
    command: list[str] = [sys.executable, "-I", "-S", leftovers.__file__, token]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(leftovers.LIMIT_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def say(words: str) -> None:
    """Tell the user, on standard error."""
    write_through(sys.stderr, f"autopar launch: {words}\n")
