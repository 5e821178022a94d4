"""How much of the input's time `autopar.data.sharded` hides behind the steps.

    python benchmarks/prefetch.py [--steps 60] [--rounds 7]

Input waits for a given share of a step's time, as a disk or a network would; the step is a computation on the devices. Steps with
no input to wait for, with input in the loop, and with input ahead of it run in turn. What is hidden is found for each round, in
which other processes slow all alike. How long steps with input ahead wait for it is measured too. Target: of input that takes 0.8
of a step, 95 % is hidden.
"""

import argparse
import itertools
import json
import os
import statistics
import time

os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.data import sharded

WIDTH, ROWS, SHARE = 512, 512, 0.8


def train_step(weights, batch):
    """A few products of matrices."""

    def loss_of(weights):
        x = batch
        for _ in range(8):
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.01 * gradient, loss


def seconds_per_step(step, weights, batches, steps):
    """((seconds, seconds of these in which the loop waits for a batch), new weights); the first two steps do not count."""
    for _ in range(2):
        weights, loss = step(weights, next(batches))
        float(loss)
    began, waited_s = time.perf_counter(), 0.0
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked
        weights, loss = step(weights, batch)
        float(loss)
    return ((time.perf_counter() - began) / steps, waited_s / steps), weights


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    step = autopar.parallelize(train_step, mesh_shape=(2,))
    weights, batch = jnp.eye(WIDTH), np.ones((ROWS, WIDTH), np.float32)
    step.plan(weights, batch)
    weights = step.init_state(lambda given: given, weights)
    ready = next(sharded([batch], step))
    (alone_s, _), weights = seconds_per_step(step, weights, itertools.repeat(ready), options.steps)

    def slow():
        while True:
            time.sleep(SHARE * alone_s)
            yield batch

    found = {"alone": [], "in the loop": [], "ahead": []}
    for _ in range(options.rounds):
        for kind, made in found.items():
            data = {
                "alone": lambda: itertools.repeat(ready),
                "in the loop": slow,
                "ahead": lambda: sharded(slow, step),
            }[kind]()
            taken, weights = seconds_per_step(step, weights, data, options.steps)
            made.append(taken)
    report(found, SHARE * alone_s)


def report(found, input_s):
    """Print seconds per step, and how much of the input's is hidden: of each round, and their median."""
    alone, in_loop, ahead = (statistics.median(whole for whole, _ in made) for made in found.values())
    rounds = [
        1 - max(late - whole, 0) / input_s for (whole, _), (late, _) in zip(found["alone"], found["ahead"], strict=True)
    ]
    hidden, spread = statistics.median(rounds), f"{min(rounds):.0%} to {max(rounds):.0%}"
    waited = statistics.median(waited_s for _, waited_s in found["ahead"]) / input_s
    print(
        f"{alone * 1e3:.2f} ms per step, {in_loop * 1e3:.2f} ms with input in the loop, {ahead * 1e3:.2f} ms with input ahead"
    )
    print(f"of input that takes {SHARE:.1f} of a step, {hidden:.0%} is hidden (rounds {spread}; target 95 %)")
    print(f"steps with input ahead wait for {waited:.1%} of its time")
    print(f"processes that wanted a core: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    seconds = {"alone_s": alone, "in_loop_s": in_loop, "ahead_s": ahead}
    print(json.dumps({**seconds, "hidden": hidden, "rounds": rounds, "waited": waited}))


if __name__ == "__main__":
    main()
