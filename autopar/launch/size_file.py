"""The size of a running job, read from a file such as `4` or `4 2`, which a scheduler writes.

In: a path. Out: the size that the file asks for, when it changes. The first number counts workers, the second, if there is one,
the devices of each. What can go wrong: something else is in the file, or it cannot be read; the supervisor says so once, and the
job stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from autopar.errors import ArgumentError
from autopar.launch.settings import Size

LINE = re.compile(r"\s*(\d+)(?:\s*[x, ]\s*(\d+))?\s*")


class SizeFile:
    """A file that the supervisor reads again and again."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        """Read a path, or nothing if it is None. `say` reports a file that cannot be read."""
        self._path, self._say, self._wrong = path, say, ""

    def read(self, now: Size) -> Size:
        """Return the size that the file asks for; `now` if there is no file, or no other size in it."""
        if self._path is None:
            return now
        try:
            return parse_size(self._path.read_text(errors="replace"), now)
        except FileNotFoundError:
            return now
        except (ArgumentError, OSError) as error:
            if str(error) != self._wrong:
                self._wrong = str(error)
                self._say(f"{self._path}: {error}; the job stays as it is")
            return now


def parse_size(text: str, now: Size) -> Size:
    """Read `4` or `4 2`. Without a second number the devices stay as they are. Raises ArgumentError for other text."""
    found = LINE.fullmatch(text)
    if not text.strip():  # it is being written
        return now
    if found is None or int(found[1]) == 0 or found[2] == "0":
        raise ArgumentError(
            f"{text.strip()[:40]!r} is no size of a job: write how many workers, and how many devices each, as in '4 2'"
        )
    return Size(int(found[1]), now.devices if found[2] is None else int(found[2]))
