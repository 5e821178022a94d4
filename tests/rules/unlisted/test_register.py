"""Primitives without a rule, and rules of a user's own: what is refused, at which time, and in which words."""

import functools
import inspect
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import ArgumentError, AutoparWarning, RuleError
from autopar.program.from_jaxpr import program_of
from autopar.rules import on_shard, table
from autopar.rules.notation import parse
from autopar.rules.table import entry_for, rule_for
from autopar.rules.unlisted.register import register_rule
from autopar.testing import run_with_random_strategies


def new_primitive(name):
    """`name`: (b s c), (c e) -> tanh(x @ w), compiled like any other."""
    primitive = Primitive(name)

    def compute(x, w):
        return jnp.tanh(x @ w)

    primitive.def_impl(compute)
    primitive.def_abstract_eval(lambda x, w: jax.core.ShapedArray((*x.shape[:-1], w.shape[1]), x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return primitive


@functools.cache
def fused_dense():
    return new_primitive("fused_dense")


@pytest.fixture
def user_rules():
    """Rules registered in a test go with it."""
    before = dict(table.USER_RULES)
    yield
    table.USER_RULES.clear()
    table.USER_RULES.update(before)


X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 12)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(12, 16)), jnp.float32)


def two_layers(x, w):
    y = fused_dense().bind(x * 2, w)
    return fused_dense().bind(y, w.T).sum(axis=0)


LINE = f"{Path(__file__).name}:{inspect.getsourcelines(two_layers)[1] + 1}"


