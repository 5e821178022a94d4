"""Does planning a step of a library take long beside compiling it? `python -m tests.libraries.planning_time [NAME ...]`

For each step of the corpus whose packages are installed, or those named: seconds of the processor that planning for 8 devices
of the `cpu` cluster takes, tracing included, over those of `jax.jit`; the least of three each, with JAX's caches emptied. The
target is a ratio of at most 3; exit status 1 if a step misses it.
"""

import gc
import importlib.util
import os
import sys
import time
import warnings

os.environ.update(AUTOPAR_CACHE="off", JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")

import jax

import autopar
from tests.libraries import (  # noqa: F401 - they fill the corpus
    equinox_and_haiku_steps,
    flax_steps,
    geometry_steps,
    optimizer_steps,
    probability_steps,
    transformers_steps,
)
from tests.libraries.corpus import CORPUS

TIMES, MOST = 3, 3.0


def least_cpu_s(function):
    """The least of some runs."""
    return min(map(cpu_s, [function] * TIMES))


def cpu_s(function):
    """Seconds of the processor that a function takes, nothing traced or compiled before."""
    jax.clear_caches()
    gc.collect()
    started = time.process_time()
    function()
    return time.process_time() - started


def measure(name):
    """(seconds to compile, seconds to plan) of a step."""
    step, state, batch = CORPUS[name].build()
    return (
        least_cpu_s(lambda: jax.jit(step).lower(state, batch).compile()),
        least_cpu_s(lambda: autopar.parallelize(step, devices=8, cluster="cpu").plan(state, batch)),
    )


def say(line):
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    """A row per step."""
    warnings.simplefilter("ignore")
    missed = 0
    say(f"{'step':55s} {'jax.jit':>7s}  {'planning':>8s}  ratio")
    for name in sys.argv[1:] or CORPUS:
        if all(importlib.util.find_spec(package) for package in CORPUS[name].packages):
            jit_s, plan_s = measure(name)
            missed += plan_s > MOST * jit_s
            say(f"{name:55s} {jit_s:5.2f} s  {plan_s:6.2f} s  {plan_s / jit_s:5.2f}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
