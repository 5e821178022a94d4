"""Does planning a small program take long beside compiling it? Seconds of planning over those of `jax.jit`.

    python benchmarks/small_programs.py [--only flow "operations *" ...] [--json FILE]

In: programs of a few kilobytes: a normalizing flow of two coupling layers (about 350 tiny equations), a transformer of 4
blocks of 32 in four microbatches, each model of `autopar.models` at a tiny size, and 14 operations without and within 0.5 to
0.9 of the peak that their plan has without a limit. Each is planned for 8 devices of the `cpu` cluster, tracing included.
Out: per program the seconds of both, of the processor and of the wall, and their ratio on the processor. The target is a
ratio of at most 3 and at most 5 s, for the 14 operations at most 2 s; exit status 1 if one is missed. All runs are in one
process, whose caches of JAX are emptied before each; one program of each kind runs before the clock does. What can go wrong:
XLA compiles in several threads, so its seconds of the processor are more than those of a quiet machine's wall.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"

import jax
import jax.numpy as jnp
import optax

import autopar
from autopar.files.whole_file import save
from autopar.models import registry

DEVICES, SHARES = 8, (0.5, 0.6, 0.7, 0.8, 0.9)
MOST_OF_JIT, MOST_S, MOST_OF_OPERATIONS_S = 3.0, 5.0, 2.0
TINY: Mapping[str, dict[str, Any]] = {
    "mlp": {"layers": 2, "hidden": 32},
    "gpt": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "gpt_scan": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "moe": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8, "experts": 4, "group": 16},
    "wide_resnet": {"image_size": 8, "base_channels": 4, "batch": 16},
    "bert": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 8},
    "t5": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "target_seq": 12, "batch": 8},
    "llama": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "seq": 16, "batch": 8},
    "unet": {"image_size": 8, "base_channels": 4, "batch": 8},
    "densenet": {"image_size": 8, "layers": 4, "blocks": 2, "growth": 4, "batch": 16},
}
"""Sizes of the models."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step, the shapes of its arguments, and how it is planned."""

    step: Callable[..., Any]
    state: Any
    batch: Any
    wishes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    most_s: float = MOST_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a program took; seconds of the processor (`cpu_s`) and of the wall."""

    name: str
    equations: int
    jit_cpu_s: float
    jit_s: float
    plan_cpu_s: float
    plan_s: float
    most_s: float
    what: str

    @property
    def is_good(self) -> bool:
        """Whether it meets its targets."""
        return self.plan_cpu_s <= min(self.most_s, MOST_OF_JIT * self.jit_cpu_s)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    """An array of floats."""
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def trained(loss_of: Callable[..., jax.Array], params: Any) -> tuple[Callable[..., Any], Any]:
    """A step of AdamW on a loss of (parameters, batch), and the shapes of its state."""
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return step, {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}


def flow(width: int = 8, hidden: int = 32) -> Program:
    """Maximum likelihood of a normalizing flow of two coupling layers, each with a network of three layers."""

    def log_density(layers: Any, x: jax.Array) -> jax.Array:
        log_determinant = jnp.zeros(x.shape[0])
        for number, layer in enumerate(layers):
            kept, moved = jnp.split(x, 2, axis=-1)[:: -1 if number % 2 else 1]
            h = jax.nn.relu(kept @ layer["in"] + layer["in_bias"])
            h = jax.nn.relu(h @ layer["mid"] + layer["mid_bias"])
            scale, shift = jnp.split(h @ layer["out"] + layer["out_bias"], 2, axis=-1)
            scale = jnp.tanh(scale)
            log_determinant = log_determinant + scale.sum(axis=-1)
            x = jnp.concatenate([kept, moved * jnp.exp(scale) + shift], axis=-1)
        return jax.scipy.stats.norm.logpdf(x).sum(axis=-1) + log_determinant

    layer = {
        "in": shape(width // 2, hidden),
        "in_bias": shape(hidden),
        "mid": shape(hidden, hidden),
        "mid_bias": shape(hidden),
        "out": shape(hidden, width),
        "out_bias": shape(width),
    }
    step, state = trained(lambda layers, x: -log_density(layers, x).mean(), [layer, layer])
    return Program(step=step, state=state, batch=shape(256, width))


def transformer(blocks: int = 4, width: int = 32, heads: int = 2, length: int = 16) -> Program:
    """Blocks written for one example and mapped over the batch, as users of Equinox do, in four microbatches."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def attend(block: Any, x: jax.Array) -> jax.Array:
        query, key, value = ((x @ block[name]).reshape(length, heads, -1) for name in ("query", "key", "value"))
        scores = jnp.einsum("qhd,khd->hqk", query, key) / jnp.sqrt(query.shape[-1])
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value).reshape(length, width) @ block["out"]

    def one(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for block in params["blocks"]:
            x = x + attend(block, norm(x, block["first_norm"]))
            x = x + jax.nn.gelu(norm(x, block["second_norm"]) @ block["up"] + block["up_bias"]) @ block["down"]
        return jnp.mean((norm(x, params["norm"]) @ params["head"] - y) ** 2)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        return jax.vmap(one, (None, 0, 0))(params, batch["x"], batch["y"]).mean()

    block = {
        **dict.fromkeys(("query", "key", "value", "out"), shape(width, width)),
        **dict.fromkeys(("first_norm", "second_norm"), shape(width)),
        "up": shape(width, 4 * width),
        "up_bias": shape(4 * width),
        "down": shape(4 * width, width),
    }
    step, state = trained(loss_of, {"blocks": [block] * blocks, "norm": shape(width), "head": shape(width, width)})
    batch = dict.fromkeys("xy", shape(16, length, width))
    return Program(step=step, state=state, batch=batch, wishes={"num_microbatches": 4})


def model(name: str) -> Program:
    """A model at a tiny size."""
    built = registry.build(name, **TINY[name])
    state = jax.eval_shape(lambda: built.create_state(jax.random.key(0)))
    return Program(step=built.train_step, state=state, batch=built.batch_shape())


def operations(share: float | None = None) -> Program:
    """Fourteen operations and their gradient, within a share of the peak of the plan without a limit."""

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(p: Any) -> jax.Array:
            h = jnp.tanh(batch["y"] @ p["w0"]) + batch["y"]
            h = jnp.maximum(batch["x"], jnp.tanh(h @ p["w0"]) + h)[4:]
            return jnp.linalg.norm(jnp.stack([h, jax.nn.relu(h @ p["w1"] + p["b"])], -1) + 0.1)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    state = {"w0": shape(16, 16), "w1": shape(16, 16), "b": shape(16)}
    program = Program(step=step, state=state, batch=dict.fromkeys("xy", shape(8, 16)), most_s=MOST_OF_OPERATIONS_S)
    if share is None:
        return program
    return dataclasses.replace(program, wishes={"memory_limit_bytes": int(share * peak_of(program))})


def peak_of(program: Program) -> int:
    """Bytes of the device that needs most, in the plan of a program."""
    plan = plan_of(program)
    return plan.peak_bytes if isinstance(plan, autopar.Plan) else max(stage.peak_bytes for stage in plan.stages)


def plan_of(program: Program) -> autopar.Plan | autopar.PipelinePlan:
    """The plan of a program."""
    step = autopar.parallelize(program.step, devices=DEVICES, cluster="cpu", **program.wishes)
    found: autopar.Plan | autopar.PipelinePlan = step.plan(program.state, program.batch)
    return found


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "flow": flow,
    "transformer": transformer,
    **{name: functools.partial(model, name) for name in TINY},
    "operations": operations,
    **{f"operations {share}": functools.partial(operations, share) for share in SHARES},
}


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a function returns with JAX's caches empty; seconds of the processor and of the wall."""
    jax.clear_caches()
    gc.collect()
    started, started_cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.process_time() - started_cpu, time.perf_counter() - started


