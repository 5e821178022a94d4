"""The flags of planning, which all commands that plan a step share."""

from __future__ import annotations

import argparse

from autopar.commands.arguments import values
from autopar.cost_model.cores import available_cores


def add_planning(parser: argparse.ArgumentParser, *, on_each_core: bool, many: bool = False) -> None:
    """Add the options of planning; those that name one machine not where there are `many`."""
    group = parser.add_argument_group("planning")
    if not many:
        _add_machine(group)
    group.add_argument(
        "--mesh",
        type=values.mesh_shapes,
        action="extend",
        metavar="SIZES",
        help="how the devices are arranged along named axes, such as 2,4 or data=2,model=4; one mesh for each pipeline stage as "
        "1,2/1,2/1,4, or repeated; default: compare all",
    )
    group.add_argument(
        "--memory-limit",
        type=values.byte_count,
        metavar="SIZE",
        help="the most that a plan may take of each device, such as 16GB or 16GiB, where a bare number is bytes; default: the "
        "memory of the cluster's devices",
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
        "--zero",
        type=int,
        choices=(1, 2, 3),
        help="data parallel, with optimizer state (1), also gradients (2), also parameters (3) split over the devices; on "
        "one mesh, unless --stages is given",
    )
    group.add_argument(
        "--data-parallel",
        action="store_true",
        help="split the batch over all devices, and keep the whole state on each; on one mesh, unless --stages is given",
    )
    _add_allowed(group)
    _add_search(parser, on_each_core=on_each_core)
    _add_pipeline(parser)


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--devices", type=values.positive, metavar="N", help="number of devices; default 8")
    group.add_argument(
        "--nodes", type=values.positive, metavar="N", help="machines of --cluster, each with all of its devices"
    )
    group.add_argument(
        "--cluster",
        type=values.cluster,
        default="auto",
        metavar="NAME|FILE",
        help="what the machine can do: a preset, or a file as `calibrate` writes it; an unknown name lists the presets",
    )


def _add_allowed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow-redundant-compute",
        action="store_true",
        help="let devices repeat each other's matrix products where that saves communication",
    )
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
        help="forward work that the backward pass repeats to save memory: none, that of whole layers, or all but the values "
        "named by jax.ad_checkpoint.checkpoint_name; default: what the memory needs",
    )


def _add_search(parser: argparse.ArgumentParser, *, on_each_core: bool) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--planning-processes",
        type=values.positive,
        default=available_cores() if on_each_core else 1,
        metavar="N",
        help="number of processes that search side by side; default: " + ("one for each core" if on_each_core else "1"),
    )
    group.add_argument(
        "--planning-seconds",
        type=values.seconds,
        default=60.0,
        metavar="N",
        help="end the search after so many seconds with the best plan so far, or none for no limit; default 60. Without a "
        "plan so far, the first one is finished, which may take longer",
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
        help="number of pipeline stages, each on its own devices; default: as many as are fastest, or one for each --mesh",
    )
    group.add_argument(
        "--microbatches",
        type=values.positive,
        metavar="N",
        help="number of parts into which the batch is cut, done one after the other; default: on one mesh what the memory needs, "
        "in stages the fastest",
    )
    group.add_argument(
        "--batch-statistics",
        choices=("batch", "microbatch"),
        default="batch",
        help="what batch normalisation averages over: the whole batch, which then cannot be cut into microbatches, or each "
        "microbatch; default batch",
    )
    group.add_argument(
        "--schedule",
        choices=("auto", *sorted(SCHEDULES)),
        default="auto",
        help="order of work in a pipeline; default: the fastest",
    )
    group.add_argument(
        "--virtual-stages",
        type=values.positive,
        metavar="N",
        help="stages per mesh, for the schedules interleaved, gpipe and inference; default: as many as are fastest",
    )
