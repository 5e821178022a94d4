"""Predicted peak memory of plans against XLA's own account of the compiled programs, on 8 virtual CPU devices or for GPUs.

In: train steps of the registry at small sizes; for each, plans of several kinds and meshes: one device, data parallel, tensor
parallel, ZeRO-2, ZeRO-3, searched, in microbatches, searched under a memory limit. Out: per plan the predicted bytes of one
device, XLA's (arguments + outputs - aliased + temporaries), their ratio, that of the temporaries alone, and for limited plans
whether XLA's figure is within the limit; then the spread of the ratios, apart for the plans that the memory model was made
from and for those that it was not (other models, other sizes). A plan that fails is named and ends nothing. The exit status
is 1 if a ratio leaves the target, a limit is exceeded or a plan failed. With `--compiler a100` steps of a size that GPUs are
bought for (group `large`) are compiled for GPUs, which need not be there; `autopar.verify.compile_only` names the packages.
What can go wrong: XLA's account differs between versions of JAX; say which one a figure is from.

    python benchmarks/memory_error.py [--models mlp gpt] [--plans auto limited] [--groups held-out] [--json FILE]
    JAX_PLATFORMS=cpu python benchmarks/memory_error.py --compiler a100 [--dtype bfloat16]
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
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import autopar  # noqa: E402
from autopar.files.whole_file import save  # noqa: E402
from autopar.intra_op.memory.tuning import TUNING  # noqa: E402
from autopar.models import registry  # noqa: E402
from autopar.models.config import DTYPES  # noqa: E402
from autopar.verify.compile_only import compile_only_devices  # noqa: E402

LEAST_RATIO, MOST_RATIO = 0.9, 1.1
LIMIT_SHARE = 0.9
"""A limited plan gets this share of what a limit must offer for the searched plan, margin included."""

LARGE = {"hidden": 1024, "heads": 16, "seq": 512, "batch": 16, "vocab": 8192}
MODELS: Mapping[str, tuple[str, Mapping[str, int | float | bool]]] = {
    "mlp": ("mlp", {}),
    "wide mlp": ("mlp", {"hidden": 128, "layers": 3, "batch": 64}),
    "batch mlp": ("mlp", {"hidden": 64, "layers": 6, "batch": 1024}),
    "gpt": ("gpt", {"layers": 2, "hidden": 64}),
    "gpt remat": ("gpt", {"layers": 4, "hidden": 64, "remat": True}),
    "gpt scan": ("gpt_scan", {"layers": 4, "hidden": 64}),
    "moe": ("moe", {"layers": 2, "hidden": 64, "seq": 32, "experts": 8}),
    "wide_resnet": ("wide_resnet", {"base_channels": 8, "width_factor": 2, "image_size": 16, "batch": 32}),
    "odd mlp": ("mlp", {"hidden": 96, "layers": 4, "batch": 128}),
    "odd gpt": ("gpt", {"layers": 3, "hidden": 96, "seq": 48, "batch": 8}),
    "odd moe": ("moe", {"layers": 2, "hidden": 32, "seq": 64, "experts": 4}),
    "odd resnet": ("wide_resnet", {"base_channels": 16, "width_factor": 1, "image_size": 8, "batch": 64}),
    "llama": ("llama", {"layers": 2, "hidden": 64, "ffn": 192, "seq": 32}),
    "llama 128": ("llama", {"layers": 2, "hidden": 64, "ffn": 192, "seq": 128, "batch": 8}),
    "llama 512": ("llama", {"layers": 2, "hidden": 64, "ffn": 192, "seq": 512, "batch": 8}),
    "llama fused": ("llama", {"layers": 2, "hidden": 64, "ffn": 192, "seq": 128, "batch": 8, "fused_attention": True}),
    "gpt 512": ("gpt", {"layers": 2, "hidden": 64, "seq": 512, "batch": 8}),
    "llama scan": ("llama", {"layers": 4, "hidden": 64, "ffn": 192, "seq": 32, "scan_layers": True}),
    "bert": ("bert", {"layers": 2, "hidden": 64, "seq": 32}),
    "bert remat": ("bert", {"layers": 3, "hidden": 64, "seq": 32, "remat": True}),
    "t5": ("t5", {"layers": 1, "hidden": 64, "seq": 32, "target_seq": 16}),
    "unet": ("unet", {"base_channels": 8}),
    "large mlp": ("mlp", {"hidden": 4096, "inputs": 1024, "batch": 8192, "layers": 6}),
    "large gpt": ("gpt", {"layers": 2, **LARGE}),
    "large gpt remat": ("gpt", {"layers": 4, "remat": True, **LARGE}),
    "large gpt scan": ("gpt_scan", {"layers": 4, **LARGE}),
    "large llama": ("llama", {"layers": 2, "ffn": 2816, "kv_heads": 8, **LARGE}),
    "large bert": ("bert", {"layers": 2, **LARGE}),
    "large t5": ("t5", {"layers": 1, "target_seq": 256, **LARGE}),
    "large moe": ("moe", {"layers": 2, "experts": 8, "group": 512, **LARGE}),
    "large unet": ("unet", {"image_size": 64, "base_channels": 64, "batch": 64}),
    "large wide_resnet": ("wide_resnet", {"image_size": 64, "base_channels": 64, "batch": 64}),
}
TENSOR = {"state/params/*up/kernel": P(None, "x"), "state/params/*down/kernel": P("x")}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "one device": {},
    "data parallel": {"constraints": autopar.data_parallel()},
    "tensor parallel": {"constraints": TENSOR},
    "zero2": {"constraints": autopar.zero2()},
    "zero3": {"constraints": autopar.zero3()},
    "microbatches": {"constraints": autopar.data_parallel(), "num_microbatches": 4},
    "auto": {},
    "limited": {"num_microbatches": 1},
}
Case = tuple[str, str, tuple[int, ...]]
FITTED: Sequence[Case] = (
    ("mlp", "one device", (1,)),
    ("mlp", "data parallel", (8,)),
    ("mlp", "zero3", (4,)),
    ("mlp", "auto", (2, 2)),
    ("wide mlp", "data parallel", (8,)),
    ("wide mlp", "zero2", (4,)),
    ("wide mlp", "zero3", (8,)),
    ("wide mlp", "auto", (4,)),
    ("batch mlp", "data parallel", (2,)),
    ("batch mlp", "auto", (2, 2)),
    ("batch mlp", "limited", (8,)),
    ("gpt", "one device", (1,)),
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
    ("moe", "data parallel", (4,)),
    ("moe", "zero2", (2,)),
    ("moe", "auto", (8,)),
    ("moe", "limited", (4,)),
    ("wide_resnet", "data parallel", (4,)),
    ("wide_resnet", "zero3", (8,)),
    ("wide_resnet", "auto", (2, 2)),
    ("wide_resnet", "limited", (4,)),
    ("llama", "one device", (1,)),
    ("llama 128", "one device", (1,)),
    ("llama 512", "one device", (1,)),
    ("llama fused", "one device", (1,)),
    ("gpt 512", "one device", (1,)),
    ("bert", "one device", (1,)),
)
"""Plans whose buffer assignments were read to find out what XLA does."""
HELD_OUT: Sequence[Case] = (
    ("odd mlp", "one device", (1,)),
    ("odd mlp", "microbatches", (2,)),
    ("odd gpt", "zero3", (4,)),
    ("odd gpt", "tensor parallel", (2,)),
    ("odd gpt", "auto", (4,)),
    ("odd moe", "data parallel", (8,)),
    ("odd moe", "auto", (2, 2)),
    ("odd resnet", "data parallel", (8,)),
    ("odd resnet", "auto", (8,)),
    ("llama", "data parallel", (4,)),
    ("llama", "zero3", (8,)),
    ("llama", "auto", (2, 2)),
    ("llama", "microbatches", (2,)),
    ("llama 128", "data parallel", (2,)),
    ("llama 128", "zero3", (4,)),
    ("llama 128", "auto", (2, 2)),
    ("llama 512", "data parallel", (4,)),
    ("llama fused", "data parallel", (4,)),
    ("gpt 512", "data parallel", (4,)),
    ("llama scan", "zero3", (4,)),
    ("bert", "data parallel", (4,)),
    ("bert", "tensor parallel", (4,)),
    ("bert", "zero3", (8,)),
    ("bert remat", "data parallel", (2,)),
    ("t5", "data parallel", (4,)),
    ("t5", "auto", (8,)),
    ("unet", "one device", (1,)),
    ("unet", "data parallel", (4,)),
    ("unet", "zero3", (4,)),
    ("unet", "auto", (2, 2)),
)
"""Plans that were only ever compared."""
LARGE_CASES: Sequence[Case] = tuple(
    (model, plan, mesh)
    for plan, mesh in (
        ("one device", (1,)),
        ("data parallel", (4,)),
        ("zero3", (4,)),
        ("auto", (2, 4)),
        ("microbatches", (2,)),
    )
    for model in MODELS
    if model.startswith("large ") and (model, plan) != ("large wide_resnet", "microbatches")
)
"""Steps of a size that GPUs are bought for, of which nothing runs. Statistics of a whole batch are not cut into microbatches."""
GROUPS: Mapping[str, Sequence[Case]] = {"fitted": FITTED, "held-out": HELD_OUT, "large": LARGE_CASES}


@dataclasses.dataclass(frozen=True)
class Account:
    """One plan: what was predicted, what XLA says, bytes of one device; `temporaries` are those of XLA's that are neither
    argument nor result."""

    group: str
    model: str
    plan: str
    mesh: tuple[int, ...]
    predicted_bytes: int
    xla_bytes: int
    temporaries_bytes: int
    limit_bytes: int | None

    @property
    def ratio(self) -> float:
        """Predicted over XLA's."""
        return self.predicted_bytes / self.xla_bytes

    @property
    def is_near(self) -> bool:
        """Whether the ratio is within the target."""
        return LEAST_RATIO <= self.ratio <= MOST_RATIO

    @property
    def temporaries_ratio(self) -> float:
        """The same of temporaries alone; what is there besides is known exactly."""
        return 1 + (self.predicted_bytes - self.xla_bytes) / self.temporaries_bytes

    @property
    def is_within(self) -> bool:
        """Whether XLA's figure is within the limit; True without one."""
        return self.limit_bytes is None or self.xla_bytes <= self.limit_bytes


