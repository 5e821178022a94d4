"""Oracle: what a rule calls linear is so in the machine's arithmetic.

A sum lies on the devices as terms. An operation may be done to each term instead of the sum only if the terms of the results
add up to the result of the sum: integers that wrap, infinities, NaN and numbers near the ends of the range included. For every
example in `examples.py`, with numbers of every type that its operation takes, and for every pair of types of a conversion, terms
are drawn and both ways compared. A wrong claim that is added to the table is found here, unless only an overflow of a term
shows it: an operation by which numbers grow may make infinities of terms that are within its factor of the largest number.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.content import digest_of
from autopar.layouts.monoids import COMBINE, neutral_element
from autopar.rules import by_shape, matrices, pointwise
from autopar.rules.primitive_rule import PrimitiveRule
from autopar.rules.table import RULES, linear_if_finite, rule_for
from tests.rules.examples import EXAMPLES, Example

DTYPES = ("float32", "int8")
MORE_DTYPES = ("float16", "bfloat16", "int32", "uint8", "complex64")
NOT_COMPLEX = {
    "random_gamma": "has real parameters, to which JAX casts them with a warning",
    "select_and_scatter_add": "compares, which JAX finds out when it compiles",
}
KINDS = ("moderate", "special", "large")
TERMS = 3


def drawn(aval, kind, rng):
    """An array like `aval`: numbers of moderate size; some of them infinite, NaN or zero; or most of them near the ends."""
    dtype, shape = aval.dtype, aval.shape
    if jnp.issubdtype(dtype, jnp.bool_):
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return rng.integers(info.min, info.max, size=shape, endpoint=True, dtype=np.int64).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [drawn(jax.ShapeDtypeStruct(shape, np.float32), kind, rng) for _ in range(2)]
        return np.asarray(lax.complex(*map(jnp.asarray, parts)))
    numbers = rng.normal(size=shape)
    if kind == "special":
        numbers = np.where(rng.random(shape) < 0.3, rng.choice([0.0, np.inf, -np.inf, np.nan], size=shape), numbers)
    if kind == "large":
        numbers = np.sign(numbers) * float(jnp.finfo(dtype).max) * 2.0 ** -rng.integers(10, 14, size=shape)
    return numbers.astype(dtype)


def assert_adds_up(actual, expected, *, unit, what):
    """Equal, or up to rounding of the largest finite number in units of the terms' type, with NaN and infinities in place."""
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    if jnp.issubdtype(expected.dtype, jnp.complexfloating):
        for part in (np.real, np.imag):
            assert_adds_up(part(actual), part(expected), unit=unit, what=what)
        return
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    largest = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=32 * unit * largest, err_msg=what)


def assert_linear(eqn, bind, group, monoid, kind, rng):
    """The combined results of terms are the result of the combined terms."""
    fixed = [jnp.asarray(v.val if hasattr(v, "val") else drawn(v.aval, kind, rng), v.aval.dtype) for v in eqn.invars]
    terms = [[jnp.asarray(drawn(eqn.invars[i].aval, kind, rng)) for i in group] for _ in range(TERMS)]
    for number, i in enumerate(group):
        if hasattr(eqn.invars[i], "val"):  # a literal counts once
            zero = neutral_element(monoid, eqn.invars[i].aval.dtype)
            for place, term in enumerate(terms):
                term[number] = jnp.asarray(eqn.invars[i].val if place == 0 else zero, eqn.invars[i].aval.dtype)
    combine = COMBINE[monoid]

    def results(given):
        operands = list(fixed)
        for i, value in zip(group, given, strict=True):
            operands[i] = value
        return jax.tree.leaves(bind(*operands))

    whole = terms[0]
    each = results(terms[0])
    for term in terms[1:]:
        whole = [combine(a, b) for a, b in zip(whole, term, strict=True)]
        each = [combine(a, b) for a, b in zip(each, results(term), strict=True)]
    dtype = eqn.invars[group[0]].aval.dtype
    unit = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
    for actual, expected in zip(each, results(whole), strict=True):
        assert_adds_up(actual, expected, unit=unit, what=f"{eqn.primitive} {eqn.invars} {eqn.params} {group} {kind}")


def variants(name, example, dtypes):
    """The equation of an example, with its numbers of each of these types that the operation takes."""
    for dtype in dtypes:
        if name in NOT_COMPLEX and dtype == "complex64":
            continue
        args = [x.astype(dtype) if getattr(x, "dtype", None) == jnp.float32 else x for x in example.args]
        try:
            yield Example(example.fun, tuple(args)).equation(name)
        except (TypeError, ValueError, KeyError, NotImplementedError):
            continue  # JAX refuses the type, or takes another operation for it


def claims(eqn):
    """(linear group, monoid) of a rule."""
    rule = rule_for(eqn)
    monoids = ("sum", "max", "min") if rule.any_monoid else ("sum",)
    inexact = [v for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.complexfloating)]
    return [(group, monoid) for group in rule.linear for monoid in monoids if monoid == "sum" or not inexact]


def test_products_are_linear_in_each_factor_if_the_other_is_finite():
    assert {name for name, row in RULES.items() if row.if_finite is not None} == {
        "conv_general_dilated", "div", "dot_general", "mul", "ragged_dot_general", "triangular_solve"
    }  # fmt: skip


