"""Planning on several cores: independent jobs, done by this process and by forks of it.

In: jobs, and how many processes may work. Out: their results, in order. All processes take the next job from one queue until it
is empty; forks write what they find to files and end. This process does again what a fork does not bring (its job raised an error
or warned, or the fork died or hangs), so errors and warnings are those of one process. What can go wrong: threads do not survive
a fork, so a fork that runs an array operation of JAX waits forever. Jobs compute with numbers alone, and a fork that stands still
is given up.
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
from pathlib import Path
from typing import IO, NoReturn, TypeVar, cast

from autopar.forks.held_signals import holding_signals

T = TypeVar("T")

PATIENCE_S = 20.0
"""Seconds for which a fork may stand still, without time of the processor, once this process has run out of jobs."""
CAN_COUNT = Path("/proc/self/stat").exists()
"""Whether the system tells what a fork has used of the processor. Elsewhere one may take as long as all jobs took here."""
_POLL_S = 0.005
_TOKEN_BYTES = 4
_WARNED_OF = (("os.fork", RuntimeWarning), (".*multi-threaded", DeprecationWarning))
"""What JAX and Python say if a process with threads forks."""


def run_side_by_side(
    jobs: Sequence[Callable[[], T]],
    *,
    processes: int,
    weights: Sequence[float] | None = None,
    pack: Callable[[T], object] | None = None,
    unpack: Callable[[int, object], T] | None = None,
    patience_s: float = PATIENCE_S,
    may_give_up: Callable[[], bool] = lambda: False,
    given_up: T | None = None,
    ends_at_error: bool = False,
) -> list[T]:
    """The results of all jobs, found by up to `processes` processes.

    Args:
        jobs: functions without arguments. Their results must be picklable, unless `pack` says what is sent of them.
        processes: how many processes work, this one counted.
        weights: about how much work each job is; several processes take the largest first.
        pack: what a fork sends of a result that cannot be pickled, or is too large.
        unpack: the result of job `number` from what a fork packed; needed with `pack`. What this process did itself is
            neither packed nor unpacked.
        patience_s: see `PATIENCE_S`.
        may_give_up: whether jobs that only forks are still at work on need not be finished; asked while this process waits.
        given_up: their result then.
        ends_at_error: whether an error that this process meets is raised at once, and the other jobs are left.

    Raises:
        Exception: the error of the first job that raises one, or of any if `ends_at_error`.
    """
    if min(processes, len(jobs)) <= 1 or not hasattr(os, "fork"):
        return [job() for job in jobs]
    order = sorted(range(len(jobs)), key=lambda number: 0 if weights is None else -weights[number])
    with _open_queue(order) as queue, contextlib.ExitStack() as ended:
        started = time.monotonic()
        forks = [ended.enter_context(_fork_worker(jobs, queue, pack)) for _ in range(min(processes, len(jobs)) - 1)]
        done, failed = _do_own(jobs, queue, ends_at_error=ends_at_error)
        patience_s = patience_s if CAN_COUNT else max(patience_s, time.monotonic() - started)
        for fork in forks:
            for number, sent in fork.results(patience_s, may_give_up).items():
                done[number] = cast(T, sent) if unpack is None else unpack(number, sent)
    is_given_up = may_give_up()
    for number in sorted({*range(len(jobs))} - set(done)):
        if number in failed:
            raise failed[number]
        done[number] = cast(T, given_up) if is_given_up else jobs[number]()
    return [done[number] for number in range(len(jobs))]


@contextlib.contextmanager
def started_aside(job: Callable[[], T], *, processes: int) -> Iterator[Callable[[], T]]:
    """A function that returns the result of a job, on which a fork works from now on if several processes may.

    This process does the job when it is asked for the result and no fork brings it, or if it alone may work.

    Args:
        job: a function without arguments, whose result must be picklable.
        processes: how many processes work, this one counted.
    """
    if processes <= 1 or not hasattr(os, "fork"):
        yield job
        return
    with _open_queue([0]) as queue, _fork_worker([job], queue, None) as fork:
        yield lambda: cast(T, found[0]) if (found := fork.results(PATIENCE_S, lambda: False)) else job()


@contextlib.contextmanager
def _open_queue(order: Sequence[int]) -> Iterator[int]:
    """A pipe that holds the numbers of all jobs. Whichever process reads a token takes that job."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"".join(number.to_bytes(_TOKEN_BYTES, "little") for number in order))
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def _take_jobs(queue: int) -> Iterator[int]:
    while token := os.read(queue, _TOKEN_BYTES):
        yield int.from_bytes(token, "little")


