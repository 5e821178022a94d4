"""Kill the processes that workers have left behind, so that no process of a job outlives it.

In: the token of a job, which every process has in its environment that a worker or its children started. Out: none of them is
there. `python leftovers.py TOKEN` does it as soon as its standard input ends: it is a process beside the supervisor, for the case
that the supervisor itself is killed. It imports nothing of autopar, so that it starts at once.

What can go wrong: a process that has emptied its environment, or whose owner is another user, is not found. Without `/proc`, as
on macOS, only the process groups of workers are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 5.0
PROCESSES = Path("/proc")
VARIABLE = b"AUTOPAR_LAUNCH="


def find(token: str) -> list[int]:
    """Return the processes of a job, and of jobs that its workers have started."""
    wanted, found = VARIABLE + token.encode(), []
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            words = (folder / "environ").read_bytes().split(b"\0")
            if any(word.startswith(wanted) for word in words) and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def kill(token: str, limit_s: float = LIMIT_S) -> list[int]:
    """Kill the processes of a job until there are none. Returns those that existed at first."""
    ends, first = time.monotonic() + limit_s, find(token)
    left = first
    while left and time.monotonic() < ends:
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        left = find(token)
    return first


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill(sys.argv[1])
