"""One worker as its supervisor sees it: a process in a group of its own, its output, and the signs that it gives.

In: a command and its environment. Out: the worker's output, with its number in front, and an `Ending` once it has ended or has to
be given up. What can go wrong: a process that the worker has left behind keeps the output open. The supervisor reads it for a
moment after the worker's end, and no longer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from autopar.launch.endings import Ending, Kind
from autopar.launch.messages import Message, MessageReader
from autopar.launch.output import PrefixedLines
from autopar.launch.tuning import TUNING

CHUNK_BYTES = 1 << 16
CHUNKS = 16
"""Of a descriptor that are read before others have their turn. A pipe holds one, and 16 where a process has made it larger."""


class WorkerProcess:
    """A worker from its start to its end. `ending` is None while it runs as it should."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        variables: Callable[[int], Mapping[str, str]],
        loop: selectors.BaseSelector,
    ) -> None:
        """Start the worker.

        Args:
            rank: its number among all workers.
            command: the command that it runs.
            variables: returns its environment, given the descriptor of its pipe.
            loop: the selector of the supervisor, which calls `data()` of a registered stream when there is something to read.
        """
        self.rank, self._loop = rank, loop
        self.ending: Ending | None = None
        self.began_s = self.heard_s = time.monotonic()
        self.last = Message(kind="beat", at_s=self.began_s)
        self._failed: Message | None = None
        self._stalled: Message | None = None
        self._stopped: tuple[int, float] | None = None
        self._patience_s = TUNING.start_s
        self._reader = MessageReader()
        self._lines = [PrefixedLines(f"[{rank}] ", sys.stdout), PrefixedLines(f"[{rank}] ", sys.stderr)]
        here, there = os.pipe()
        self._process = subprocess.Popen(
            command,
            env=dict(variables(there)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(there,),
            start_new_session=True,
        )
        os.close(there)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._open: dict[int, Callable[[bytes], object]] = {
            self._process.stdout.fileno(): self._lines[0].feed,
            self._process.stderr.fileno(): self._lines[1].feed,
            here: self._hear,
        }
        self._pipe = here
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
            loop.register(descriptor, selectors.EVENT_READ, lambda descriptor=descriptor: self._read(descriptor))

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    @property
    def is_drained(self) -> bool:
        """Whether the process has ended, and all its output has been read."""
        return self.has_ended and not self._open

    def signal(self, number: int) -> None:
        """Send a signal to the process, but not to those that it has started."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process and all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def look(self, now_s: float, *, silence_s: float) -> None:
        """Find out whether the worker has ended, stands still, or is silent for too long."""
        self._wait(now_s)
        if self.has_ended or self.ending is not None:
            return
        if self._stopped is not None and now_s - self._stopped[1] > TUNING.stopped_s:
            number, since_s = self._stopped
            self.ending = self._end("stopped", now_s, status=number, silent_s=now_s - since_s, words=self.last.words)
        elif self._pipe in self._open and now_s - self.heard_s > silence_s + self._patience_s:
            self.ending = self._end("silent", now_s, silent_s=now_s - self.heard_s, words=self.last.words)
        elif self._failed is not None and now_s - self._failed.at_s > TUNING.exit_s:
            self.ending = self._end("exit", self._failed.at_s, status=1, words=self._failed.words)
        elif self._stalled is not None:
            self.ending = self._end("stalled", self._stalled.at_s, words=self._stalled.words)

    def forgive(self, seconds: float) -> None:
        """Do not hold the supervisor's own standstill against the worker."""
        self.heard_s += seconds
        if self._stopped is not None:
            self._stopped = (self._stopped[0], self._stopped[1] + seconds)

    def close(self) -> None:
        """Read the rest of the output, and close it."""
        for descriptor in list(self._open):
            self._read(descriptor)
        for descriptor in list(self._open):
            self._shut(descriptor)
        for lines in self._lines:
            lines.close()

    def _wait(self, now_s: float) -> None:
        """Ask the kernel for changes of the process, and note the end."""
        while not self.has_ended:
            found, status = os.waitpid(self._process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if found == 0:
                return
            if os.WIFSTOPPED(status):
                self._stopped = (os.WSTOPSIG(status), now_s)
            elif os.WIFCONTINUED(status):
                self._stopped, self.heard_s = None, now_s
            else:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._note_end(self._process.returncode, now_s)

    def _note_end(self, code: int, now_s: float) -> None:
        """Note the ending of a process that has ended by itself. One that was given up keeps the reason for that."""
        if self._pipe in self._open:
            self._read(self._pipe)
        if self.ending is not None:
            return
        failed = self._failed
        # A signal that ends a process during its exit after an error is not the cause.
        if failed is not None and code != 0:
            self.ending = self._end("exit", failed.at_s, status=max(code, 1), words=failed.words)
        elif code < 0:
            self.ending = self._end("signal", now_s, status=-code, words=self.last.words)
        elif code > 0:
            self.ending = self._end("exit", now_s, status=code)
        else:
            self.ending = self._end("done", now_s)

    def _end(self, kind: Kind, at_s: float, *, status: int = 0, words: str = "", silent_s: float = 0.0) -> Ending:
        return Ending(
            rank=self.rank, kind=kind, at_s=at_s, status=status, steps=self.last.steps, words=words, silent_s=silent_s
        )

    def _hear(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self.heard_s, self._patience_s = max(self.heard_s, message.at_s), 0.0
            if message.kind == "failed":
                self._failed = message
            elif message.kind in ("stalled", "going on"):
                self._stalled = message if message.kind == "stalled" else None
            self.last = message

    def _read(self, descriptor: int) -> None:
        """Read from a descriptor as much as a pipe holds. The rest waits, since a worker may write without end."""
        for _ in range(CHUNKS):
            if descriptor not in self._open:
                return
            try:
                data = os.read(descriptor, CHUNK_BYTES)
            except BlockingIOError:
                return
            if data:
                self._open[descriptor](data)
            else:
                self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        self._loop.unregister(descriptor)
        del self._open[descriptor]
        if descriptor == self._pipe:
            os.close(descriptor)
            return
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None and not stream.closed and stream.fileno() == descriptor:
                stream.close()
