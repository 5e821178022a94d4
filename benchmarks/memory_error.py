"""Predicted peak memory of plans against XLA's own account of the compiled programs, on 8 virtual CPU devices.

In: train steps of the registry at small sizes; for each, plans of several kinds and meshes: data parallel, ZeRO-2, ZeRO-3,
searched, searched under a memory limit. Out: per plan the predicted bytes of one device, XLA's (arguments + outputs -
aliased + temporaries), their ratio, and for limited plans whether XLA's figure is within the limit; then the spread of the
ratios. The exit status is 1 if a ratio leaves the target or a limit is exceeded. What can go wrong: XLA's account differs
between versions of JAX; say which one a figure is from.

    python benchmarks/memory_error.py [--models mlp gpt] [--plans auto limited] [--json FILE]
"""

from __future__ import annotations

import os

DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import autopar  # noqa: E402
from autopar.models import registry  # noqa: E402

LEAST_RATIO, MOST_RATIO = 0.9, 1.1
LIMIT_SHARE = 0.8
"""A limited plan gets this share of what the searched plan needs, or the smallest share above it that any plan fits."""
LIMIT_STEP = 0.05

MODELS: Mapping[str, tuple[str, Mapping[str, int | float | bool]]] = {
    "mlp": ("mlp", {}),
    "wide mlp": ("mlp", {"hidden": 128, "layers": 3, "batch": 64}),
    "batch mlp": ("mlp", {"hidden": 64, "layers": 6, "batch": 1024}),
    "gpt": ("gpt", {"layers": 2, "hidden": 64}),
    "gpt remat": ("gpt", {"layers": 4, "hidden": 64, "remat": True}),
    "gpt scan": ("gpt_scan", {"layers": 4, "hidden": 64}),
    "moe": ("moe", {"layers": 2, "hidden": 64, "seq": 32, "experts": 8}),
    "wide_resnet": ("wide_resnet", {"base_channels": 8, "width_factor": 2, "image_size": 16, "batch": 32}),
}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "data parallel": {"constraints": autopar.data_parallel()},
    "zero2": {"constraints": autopar.zero2()},
    "zero3": {"constraints": autopar.zero3()},
    "auto": {},
    "limited": {},
}
CASES: Sequence[tuple[str, str, tuple[int, ...]]] = (
    ("mlp", "data parallel", (8,)),
    ("mlp", "zero3", (4,)),
    ("mlp", "auto", (2, 2)),
    ("wide mlp", "data parallel", (8,)),
    ("wide mlp", "zero2", (4,)),
    ("wide mlp", "zero3", (8,)),
    ("wide mlp", "auto", (4,)),
    ("wide mlp", "limited", (4,)),
    ("batch mlp", "data parallel", (2,)),
    ("batch mlp", "auto", (2, 2)),
    ("batch mlp", "limited", (8,)),
    ("gpt", "data parallel", (2,)),
    ("gpt", "zero2", (4,)),
    ("gpt", "zero3", (8,)),
    ("gpt", "auto", (2, 2)),
    ("gpt", "auto", (8,)),
    ("gpt", "limited", (4,)),
    ("gpt remat", "data parallel", (4,)),
    ("gpt remat", "zero3", (4,)),
    ("gpt scan", "data parallel", (4,)),
    ("gpt scan", "zero3", (8,)),
    ("gpt scan", "auto", (2, 2)),
    ("gpt scan", "limited", (4,)),
    ("moe", "data parallel", (4,)),
    ("moe", "zero2", (2,)),
    ("moe", "auto", (8,)),
    ("moe", "limited", (4,)),
    ("wide_resnet", "data parallel", (4,)),
    ("wide_resnet", "zero3", (8,)),
    ("wide_resnet", "auto", (2, 2)),
    ("wide_resnet", "limited", (4,)),
)


