"""A process that runs harnesses, as `tests/in_processes.py` starts it, several in one compiled program.

It reads lines `MESH NAME`, MESH being a place in `MESHES`.
"""

import functools
import itertools
import traceback

import jax
from jax.extend.core import jaxpr_as_fun

from autopar.testing import run_with_random_strategies
from tests.harnesses.cases import MESHES, NOT_RUN_BY_JAX, Case, all_harnesses, differences, seed_of
from tests.in_processes import work_through

QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def all_by_name():
    """The harnesses by their names."""
    return {harness.fullname: harness for harness in all_harnesses()}


def joined(cases):
    """(one function of all cases' arguments, these arguments)."""

    def run(*arguments):
        results, first = [], 0
        for case in cases:
            last = first + len(case.arguments)
            results.append(jaxpr_as_fun(case.jaxpr)(*arguments[first:last]))
            first = last
        return results

    return run, [x for case in cases for x in case.arguments]


def expected_of(cases):
    """What `jax.jit` makes of the cases on one device; None if it fails."""
    run, arguments = joined(cases)
    try:
        return jax.block_until_ready(jax.jit(run, compiler_options=QUICK)(*arguments))
    except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def problems_of(cases, mesh_shape):
    """What differs, or fails, by the name of the harness; where a program of several fails, they run one by one."""
    expected = expected_of(cases)
    if expected is None and len(cases) == 1:
        plain = Case.of(
            all_by_name()[cases[0].name], gradient=False
        )  # JAX traces some gradients that it cannot compile
        is_other = plain is not None and len(plain.jaxpr.out_avals) < len(cases[0].jaxpr.out_avals)
        return problems_of([plain], mesh_shape) if is_other else {cases[0].name: NOT_RUN_BY_JAX}
    try:
        if expected is None:
            raise ValueError("jax.jit refuses one of them")
        run, arguments = joined(cases)
        seed = seed_of(cases[0].name)
        actual = run_with_random_strategies(run, *arguments, mesh_shape=mesh_shape, seed=seed)
        found = {c.name: differences(a, e) for c, a, e in zip(cases, actual, expected, strict=True)}
        return {name: text for name, text in found.items() if text}
    except Exception:  # noqa: BLE001 - whatever is raised is what the test reports
        if len(cases) == 1:
            return {cases[0].name: traceback.format_exc(limit=-3)[-1000:]}
    return {k: v for case in cases for k, v in problems_of([case], mesh_shape).items()}


def problems_of_lines(lines):
    """What is wrong with the harnesses of lines `MESH NAME`, by their names."""
    found = {}
    for mesh, group in itertools.groupby((line.split() for line in lines), key=lambda words: int(words[0])):
        named = {name: Case.of(all_by_name()[name]) for _, name in group}
        cases = [case for case in named.values() if case is not None]
        found |= {name: NOT_RUN_BY_JAX for name, case in named.items() if case is None}
        found |= problems_of(cases, MESHES[mesh]) if cases else {}
    return found


if __name__ == "__main__":
    work_through(problems_of_lines)
