"""The command line, `python -m autopar COMMAND`; `--help` lists the commands.

Arguments in, one call of `autopar.commands` out. An argument that cannot be used is one line on standard error and exit
status 2, and so is an error of the user's own code, with the lines of it that led there. Ctrl-C is exit status 130, also where
a plan was printed that the search had until then.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from autopar.commands.arguments.in_flags import in_flags
from autopar.commands.parser import read
from autopar.commands.terminal.documents import documents_alone
from autopar.commands.terminal.users_error import describe_users_error
from autopar.errors import AutoparError, AutoparWarning

USAGE_ERROR, INTERRUPTED, TERMINATED = 2, 130, 143


def end_with_command() -> NoReturn:
    """Run the command of this process and end it, at once if a signal has stopped the command.

    An interpreter that ends as usual waits for what XLA compiles in threads of its own, up to 20 seconds, and then may crash.
    Where other processes take part, they hear of the usual end.
    """
    try:
        status = main()
    except SystemExit as ended:
        if ended.code != TERMINATED:
            raise
        status = TERMINATED
    if status in (INTERRUPTED, TERMINATED) and not _is_one_of_several():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _is_one_of_several() -> bool:
    """Whether this process computes with others; it has loaded JAX then."""
    return "jax" in sys.modules and importlib.import_module("autopar.compat").coordination() is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    options = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shorten(warnings.showwarning)
            options = read(list(sys.argv[1:] if argv is None else argv))
            with documents_alone(as_json=bool(getattr(options, "json", False))):
                return int(options.run(options))
    except AutoparError as error:
        sys.stderr.write(f"autopar: {in_flags(str(error))}\n")
        return USAGE_ERROR
    except Exception as error:
        said = describe_users_error(error)
        if said is None or getattr(options, "verbose", False):
            raise
        sys.stderr.write(f"autopar: {said}\n")
        return USAGE_ERROR
    except KeyboardInterrupt as interrupt:
        words = f": {interrupt}" if str(interrupt) else ""
        sys.stderr.write(f"autopar: stopped by Ctrl-C{words}\n")
        return INTERRUPTED


def _shorten(usual: Callable[..., None]) -> Callable[..., None]:
    """Show autopar's own warnings as one line without a line of source, which would be one of autopar's."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, AutoparWarning):
            sys.stderr.write(f"autopar: warning: {in_flags(str(message))}\n")
        else:
            usual(message, category, filename, lineno, file, line)

    return show


if __name__ == "__main__":
    end_with_command()