def xla_bytes(compiled: Any) -> int:
    """Arguments + outputs - aliased + temporaries of one device."""
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    return int(kept + account.temp_size_in_bytes)


def account_of(
    group: str,
    model_name: str,
    plan_name: str,
    mesh: tuple[int, ...],
    *,
    dtype: str,
    devices: Sequence[jax.Device],
) -> Account:
    """Plan, compile, read both figures. Raises OutOfMemoryError if no plan was found within the limit of a limited one."""
    name, sizes = MODELS[model_name]
    model = registry.build(name, **sizes, dtype=dtype)
    shapes = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    given = {"devices": devices[: math.prod(mesh)], "mesh_shape": mesh, **PLANS[plan_name]}
    limit = None
    if plan_name == "limited":
        limit = int(LIMIT_SHARE * required_bytes(autopar.parallelize(model.train_step, **given).plan(*shapes)))
    compiled = autopar.parallelize(model.train_step, memory_limit_bytes=limit, **given).compile(*shapes)
    temporaries = int(compiled.memory_analysis().temp_size_in_bytes)
    return Account(
        group, model_name, plan_name, mesh, compiled.plan.peak_bytes, xla_bytes(compiled), temporaries, limit
    )


def required_bytes(plan: autopar.Plan) -> float:
    """The least limit under which a plan may be chosen: inputs are exact, temporaries have a margin."""
    inputs = sum(value.bytes_per_device for value in plan.inputs)
    return inputs + (plan.peak_bytes - inputs) / TUNING.temporaries_margin