def check_finiteness(eqn):
    """Every claim of what an equation is linear in if the other operands are finite.

    If they are, as a rule claims; otherwise the results of the terms are finite where those of the sum are, and equal there.
    """
    bind = jax.jit(lambda *operands: eqn.primitive.bind(*operands, **eqn.params))
    for group in linear_if_finite(eqn, rule_for(eqn)):
        assert_linear(eqn, bind, group, "sum", "moderate", np.random.default_rng(0))
        for seed in range(8):
            rng = np.random.default_rng(seed)
            operands = [jnp.asarray(v.val if hasattr(v, "val") else drawn(v.aval, "special", rng)) for v in eqn.invars]
            (place,) = group
            terms = [drawn(eqn.invars[place].aval, "moderate", rng) for _ in range(TERMS)]
            made = [
                jax.tree.leaves(bind(*operands[:place], jnp.asarray(x), *operands[place + 1 :]))[0]
                for x in (*terms, sum(terms))
            ]
            each, whole = np.asarray(sum(made[:-1])), np.asarray(made[-1])
            np.testing.assert_array_equal(np.isfinite(each), np.isfinite(whole), err_msg=f"{eqn.primitive} {group}")
            np.testing.assert_allclose(
                *(np.where(np.isfinite(whole), x, 0) for x in (each, whole)), rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize("name", [name for name in EXAMPLES if RULES[name].if_finite is not None])
def test_terms_of_products_add_up_if_the_other_factors_are_finite(name):
    found = [eqn for example in EXAMPLES[name] for eqn in variants(name, example, ("float32", "complex64"))]
    assert any(linear_if_finite(eqn, rule_for(eqn)) for eqn in found)
    for eqn in found:
        check_finiteness(eqn)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if RULES[name].if_finite is not None])
def test_no_terms_are_rounded_to_half_precision(name):
    for example in EXAMPLES[name]:
        for eqn in variants(name, example, ("float16", "bfloat16", "int32")):
            assert linear_if_finite(eqn, rule_for(eqn)) == ()


def test_products_in_half_precision_of_wider_numbers_round_their_terms():
    x = jnp.ones((8, 8), jnp.float32)
    for asked, expected in ((None, ((0,), (1,))), (lax.DotAlgorithmPreset.BF16_BF16_F32, ())):
        fun = functools.partial(lax.dot, precision=asked, preferred_element_type=jnp.float32)
        eqn = Example(fun, (x, x)).equation("dot_general")
        assert linear_if_finite(eqn, rule_for(eqn)) == expected


def check(eqn):
    """Every claim of an equation's rule."""
    bind = jax.jit(lambda *operands: eqn.primitive.bind(*operands, **eqn.params))
    for group, monoid in claims(eqn):
        for kind in KINDS if any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars) else KINDS[:1]:
            assert_linear(
                eqn, bind, group, monoid, kind, np.random.default_rng(zlib.crc32(f"{eqn.primitive}{kind}".encode()))
            )


CLAIMING = [
    name
    for name in EXAMPLES
    if RULES[name].rule
    not in (pointwise.nonlinear, pointwise.convert, matrices.factorization, by_shape.everything_whole)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CLAIMING)
def test_terms_of_results_add_up_to_the_result_of_the_sum(name):
    for example in EXAMPLES[name]:
        for eqn in variants(name, example, DTYPES):
            check(eqn)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMING)
def test_terms_of_results_add_up_for_numbers_of_other_types_too(name):
    for example in EXAMPLES[name]:
        for eqn in variants(name, example, MORE_DTYPES):
            check(eqn)


NUMBERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (4, 8, 16, 32)]
NUMBERS += ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]


def conversion(old, new):
    return Example(lambda x: lax.convert_element_type(x, new), (jnp.ones((8, 12), old),)).equation(
        "convert_element_type"
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("old", NUMBERS)
def test_converted_terms_add_up_to_the_converted_sum(old):
    for new in (*NUMBERS, "complex64"):
        if new != old:
            check(conversion(old, new))


@pytest.mark.parametrize(
    "add", [lambda a, b: sum([a, b]), lambda a, b: 2.0 + a + b, lambda a, b: a + 2.0 + b], ids=["sum", "2 +", "+ 2"]
)
def test_a_number_in_a_sum_of_partial_sums_is_one_term_and_forces_no_reduction(add):
    split = {"state/*": P("x"), "batch/*": P(None, "x")}

    def collectives(add):
        step = autopar.parallelize(
            lambda state, batch: (state, jnp.exp(add(*(x @ w for x, w in zip(batch, state, strict=True))))),
            devices=4,
            mesh_shape=(4,),
            cluster="dgx-h100",
            constraints=split,
        )
        shapes = [[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2 for shape in ((2048, 128), (128, 2048))]
        return [(c.kind, c.operand) for c in step.plan(*shapes).collectives]

    assert collectives(add) == collectives(lambda a, b: a + b)


def test_a_rule_that_a_user_registered_keeps_its_digest():
    """Plans for it were written before rows of the table had a column of finite factors, which no user's rule has."""
    row = PrimitiveRule(rule=pointwise.copy)
    assert digest_of(row) == digest_of(dataclasses.replace(row, if_finite=RULES["mul"].if_finite))
