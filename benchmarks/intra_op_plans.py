"""Step time of autopar's plan against hand-written plans for plain `jax.jit`, on 8 virtual CPU devices.

In: GPT, MoE and Wide-ResNet train steps of the registry at moderate sizes. Each is compiled for autopar's own plan and for
plans that an expert writes by rules over leaf paths: data parallel, FSDP (parameters and optimizer state split too), Megatron
tensor parallel (experts or output channels where the model has them) and the 2-D grid of data and model. Out: medians of
rounds in which every variant makes one step, in a rotating order, in one process, so that all of them see the same machine. Every
variant's first loss must equal that of plain `jax.jit` on one device. What can go wrong: a busy machine widens the spread
that is shown beside each median; ratios of medians are then worth less.

    python benchmarks/intra_op_plans.py [--models gpt moe] [--rounds 15] [--quick] [--forced] [--json FILE]
"""

from __future__ import annotations

import os

DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import autopar  # noqa: E402
from autopar.files.whole_file import save  # noqa: E402
from autopar.models import registry  # noqa: E402
from autopar.models.config import DTYPES  # noqa: E402

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-3}
TARGET_RATIO = 1.03

SIZES: Mapping[str, Mapping[str, int | float | str]] = {
    "gpt": {"layers": 2, "hidden": 256, "heads": 8, "seq": 64, "batch": 16},
    "moe": {"layers": 2, "hidden": 192, "heads": 8, "seq": 64, "batch": 16, "experts": 8},
    "wide_resnet": {"depth": 11, "base_channels": 16, "width_factor": 2, "image_size": 16, "batch": 32},
}
QUICK_SIZES: Mapping[str, Mapping[str, int | float | str]] = {
    "gpt": {"layers": 1, "hidden": 64, "heads": 8, "seq": 32, "batch": 8},
    "moe": {"layers": 2, "hidden": 64, "heads": 8, "seq": 32, "batch": 16, "experts": 8},
    "wide_resnet": {"depth": 11, "base_channels": 8, "width_factor": 1, "image_size": 8, "batch": 16},
}

SpecOf = Callable[[str, tuple[int, ...]], P]
"""Leaf path within the state and its shape -> PartitionSpec."""


@dataclasses.dataclass(frozen=True)
class HandPlan:
    """A plan as an expert writes it: a mesh, the batch's split, and a rule for the state's leaves."""

    name: str
    mesh: Mapping[str, int]
    batch: P
    state: SpecOf


@dataclasses.dataclass
class Variant:
    """A step ready to run: `state` and `batch` already lie where the step wants them."""

    name: str
    kind: str
    run: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any
    compile_s: float
    plan: autopar.Plan | None = None
    first_loss: float = math.nan
    times_s: list[float] = dataclasses.field(default_factory=list)


def replicated(path: str, shape: tuple[int, ...]) -> P:
    """Every device holds the leaf."""
    return P()


def fully_sharded(axis: str) -> SpecOf:
    """Split the largest dimension that the devices divide; leaves that have none are replicated."""

    def spec(path: str, shape: tuple[int, ...]) -> P:
        divisible = [d for d, size in enumerate(shape) if size % DEVICES == 0]
        if not divisible or not path.startswith(("params", "opt_state")):
            return P()
        split = max(divisible, key=lambda d: shape[d])
        return P(*(axis if d == split else None for d in range(len(shape))))

    return spec


def by_suffix(rules: Sequence[tuple[str, P]]) -> SpecOf:
    """The spec of the first rule whose text ends the path; optimizer moments follow their parameter."""

    def spec(path: str, shape: tuple[int, ...]) -> P:
        return next((found for suffix, found in rules if path.endswith(suffix)), P())

    return spec


def megatron(axis: str) -> SpecOf:
    """Column, then row: heads of attention, the wide dimension of the feed-forward; embeddings replicated."""
    return by_suffix(
        [
            ("qkv/kernel", P(None, None, axis, None)),
            ("qkv/bias", P(None, axis, None)),
            ("attention/out/kernel", P(axis, None, None)),
            ("ffn/up/kernel", P(None, axis)),
            ("ffn/up/bias", P(axis)),
            ("ffn/down/kernel", P(axis, None)),
            *experts(axis),
        ]
    )


def experts(axis: str) -> list[tuple[str, P]]:
    """The experts' weights, split by expert."""
    return [("moe/up", P(axis, None, None)), ("moe/down", P(axis, None, None))]


def output_channels(axis: str) -> SpecOf:
    """Every convolution and its BatchNorm split by output channel."""

    def spec(path: str, shape: tuple[int, ...]) -> P:
        if path.endswith("kernel") and len(shape) == 4:
            return P(None, None, None, axis)
        if "norm" in path and len(shape) == 1:
            return P(axis)
        return P()

    return spec


