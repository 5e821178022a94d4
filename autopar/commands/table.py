"""The commands of `autopar`, a line for each.

A new command is a file of its flags in `parsers/`, a file that does its work in the folder of its kin, and a line here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Mapping

from autopar.commands.parsers import (
    bench,
    cache,
    calibrate,
    collectives,
    demo,
    diff,
    doctor,
    explain,
    plan,
    rank,
    run,
    simulate,
    train,
    verify,
)
from autopar.errors import OutOfMemoryError
from autopar.launch.command import add_launch


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        about: What it does, in a line of the help.
        add: Adds its flags to a parser. They may have a default `check`, a function of the options that raises ArgumentError.
        target: The function that runs it, of the options to an exit status, as `module:function`. It is imported when it is
            called, because it imports JAX.
        model_at: Which word after the command is MODEL, which brings flags for its sizes; 0 if there is none.
    """

    about: str
    add: Callable[[argparse.ArgumentParser], None]
    target: str
    model_at: int = 0

    def run(self, options: argparse.Namespace) -> int:
        """Check the options, and run the command; returns the exit status.

        Where no plan fits, the command's JSON says so in place of its own document. The error goes on, as do all others.
        """
        if options.check is not None:
            options.check(options)
        try:
            return int(self.find()(options))
        except OutOfMemoryError as error:
            if getattr(options, "json", False):
                document = importlib.import_module("autopar.commands.plans.document").misfit_document(error)
                importlib.import_module("autopar.commands.terminal.printing").print_json(document)
            raise

    def find(self) -> Callable[[argparse.Namespace], int]:
        """Import the function that runs the command."""
        module, _, function = self.target.partition(":")
        found: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), function)
        return found


COMMANDS: Mapping[str, Command] = {
    "plan": Command(plan.HELP, plan.add, "autopar.commands.plans.plan:plan", model_at=1),
    "explain": Command(explain.HELP, explain.add, "autopar.commands.plans.plan:show_file"),
    "show": Command(explain.HELP_OF_SHOW, explain.add, "autopar.commands.plans.plan:show_file"),
    "diff": Command(diff.HELP, diff.add, "autopar.commands.plans.diff:diff"),
    "rank": Command(rank.HELP, rank.add, "autopar.commands.plans.rank:rank", model_at=1),
    "verify": Command(verify.HELP, verify.add, "autopar.commands.plans.verify:verify", model_at=1),
    "train": Command(train.HELP, train.add, "autopar.commands.training.train:train", model_at=1),
    "run": Command(run.HELP, run.add, "autopar.commands.training.run:run", model_at=2),
    "bench": Command(bench.HELP, bench.add, "autopar.commands.training.bench:bench", model_at=1),
    "simulate": Command(simulate.HELP, simulate.add, "autopar.commands.simulated.simulate:simulate"),
    "calibrate": Command(calibrate.HELP, calibrate.add, "autopar.commands.machine.calibrate:calibrate"),
    "collectives": Command(collectives.HELP, collectives.add, "autopar.commands.machine.collectives:collectives"),
    "doctor": Command(doctor.HELP, doctor.add, "autopar.commands.machine.doctor:doctor"),
    "launch": Command(
        "run a script in several processes, watch them, and start them again when one is lost",
        add_launch,
        "autopar.launch.command:launch",
    ),
    "cache": Command(cache.HELP, cache.add, "autopar.commands.plans.cache:cache"),
    "demo": Command(demo.HELP, demo.add, "autopar.commands.training.demo:run"),
}
