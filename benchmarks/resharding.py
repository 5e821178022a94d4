"""Bytes over the slow link against their lower bound, and milliseconds against `jax.device_put`, between two meshes.

In: nothing but sizes. Out: one row per case, 11 as in the plan of the runtime and some beyond it: the bytes that the plan sends
from mesh to mesh over the least that any plan must, what the busiest sender does over what it could be spared, and medians
of rounds in which both ways move a fresh array once. `returns` is the time after which the call comes back while the
program that computes the array still runs. What can go wrong: on virtual CPU devices every link is the same memory, and
`device_put` to another tiling goes through one host array that the devices then share without a copy; the
milliseconds show what a transfer costs this host, not what a network does. Uneven tiles are planned and not run: no JAX
sharding holds them.

    python benchmarks/resharding.py [--rows 2048] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import os

DEVICES = 16
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from autopar.compat import make_mesh  # noqa: E402
from autopar.files.whole_file import save  # noqa: E402
from autopar.runtime.resharding.plan import ReshardPlan  # noqa: E402
from autopar.runtime.resharding.planner import plan_reshard  # noqa: E402
from autopar.runtime.resharding.reshard import Resharder  # noqa: E402
from autopar.runtime.resharding.routes import Move  # noqa: E402
from autopar.runtime.resharding.tiling import Tiling  # noqa: E402

Spec = tuple[tuple[int, ...], ...]

WHOLE: Spec = ((), ())
ROWS: Spec = ((0,), ())
COLUMNS: Spec = ((), (0,))
BOTH: Spec = ((0,), (1,))
SWAPPED: Spec = ((1,), (0,))
ALL_COLUMNS: Spec = ((), (0, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """Two meshes, and per dimension the mesh axes that split it on each; `less` is taken from both sizes."""

    name: str
    source_mesh: tuple[int, ...]
    source: Spec
    target_mesh: tuple[int, ...]
    target: Spec
    less: int = 0

    def shape(self, rows: int) -> tuple[int, int]:
        """The array's shape."""
        return rows - self.less, rows - 3 * self.less

    def tilings(self, rows: int) -> tuple[Tiling, Tiling]:
        """The tiles on both meshes, the target's devices after the source's."""
        source = Tiling.of_spec(self.shape(rows), self.source, mesh_shape=self.source_mesh)
        first = math.prod(self.source_mesh)
        return source, Tiling.of_spec(self.shape(rows), self.target, mesh_shape=self.target_mesh, first_device=first)

    def shardings(self) -> tuple[NamedSharding, NamedSharding]:
        """The same as JAX says it."""
        first = math.prod(self.source_mesh)
        return sharding(self.source_mesh, self.source, 0), sharding(self.target_mesh, self.target, first)


CASES = (
    Case("equal", (2, 4), BOTH, (2, 4), BOTH),
    Case("transposed", (2, 4), BOTH, (2, 4), SWAPPED),
    Case("replicated", (2, 4), BOTH, (2, 4), WHOLE),
    Case("uneven", (2, 4), BOTH, (2, 4), SWAPPED, less=1),
    Case("equal", (1, 4), ALL_COLUMNS, (2, 2), ALL_COLUMNS),
    Case("transposed", (1, 4), ALL_COLUMNS, (2, 2), BOTH),
    Case("replicated", (1, 4), WHOLE, (2, 2), ROWS),
    Case("uneven", (1, 4), ALL_COLUMNS, (2, 2), ROWS, less=1),
    Case("halved", (4,), ROWS, (2,), ROWS),
    Case("transposed", (4,), ROWS, (2,), COLUMNS),
    Case("replicated", (4,), ROWS, (2,), WHOLE),
)
BEYOND = (
    Case("replicated", (4,), WHOLE, (4,), WHOLE),
    Case("gathered", (4,), ROWS, (4,), WHOLE),
    Case("transposed", (4,), ROWS, (4,), COLUMNS),
    Case("thirds", (4,), ROWS, (3,), ROWS, less=-4),
    Case("thirds", (2,), WHOLE, (3,), ROWS, less=-4),
)