def hand_plans(model: str) -> list[HandPlan]:
    """What an expert would try for this model on 8 devices."""
    grid = {"data": 2, "model": DEVICES // 2}
    plans = [
        HandPlan("data parallel (8,)", {"data": DEVICES}, P("data"), replicated),
        HandPlan("FSDP (8,)", {"data": DEVICES}, P("data"), fully_sharded("data")),
    ]
    if model == "wide_resnet":
        return [
            *plans,
            HandPlan("output channels (8,)", {"model": DEVICES}, P(), output_channels("model")),
            HandPlan("data x channels (2,4)", grid, P("data"), output_channels("model")),
        ]
    if model == "moe":
        plans += [
            HandPlan("expert parallel (8,)", {"data": DEVICES}, P("data"), by_suffix(experts("data"))),
            HandPlan("data x experts (2,4)", grid, P(("data", "model")), by_suffix(experts("model"))),
        ]
    return [
        *plans,
        HandPlan("Megatron (8,)", {"model": DEVICES}, P(), megatron("model")),
        HandPlan("data x Megatron (2,4)", grid, P("data"), megatron("model")),
    ]


def path_of(keys: tuple[Any, ...]) -> str:
    """A key path as text, `params/block_0/ffn/up/kernel`."""
    return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in keys)


def hand_variant(model: registry.BuiltModel, plan: HandPlan, state: Any, batch: Any) -> Variant:
    """The undecorated step, given to `jax.jit` with the plan's shardings."""
    auto = (AxisType.Auto,) * len(plan.mesh)
    mesh = Mesh(np.array(jax.devices()).reshape(*plan.mesh.values()), tuple(plan.mesh), axis_types=auto)
    state_shardings = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: NamedSharding(mesh, plan.state(path_of(keys), leaf.shape)), state
    )
    batch_shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, plan.batch), batch)
    jitted = jax.jit(
        model.train_step,
        in_shardings=(state_shardings, batch_shardings),
        out_shardings=(state_shardings, NamedSharding(mesh, P())),
        donate_argnums=(0,),
    )
    started = time.perf_counter()
    compiled = jitted.lower(state, batch).compile()
    compile_s = time.perf_counter() - started
    return Variant(
        plan.name,
        "hand",
        compiled,
        jax.device_put(state, state_shardings),
        jax.device_put(batch, batch_shardings),
        compile_s,
    )


def autopar_variant(name: str, model: registry.BuiltModel, state: Any, batch: Any, **options: Any) -> Variant:
    """The step under autopar's plan, called as a user calls it."""
    step = autopar.parallelize(model.train_step, **options)
    plan = step.plan(state, batch)
    started = time.perf_counter()
    compiled = step.compile(state, batch)
    compiled.memory_analysis()
    compile_s = time.perf_counter() - started
    leaves, tree = jax.tree.flatten((state, batch))
    shardings = compiled.in_shardings[: len(leaves)]
    placed_state, placed_batch = jax.tree.unflatten(tree, map(jax.device_put, leaves, shardings))
    kind = "autopar" if not options else "forced"
    return Variant(name, kind, step, placed_state, placed_batch, compile_s, plan)


def forced_variants(model: registry.BuiltModel, state: Any, batch: Any) -> list[Variant]:
    """Autopar's own plans on one fixed mesh or under a preset: predicted against measured shows the cost model's errors."""
    options: Mapping[str, Mapping[str, Any]] = {
        "autopar, mesh (8,)": {"mesh_shape": (8,)},
        "autopar, mesh (2,4)": {"mesh_shape": (2, 4)},
        "autopar, data_parallel() (8,)": {"mesh_shape": (8,), "constraints": autopar.data_parallel()},
        "autopar, zero2() (8,)": {"mesh_shape": (8,), "constraints": autopar.zero2()},
        "autopar, zero3() (8,)": {"mesh_shape": (8,), "constraints": autopar.zero3()},
    }
    return [autopar_variant(name, model, state, batch, **chosen) for name, chosen in options.items()]


def reference_loss(model: registry.BuiltModel, state: Any, batch: Any) -> float:
    """The loss of the first step on one device."""
    _, metrics = jax.jit(model.train_step)(state, batch)
    return float(metrics["loss"])


def one_step(variant: Variant) -> float:
    """Make one step; returns the loss."""
    started = time.perf_counter()
    variant.state, metrics = jax.block_until_ready(variant.run(variant.state, variant.batch))
    variant.times_s.append(time.perf_counter() - started)
    return float(metrics["loss"])


def measure(variants: Sequence[Variant], rounds: int, expected_loss: float, *, tolerance: float) -> None:
    """Check each variant's first loss, then time rounds in which each makes one step, in rotating order."""
    for variant in variants:
        variant.first_loss = one_step(variant)
        if abs(variant.first_loss - expected_loss) > tolerance:
            raise SystemExit(
                f"{variant.name}: first loss {variant.first_loss}, plain jit on one device {expected_loss}"
            )
        one_step(variant)
        variant.times_s.clear()
    for turn in range(rounds):
        start = turn % len(variants)
        for variant in (*variants[start:], *variants[:start]):
            one_step(variant)


