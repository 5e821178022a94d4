"""The parser of the command line.

The flags of a model's sizes are the fields of its config, so they are known once MODEL is. MODEL therefore stands right after
the command. `read` returns the options of one command, and `options.run(options)` runs it. Nothing here imports JAX, which
takes a second: help and errors come at once.
"""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

import autopar
from autopar.commands.arguments import values
from autopar.commands.parsers.sizes import add_sizes
from autopar.commands.table import COMMANDS
from autopar.errors import ArgumentError
from autopar.models import MODELS


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ArgumentErrors: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        if message.endswith(": MODEL"):
            about = (self.description or "").rstrip(".")
            message += (
                f", which is {', '.join(MODELS)}, or module:function for a step of your own, as in "
                f"`{self.prog} {'plan.json ' * _takes_file(self.prog.split()[-1])}gpt`: {about}"
            )
        raise ArgumentError(f"{message}{_nearest_choice(message)} (see {self.prog} --help)")


def _nearest_choice(message: str) -> str:
    """What may be meant by a word that is none of those that argparse lists, if one is like it."""
    found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
    close = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1) if found else []
    return f"; did you mean {close[0]}?" if close else ""


_OF_A_STEP = ("--leaf", "--conflict", "--classic", "--what-if")
"""Questions that are answered by planning a step again."""


def read(argv: list[str]) -> argparse.Namespace:
    """Read the options of a command line; ArgumentError says what cannot be used."""
    explained = len(argv) > 1 and argv[0] == "explain" and values.is_model(argv[1])
    argv = ["plan", *argv[1:]] if explained else argv
    argv = _join_negative(argv)
    model = _find_model(argv)
    _check_order(argv)
    parser = _make_parser(model)
    options, unknown = parser.parse_known_args(argv)
    options.command = "explain" if explained else options.command
    if unknown:
        raise ArgumentError(_describe_unknown(unknown[0], options, model))
    sizes = {name.removeprefix("size_"): value for name, value in vars(options).items() if name.startswith("size_")}
    options.sizes = {**getattr(options, "published", {}), **sizes}
    return options


def _join_negative(argv: list[str]) -> list[str]:
    """Write --memory-limit -1GB as --memory-limit=-1GB: argparse takes -1GB for a flag, and says that there is no argument.

    The arguments of a script that is launched are its own.
    """
    joined: list[str] = []
    for word in argv:
        if joined and argv[0] != "launch" and _is_value(word) and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _is_value(word: str) -> bool:
    return re.match(r"-\.?\d", word) is not None


def _describe_unknown(word: str, options: argparse.Namespace, model: str | None) -> str:
    place = f"{options.command} {model}" if model else options.command
    names = [flag.removeprefix("--") for flag in options.flags]
    close = difflib.get_close_matches(word.split("=")[0].lstrip("-").replace("_", "-"), names, n=1)
    if options.command in ("explain", "show") and word.split("=")[0] in _OF_A_STEP:
        return (
            f"a plan file has no step to search again, which {word.split('=')[0]} does: name the model in its place, as in "
            f"`autopar explain MODEL {word}`, with the flags that the plan was made with"
        )
    if options.command == "run" and word.split("=")[0] in _flags_of_plan():
        return (
            f"run takes devices, meshes and stages from the plan, so it has no {word.split('=')[0]}: leave it out, or plan again "
            f"with it, as in `autopar plan {model or 'MODEL'} {word} ... -o {options.file}`"
        )
    if close:
        return f"{place} has no argument {word!r}; did you mean --{close[0]}?"
    if model is None and _takes_model(options.command):
        place += f", without {'FILE ' * _takes_file(options.command)}MODEL right after {options.command},"
    return f"{place} has no argument {word!r}; it takes {', '.join(sorted(options.flags))}"


def _find_model(argv: list[str]) -> str | None:
    """The word that names the model: right after the command, or after the file that the command takes."""
    if not argv or not _takes_model(argv[0]):
        return None
    place = COMMANDS[argv[0]].model_at
    before = argv[1 : place + 1]
    return argv[place] if len(before) == place and not any(word.startswith("-") for word in before) else None


def _flags_of_plan() -> list[str]:
    parser = argparse.ArgumentParser()
    COMMANDS["plan"].add(parser)
    return _long_flags(parser)


def _long_flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _check_order(argv: list[str]) -> None:
    """Raise ArgumentError if MODEL stands where the file belongs that comes before it."""
    words = argv[1:3]
    if words and _takes_model(argv[0]) and _takes_file(argv[0]) and values.is_model(words[0]):
        file = words[1] if len(words) > 1 and not words[1].startswith("-") else "plan.json"
        raise ArgumentError(f"{argv[0]} takes the file of the plan before MODEL: `autopar {argv[0]} {file} {words[0]}`")


def _takes_file(command: str) -> bool:
    """Whether the file of a plan stands between a command and its MODEL."""
    return COMMANDS[command].model_at > 1


def _takes_model(command: str) -> bool:
    return command in COMMANDS and COMMANDS[command].model_at > 0


def _make_parser(model: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="autopar", description="Plan and train JAX steps on many devices.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        one = parsers.add_parser(name, help=command.about, description=f"{command.about}.", allow_abbrev=False)
        one.set_defaults(run=command.run, check=None)
        command.add(one)
        if model and command.model_at and ":" not in model:
            add_sizes(one, model)
        one.set_defaults(flags=_long_flags(one))
    return parser
