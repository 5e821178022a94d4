"""`plan`: find a plan without devices, print it, keep it. `show`: print a plan that was kept."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from autopar.commands.subject import device_count, parallel, subject_of
from autopar.errors import ArgumentError
from autopar.explain import show, standard_output
from autopar.plan import Plan


def plan(options: argparse.Namespace) -> int:
    """Plan a step from shapes alone; print the plan and write it to `options.output`, if given."""
    output: Path | None = options.output
    if output is not None and not output.parent.is_dir():
        raise ArgumentError(f"cannot write {output}: there is no folder {output.parent}")
    count = device_count(options.devices, options.mesh)
    subject = subject_of(options.model, options.sizes)
    with Console(stderr=True).status(f"planning for {count} devices"):
        found = parallel(subject.step, count, options).plan(subject.state, subject.batch)
    if output is not None:
        _write(output, found.to_json())
    console = standard_output()
    show(found, console, full=options.full)
    if output is not None:
        console.print(f"\nplan written to {output}", markup=False, highlight=False)
    return 0


def show_file(options: argparse.Namespace) -> int:
    """Print the plan in a file that `plan -o` wrote."""
    show(read_plan(options.file), full=options.full)
    return 0


def read_plan(path: Path) -> Plan:
    """The plan in a file; ArgumentError or PlanError if it cannot be read or is none."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
        raise ArgumentError(f"{path} is not a plan that `autopar plan -o` wrote: {error}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None
