"""The table of commands: each line leads to a function, and a check of options comes before it."""

import argparse
import inspect
import re

import pytest

from autopar.commands.parser import read
from autopar.commands.table import COMMANDS, Command
from autopar.errors import ArgumentError


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leads_to_a_function_of_its_options(name):
    parameters = inspect.signature(COMMANDS[name].find()).parameters.values()
    first, *others = parameters
    assert first.name == "options"
    assert all(other.default is not inspect.Parameter.empty for other in others)


def test_help_lists_the_commands_in_the_order_of_the_table(capsys):
    with pytest.raises(SystemExit):
        read(["--help"])
    printed = capsys.readouterr().out
    places = [re.search(rf"^    {name}\b", printed, re.MULTILINE).start() for name in COMMANDS]
    assert places == sorted(places)


def test_options_are_checked_before_what_runs_them_is_imported():
    def refuse(options):
        raise ArgumentError("not like this")

    command = Command("nothing", lambda parser: None, "autopar.nowhere:nothing")
    with pytest.raises(ArgumentError, match="not like this"):
        command.run(argparse.Namespace(check=refuse))
    with pytest.raises(ModuleNotFoundError):
        command.run(argparse.Namespace(check=None))
