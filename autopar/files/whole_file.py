"""A file that is written whole or not at all.

In: a path and what the file is to hold. Out: the file. Whoever reads it meanwhile, and whoever finds it after a full disk or a
killed process, has the old content or all of the new one. What can go wrong: OSError, which leaves the old file as it was;
`save` says so in words for a user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from pathlib import Path

from autopar.errors import ArgumentError
from autopar.events import reach

UNFINISHED = ".part"
"""How the names of files end that are not whole yet."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by renaming a finished one; what is no ordinary file, such as a pipe, is written as it is."""
    reach("write", path)
    if is_stream(path):
        path.write_bytes(content)
        return
    target = path.resolve()  # a link stays a link
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with part.open("xb") as file:
            file.write(content)
        reach("replace", path)
        os.replace(part, target)
        reach("written", path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def is_stream(path: Path) -> bool:
    """Whether a path names what is written to piece by piece, such as a pipe or a terminal."""
    return path.exists() and not path.is_file()


def save(path: Path, text: str) -> None:
    """Write a file that the user named. Raises ArgumentError if that cannot be done; a file that was there is as it was."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ArgumentError(why_not_written(path, error)) from None


def check_writable(path: Path) -> None:
    """Raise ArgumentError if `save` could not write a file now. This leaves nothing behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not is_stream(path):
            check_room(path.resolve().parent)
    except OSError as error:
        raise ArgumentError(why_not_written(path, error)) from None


def check_room(folder: Path) -> None:
    """Raise OSError if no file can be made in a folder, by making one there, which is gone at once."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def why_not_written(path: Path, error: OSError) -> str:
    """What happened to a file that could not be written, and what to do, in words for a user."""
    kept = "; the file that was there is as it was" if path.is_file() else ""
    why, advice = error.strerror or str(error), "Name a file elsewhere"
    if path.is_dir():
        why, advice = "it is a folder", "Name a file in it"
    elif error.errno == errno.ENOENT and not path.parent.exists():
        why, advice = f"there is no folder {path.parent}", "Make it, or name a file elsewhere"
    elif error.errno == errno.ENOENT:
        why = f"no file can be made in {path.parent}"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "Make room there, or name a file elsewhere"
    return f"cannot write {path}: {why}{kept}. {advice}"
