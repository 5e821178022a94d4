"""The files of the plan cache: one for each question, in a folder that is bounded in size.

In: entries and keys. Out: entries, as far as their files can be read. Files appear whole, by renaming, so several processes
may use the folder at once; the last to write an entry wins. Reading a file marks it as used, and those that were not used for the
longest time make room. What can go wrong: the disk is full or read-only; plans are then not kept, and a warning says so once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from autopar.errors import PlanError, warn
from autopar.files.whole_file import UNFINISHED, write_whole
from autopar.plan_cache.entry import Entry, pack, unpack
from autopar.progress import LOGGER

VARIABLE, OFF = "AUTOPAR_CACHE", "off"
LIMIT_BYTES = 256 * 2**20
_SUFFIX = ".plan"
_ABANDONED_S = 3600.0
"""After this many seconds an unfinished file belongs to a process that is gone."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file of the cache: where it is, its size, and when it was last used, in seconds since 1970."""

    path: Path
    size_bytes: int
    used_at: float

    @property
    def key(self) -> str:
        """The key of the entry that it should hold."""
        return self.path.name.removesuffix(_SUFFIX)


@dataclasses.dataclass(frozen=True)
class CacheFolder:
    """A folder of entries, which together take at most `limit_bytes`."""

    path: Path
    limit_bytes: int = LIMIT_BYTES

    def find(self, key: str) -> Entry | None:
        """The entry of a key, marked as used; None, and a line in the log, if there is none that can be read."""
        file = self._file(key)
        try:
            entry = unpack(file.read_bytes(), key)
        except FileNotFoundError:
            LOGGER.info("no plan in the cache for %s", key[:12])
            return None
        except (OSError, PlanError) as error:
            LOGGER.info("the plan in the cache for %s cannot be used: %s", key[:12], error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return entry

    def keep(self, entry: Entry) -> None:
        """Write an entry, and remove what was not used for the longest time if the folder is too large."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file(entry.key), pack(entry))
            self._make_room()
        except OSError as error:
            _warn_once(
                f"plans cannot be kept in {self.path} ({error.strerror or error}), so each run searches again; set {VARIABLE} to "
                f"another folder, or to {OFF!r}"
            )

    def files(self) -> list[StoredFile]:
        """The files of entries, the last used first."""
        return sorted(self._list_files(_SUFFIX), key=lambda file: (-file.used_at, file.path.name))

    def clear(self) -> int:
        """Remove all entries; returns how many there were. Raises OSError if that is not allowed."""
        files = [*self.files(), *self._list_files(UNFINISHED)]
        for file in files:
            file.path.unlink(missing_ok=True)
        return sum(file.path.name.endswith(_SUFFIX) for file in files)

    def _file(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"

    def _make_room(self) -> None:
        left = self.limit_bytes
        for file in self.files():
            left -= file.size_bytes
            if left < 0:
                file.path.unlink(missing_ok=True)
        for file in self._list_files(UNFINISHED):
            if file.used_at < time.time() - _ABANDONED_S:
                file.path.unlink(missing_ok=True)

    def _list_files(self, suffix: str) -> Iterator[StoredFile]:
        """The files with a suffix; one that another process removes meanwhile is left out."""
        if not self.path.is_dir():
            return
        for path in self.path.glob(f"*{suffix}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield StoredFile(path, status.st_size, status.st_mtime)


def cache_folder() -> CacheFolder | None:
    """The folder that the environment names; None if the cache is off, or there is no home for it."""
    given = os.environ.get(VARIABLE, "").strip()
    if given.lower() == OFF:
        return None
    try:
        return CacheFolder(Path(given).expanduser() if given else _usual_folder())
    except RuntimeError:  # pathlib knows no home of this user
        return None


def _usual_folder() -> Path:
    """`autopar` in the cache folder of the XDG base directory specification."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "autopar"


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)