def shown(accounts: Sequence[Account]) -> Table:
    """One row per plan."""
    table = Table(title=f"memory of one device, JAX {jax.__version__}")
    words = ("", "model", "plan", "mesh")
    for heading in (*words, "predicted", "XLA", "ratio", "temporaries", "limit", "XLA / limit"):
        table.add_column(heading, justify="left" if heading in words else "right")
    for a in accounts:
        style = None if a.is_near and a.is_within else "red"
        limit = ("", "") if a.limit_bytes is None else (f"{a.limit_bytes:,}", f"{a.xla_bytes / a.limit_bytes:.3f}")
        ratios = (f"{a.ratio:.3f}", f"{a.temporaries_ratio:.3f}")
        figures = (f"{a.predicted_bytes:,}", f"{a.xla_bytes:,}", *ratios, *limit)
        table.add_row(a.group, a.model, a.plan, str(a.mesh), *figures, style=style)
    return table


def summary(group: str, accounts: Sequence[Account]) -> str:
    """The spread of one group's ratios."""
    ratios, temporaries = [a.ratio for a in accounts], [a.temporaries_ratio for a in accounts]
    near = sum(a.is_near for a in accounts)
    exceeded = sum(not a.is_within for a in accounts)
    error = statistics.mean(abs(ratio - 1) for ratio in ratios)
    return (
        f"{group}, {len(ratios)} plans: ratios {min(ratios):.3f} to {max(ratios):.3f}, mean error {error:.1%}; temporaries "
        f"alone {min(temporaries):.3f} to {max(temporaries):.3f}; {near} within {LEAST_RATIO} to {MOST_RATIO}; "
        f"{exceeded} limits exceeded in XLA's account"
    )


