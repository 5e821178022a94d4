"""One run at a time writes checkpoints to a folder.

In: a folder. Out: a context that holds a lock of the operating system on `FOLDER/.lock`, which ends with the process, however it
ends. What can go wrong: another run has the lock, and CheckpointError names its process. Or the file system has no locks; then a
line in the log says so, and no run is kept out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from autopar.errors import CheckpointError
from autopar.progress import LOGGER

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Open a context in which no other run uses the folder. Raises CheckpointError if one does, or if it cannot be created."""
    path = folder / NAME
    file = _open(path)
    try:
        while not _is_taken(file, folder):
            os.close(file)
            file = _open(path)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise CheckpointError(f"{path.parent} cannot be written to: {error.strerror}") from error


def _is_taken(file: int, folder: Path) -> bool:
    """Take the lock; False if the file has been removed meanwhile by the run that had it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.pread(file, 200, 0).decode(errors="replace") or "another process"
        raise CheckpointError(
            f"another run writes its checkpoints to {folder} ({who}): wait for its end, or name another folder"
        ) from None
    except OSError as error:
        LOGGER.info("%s has no locks (%s): nothing keeps two runs from writing to it", folder, error.strerror)
        return True
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(folder / NAME))
    return False
