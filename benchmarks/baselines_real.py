"""Real steps on 8 virtual devices: the plan that autopar finds beside the classic ones, and beside XLA's own partitioners.

    python benchmarks/baselines_real.py [--only gpt moe] [--ways autopar 'ZeRO*'] [--rounds 21] [--cluster FILE] [--plot]

In: GPT, a mixture of experts and a wide residual network at small sizes. Each is trained by our own plan; by data
parallelism, ZeRO 2, ZeRO 3, Megatron's layouts beside data parallelism, and GPipe's stages beside data parallelism; by plans
of one mesh alone and of stages of one device alone; by plain `jax.jit` from our shardings of arguments and results, under
Shardy and under GSPMD; and by data parallelism as one writes it by hand with `jax.shard_map`, of models without statistics
over the batch. All ways of a model are compiled first and then run in turn, one step each, round after round, so that what
else the machine does falls on all of them alike. Out: for each model a JSON file in `docs/benchmarks/baselines_real/` with
the seconds of each step, their median, the median over that of our plan, the median of the ratios within a round, and what
was planned; `--plot` draws them as PNG and SVG and writes a table beside these. The exit status is 1 if our plan is more than
3 % slower than another way.

What can go wrong: virtual devices share the cores of one machine, so a plan that saves work wins here by as much as it saves,
and one that saves only communication by little. Say how many cores there were, and what else ran.
"""

from __future__ import annotations

import os

DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import fnmatch  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
from hand_plans import megatron, tensor_parallel  # noqa: E402
from hand_written import data_parallel_step, has_equal_parts  # noqa: E402

import autopar  # noqa: E402
from autopar.commands.arguments.subject import find_shapes  # noqa: E402
from autopar.files.whole_file import save  # noqa: E402
from autopar.models import BuiltModel, build  # noqa: E402

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "baselines_real"
MODELS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gpt": ("gpt", {"layers": 4, "hidden": 128, "heads": 4, "seq": 64, "batch": 32, "vocab": 512}),
    "moe": ("moe", {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "batch": 32, "experts": 8}),
    "wide_resnet": ("wide_resnet", {"base_channels": 16, "width_factor": 2, "image_size": 16, "batch": 64}),
}
OURS, BY_HAND = "autopar", "shard_map by hand, data parallel"
MOST_RATIO = 1.03
WARM_UPS = 2
Run = Callable[[], None]
"""One step, with its results waited for."""


@dataclasses.dataclass
class Way:
    """One way of a model: what was planned, or why it cannot be, and the seconds of its steps."""

    name: str
    what: str
    run: Run | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)


