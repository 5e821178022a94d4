"""The endings of workers, and which of several endings caused the others.

In: what the supervisor has seen of its workers. Out: an `Ending` for each, one of which is the cause. A worker that is killed
takes others with it: they raise `PipelineError`, or JAX's coordination service aborts them. So a loss counts before an error, an
error of its own before one that speaks of another process, and of equals the earliest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["done", "exit", "signal", "stopped", "silent", "stalled"]
TIMED_OUT = 124
"""The exit status for a worker that did not end by itself; the command `timeout` has the same."""
OF_OTHERS = re.compile(
    r"process \d+ (failed|has ended|cannot go on)|coordination service|JaxRuntimeError: (UNAVAILABLE|ABORTED|CANCELLED|DEADLINE)"
    r"|Gloo|Connection (closed|reset) by peer",
    re.IGNORECASE,
)
"""Words of errors that are about the loss of another process."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a worker, or the moment when the supervisor gave it up.

    Attributes:
        rank: The number of the worker.
        kind: It ended with a status or by a signal; it stands still by a signal, gives no sign, or its step stands still.
        at_s: The time in seconds of the monotonic clock.
        status: The exit status, or the signal's number.
        steps: The number of steps that it had done.
        words: Its own words: the error, or what it was doing.
        silent_s: Since when it stands still, for a worker that was given up.
    """

    rank: int
    kind: Kind
    at_s: float
    status: int = 0
    steps: int = 0
    words: str = ""
    silent_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the script came to its end."""
        return self.kind == "done"

    @property
    def is_loss(self) -> bool:
        """Whether the worker was lost for a reason outside its script."""
        return self.kind in ("stopped", "silent") or (self.kind == "signal" and self.status != signal.SIGABRT)

    @property
    def exit_status(self) -> int:
        """The exit status of the command if this ending was the cause."""
        if self.kind == "signal":
            return 128 + self.status
        return self.status if self.kind in ("done", "exit") else TIMED_OUT

    def describe(self) -> str:
        """Describe the ending in words."""
        exactly = "" if self.kind in ("done", "exit") else "at least "  # it says so twice a second, and when it fails
        at = f" after {exactly}{self.steps} step{'s' * (self.steps != 1)}" if self.steps else ""
        said = f": {self.words}" if self.words else ""
        name = f"worker {self.rank}"
        match self.kind:
            case "done":
                return f"{name} has come to its end{at}"
            case "exit":
                return f"{name} ended with status {self.status}{at}{said}"
            case "signal":
                why = " (by the kernel if memory ran out, see `dmesg`; or by a person)" if self.status == 9 else ""
                return f"{name} was ended by {signal_name(self.status)}{why}{at}; the last it said: {self.words or 'nothing'}"
            case "stopped":
                return f"{name} has stood still by {signal_name(self.status)} for {self.silent_s:.0f} s{at}; before: {self.words}"
            case "silent":
                return f"{name} has given no sign for {self.silent_s:.0f} s{at}; the last it said: {self.words or 'nothing'}"
            case "stalled":
                return f"{name}{at}{said}"


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(endings: Sequence[Ending]) -> Ending:
    """Return the bad ending that caused the others."""
    return min((ending for ending in endings if not ending.is_good), key=lambda ending: (_weight(ending), ending.at_s))


def _weight(ending: Ending) -> int:
    if ending.is_loss and ending.kind != "silent":
        return 0
    if ending.kind == "exit":
        return 3 if OF_OTHERS.search(ending.words) else 1
    return 2 if ending.kind in ("silent", "stalled") else 3