def sharding(mesh_shape: Sequence[int], spec: Spec, first: int) -> NamedSharding:
    """A JAX sharding on the devices from number `first`."""
    names = "xyz"[: len(mesh_shape)]
    devices = np.array(jax.devices()[first : first + math.prod(mesh_shape)]).reshape(mesh_shape)
    return NamedSharding(
        make_mesh(devices, tuple(names)), PartitionSpec(*(tuple(names[axis] for axis in axes) or None for axes in spec))
    )


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians in ms: a transfer of an array that is there, and the return of the call while the array is computed."""

    done_ms: float
    returns_ms: float


def timed(
    ways: Sequence[Callable[[Any], Any]], source: NamedSharding, shape: Sequence[int], rounds: int
) -> list[Timing]:
    """Every way moves one fresh array per round, in turn."""
    fresh = jax.jit(lambda array, number: array + number, out_shardings=source)
    weights = jnp.full((256, 256), 0.01, np.float32)

    def ground(array: jax.Array, number: float) -> jax.Array:
        return array + jax.lax.fori_loop(0, 60, lambda _, factor: jnp.tanh(factor @ factor), weights * number)[0, 0]

    busy = jax.jit(ground, out_shardings=source)
    start = jax.device_put(np.ones(shape, np.float32), source)
    done: list[list[float]] = [[] for _ in ways]
    returns: list[list[float]] = [[] for _ in ways]
    for number in range(-1, rounds):
        for way, done_s, returns_s in zip(ways, done, returns, strict=True):
            array = jax.block_until_ready(fresh(start, float(number)))
            begun = time.perf_counter()
            jax.block_until_ready(way(array))
            done_s.append(time.perf_counter() - begun)
            array = busy(start, float(number))
            begun = time.perf_counter()
            moved = way(array)
            returns_s.append(time.perf_counter() - begun)
            jax.block_until_ready(moved)
    # The first round compiles.
    return [
        Timing(1e3 * statistics.median(done_s[1:]), 1e3 * statistics.median(returns_s[1:]))
        for done_s, returns_s in zip(done, returns, strict=True)
    ]


def measured(case: Case, rows: int, rounds: int) -> tuple[ReshardPlan, list[Timing]]:
    """The plan of a case and the timings of autopar and of `jax.device_put`; none if JAX cannot hold its tiles."""
    shape = case.shape(rows)
    source_tiling, target_tiling = case.tilings(rows)
    plan = plan_reshard(shape, 4, source_tiling, target_tiling)
    if any(
        len({tuple(b - a for a, b in box) for box in tiling.boxes}) > 1 for tiling in (source_tiling, target_tiling)
    ):
        return plan, []
    source, target = case.shardings()
    resharder = Resharder([Move(shape, np.dtype(np.float32), source, target)])
    assert resharder.plans == (plan,)

    def prepared(array: jax.Array) -> jax.Array:
        return resharder([array])[0]

    value = jax.device_put(np.arange(math.prod(shape), dtype=np.float32).reshape(shape), source)
    np.testing.assert_array_equal(np.asarray(prepared(value)), np.asarray(value))
    return plan, timed([prepared, lambda array: jax.device_put(array, target)], source, shape, rounds)


def sender_imbalance(plan: ReshardPlan) -> float:
    """Bytes of the busiest sender over what it could be spared; 1 is as good as any assignment.

    No sender need do less than a fair share among all source devices, nor less than the busiest receiver takes in: the
    transfer does not end before that one is done.
    """
    sent = plan.sent_bytes.values()
    return max(1.0, max(sent) / max(sum(sent) / len(plan.source.devices), *plan.received_bytes.values()))


def row_of(case: Case, plan: ReshardPlan, timings: Sequence[Timing]) -> dict[str, Any]:
    """The figures of one case."""
    row = {
        "case": case.name,
        "from": f"{case.source_mesh} {case.source}",
        "to": f"{case.target_mesh} {case.target}",
        "slow_bytes": plan.slow_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "busiest_sender_bytes": max(plan.sent_bytes.values()),
        "sender_imbalance": sender_imbalance(plan),
        "kind": plan.kind + (" + gather" if plan.cuts else ""),
        "messages": len(plan.sends),
    }
    for name, timing in zip(("autopar", "device_put"), timings, strict=False):
        row |= {f"{name}_ms": timing.done_ms, f"{name}_returns_ms": timing.returns_ms}
    return row


def shown(mesh: Sequence[int], spec: Spec) -> str:
    """A mesh and a spec as `(2,4) [x, y]`."""
    dims = ", ".join("".join("xyz"[axis] for axis in axes) or "-" for axes in spec)
    return f"({','.join(map(str, mesh))}) [{dims}]"


def table_of(cases: Sequence[Case], rows: Sequence[dict[str, Any]], *, title: str) -> Table:
    """One row per case."""
    table = Table(title=title)
    for heading in ("case", "from", "to"):
        table.add_column(heading)
    headings = (
        "slow, MB",
        "/ bound",
        "sender, MB",
        "/ spared",
        "plan",
        "boxes",
        "ms",
        "put, ms",
        "returns",
        "put returns",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for case, row in zip(cases, rows, strict=True):
        times = [row.get(f"{name}_{what}") for what in ("ms", "returns_ms") for name in ("autopar", "device_put")]
        table.add_row(
            case.name,
            escape(shown(case.source_mesh, case.source)),
            escape(shown(case.target_mesh, case.target)),
            f"{row['slow_bytes'] / 1e6:.2f}",
            f"{row['slow_bytes'] / row['lower_bound_bytes']:.2f}",
            f"{row['busiest_sender_bytes'] / 1e6:.2f}",
            f"{row['sender_imbalance']:.2f}",
            row["kind"],
            str(row["messages"]),
            *("" if one is None else f"{one:.2f}" for one in times),
        )
    return table


def main() -> None:
    """Plan and run every case, print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=2048, help="rows and columns of the array, float32 (default 2048)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    given = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 170)
    found: dict[str, list[dict[str, Any]]] = {}
    for title, cases in (("The 11 cases", CASES), ("Beyond them", BEYOND)):
        results = [measured(case, given.rows, given.rounds) for case in cases]
        found[title] = [row_of(case, *result) for case, result in zip(cases, results, strict=True)]
        console.print(
            table_of(cases, found[title], title=f"{title}: {given.rows} x {given.rows} float32, {given.rounds} rounds")
        )
    if given.json is not None:
        save(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
