"""The output of workers, line by line with the worker's number in front: `[2] step 17`.

In: bytes as they come, in any pieces. Out: whole lines. What can go wrong: a line without end, which is cut after `LONGEST`
bytes; a reader of ours that has gone, after which workers write to nobody and go on; a full disk, for which lines are lost.
"""

from __future__ import annotations

import re
from typing import TextIO

LONGEST = 1 << 16
ENDS = re.compile(rb"\r\n|\n|\r")


class PrefixedLines:
    """The lines of one stream of one worker, each with a prefix."""

    def __init__(self, prefix: str, target: TextIO) -> None:
        """Write to `target`, each line after `prefix`."""
        self._prefix, self._target, self._rest = prefix, target, b""
        self._is_read = True

    def feed(self, data: bytes) -> None:
        """Take the next bytes, and write the lines that are complete."""
        *lines, self._rest = ENDS.split(self._rest + data)
        if len(self._rest) > LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def close(self) -> None:
        """Write the rest, which has no end of a line."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        if not lines or not self._is_read:
            return
        text = "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)
        self._is_read = write_through(self._target, text)


def write_through(target: TextIO, text: str) -> bool:
    """Write to a stream at once. Returns whether anybody reads it. Text that a full disk cannot take is lost."""
    try:
        target.write(text)
        target.flush()
    except OSError as error:
        return not isinstance(error, BrokenPipeError)
    return True
