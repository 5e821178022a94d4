"""A process that runs random programs, as `tests/in_processes.py` starts it.

It reads lines `KIND KIND_NUMBER`. A `program` runs under random strategies on its mesh; a `step`, or one with `metrics`, twice
through `autopar.parallelize` with its options, from copies of its state. Each is compared with `jax.jit`.
"""

import traceback

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.testing import run_with_random_strategies
from tests.harnesses.cases import as_numpy, difference
from tests.in_processes import work_through
from tests.random_programs.metrics import random_step_with_metrics
from tests.random_programs.programs import is_float, random_program, random_step

REFUSED = "refused: "
QUICK = {"xla_backend_optimization_level": 0}
NUDGE = 3e-7
"""A few roundings of an argument; what they move a result by, times `NUDGES`, is what rounding may move it by."""
NUDGES = 30.0
LEAST_ERROR = 2e-6
"""What any result may be off by, as programs work on numbers around one."""


def nudged(arguments):
    """The arguments with every number off by a few roundings, at random."""
    rng = np.random.default_rng(0)

    def off(x):
        return x * jnp.asarray(1 + NUDGE * rng.choice((-1, 1), size=x.shape), x.dtype) if is_float(x) else x

    return jax.tree.map(off, arguments)


def compared(actual, expected, other):
    """What is wrong with the leaves beyond what `other`, the results of nudged arguments, differs by; empty if nothing is."""
    problems = []
    for place, leaves in enumerate(zip(*map(jax.tree.leaves, (actual, expected, other)), strict=True)):
        a, e, o = map(as_numpy, leaves)
        problem = difference(a, e)
        if problem and is_float(e) and a.shape == e.shape and a.dtype == e.dtype:
            if not np.array_equal(np.isfinite(e), np.isfinite(o)):
                continue  # what overflows is a matter of rounding
            moved = NUDGES * np.max(np.abs(o - e), where=np.isfinite(e), initial=0.0)
            error = np.max(np.abs(a - e), where=np.isfinite(e), initial=0.0)
            if error <= max(moved, LEAST_ERROR) and np.array_equal(np.isnan(a), np.isnan(e)):
                continue
            problem += f" where rounding explains {moved:.2g}"
        if problem:
            problems.append(f"result {place}: {problem}")
    return "; ".join(problems)


def with_nans(results, actual, one_by_one):
    """The results, NaN where both others are.

    XLA drops some NaNs when it compiles a whole program: it makes a product with a truth value a choice between the other factor
    and 0. Which products it sees depends on what lies between the two, and one operation at a time it sees none.
    """

    def leaf(result, a, o):
        result, a, o = map(as_numpy, (result, a, o))
        is_comparable = is_float(result) and result.shape == a.shape
        return np.where(np.isnan(a) & np.isnan(o), a, result) if is_comparable else result

    return jax.tree.map(leaf, results, actual, one_by_one)


def by_jit(fun, arguments):
    """What `jax.jit` makes of a function on one device; None where XLA itself fails."""
    try:
        return jax.block_until_ready(jax.jit(fun, compiler_options=QUICK)(*arguments))
    except jax.errors.JaxRuntimeError:
        return None


def problem_of_results(actual, expected, fun, arguments):
    """What is wrong with the results of a function, beside rounding; `expected` are those of `by_jit`."""
    if not compared(actual, expected, expected):
        return ""
    moved = by_jit(fun, nudged(arguments))
    if not compared(actual, expected, moved):
        return ""
    one_by_one = fun(*arguments)
    return compared(actual, *(with_nans(results, actual, one_by_one) for results in (expected, moved)))


def problem_of_program(number):
    """What differs under random strategies; nothing where there is nothing to compare with."""
    program = random_program(number)
    expected = by_jit(program.fun, program.arguments)
    if expected is None:
        return ""
    actual = run_with_random_strategies(program.fun, *program.arguments, mesh_shape=program.mesh_shape, seed=number)
    return problem_of_results(actual, expected, program.fun, program.arguments)


def problem_of_step(program):
    """What differs through `parallelize`."""
    devices = jax.devices()[: int(np.prod(program.mesh_shape)) * program.options.get("num_stages", 1)]
    shapes = [program.mesh_shape] * program.options.get("num_stages", 1)
    mesh = {"mesh_shape": shapes if len(shapes) > 1 else program.mesh_shape}
    parallel = autopar.parallelize(program.fun, devices=devices, planning_seconds=10.0, **mesh, **program.options)
    plain = jax.jit(program.fun, compiler_options=QUICK)
    state, batch = program.arguments
    own, nudged_state = jax.tree.map(jnp.copy, state), nudged(state)
    for _ in range(2):
        state, loss = plain(state, batch)
        nudged_state, nudged_loss = plain(nudged_state, batch)
        own, own_loss = parallel(own, batch)
    return compared((own, own_loss), (state, loss), (nudged_state, nudged_loss))


KINDS = {
    "program": problem_of_program,
    "step": lambda number: problem_of_step(random_step(number)),
    "metrics": lambda number: problem_of_step(random_step_with_metrics(number)),
}
"""What is wrong with the program of a number, by its kind."""


def problems_of_lines(lines):
    """What is wrong with the programs of lines `KIND KIND_NUMBER`, by their names; nothing at all is said of the others."""
    found = {}
    for kind, name in map(str.split, lines):
        try:
            problem = KINDS[kind](int(name.rpartition("_")[2]))
        except autopar.AutoparError as error:
            problem = f"{REFUSED}{error}"[:1000]
        except Exception:  # noqa: BLE001 - whatever is raised is what the test reports
            problem = traceback.format_exc(limit=-3)[-1000:]
        if problem:
            found[name] = problem
    return found


if __name__ == "__main__":
    work_through(problems_of_lines)
