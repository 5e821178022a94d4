"""Finds what is wrong with a command line, as far as that can be known without JAX.

These checks run before a command's own module is imported, which imports JAX: whoever mistyped a file's name should not wait
for that.
"""

from __future__ import annotations

import argparse
import errno
from pathlib import Path

from autopar.errors import ArgumentError
from autopar.files import whole_file

RECORDED_STEP = 2
"""The step that `train --timeline` looks into: XLA compiles in the first."""


def check_readable(path: Path) -> None:
    """ArgumentError if a file cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None


def check_writable(*paths: Path | None) -> None:
    """ArgumentError if one of the files cannot be written; None is no file."""
    for path in paths:
        if path is not None:
            whole_file.check_writable(path)


def check_planning(options: argparse.Namespace) -> None:
    """ArgumentError if wishes for a plan contradict each other."""
    if options.data_parallel and options.zero:
        raise ArgumentError(
            f"--data-parallel keeps the whole state on each device, and --zero {options.zero} splits it: give only one; both "
            "split the batch over all devices"
        )


def check_train(options: argparse.Namespace) -> None:
    """ArgumentError if what `train` is to keep cannot be written, or the recorded step is not made."""
    check_planning(options)
    check_writable(options.timeline, options.log)
    if options.timeline is not None and options.steps < RECORDED_STEP:
        raise ArgumentError(f"--timeline looks into step {RECORDED_STEP}, and --steps is {options.steps}: give more")
    if options.save_every is not None or options.resume:
        _check_checkpoints(options.checkpoints)


def _check_checkpoints(folder: Path) -> None:
    """ArgumentError if it is a file, would need more than one new folder, or cannot be written to."""
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"--checkpoints {folder} is a file: name a folder")
    if not folder.absolute().parent.is_dir():
        raise ArgumentError(f"--checkpoints {folder}: there is no folder {folder.absolute().parent} to make it in")
    place = folder if folder.exists() else folder.absolute().parent
    try:
        whole_file.check_room(place)
    except OSError as error:
        why = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
        raise ArgumentError(
            f"--checkpoints {folder}: no file can be made in {place}{why}; name a folder elsewhere"
        ) from None


def check_simulate(options: argparse.Namespace) -> None:
    """ArgumentError if the arguments of `simulate` do not go together or its file cannot be read."""
    if (options.table is None) == (options.plan is None):
        raise ArgumentError(
            "simulate takes a table of runs (--table rows.csv) or a saved plan (--plan plan.json --cluster NAME)"
        )
    if options.table is not None and options.cluster is not None:
        raise ArgumentError("--cluster goes with --plan; the rows of a table name their clusters")
    if options.plan is not None and options.cluster is None:
        raise ArgumentError("--plan needs --cluster: the name of a preset, or the path of a cluster file")
    if options.plan is not None and options.csv is not None:
        raise ArgumentError("--csv goes with --table; for a plan use --json")
    check_writable(options.csv)
    check_readable(options.plan if options.table is None else options.table)
