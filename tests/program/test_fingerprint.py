"""The fingerprint tells programs apart by what they compute, and is the same in every process."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import autopar
from autopar.errors import PlanError
from autopar.program.fingerprint import fingerprint_of, outline_of
from autopar.program.from_jaxpr import program_of

ROOT = Path(__file__).resolve().parents[2]
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
DIFFERENT = {
    "sum over rows": lambda w, x: (w + x, (x + w).sum(0)),
    "sum over columns": lambda w, x: (w + x, (x + w).sum(1)),
    "product": lambda w, x: (w, x @ w),
    "product with the transpose": lambda w, x: (w, x @ w.T),
    "precise product": lambda w, x: (w, jnp.matmul(x, w, precision="highest")),
    "first rows": lambda w, x: (w, (x + w)[:4]),
    "last rows": lambda w, x: (w, (x + w)[4:]),
    "reversed rows": lambda w, x: (w, (x + w)[::-1]),
    "reversed columns": lambda w, x: (w, (x + w)[:, ::-1]),
    "another literal": lambda w, x: (w, x * 2.0),
    "a literal": lambda w, x: (w, x * 3.0),
    "scan": lambda w, x: lax.scan(lambda c, row: (c @ c, row.sum()), w, x),
    "reversed scan": lambda w, x: lax.scan(lambda c, row: (c @ c, row.sum()), w, x, reverse=True),
    "scan of another body": lambda w, x: lax.scan(lambda c, row: (c @ c.T, row.sum()), w, x),
    "scan of swapped results": lambda w, x: lax.scan(lambda c, row: (c * row, row.max()), w, x),
    "scan of results in order": lambda w, x: lax.scan(lambda c, row: (row * c, row.max()), w, x),
    "first branch": lambda w, x: (w, lax.cond(x[0, 0] > 0, lambda: x.sum(0), lambda: x.max(0))),
    "branches swapped": lambda w, x: (w, lax.cond(x[0, 0] > 0, lambda: x.max(0), lambda: x.sum(0))),
}


def fingerprint(step) -> str:
    return autopar.parallelize(step, devices=1, donate_argnums=()).plan(SQUARE, SQUARE).fingerprint


def all_fingerprints() -> dict[str, str]:
    return {name: fingerprint(step) for name, step in DIFFERENT.items()}


def test_programs_that_compute_different_things_differ_and_equal_ones_do_not():
    found = all_fingerprints()
    equal = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert equal == []
    assert all_fingerprints() == found


def test_another_process_finds_the_same():
    script = "from tests.program.test_fingerprint import all_fingerprints; print(all_fingerprints())"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7"}
    env["AUTOPAR_CACHE"] = "off"
    process = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert process.stdout.strip() == str(all_fingerprints()), process.stderr


def test_a_plan_of_a_step_with_other_parameters_is_refused():
    plan = autopar.parallelize(DIFFERENT["product"], devices=1).plan(SQUARE, SQUARE)
    other = autopar.parallelize(DIFFERENT["product with the transpose"], devices=1, plan=plan)
    with pytest.raises(PlanError, match="made for another step"):
        other.plan(SQUARE, SQUARE)


def test_outlines_differ_like_fingerprints_except_for_the_values_of_literals():
    programs = {name: program_of(jax.make_jaxpr(fun)(SQUARE, SQUARE))[0] for name, fun in DIFFERENT.items()}
    outlines = {name: outline_of(program) for name, program in programs.items()}
    assert outlines["a literal"] == outlines["another literal"]
    assert len(set(outlines.values())) == len(DIFFERENT) - 1
    again = program_of(jax.make_jaxpr(DIFFERENT["scan"])(SQUARE, SQUARE))[0]
    assert outline_of(again) == outlines["scan"]


def test_a_trail_tells_at_which_equation_programs_begin_to_differ():
    def program(fun):
        return program_of(jax.make_jaxpr(fun)(SQUARE, SQUARE))[0]

    one = program(lambda w, x: jnp.cos(jnp.sin(x @ w).sum(0)))
    other = program(lambda w, x: jnp.cos(jnp.sin(x @ w).sum(1)))
    assert fingerprint_of(one).first_difference(fingerprint_of(one).trail) is None
    number = fingerprint_of(one).first_difference(fingerprint_of(other).trail)
    assert [*one.walk()][number].primitive.name == "reduce_sum"


class HashedDict(dict):
    """A mapping that JAX takes as a parameter."""

    def __hash__(self):
        return hash(frozenset(self.items()))


def test_parameters_with_keys_that_have_no_order_have_fingerprints():
    noted_p = Primitive("noted")
    noted_p.def_abstract_eval(lambda x, about: x)

    def fingerprint_with(about):
        traced = jax.make_jaxpr(lambda x: noted_p.bind(x, about=HashedDict(about)))(SQUARE)
        return fingerprint_of(program_of(traced)[0])

    assert fingerprint_with({1: 2, "a": 3}) == fingerprint_with({"a": 3, 1: 2})
    assert fingerprint_with({1: 2, "a": 3}) != fingerprint_with({1: 3, "a": 2})
    assert fingerprint_with({None: 2, (1, "a"): 3}) == fingerprint_with({(1, "a"): 3, None: 2})


def test_callbacks_of_other_code_have_other_fingerprints():
    def fingerprint_with(callback):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return fingerprint_of(program_of(jax.make_jaxpr(lambda x: jax.pure_callback(callback, shape, x))(SQUARE))[0])

    assert fingerprint_with(lambda x: x * 2) == fingerprint_with(lambda x: x * 2)
    assert fingerprint_with(lambda x: x * 2) != fingerprint_with(lambda x: x * 3)
