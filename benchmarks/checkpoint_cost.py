"""What saving every 50 steps costs the steps: stretches with and without saving in turn, and growth over many steps.

    python benchmarks/checkpoint_cost.py [--width 768] [--rounds 6] [--growth 0]

Both kinds of stretch are 50 steps of one program on one state. A stretch with saving starts a save at its beginning, which goes
on in the background; the next one begins when it is complete, so that no save is counted against steps without one. Target: at
most 5 %. With `--growth N` it makes N more steps with a save every 50, and tells how memory, threads and files have grown.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.checkpoints import Checkpoints

EVERY, LAYERS = 50, 4


def train_step(state, batch):
    """A deep network with momentum."""

    def loss_of(params):
        x = batch
        for weights in params:
            x = x + jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    return {"params": jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum), "momentum": momentum}, loss


def resident_bytes():
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stretch(step, state, batch, save):
    """(seconds per step, state) of as many steps as lie between two saves."""
    began = time.perf_counter()
    if save is not None:
        save(state)
    for _ in range(EVERY):
        state, loss = step(state, batch)
        float(loss)
    return (time.perf_counter() - began) / EVERY, state


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--growth", type=int, default=0)
    options = parser.parse_args()
    width, rows = options.width, options.rows
    params = [
        jnp.asarray(np.random.default_rng(k).normal(size=(width, width)) / width, jnp.float32) for k in range(LAYERS)
    ]
    batch = np.ones((rows, width), np.float32)
    step = autopar.parallelize(train_step, mesh_shape=(2,), constraints=autopar.zero3())
    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}
    step.plan(state, batch)
    state = step.init_state(lambda given: given, state)
    seconds = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints, number = Checkpoints(folder, step, keep=2), 0

        def save(state):
            nonlocal number
            number += 1
            checkpoints.save(number, state)

        _, state = stretch(step, state, batch, save)
        for _ in range(options.rounds):
            for kind in seconds:
                checkpoints.wait()
                taken, state = stretch(step, state, batch, save if kind == "with" else None)
                seconds[kind].append(taken)
        without, with_saves = (statistics.median(seconds[kind]) for kind in ("without", "with"))
        shares = [b / a - 1 for a, b in zip(seconds["without"], seconds["with"], strict=True)]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        result = {
            "state_bytes": size,
            "step_s": without,
            "step_with_saves_s": with_saves,
            "cost": statistics.median(shares),
            "pairs": shares,
        }
        print(
            f"state {size / 2**20:.0f} MiB, {without * 1e3:.2f} ms per step, {with_saves * 1e3:.2f} ms with a save every {EVERY}"
        )
        spread = f"{min(shares):.1%} to {max(shares):.1%}"
        print(f"saving costs {result['cost']:.1%} of a step (median of {options.rounds} pairs, {spread}; target 5 %)")
        print(f"processes that wanted a core: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        if options.growth:
            result |= grow(step, state, batch, save, checkpoints, options.growth)
    print(json.dumps(result))


def grow(step, state, batch, save, checkpoints, steps):
    """Memory, threads and files before and after many steps."""

    def measure():
        checkpoints.wait()
        files = sum(len(names) for _, _, names in os.walk(checkpoints.folder))
        return resident_bytes(), threading.active_count(), files, len(os.listdir("/proc/self/fd"))

    for _ in range(10):
        _, state = stretch(step, state, batch, save)
    before, tenths = measure(), []
    for number in range(1, steps // EVERY + 1):
        _, state = stretch(step, state, batch, save)
        if number * 10 // (steps // EVERY) > len(tenths):
            tenths.append(resident_bytes() >> 20)
    after = measure()
    grown = dict(zip(("memory_bytes", "threads", "files", "descriptors"), zip(before, after, strict=True), strict=True))
    print(f"over {steps} steps and {steps // EVERY} saves (before, after): {grown}")
    print(f"memory after each tenth of them, in MiB: {tenths}; what glibc keeps settles after some saves")
    return {"growth": grown, "tenths_mib": tenths}


if __name__ == "__main__":
    main()