def as_json(accounts: Sequence[Account], failures: Sequence[str]) -> str:
    """The figures so far; written after every plan, so that a run that is ended early leaves what it found."""
    rows = [{**dataclasses.asdict(a), "ratio": a.ratio} for a in accounts]
    return json.dumps({"jax": jax.__version__, "rows": rows, "failures": list(failures)}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the cases, print the table; 1 if a ratio is outside the target, a limit is exceeded or a plan failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="default: large with --compiler, else the others")
    parser.add_argument("--compiler", choices=("v100", "a100", "h100"), help="compile for GPUs that need not be there")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the models compute in")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args(arguments)
    groups = given.groups or (["large"] if given.compiler else ["fitted", "held-out"])
    devices = compile_only_devices(given.compiler, DEVICES) if given.compiler else jax.devices()
    cases = [(g, *case) for g in groups for case in GROUPS[g] if case[0] in given.models and case[1] in given.plans]
    console = Console(width=130)
    started = time.process_time()
    accounts: list[Account] = []
    failures: list[str] = []
    for number, case in enumerate(cases, 1):
        begun = time.process_time()
        try:
            accounts.append(account_of(*case, dtype=given.dtype, devices=devices))
            said = f"{accounts[-1].ratio:.3f}"
        except autopar.OutOfMemoryError:
            said = f"no plan within {LIMIT_SHARE:.0%} of what the searched one needs"
        except Exception as error:  # noqa: BLE001 - one plan less; the others are worth having, the exit status says it
            said = f"failed, {type(error).__name__}: {error}"
            failures.append(f"{case}: {said}")
        console.log(f"{number}/{len(cases)} {case}: {said} ({time.process_time() - begun:.0f} s)", markup=False)
        if given.json:
            save(given.json, as_json(accounts, failures))
    console.print(shown(accounts))
    console.print(f"{time.process_time() - started:.0f} s of processor time")
    for group in groups:
        members = [a for a in accounts if a.group == group]
        if members:
            console.print(summary(group, members))
    if len(groups) > 1 and accounts:
        console.print(summary("all", accounts))
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return int(bool(failures) or any(not a.is_near or not a.is_within for a in accounts))


if __name__ == "__main__":
    sys.exit(main())