def _do_own(
    jobs: Sequence[Callable[[], T]], queue: int, *, ends_at_error: bool
) -> tuple[dict[int, T], dict[int, Exception]]:
    """What this process takes from the queue: results, and the errors of those that raise one, unless the first ends all."""
    done: dict[int, T] = {}
    failed: dict[int, Exception] = {}
    for number in _take_jobs(queue):
        try:
            done[number] = jobs[number]()
        except Exception as error:
            if ends_at_error:
                raise
            failed[number] = error
    return done, failed


class _Fork:
    """A process at work, and the file to which it writes (number, what it sends of the result)."""

    def __init__(self, process: int, file: IO[bytes]) -> None:
        self._process, self._file = process, file
        self._has_ended = False

    def results(self, patience_s: float, may_give_up: Callable[[], bool]) -> Mapping[int, object]:
        """What it wrote, by the number of the job, once it has ended, stands still for so long, or is given up."""
        used, since = self._used(), time.monotonic()
        while self._is_at_work() and time.monotonic() < since + patience_s and not may_give_up():
            time.sleep(_POLL_S)
            if (now := self._used()) != used:
                used, since = now, time.monotonic()
        self.end()
        self._file.seek(0)
        found: dict[int, object] = {}
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the end, or a record cut off
            while True:
                number, result = pickle.load(self._file)
                found[number] = result
        return found

    def _used(self) -> tuple[str, ...]:
        """Its time of the processor, in the system's words; nothing where the system does not count it."""
        with contextlib.suppress(OSError):
            return tuple(Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()[11:13])
        return ()

    def end(self) -> None:
        """Kill it if it is still at work, and wait until it is gone, whatever signals come meanwhile."""
        with holding_signals():
            if self._is_at_work():
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                self._has_ended = True

    def _is_at_work(self) -> bool:
        if not self._has_ended:
            try:
                self._has_ended = os.waitpid(self._process, os.WNOHANG)[0] != 0
            except ChildProcessError:  # it had been waited for when a handler raised, before that was noted
                self._has_ended = True
        return not self._has_ended


@contextlib.contextmanager
def _fork_worker(jobs: Sequence[Callable[[], T]], queue: int, pack: Callable[[T], object] | None) -> Iterator[_Fork]:
    """A fork that works on the queue, and is gone at the end."""
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as ended:
        with holding_signals(), warnings.catch_warnings():
            for message, category in _WARNED_OF:
                warnings.filterwarnings("ignore", message, category)
            process = os.fork()
            if process == 0:
                _work_and_exit(jobs, queue, file, pack)
            fork = _Fork(process, file)
            ended.callback(fork.end)
        yield fork


def _work_and_exit(
    jobs: Sequence[Callable[[], T]], queue: int, file: IO[bytes], pack: Callable[[T], object] | None
) -> NoReturn:
    """In the fork: do jobs, then exit without running anything that belongs to the parent process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this process
        for number in _take_jobs(queue):
            # Errors and warnings are left to the parent, which does the job again.
            with warnings.catch_warnings(record=True) as warned, contextlib.suppress(Exception):
                warnings.simplefilter("always")
                result = jobs[number]()
                record = pickle.dumps((number, result if pack is None else pack(result)))
                if not warned:
                    file.write(record)
                    file.flush()
    finally:
        os._exit(0)