def measure(name: str, program: Program) -> Row:
    """Compile and plan a program."""
    arguments = program.state, program.batch
    _, jit_cpu_s, jit_s = timed(lambda: jax.jit(program.step).lower(*arguments).compile())
    what, plan_cpu_s, plan_s = timed(lambda: describe(program))
    return Row(
        name=name,
        equations=len(jax.make_jaxpr(program.step)(*arguments).eqns),
        jit_cpu_s=jit_cpu_s,
        jit_s=jit_s,
        plan_cpu_s=plan_cpu_s,
        plan_s=plan_s,
        most_s=program.most_s,
        what=what,
    )


def describe(program: Program) -> str:
    """Plan a program; its plan in a few words."""
    try:
        plan = plan_of(program)
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    how = f"mesh {plan.mesh_shape}" if isinstance(plan, autopar.Plan) else f"{len(plan.stages)} stages"
    return f"{how}, step {1e3 * plan.step_s:.3f} ms{', ended early' if plan.ended_early else ''}"


def line(row: Row) -> str:
    """One row of the table."""
    jit, plan = f"{row.jit_cpu_s:5.2f} ({row.jit_s:5.2f})", f"{row.plan_cpu_s:5.2f} ({row.plan_s:5.2f})"
    verdict = "" if row.is_good else "MISSED"
    ratio = row.plan_cpu_s / row.jit_cpu_s
    figures = f"{row.equations:5d}  {jit:>14}  {plan:>14}  {ratio:6.2f}  {row.most_s:4.0f} s"
    return f"{row.name:15s} {figures}  {verdict:6s}  {row.what}"


def main() -> int:
    """Measure each program, print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help=", ".join(PROGRAMS))
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    measure("warm", operations())
    print("Seconds of the processor (of the wall)")
    print(f"{'program':15s} {'eqns':>5s}  {'jax.jit':>14}  {'planning':>14}  {'ratio':>6}  {'most':>6}  {'':6s}  plan")
    rows: list[Row] = []
    for name, build in PROGRAMS.items():
        if any(fnmatch.fnmatch(name, glob) for glob in given.only):
            rows.append(measure(name, build()))
            print(line(rows[-1]), flush=True)
            if given.json:
                save(given.json, json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
