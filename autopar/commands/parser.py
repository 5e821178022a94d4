"""The parser of the command line.

The flags of a model's sizes are the fields of its config, so they are known once MODEL is. MODEL therefore stands right after
the command. `read` returns the options of one command, and `options.run(options)` runs it. Nothing here imports JAX, which
takes a second: help and errors come at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from pathlib import Path
from typing import NoReturn

import autopar
from autopar.commands.arguments import values
from autopar.commands.arguments.checks import check_folder, check_readable, check_simulate
from autopar.commands.compare_options import add_diff, add_rank
from autopar.commands.machine_options import add_calibrate, add_collectives, add_doctor
from autopar.cost_model.cores import available_cores
from autopar.errors import ArgumentError
from autopar.launch.command import add_launch

_WITH_MODEL = ("plan", "train", "rank")
_MODEL_HELP = (
    "a model, named right after the command: mlp, gpt, gpt_scan, moe, wide_resnet, bert, t5, llama, unet or densenet; "
    "its sizes are flags, see `%(prog)s gpt --help`"
)
_PLAN_HELP = (
    _MODEL_HELP + "; or your own step as module:function, where function() returns (train_step, state_shapes, "
    "batch_shapes), the shapes as trees of arrays or jax.ShapeDtypeStruct"
)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ArgumentErrors: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def read(argv: list[str]) -> argparse.Namespace:
    """Read the options of a command line; ArgumentError says what cannot be used."""
    explained = len(argv) > 1 and argv[0] == "explain" and values.is_model(argv[1])
    argv = ["plan", *argv[1:]] if explained else argv
    named = len(argv) > 1 and argv[0] in _WITH_MODEL and not argv[1].startswith("-")
    model = argv[1] if named else None
    parser = _make_parser(model)
    options, unknown = parser.parse_known_args(argv)
    options.command = "explain" if explained else options.command
    if unknown:
        raise ArgumentError(_describe_unknown(unknown[0], options, model))
    sizes = {name.removeprefix("size_"): value for name, value in vars(options).items() if name.startswith("size_")}
    options.sizes = sizes
    return options


def _describe_unknown(word: str, options: argparse.Namespace, model: str | None) -> str:
    place = f"{options.command} {model}" if model else options.command
    names = [flag.removeprefix("--") for flag in options.flags]
    close = difflib.get_close_matches(word.split("=")[0].lstrip("-").replace("_", "-"), names, n=1)
    if close:
        return f"{place} has no argument {word!r}; did you mean --{close[0]}?"
    if model is None and options.command in _WITH_MODEL:
        place += f", without MODEL right after {options.command},"
    return f"{place} has no argument {word!r}; it takes {', '.join(sorted(options.flags))}"


def _make_parser(model: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="autopar", description="Plan and train JAX steps on many devices.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, help_text, add in (
        ("plan", "find a plan for a step, without any device, and print it", _add_plan),
        (
            "explain",
            "print a plan that `plan -o` wrote, or write its report as a page of HTML; with a model for the file, plan it",
            _add_explain,
        ),
        ("show", "print a plan that `plan -o` wrote, as `explain` does", _add_explain),
        ("diff", "say what differs between two plans that `plan -o` wrote", add_diff),
        (
            "rank",
            "plan a step on several clusters and numbers of devices, and compare time, memory and price",
            _add_rank,
        ),
        ("train", "train a model on real data under a plan", _add_train),
        ("simulate", "predict published runs, or a saved plan on another cluster, and compare", _add_simulate),
        ("calibrate", "measure the devices at hand and write a cluster file for `--cluster`", add_calibrate),
        ("collectives", "price every algorithm of each collective on a cluster, and say which wins", add_collectives),
        ("doctor", "look whether autopar, JAX and the devices at hand work, and how they are priced", add_doctor),
        ("launch", "run a script in several processes, watch them, and start them again when one is lost", add_launch),
        ("cache", "list or remove the plans that are kept on disk for later runs", _add_cache),
        (
            "demo",
            "train a small GPT on 8 virtual CPU devices, on one mesh and as a pipeline, and compare with jax.jit on one",
            _add_demo,
        ),
    ):
        command = commands.add_parser(name, help=help_text, description=f"{help_text}.", allow_abbrev=False)
        add(command)
        if model and name in _WITH_MODEL and ":" not in model:
            _add_sizes(command, model)
        command.set_defaults(
            flags=[flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        )
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_PLAN_HELP)
    _add_planning(parser, on_each_core=True)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan as JSON")
    _add_report(parser)
    parser.add_argument(
        "--leaf",
        metavar="PATH",
        help="why this leaf has its layout, such as state/params/block_0/ffn/up/kernel, instead of the report: what decides, and "
        "what each other layout would cost, tried",
    )
    parser.add_argument(
        "--conflict",
        action="store_true",
        help="if nothing fits the memory: which wishes conflict, and ways out with prices",
    )
    parser.set_defaults(run=_run_plan)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a plan in JSON")
    _add_report(parser)
    parser.set_defaults(run=_run_explain)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="give each leaf, collective and stage a row")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as one page that needs nothing else"
    )


def _add_rank(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_PLAN_HELP)
    _add_planning(parser, on_each_core=True, many=True)
    add_rank(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    _add_planning(parser, on_each_core=False)
    parser.add_argument("--steps", type=values.positive, default=100, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, dropout and data; default %(default)s")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write step, loss and seconds as CSV")
    parser.add_argument(
        "--save-every", type=values.positive, metavar="N", help="save the state every N steps, and when the run ends"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        metavar="FOLDER",
        help="where they are; default %(default)s",
    )
    parser.add_argument("--compare-jit", action="store_true", help="run the same steps with jax.jit on one device")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the second step of a pipeline as a Chrome trace"
    )
    parser.add_argument("--full", action="store_true", help="give each leaf and collective of the plan a row")
    parser.set_defaults(run=_run_train)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, metavar="FILE", help="runs as CSV, with the columns of published steps")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write each row's prediction as CSV")
    parser.add_argument(
        "--closed-form",
        action="store_true",
        help="predict rows by formulas alone, without planning the layers of the real models",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan that `plan -o` wrote, to price on --cluster")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="a preset or a cluster file, for --plan")
    parser.add_argument("--planned-for", metavar="NAME|FILE", help="the cluster of the plan, if it is no preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_simulate)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("list", "clear", "path"), help="list the plans, remove them all, or print where they are"
    )
    parser.set_defaults(run=_run_cache)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=values.positive, default=80, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="that the model computes in; default %(default)s",
    )
    parser.set_defaults(run=_run_demo)


def _add_planning(parser: argparse.ArgumentParser, *, on_each_core: bool, many: bool = False) -> None:
    """Add the options of planning; those that name one machine not where there are `many`."""
    group = parser.add_argument_group("planning")
    if not many:
        _add_machine(group)
    group.add_argument(
        "--mesh",
        type=values.mesh_shapes,
        action="extend",
        metavar="SIZES",
        help="such as 2,4 or data=2,model=4; one for each stage as 1,2/1,2/1,4, or repeated; default: compare all",
    )
    group.add_argument(
        "--memory-limit", type=values.byte_count, metavar="SIZE", help="per device, such as 16GB or 16GiB"
    )
    group.add_argument(
        "--constraint",
        type=values.constraint,
        action="append",
        default=[],
        metavar="GLOB=SPEC",
        help="a layout for the leaves whose path matches GLOB; SPEC is, for each dimension, an axis, axes joined by +, "
        "or -, such as state/params/*/kernel=-,x; or it is replicated, split or split:x; repeatable",
    )
    group.add_argument(
        "--zero", type=int, choices=(1, 2, 3), help="split optimizer state (1), gradients (2), parameters (3)"
    )
    group.add_argument("--data-parallel", action="store_true", help="split the batch over all axes, and nothing else")
    _add_allowed(group)
    _add_search(parser, on_each_core=on_each_core)
    _add_pipeline(parser)


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--devices", type=values.positive, metavar="N", help="how many; default 8")
    group.add_argument(
        "--cluster",
        type=values.cluster,
        default="auto",
        metavar="NAME|FILE",
        help="what the machine can do: a preset, or a file as `calibrate` writes it; an unknown name lists the presets",
    )


def _add_allowed(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--allow-redundant-compute", action="store_true", help="let devices repeat contractions")
    group.add_argument(
        "--collectives",
        type=values.names,
        metavar="KINDS",
        help="the only kinds that the plan may use, such as all-reduce,all-gather; default: all",
    )
    group.add_argument(
        "--recompute",
        choices=("auto", "none", "layer", "named"),
        default="auto",
        help="forward work that the backward pass repeats, of layers or all but what checkpoint_name names; default: what "
        "the memory needs",
    )


def _add_search(parser: argparse.ArgumentParser, *, on_each_core: bool) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--planning-processes",
        type=values.positive,
        default=available_cores() if on_each_core else 1,
        metavar="N",
        help="processes that plan layers and stages side by side; default: "
        + ("one for each core" if on_each_core else "1"),
    )
    group.add_argument(
        "--planning-seconds",
        type=values.seconds,
        default=60.0,
        metavar="N",
        help="end the search after so many seconds with the best plan so far, or none for no limit; default 60",
    )
    group.add_argument(
        "--no-plan-cache",
        action="store_false",
        dest="plan_cache",
        help="search even if an earlier run found the plan, and keep nothing; see `autopar cache`",
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="log phases and better plans on standard error; -vv: all that is tried",
    )


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    from autopar.schedules.schedules import SCHEDULES

    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--stages",
        type=values.positive,
        metavar="N",
        help="meshes that work as a pipeline; default: as many as are fastest, or one for each --mesh",
    )
    group.add_argument(
        "--microbatches",
        type=values.positive,
        metavar="N",
        help="parts of the batch, one after the other; default: on one mesh what the memory needs, in stages the fastest",
    )
    group.add_argument(
        "--batch-statistics",
        choices=("batch", "microbatch"),
        default="batch",
        help="of what batch normalisation takes its statistics; default: of the whole batch, which cannot be in microbatches",
    )
    group.add_argument(
        "--schedule", choices=("auto", *sorted(SCHEDULES)), default="auto", help="of a pipeline; default: the fastest"
    )
    group.add_argument(
        "--virtual-stages",
        type=values.positive,
        metavar="N",
        help="stages per mesh, for the interleaved schedule; default: as many as are fastest",
    )


def _add_sizes(parser: argparse.ArgumentParser, model: str) -> None:
    """A flag for each field of the model's config."""
    group = parser.add_argument_group(f"sizes of {model}")
    for field in dataclasses.fields(values.model_entry(model).config):
        flag, dest, default = f"--{field.name.replace('_', '-')}", f"size_{field.name}", f"default {field.default}"
        if field.type is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, dest=dest, default=argparse.SUPPRESS, help=default)
        else:
            kind = field.type if isinstance(field.type, type) else str
            read_size, choices = values.size_reader(kind), field.metadata.get("choices")
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(
                flag,
                type=read_size,
                choices=choices,
                metavar=metavar,
                dest=dest,
                default=argparse.SUPPRESS,
                help=default,
            )


def _run_plan(options: argparse.Namespace) -> int:
    check_folder(options.output)
    check_folder(options.html)
    from autopar.commands.planning import plan

    return plan(options)


def _run_explain(options: argparse.Namespace) -> int:
    check_readable(options.file)
    check_folder(options.html)
    from autopar.commands.planning import show_file

    return show_file(options)


def _run_train(options: argparse.Namespace) -> int:
    from autopar.commands.training import train

    return train(options)


def _run_simulate(options: argparse.Namespace) -> int:
    check_simulate(options)
    from autopar.commands.simulate import simulate

    return simulate(options)


def _run_cache(options: argparse.Namespace) -> int:
    from autopar.commands.cache import cache

    return cache(options)


def _run_demo(options: argparse.Namespace) -> int:
    from autopar.commands.demo import demo, demo_options

    return demo(demo_options(options))
