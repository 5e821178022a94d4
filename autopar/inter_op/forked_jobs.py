"""Planning on several cores: independent jobs, done by this process and by forks of it.

In: jobs, functions whose results can be pickled, and how many processes may work. Out: their results, in order. All processes
take the next job from one queue until it is empty; forks write what they find to files and end. What a fork does not bring (its
job raised an error or warned, or it died or hangs) is done again here, so errors and warnings are those of one process. What can
go wrong: threads do not survive a fork, so a fork that runs an array operation of JAX waits for ever: jobs compute with numbers
alone, and one that takes far longer than it may is given up.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NoReturn, TypeVar

T = TypeVar("T")

PATIENCE_S = 20.0
"""How long a fork's last job may take after this process has done its own; or as long again as all took before."""
_POLL_S = 0.005
_TOKEN_BYTES = 4
_WARNED_OF = (("os.fork", RuntimeWarning), (".*multi-threaded", DeprecationWarning))
"""What JAX and Python say where a process with threads forks."""


def side_by_side(
    jobs: Sequence[Callable[[], T]],
    *,
    processes: int,
    weights: Sequence[float] | None = None,
    patience_s: float = PATIENCE_S,
) -> list[T]:
    """The results of all jobs, by up to so many processes. Raises the error of the first job that raises one.

    `weights`: about how much work each is; several processes take the largest first.
    """
    if min(processes, len(jobs)) <= 1 or not hasattr(os, "fork"):
        return [job() for job in jobs]
    done: dict[int, T] = {}
    failed: dict[int, Exception] = {}
    order = sorted(range(len(jobs)), key=lambda number: 0 if weights is None else -weights[number])
    with _queue(order) as queue, contextlib.ExitStack() as ended:
        started = time.monotonic()
        forks = [ended.enter_context(_forked(jobs, queue)) for _ in range(min(processes, len(jobs)) - 1)]
        for number in _taken(queue):
            try:
                done[number] = jobs[number]()
            except Exception as error:  # noqa: BLE001 - raised below, unless an earlier job raises one
                failed[number] = error
        until = time.monotonic() + max(patience_s, time.monotonic() - started)
        for fork in forks:
            done.update(fork.results(until))
    for number in sorted({*range(len(jobs))} - set(done)):
        if number in failed:
            raise failed[number]
        done[number] = jobs[number]()
    return [done[number] for number in range(len(jobs))]


@contextlib.contextmanager
def _queue(order: Sequence[int]) -> Iterator[int]:
    """A pipe that holds the numbers of all jobs; a read of one token by whichever process gets it takes that job."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"".join(number.to_bytes(_TOKEN_BYTES, "little") for number in order))
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def _taken(queue: int) -> Iterator[int]:
    while token := os.read(queue, _TOKEN_BYTES):
        yield int.from_bytes(token, "little")


class _Fork:
    """A process at work, and the file to which it writes (number, result)."""

    def __init__(self, process: int, file: IO[bytes]) -> None:
        self._process, self._file = process, file
        self._is_there = True

    def results(self, until: float) -> Mapping[int, Any]:
        """What it brought when it had ended, or when the time came."""
        while self._still_works() and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.end()
        self._file.seek(0)
        found: dict[int, Any] = {}
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the end, or a record cut off
            while True:
                number, result = pickle.load(self._file)
                found[number] = result
        return found

    def end(self) -> None:
        """End it if it is still there."""
        if self._still_works():
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self._is_there = False

    def _still_works(self) -> bool:
        self._is_there = self._is_there and os.waitpid(self._process, os.WNOHANG)[0] == 0
        return self._is_there


@contextlib.contextmanager
def _forked(jobs: Sequence[Callable[[], Any]], queue: int) -> Iterator[_Fork]:
    """A fork that works on the queue, and is gone at the end."""
    with tempfile.TemporaryFile() as file:
        with warnings.catch_warnings():
            for message, category in _WARNED_OF:
                warnings.filterwarnings("ignore", message, category)
            process = os.fork()
        if process == 0:
            _work(jobs, queue, file)
        fork = _Fork(process, file)
        try:
            yield fork
        finally:
            fork.end()


def _work(jobs: Sequence[Callable[[], Any]], queue: int, file: IO[bytes]) -> NoReturn:
    """In the fork: do jobs, and leave without running anything that belongs to the process it came from."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process it came from hears it, and ends this one
        for number in _taken(queue):
            with warnings.catch_warnings(record=True) as warned, contextlib.suppress(Exception):
                warnings.simplefilter("always")
                record = pickle.dumps((number, jobs[number]()))
                if not warned:
                    file.write(record)
                    file.flush()
    finally:
        os._exit(0)
