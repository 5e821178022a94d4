"""`autopar launch`: its arguments and their meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.errors import ArgumentError
from autopar.launch.settings import LaunchSettings, Nodes, Size
from autopar.launch.supervisor import supervise
from autopar.testing.faults import parse


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = "%(prog)s [options] (SCRIPT | -m MODULE) [arguments of the script]"
    parser.add_argument("-n", "--processes", type=_count, default=1, metavar="N", help="workers; default %(default)s")
    parser.add_argument(
        "--devices-per-process",
        type=_count,
        metavar="N",
        help="virtual CPU devices of each worker; default: what it finds",
    )
    parser.add_argument("-m", "--module", metavar="MODULE", help="run a module in place of a script")
    _add_restarts(parser)
    _add_watch(parser)
    _add_nodes(parser)
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="what each worker runs, and its arguments"
    )


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("restarts")
    group.add_argument(
        "--max-restarts", type=_count_or_zero, default=10, metavar="N", help="after failures; default %(default)s"
    )
    group.add_argument(
        "--restart-pause", type=_seconds, default=1.0, metavar="N", help="seconds before a restart; default %(default)g"
    )
    group.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=30.0,
        metavar="N",
        help="that workers have to save when the job is to stop; default %(default)g",
    )
    group.add_argument(
        "--size-file",
        type=Path,
        metavar="FILE",
        help="a file with the number of workers, and of devices of each; when it changes, the job goes on with as many",
    )
    group.add_argument(
        "--min-processes",
        type=_count,
        metavar="N",
        help="go on with fewer workers, down to this, if one is lost twice in a row; default: always with as many",
    )


def _add_watch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watch")
    group.add_argument(
        "--silence-seconds",
        type=_seconds,
        default=30.0,
        metavar="N",
        help="without a sign, after which a worker counts as lost; default %(default)g",
    )

    group.add_argument(
        "--stall-seconds",
        type=_seconds,
        metavar="N",
        help="after which a step that stands still is named, and the job started again; default: it is waited for",
    )
    group.add_argument(
        "--metrics", metavar="FILE", help="of each worker as lines of JSON; {rank} in its name is the worker"
    )
    group.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="FAULT",
        help="let something go wrong, such as kill@step,count=7,rank=1,attempt=0; repeatable; see `autopar.testing.faults`",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines")
    group.add_argument(
        "--nodes", type=_count, default=1, metavar="N", help="machines, each with its own `autopar launch`"
    )
    group.add_argument("--node-rank", type=_count_or_zero, default=0, metavar="N", help="which of them this is, from 0")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of the first machine; default: a free port of this one"
    )


def launch(options: argparse.Namespace) -> int:
    """Run the command. Returns its exit status."""
    return supervise(settings_of(options))


def settings_of(options: argparse.Namespace) -> LaunchSettings:
    """Return the job that a command line asks for. Raises ArgumentError if an argument cannot be used."""
    command = list(options.script)
    if command[:1] == ["--"]:
        command = command[1:]
    if options.module is not None:
        command = ["-m", options.module, *command]
    elif not command:
        raise ArgumentError("launch needs a script to run, as in `autopar launch -n 4 train.py`, or a module after -m")
    elif not Path(command[0]).is_file():
        raise ArgumentError(f"there is no script {command[0]}; options of launch stand before it, its own after it")
    if options.min_processes is not None and options.min_processes > options.processes:
        raise ArgumentError(f"--min-processes {options.min_processes} is more than --processes {options.processes}")
    if options.min_processes is not None and options.nodes > 1:
        raise ArgumentError(
            "--min-processes is for one machine: on --nodes the others would not know that one has fewer workers"
        )
    if options.nodes > 1 and options.coordinator is None:
        raise ArgumentError("--nodes needs --coordinator HOST:PORT, an address of the first machine that all can reach")
    if options.node_rank >= options.nodes:
        raise ArgumentError(f"--node-rank {options.node_rank} is not below --nodes {options.nodes}; it counts from 0")
    return LaunchSettings(
        command=tuple(command),
        size=Size(options.processes, options.devices_per_process),
        size_file=options.size_file,
        min_processes=options.min_processes,
        max_restarts=options.max_restarts,
        restart_pause_s=options.restart_pause,
        grace_s=options.grace_seconds,
        silence_s=options.silence_seconds,
        stall_s=options.stall_seconds or None,
        metrics=options.metrics,
        faults=tuple(options.fault),
        nodes=Nodes(count=options.nodes, rank=options.node_rank, coordinator=options.coordinator),
    )


def _fault(text: str) -> str:
    try:
        return str(parse(text))
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    return _number(text, least=1)


def _count_or_zero(text: str) -> int:
    return _number(text, least=0)


def _number(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
