"""A file to which whole lines are added, such as the metrics of a run that lasts for weeks.

In: a path, then lines. Out: the file, each of whose lines is whole whenever somebody looks: a line is one write, and half a line,
which a full disk leaves, is cut off again. What can go wrong: a line cannot be written. That ends no training: a warning says so
once, and each later line is another try.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from autopar.errors import ArgumentError, warn


class LineLog:
    """See the module's text. Lines are added to those that are there."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ArgumentError if that cannot be done."""
        self._path, self._has_warned = path, False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise ArgumentError(f"cannot write {path}: {error.strerror}. Name a file elsewhere") from None

    def add(self, line: str) -> None:
        """Add a line; its end is added, too."""
        data = f"{line}\n".encode()
        try:
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                self._warn(os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error.strerror or str(error))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            warn(f"cannot write {self._path}: {why}. The run goes on, and tries to write its next line")
        self._has_warned = True
