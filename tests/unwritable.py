"""A folder that cannot be written to, also if the tests run as somebody who may write everywhere."""

import contextlib
import os

NOBODY = 65534


@contextlib.contextmanager
def unwritable(folder):
    """A context in which a folder cannot be written to; who may write everywhere is somebody else there."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