def wishes(built: BuiltModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of ways, with the arguments of `parallelize` that fix them."""
    mesh = {"mesh_shape": {"data": DEVICES}}
    yield OURS, {}
    yield "data parallel", {**mesh, "constraints": autopar.data_parallel()}
    yield "ZeRO-2", {**mesh, "constraints": autopar.zero2()}
    yield "ZeRO-3", {**mesh, "constraints": autopar.zero3()}
    subject = find_shapes(built)
    for ways in (2, 4):
        layouts = megatron(subject, ways)
        if layouts:
            yield (
                f"Megatron {ways} x DP {DEVICES // ways}",
                tensor_parallel(DEVICES, ways, layouts, autopar.data_parallel),
            )
    stages = {"schedule": "gpipe", "num_microbatches": 4, "batch_statistics": "microbatch"}
    yield (
        "GPipe 2 x DP 4",
        {**stages, "num_stages": 2, "mesh_shape": {"data": 4}, "constraints": autopar.data_parallel()},
    )
    yield "intra-operator only", {"num_stages": 1}
    four = {"devices": jax.devices()[:4], "num_stages": 4, "mesh_shape": (1,)}
    yield "inter-operator only", {**four, "batch_statistics": "microbatch"}


def prepare(name: str, built: BuiltModel, options: Mapping[str, Any], batch: Any, given: argparse.Namespace) -> Way:
    """Plan, compile and warm up one way."""
    usual = {"devices": jax.devices(), "cluster": given.cluster, "planning_seconds": given.planning_seconds}
    step = autopar.parallelize(built.train_step, **{**usual, **options})
    shapes = find_shapes(built)
    try:
        plan = step.plan(shapes.state, shapes.batch)
    except autopar.AutoparError as error:
        return Way(name, f"cannot: {str(error)[:160]}")
    return Way(name, repr(plan), _stepping(step, step.init_state(built.create_state, jax.random.key(0)), batch))


def prepare_plain(name: str, built: BuiltModel, plan: autopar.Plan, batch: Any) -> Way:
    """Warm up `jax.jit` with the plan's shardings of arguments and results."""
    run = autopar.plain_jit(plan, built.train_step, donate_argnums=(0,))
    return Way(
        name, "the shardings of our best plan of one mesh", _stepping(run, built.create_state(jax.random.key(0)), batch)
    )


def _stepping(step: Callable[..., Any], state: Any, batch: Any) -> Run:
    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((jax.tree.leaves(state)[0], jax.tree.leaves(metrics)))

    for _ in range(WARM_UPS):
        run()
    return run


def ways_of(built: BuiltModel, given: argparse.Namespace) -> list[Way]:
    """Every way that is asked for, ready to run."""
    batch = jax.device_put(next(built.data(0)))
    found, shapes = [], find_shapes(built)
    for name, options in wishes(built):
        if any(fnmatch.fnmatch(name, pattern) for pattern in given.ways):
            found.append(prepare(name, built, options, batch, given))
            print(f"  {name}: {found[-1].what}", flush=True)
    for name, is_shardy in (("jax.jit, Shardy", True), ("jax.jit, GSPMD", False)):
        if any(fnmatch.fnmatch(name, pattern) for pattern in given.ways):
            one_mesh = autopar.parallelize(
                built.train_step, cluster=given.cluster, num_stages=1, num_microbatches=1, recompute="none"
            )
            before = jax.config.jax_use_shardy_partitioner
            jax.config.update("jax_use_shardy_partitioner", is_shardy)
            try:
                found.append(prepare_plain(name, built, one_mesh.plan(shapes.state, shapes.batch), batch))
            finally:
                jax.config.update("jax_use_shardy_partitioner", before)
            print(f"  {name}: {found[-1].what}", flush=True)
    if any(fnmatch.fnmatch(BY_HAND, pattern) for pattern in given.ways) and has_equal_parts(built):
        run = _stepping(data_parallel_step(built), built.create_state(jax.random.key(0)), batch)
        found.append(Way(BY_HAND, "each device has its examples and all weights; one psum of the gradients", run))
        print(f"  {BY_HAND}: {found[-1].what}", flush=True)
    return found


def measure(ways: Sequence[Way], rounds: int) -> None:
    """One step of each way in turn, round after round, each round in another order.

    A step is slower by a quarter after a long one of another way, which has used the caches. So each way takes a step that is not
    measured before the one that is.
    """
    running = [way for way in ways if way.run is not None]
    order = random.Random(0)
    for _ in range(rounds):
        for way in order.sample(running, len(running)):
            assert way.run is not None
            way.run()
            start = time.perf_counter()
            way.run()
            way.seconds.append(time.perf_counter() - start)


def row(way: Way, ours: Way | None) -> dict[str, Any]:
    """The figures of one way."""
    found: dict[str, Any] = {"way": way.name, "what": way.what, "seconds": way.seconds}
    if way.seconds:
        found["median_s"] = statistics.median(way.seconds)
    if way.seconds and ours is not None:
        found["median_over_ours"] = found["median_s"] / statistics.median(ours.seconds)
        found["ratio_in_rounds"] = statistics.median(
            theirs / own for theirs, own in zip(way.seconds, ours.seconds, strict=True)
        )
    return found


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Print the rows of a model; whether our plan is at most 3 % slower than each of them."""
    print(f"\n{name}: {'way':28s} median      over ours")
    for one in rows:
        figures = (
            f"{1e3 * one['median_s']:8.1f} ms {one.get('ratio_in_rounds', 1.0):8.2f}"
            if "median_s" in one
            else one["what"]
        )
        print(f"  {one['way']:30s} {figures}", flush=True)
    return all(one.get("ratio_in_rounds", 1.0) >= 1 / MOST_RATIO for one in rows)


def draw(folder: Path) -> None:
    """All models that were measured, as bars: how much longer than ours a step takes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    files = sorted(folder.glob("*.json"))
    figure, axes = plt.subplots(1, len(files), figsize=(4.2 * len(files), 4), squeeze=False, layout="constrained")
    for place, file in zip(axes[0], files, strict=True):
        rows = [one for one in json.loads(file.read_text(encoding="utf-8"))["rows"] if "ratio_in_rounds" in one]
        place.barh([one["way"] for one in rows][::-1], [one["ratio_in_rounds"] for one in rows][::-1])
        place.axvline(1.0, color="black", linewidth=0.8)
        place.set_title(file.stem)
        place.set_xlabel("seconds per step / autopar's")
    for kind in ("png", "svg"):
        figure.savefig(folder.parent / f"baselines_real.{kind}", metadata={"Date": None} if kind == "svg" else None)
    save(folder.parent / "baselines_real_table.md", table(files))


def table(files: Sequence[Path]) -> str:
    """The median step of each way and model, and by how much ours is faster, as Markdown."""
    models = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    known = [{one["way"]: one for one in model["rows"] if "median_s" in one} for model in models]
    lines = [f"| way | {' | '.join(file.stem for file in files)} |", "|---|" + "---|" * len(files)]
    for way in dict.fromkeys(way for rows in known for way in rows):
        cells = []
        for rows in known:
            row = rows.get(way)
            ratio = "" if row is None or way == OURS else f" ({row['ratio_in_rounds']:.2f})"
            cells.append("-" if row is None else f"{1e3 * row['median_s']:.1f} ms{ratio}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description="Real steps by our plan and by others.")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=["*"], help="patterns of names; autopar is needed for ratios")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--planning-seconds", type=float, default=60.0)
    parser.add_argument("--cluster", default="auto", help="what all plans are made for: a preset or a cluster file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", action="store_true")
    given = parser.parse_args(arguments)
    given.results.mkdir(parents=True, exist_ok=True)
    is_fast = True
    for name in given.only:
        model, sizes = MODELS[name]
        print(f"\n{name}: {model} {dict(sizes)}", flush=True)
        ways = ways_of(build(model, **sizes), given)
        measure(ways, given.rounds)
        ours = next((way for way in ways if way.name == OURS and way.seconds), None)
        rows = [row(way, ours) for way in ways]
        is_fast = show(name, rows) and is_fast
        about = {
            "model": model,
            "sizes": dict(sizes),
            "devices": DEVICES,
            "cores": len(os.sched_getaffinity(0)),
            "jax": jax.__version__,
        }
        save(
            given.results / f"{name}.json", json.dumps({**about, "rounds": given.rounds, "rows": rows}, indent=1) + "\n"
        )
    if given.plot:
        draw(given.results)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