def result_of(
    name: str, sizes: Mapping[str, int | float | str], variants: Sequence[Variant], expected_loss: float
) -> dict[str, Any]:
    """Figures of one model, ready for JSON."""
    hands = [v for v in variants if v.kind == "hand"]
    best = min(hands, key=lambda v: statistics.median(v.times_s))
    ours = next(v for v in variants if v.kind == "autopar")
    # The median over rounds of the ratio within a round: a disturbance that lasts longer than a round cancels.
    paired = statistics.median(a / b for a, b in zip(ours.times_s, best.times_s, strict=True))
    return {
        "model": name,
        "sizes": dict(sizes),
        "loss_on_one_device": expected_loss,
        "best_hand_plan": best.name,
        "ratio": statistics.median(ours.times_s) / statistics.median(best.times_s),
        "paired_ratio": paired,
        "variants": [_figures(v) for v in variants],
    }


def _figures(variant: Variant) -> dict[str, Any]:
    low, _, high = statistics.quantiles(variant.times_s, n=4)
    figures = {
        "name": variant.name,
        "kind": variant.kind,
        "median_s": statistics.median(variant.times_s),
        "min_s": min(variant.times_s),
        "quartiles_s": [low, high],
        "compile_s": variant.compile_s,
        "first_loss": variant.first_loss,
        "times_s": variant.times_s,
    }
    if variant.plan is not None:
        plan = variant.plan
        figures |= {"predicted_s": plan.step_s, "predicted_comm_s": plan.comm_s, "planning_s": plan.planning_s}
        figures |= {"mesh_shape": plan.mesh_shape, "collectives": sum(c.count for c in plan.collectives)}
        figures["candidates"] = [dataclasses.asdict(c) for c in plan.candidates]
    return figures


def table_of(result: Mapping[str, Any], rounds: int) -> Table:
    """One row per variant, fastest first."""
    verdict = "met" if result["ratio"] <= TARGET_RATIO else "missed"
    sizes = ", ".join(f"{size} {value}" for size, value in result["sizes"].items())
    table = Table(
        title=f"{result['model']} ({sizes}), {DEVICES} virtual devices, {rounds} rounds",
        caption=f"autopar / best hand plan ({result['best_hand_plan']}): {result['ratio']:.3f} of medians, "
        f"{result['paired_ratio']:.3f} paired by round; target {TARGET_RATIO} {verdict}",
    )
    table.add_column("plan")
    for heading in (
        "step, ms",
        "quartiles, ms",
        "min, ms",
        "vs best hand",
        "predicted, ms",
        "comm, ms",
        "compile, s",
        "plan, s",
    ):
        table.add_column(heading, justify="right")
    best = min(v["median_s"] for v in result["variants"] if v["kind"] == "hand")
    for row in sorted(result["variants"], key=lambda v: v["median_s"]):
        name = f"{row['name']} -> {tuple(row['mesh_shape'])}" if row["kind"] == "autopar" else row["name"]
        predicted = [f"{row[key] * 1e3:.1f}" if key in row else "" for key in ("predicted_s", "predicted_comm_s")]
        table.add_row(
            name,
            f"{row['median_s'] * 1e3:.1f}",
            "-".join(f"{q * 1e3:.0f}" for q in row["quartiles_s"]),
            f"{row['min_s'] * 1e3:.1f}",
            f"{row['median_s'] / best:.3f}",
            *predicted,
            f"{row['compile_s']:.1f}",
            f"{row['planning_s']:.1f}" if "planning_s" in row else "",
            style="bold" if row["kind"] == "autopar" else "dim" if row["kind"] == "forced" else None,
        )
    return table


def benchmark(name: str, sizes: Mapping[str, int | float | str], rounds: int, *, forced: bool) -> dict[str, Any]:
    """Measure one model."""
    model = registry.build(name, **sizes)
    # Kept on the host: variants donate their state, and each must start from the same one.
    state = jax.device_get(jax.jit(model.create_state)(jax.random.key(0)))
    batch = next(model.data(0))
    expected = reference_loss(model, state, batch)
    variants = [autopar_variant("autopar", model, state, batch)]
    variants += [hand_variant(model, plan, state, batch) for plan in hand_plans(name)]
    if forced:
        variants += forced_variants(model, state, batch)
    measure(variants, rounds, expected, tolerance=LOSS_TOLERANCE[str(sizes["dtype"])])
    return result_of(name, sizes, variants, expected)


def main() -> None:
    """Measure, print one table per model, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the models compute in")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and 3 rounds: does it run?")
    parser.add_argument("--forced", action="store_true", help="also autopar's plans for fixed meshes and presets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    given = parser.parse_args()
    rounds = 3 if given.quick else given.rounds
    results = []
    console = Console(width=None if Console().is_terminal else 150)
    for name in given.models:
        sizes = {**(QUICK_SIZES if given.quick else SIZES)[name], "dtype": given.dtype}
        results.append(benchmark(name, sizes, rounds, forced=given.forced))
        console.print(table_of(results[-1], rounds))
        if given.json is not None:
            save(given.json, json.dumps({"rounds": rounds, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
