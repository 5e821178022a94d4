"""The file of a training run's losses: one row of CSV for each step.

In: a path, then rows. Out: the file, which is replaced by a longer one at most once a second and when the run ends, so that it
is whole whenever somebody looks. A pipe or a terminal gets each row as it comes. What can go wrong: the file cannot be written.
That ends no training: a warning says so once, the rows are kept in memory, and each later write is another try.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from autopar.errors import ArgumentError, warn
from autopar.files.whole_file import is_stream, why_not_written, write_whole

HEADER = "step,loss,seconds\r\n"
PAUSE_S, MOST_SHARE = 1.0, 0.01
"""Seconds between two writes, at the least, and the part of the time that they may take together."""


class LossLog:
    """See the module's text. Raises ArgumentError if the file cannot be begun."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows, self._unwritten, self._has_warned = path, [HEADER], 0, False
        self._next_s = time.monotonic() + PAUSE_S
        self._stream: BinaryIO | None = None
        try:
            if is_stream(path):
                self._stream = path.open("wb", buffering=0)
                self._stream.write(HEADER.encode())
            else:
                write_whole(path, HEADER.encode())
        except OSError as error:
            raise ArgumentError(why_not_written(path, error)) from None

    def add(self, step: int, loss: float, seconds: float) -> None:
        """Add the row of a step."""
        row = f"{step},{loss:.9g},{seconds:.6f}\r\n"
        if self._stream is not None:
            with self._warning():
                self._stream.write(row.encode())
            return
        self._rows.append(row)
        self._unwritten += 1
        if time.monotonic() >= self._next_s:
            self._write()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._stream is not None:
            with self._warning():
                self._stream.close()
        elif self._unwritten:
            self._write()

    def _write(self) -> None:
        began = time.monotonic()
        with self._warning():
            write_whole(self._path, "".join(self._rows).encode())
            self._unwritten = 0
        ended = time.monotonic()
        self._next_s = ended + max(PAUSE_S, (ended - began) / MOST_SHARE)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Of what cannot be written the user hears once, and the run goes on."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                warn(f"{why_not_written(self._path, error)}. The run goes on, and tries to write its losses again")
            self._has_warned = True
