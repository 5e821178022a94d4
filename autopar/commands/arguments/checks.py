"""Finds what is wrong with a command line, as far as that can be known without JAX.

These checks run before a command's own module is imported, which imports JAX: whoever mistyped a file's name should not wait
for that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.errors import ArgumentError

RECORDED_STEP = 2
"""The step that `train --timeline` looks into: XLA compiles in the first."""


def check_readable(path: Path) -> None:
    """ArgumentError if a file cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None


def check_folder(path: Path | None) -> None:
    """ArgumentError if the folder of a file to be written does not exist; None is no file."""
    if path is not None and not path.parent.is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}")


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
    check_folder(options.timeline)
    if options.timeline is not None and options.steps < RECORDED_STEP:
        raise ArgumentError(f"--timeline looks into step {RECORDED_STEP}, and --steps is {options.steps}: give more")
    if options.save_every is not None or options.resume:
        _check_checkpoints(options.checkpoints)


def _check_checkpoints(folder: Path) -> None:
    """ArgumentError if it is a file, or would need more than one new folder."""
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"--checkpoints {folder} is a file: name a folder")
    if not folder.absolute().parent.is_dir():
        raise ArgumentError(f"--checkpoints {folder}: there is no folder {folder.absolute().parent} to make it in")


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
    check_folder(options.csv)
    check_readable(options.plan if options.table is None else options.table)