@dataclasses.dataclass(frozen=True)
class Account:
    """One plan: what was predicted, what XLA says, bytes of one device."""

    model: str
    plan: str
    mesh: tuple[int, ...]
    predicted_bytes: int
    xla_bytes: int
    limit_bytes: int | None

    @property
    def ratio(self) -> float:
        """Predicted over XLA's."""
        return self.predicted_bytes / self.xla_bytes

    @property
    def is_within(self) -> bool:
        """Whether XLA's figure is within the limit; True without one."""
        return self.limit_bytes is None or self.xla_bytes <= self.limit_bytes


def xla_bytes(compiled: Any) -> int:
    """Arguments + outputs - aliased + temporaries of one device."""
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    return int(kept + account.temp_size_in_bytes)


def account_of(model_name: str, plan_name: str, mesh: tuple[int, ...]) -> Account:
    """Plan, compile, read both figures."""
    name, sizes = MODELS[model_name]
    model = registry.build(name, **sizes)
    shapes = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    given = {"devices": jax.devices()[: math.prod(mesh)], "mesh_shape": mesh, **PLANS[plan_name]}
    limit = _limit(model.train_step, shapes, given) if plan_name == "limited" else None
    compiled = autopar.parallelize(model.train_step, memory_limit_bytes=limit, **given).compile(*shapes)
    return Account(model_name, plan_name, mesh, compiled.plan.peak_bytes, xla_bytes(compiled), limit)


def _limit(train_step: Any, shapes: Sequence[Any], given: Mapping[str, Any]) -> int:
    """The smallest share of the searched plan's peak, from `LIMIT_SHARE` up, that some plan fits."""
    free = autopar.parallelize(train_step, **given).plan(*shapes).peak_bytes
    share = LIMIT_SHARE
    while True:
        limit = int(share * free)
        try:
            autopar.parallelize(train_step, memory_limit_bytes=limit, **given).plan(*shapes)
        except autopar.OutOfMemoryError:
            share += LIMIT_STEP
        else:
            return limit


def shown(accounts: Sequence[Account]) -> Table:
    """One row per plan."""
    table = Table(title=f"memory of one device, JAX {jax.__version__}")
    for heading in ("model", "plan", "mesh", "predicted", "XLA", "ratio", "limit", "XLA / limit"):
        table.add_column(heading, justify="left" if heading in ("model", "plan", "mesh") else "right")
    for a in accounts:
        style = None if LEAST_RATIO <= a.ratio <= MOST_RATIO and a.is_within else "red"
        limit = ("", "") if a.limit_bytes is None else (f"{a.limit_bytes:,}", f"{a.xla_bytes / a.limit_bytes:.3f}")
        figures = (f"{a.predicted_bytes:,}", f"{a.xla_bytes:,}", f"{a.ratio:.3f}", *limit)
        table.add_row(a.model, a.plan, str(a.mesh), *figures, style=style)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the cases, print the table; 1 if a ratio is outside the target or a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if case[0] in given.models and case[1] in given.plans]
    console = Console(width=120)
    accounts = []
    for number, case in enumerate(cases, 1):
        accounts.append(account_of(*case))
        console.log(f"{number}/{len(cases)} {case}: {accounts[-1].ratio:.3f}")
    console.print(shown(accounts))
    ratios = [a.ratio for a in accounts]
    outside = [a for a in accounts if not LEAST_RATIO <= a.ratio <= MOST_RATIO]
    exceeded = [a for a in accounts if not a.is_within]
    error = statistics.mean(abs(ratio - 1) for ratio in ratios)
    console.print(
        f"{len(ratios)} plans: ratios {min(ratios):.3f} to {max(ratios):.3f}, mean error {error:.1%}; {len(outside)} outside "
        f"{LEAST_RATIO} to {MOST_RATIO}; {len(exceeded)} limits exceeded in XLA's account"
    )
    if given.json:
        rows = [{**dataclasses.asdict(a), "ratio": a.ratio} for a in accounts]
        given.json.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n")
    return 1 if outside or exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