def test_a_primitive_without_a_rule_gives_one_warning_with_its_name_and_line_and_the_right_result():
    step = autopar.parallelize(lambda state, x: (state, two_layers(x, state)), devices=4, mesh_shape=(4,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.plan(W, X)
    (warning,) = (w for w in caught if issubclass(w.category, AutoparWarning))
    text = str(warning.message)
    assert "no factor rule for fused_dense at " in text
    assert LINE in text
    assert text.count("fused_dense at") == 1
    assert "run whole on every device" in text
    assert 'autopar.register_rule("fused_dense", "a b c, c d -> a b d | whole: c"). That is a guess' in text
    for seed in range(3):
        actual = run_with_random_strategies(two_layers, X, W, mesh_shape=(2, 2), seed=seed)
        np.testing.assert_allclose(actual, jax.jit(two_layers)(X, W), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("user_rules")
def test_a_registered_rule_splits_the_primitive_without_a_warning():
    register_rule("fused_dense", "b s c, c e -> b s e | whole: c", heavy=True)
    step = autopar.parallelize(lambda state, x: (state, two_layers(x, state)), devices=4, mesh_shape=(4,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = step.plan(W, X)
    assert any(plan.input("x").spec)
    for seed in range(4):
        actual = run_with_random_strategies(two_layers, X, W, mesh_shape=(2, 2), seed=seed)
        np.testing.assert_allclose(actual, jax.jit(two_layers)(X, W), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("user_rules")
def test_a_registered_rule_may_run_the_shard_its_own_way():
    seen = []

    def run(call):
        seen.append(call.operands[0].shape)
        return on_shard.unchanged(call)

    register_rule("fused_dense", "b s c, c e -> b s e | whole: c", local=run)
    for seed in range(4):
        run_with_random_strategies(two_layers, X, W, mesh_shape=(4,), seed=seed)
    assert any(shape[0] == 2 or shape[1] == 1 for shape in seen), seen


def test_a_primitive_of_the_table_cannot_be_registered_again():
    with pytest.raises(RuleError, match="'dot_general' has a rule in autopar; only new primitives can be registered"):
        register_rule("dot_general", "a b, b c -> a c | sum: b")


@pytest.mark.usefixtures("user_rules")
def test_a_registered_rule_is_replaced_only_on_request():
    register_rule("fused_dense", "b s c, c e -> b s e | whole: c", heavy=True)
    register_rule("fused_dense", "b s c, c e -> b s e | whole: c", heavy=True)
    with pytest.raises(
        RuleError, match=r"'fused_dense' has been .* rule, 'b s c, c e .* whole: c' and heavy=True; pass"
    ):
        register_rule("fused_dense", "b s c, c e -> b s e | whole: c s")
    with pytest.raises(RuleError, match=r"to register 'b s c, c e -> b s e \| whole: c' in its place"):
        register_rule("fused_dense", "b s c, c e -> b s e | whole: c")
    assert table.USER_RULES["fused_dense"].heavy
    register_rule("fused_dense", "b s c, c e -> b s e | whole: c s", replace=True)
    assert not table.USER_RULES["fused_dense"].heavy


@pytest.mark.usefixtures("user_rules")
def test_a_registered_rule_that_does_not_describe_the_shapes_is_refused_with_both_shapes():
    register_rule("fused_dense", "b s c, s e -> b s e")
    with pytest.raises(
        RuleError,
        match=rf"^primitive 'fused_dense' at .*{LINE}.* says input 1 has shape \(4, 16\), the operation has \(12, 16\)",
    ):
        run_with_random_strategies(two_layers, X, W, mesh_shape=(2,), seed=0)


def test_every_primitive_that_nobody_knows_is_whole():
    program, _ = program_of(jax.make_jaxpr(two_layers)(X, W))
    eqn = next(eqn for eqn in program.equations if eqn.primitive.name == "fused_dense")
    assert entry_for(eqn) is table._FALLBACK
    assert rule_for(eqn).shardable() == ()


# --- what is refused when it is registered ----------------------------------------------------------------------------


@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize(
    ("primitive", "rule", "error", "words"),
    [
        ("fused_dense", "b s c, c e", RuleError, "^primitive 'fused_dense': rule 'b s c, c e' needs exactly one '->'"),
        ("fused_dense", "b -> b | mean: b", RuleError, "^primitive 'fused_dense': .* no clause 'mean'; there are sum"),
        ("fused_dense", 3, ArgumentError, "^primitive 'fused_dense': a rule is text, .* or a function .* not 3"),
        ("fused_dense", None, ArgumentError, "^primitive 'fused_dense': a rule is text, .* not None"),
        (fused_dense, "b -> b", ArgumentError, "takes a primitive or its name first, not <functools"),
        ("", "b -> b", ArgumentError, "takes a primitive or its name first, not ''"),
        (jax.lax.add_p, "b -> b", RuleError, "primitive 'add' has a rule in autopar"),
    ],
)
def test_what_is_no_rule_or_no_primitive_is_refused_at_once(primitive, rule, error, words):
    with pytest.raises(error, match=words):
        register_rule(primitive, rule)


@pytest.mark.usefixtures("user_rules")
def test_what_cannot_run_a_shard_is_refused_at_once():
    with pytest.raises(ArgumentError, match="'fused_dense': local='unchanged' is no function from a LocalCall"):
        register_rule("fused_dense", "b s c, c e -> b s e", local="unchanged")


# --- what is refused when a step is planned ---------------------------------------------------------------------------

TEXT = "b s c, c e -> b s e | whole: c"


def text_of(eqn):
    return TEXT


def rule_of(eqn):
    return parse(TEXT, *([v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars)))


@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize("rule", [TEXT, text_of, rule_of])
def test_a_rule_is_text_or_what_a_function_makes_of_an_equation(rule):
    register_rule(fused_dense(), rule, heavy=True)
    program, _ = program_of(jax.make_jaxpr(two_layers)(X, W))
    eqn = next(eqn for eqn in program.equations if eqn.primitive is fused_dense())
    assert str(rule_for(eqn)) == TEXT


@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            lambda eqn: None,
            "the function <function .* gives None as its rule: return the rule as text, or a FactorRule",
        ),
        (lambda eqn: "b s c -> b s e", "rule 'b s c -> b s e' names 1 inputs, the operation has 2$"),
        (lambda eqn: "b s c, c e -> b e", "output 0 has 2 dimensions, its shape is"),
        ("b s, c e -> b e", "input 0 has 2 dimensions, its shape is"),
        ("b s c, c e -> b, s, e", "names 3 outputs, the operation has 1: commas .* is 'b s e' meant"),
    ],
)
def test_a_rule_that_is_none_of_an_equation_is_refused_with_the_primitive_and_the_users_line(rule, words):
    register_rule("fused_dense", rule)
    step = autopar.parallelize(lambda state, x: (state, two_layers(x, state)), devices=4, mesh_shape=(4,))
    with pytest.raises(RuleError, match=rf"^primitive 'fused_dense' at .*{LINE}.*: .*{words}") as caught:
        step.plan(W, X)
    assert caught.value.__suppress_context__
    assert "operand" not in str(caught.value).replace("separate operands", "")


# --- what is refused when a step is compiled --------------------------------------------------------------------------


@functools.cache
def double():
    primitive = Primitive("double_of_three")
    primitive.def_impl(lambda x: x * 2)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    return primitive


def doubled(x):
    return double().bind(x)


DOUBLE_LINE = f"{Path(__file__).name}:{inspect.getsourcelines(doubled)[1] + 1}"
CUBE = jnp.ones((2, 3, 8))


def call_doubled():
    step = autopar.parallelize(
        doubled, mesh_shape=(4,), batch_argnums=(), constraints={"*": PartitionSpec(None, None, "x")}
    )
    step(CUBE + 0)


def run_doubled():
    for seed in range(4):
        run_with_random_strategies(doubled, CUBE, mesh_shape=(4,), seed=seed)


@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize("run", [call_doubled, run_doubled])
def test_a_result_of_another_shape_than_the_rule_promises_is_refused(run):
    register_rule("double_of_three", "b r n -> b r m", heavy=True)
    with pytest.raises(RuleError) as caught:
        run()
    text = str(caught.value)
    assert text.startswith("primitive 'double_of_three' at ")
    assert DOUBLE_LINE in text
    assert "rule 'b r n -> b r m' promises output 0 of shape (2, 3, 2) on each device where m is cut in 4" in text
    assert "the operation gives (2, 3, 8) there. Mend the rule, or say by `local=`" in text


@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize(
    ("local", "words"),
    [
        (lambda call: call.operands[0] * 2, "promises a sequence of 1 results on each device, there is a "),
        (lambda call: call.operands * 2, "promises a sequence of 1 results on each device, there is 2 results"),
        (lambda call: [call.operands[0][:1]], r"promises output 0 of shape \(.*the operation gives \(1, "),
    ],
)
def test_a_function_for_shards_that_returns_something_else_is_refused(local, words):
    register_rule("double_of_three", "b r n -> b r n", local=local)
    with pytest.raises(RuleError, match=rf"^primitive 'double_of_three' at .*{DOUBLE_LINE}.*{words}"):
        run_doubled()


@pytest.mark.usefixtures("user_rules")
def test_an_error_on_a_shard_says_on_which_shapes():
    def fail(call):
        raise ZeroDivisionError

    register_rule("double_of_three", "b r n -> b r n", local=fail)
    with pytest.raises(ZeroDivisionError) as caught:
        run_with_random_strategies(doubled, CUBE, mesh_shape=(1,), seed=0)
    (note,) = (text for text in caught.value.__notes__ if text.startswith("while 'double_of_three' at "))
    assert note.endswith("ran on a shard, with operands of shapes (2, 3, 8), by the rule 'b r n -> b r n'")


# --- what is registered after a step was planned ----------------------------------------------------------------------


@pytest.mark.usefixtures("user_rules")
def test_a_step_is_planned_again_once_one_of_its_primitives_has_another_rule():
    step = autopar.parallelize(doubled, devices=4, mesh_shape=(4,), batch_argnums=0)
    x = jnp.ones((4, 3, 8))
    with pytest.warns(AutoparWarning, match="no factor rule for double_of_three"):
        first = step.plan(x)
    register_rule("fused_dense", TEXT)
    assert step.plan(x) is first
    register_rule("double_of_three", "b r n -> b r n")
    second = step.plan(x)
    assert [one.name for one in second.rules] == ["double_of_three"]
    assert step.plan(x) is second is step.last_plan()
    register_rule("double_of_three", "b r n -> b r n | whole: n", replace=True)
    assert step.plan(x).rules != second.rules
    assert len(step._memory.programs) == 1


# --- how few seeds find a rule that claims too much -------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize("start", [0, 5, 17])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_as_many_seeds_as_a_registered_rule_has_factors_split_each_of_them(start, mesh_shape):
    seen = set()

    def run(call):
        seen.update(factor for factor in "brn" if call.ways(factor) > 1)
        return on_shard.unchanged(call)

    register_rule("double_of_three", "b r n -> b r n", local=run)
    for seed in range(start, start + 3):
        run_with_random_strategies(doubled, jnp.ones((4, 4, 4)), mesh_shape=mesh_shape, seed=seed)
    assert seen == set("brn")
