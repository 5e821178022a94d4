"""An error of the user's own code as a user reads it: what happened in which of their lines, without autopar's frames.

In: an exception that a command met. Out: its text, or None where the user's code had no part in it. It had one if a frame of the
traceback lies neither in autopar nor in a library, and none of autopar's comes after it. What can go wrong: code of the user that
is installed among the libraries; its errors keep their whole traceback.
"""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

import autopar

_OWN = Path(autopar.__file__).parent
_LIBRARIES = tuple({*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()})


def describe_users_error(error: Exception) -> str | None:
    """An error of the user's own code with the lines of it that led there; None if it is not one.

    Args:
        error: as it was caught, with its traceback.

    Returns:
        A line of what happened, the user's lines, and how to see the whole traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [number for number, frame in enumerate(frames) if _is_users(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"your code cannot be read: {error.msg} ({_shown(error.filename)}, line {error.lineno}){_MORE}"
    if not theirs or any(_is_own(frame.filename) for frame in frames[theirs[-1] + 1 :]):
        return None
    lines = [
        f"  {_shown(frames[n].filename)}:{frames[n].lineno}, in {frames[n].name}: {frames[n].line}" for n in theirs
    ]
    said = str(error).strip().partition("\n\n")[0]
    return "\n".join([f"your code raised {type(error).__name__}: {said}", *lines]) + _MORE


_MORE = "\n  (with -v the whole traceback)"


def _is_own(filename: str) -> bool:
    path = Path(filename).resolve()
    return any(folder.resolve() in path.parents for folder in (_OWN, *(_OWN / name for name in _LINKED)))


_LINKED = ("cost_model", "models", "runtime")
"""Packages that a checkout links to."""


def _is_users(filename: str) -> bool:
    return not (filename.startswith("<") or _is_own(filename) or filename.startswith(_LIBRARIES))


def _shown(filename: str) -> str:
    """A file as seen from the current folder, if it lies in it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
