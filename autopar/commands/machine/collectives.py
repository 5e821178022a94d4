"""`collectives`: what every algorithm of each collective costs on a cluster, by size and group, and which one wins.

In: a cluster and a logical mesh. Out: for each kind, size and group of devices a row with the cheapest algorithm, its bandwidth,
and all others. What can go wrong: a mesh that the cluster cannot hold; the error says how many devices it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from autopar.commands.terminal.printing import new_table, print_json
from autopar.cost_model.algorithms import FOR_COMPARISON, Kind
from autopar.cost_model.hardware import Cluster, find_cluster
from autopar.errors import ArgumentError
from autopar.explain import standard_output
from autopar.explain.units import bytes_text, seconds_text

KINDS: tuple[Kind, ...] = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
"""The kinds that plans use."""

_FOR_COMPARISON = (
    "*: for comparison: not implemented by the libraries that run collectives, so never chosen, however short"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priced:
    """One collective, priced by each algorithm.

    Attributes:
        kind: such as `all-reduce`.
        axes: the axes of the mesh along which devices take part, by number.
        devices: how many take part.
        bytes: what a device holds on the larger side.
        best: the algorithm that is chosen.
        seconds: by algorithm; `best` among them.
        only_compared: algorithms among them that are never chosen.
    """

    kind: str
    axes: tuple[int, ...]
    devices: int
    bytes: int
    best: str
    seconds: dict[str, float]
    only_compared: tuple[str, ...]


def collectives(options: argparse.Namespace) -> int:
    """Run `collectives`."""
    try:
        cluster = find_cluster(options.cluster)
        rows = list(price(cluster, options.mesh, options.bytes))
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    if options.json:
        print_json({"cluster": cluster.name, "mesh": options.mesh, "rows": [dataclasses.asdict(row) for row in rows]})
        return 0
    console = standard_output()
    mesh = " x ".join(map(str, options.mesh))
    if not rows:
        console.print(
            f"1 device of {cluster.name}, mesh {mesh}: one device needs no collectives", markup=False, highlight=False
        )
        return 0
    console.print(f"{math.prod(options.mesh)} devices of {cluster.name}, mesh {mesh}\n", markup=False, highlight=False)
    for axes, group in itertools.groupby(rows, key=lambda row: row.axes):
        console.print(make_table(axes, list(group)))
        console.print()
    if any(row.only_compared for row in rows):
        console.print(_FOR_COMPARISON, markup=False, highlight=False)
    return 0


def price(cluster: Cluster, mesh: Sequence[int], sizes: Sequence[int]) -> Iterator[Priced]:
    """Yield each collective along each set of axes, in each size. Raises ValueError for a mesh that the cluster cannot hold."""
    costs = cluster.mesh_costs(mesh)
    known = [axis for axis, size in enumerate(mesh) if size > 1]
    for length in range(1, len(known) + 1):
        for axes in itertools.combinations(known, length):
            for kind, size in itertools.product(KINDS, sizes):
                found = {name: cost(size) for name, cost in costs.algorithms(kind, axes).items()}
                yield Priced(
                    kind=kind,
                    axes=axes,
                    devices=math.prod(mesh[axis] for axis in axes),
                    bytes=size,
                    best=costs.best(kind, size, axes).algorithm,
                    seconds=dict(sorted(found.items(), key=lambda item: item[1])),
                    only_compared=tuple(name for name in found if name in FOR_COMPARISON),
                )


def make_table(axes: Sequence[int], rows: Sequence[Priced]) -> Table:
    """The collectives along some axes."""
    along = "axis" if len(axes) == 1 else "axes"
    title = f"{rows[0].devices} devices along {along} {', '.join(map(str, axes))}"
    table = new_table(title, "", "bytes", "seconds", "bytes/s", "best", "others", words=("", "best", "others"))
    for row in rows:
        others = (
            f"{name}{'*' if name in row.only_compared else ''} {seconds_text(seconds)}"
            for name, seconds in row.seconds.items()
            if name != row.best
        )
        seconds = row.seconds[row.best]
        rate = f"{bytes_text(row.bytes / seconds)}/s" if seconds else "-"
        table.add_row(row.kind, bytes_text(row.bytes), seconds_text(seconds), rate, row.best, ", ".join(others))
    return table
