"""A file that is written whole or not at all.

In: a path and what the file is to hold. Out: the file. Whoever reads it meanwhile, and whoever finds it after a full disk or a
killed process, has the old content or all of the new one. What can go wrong: OSError, which leaves the old file as it was.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

UNFINISHED = ".part"
"""How the names of files end that are not whole yet."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by renaming a finished one; what is no ordinary file, such as a pipe, is written as it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()  # a link stays a link
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with part.open("xb") as file:
            file.write(content)
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
