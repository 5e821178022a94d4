"""The rule table: what every rule says, and that no model falls back.

`golden/rules.txt` holds three lines per example of `examples.py`: shapes, the printed rule, and the work. After a change that
is meant, write it anew with `AUTOPAR_WRITE_GOLDEN=1 python -m pytest tests/rules/test_table.py -k golden`, and read the
difference.
"""

import inspect
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.models import registry
from autopar.program.from_jaxpr import program_of
from autopar.rules import on_shard, table
from autopar.rules.table import RULES, entry_for, flops_of, has_rule, rule_for
from autopar.testing import run_with_random_strategies
from tests.models.conftest import SIZES
from tests.rules.examples import EXAMPLES
from tests.zoo import ZOO

GOLDEN = Path(__file__).parents[1] / "golden" / "rules.txt"

WITHOUT_EXAMPLE = {
    "batch_statistic": "autopar's own: a copy",
    "constrain": "autopar's own: a copy in a layout",
    "copy_p": "another name of copy",
    "empty2": "inside derivatives of switch only",
    "eq_to": "total order, inside sort only",
    "fan_out": "autopar's own: a copy",
    "geqp3": "inside the lowering of qr only",
    "geqrf": "inside the lowering of qr only",
    "igamma_grad_a": "inside derivatives of igamma only",
    "layer_boundary": "autopar's own: a copy",
    "iota_2x32_shape": "inside random bits only",
    "layout_constraint": "names an order in memory",
    "le_to": "total order, inside sort only",
    "log2": "on newer JAX only",
    "lt_to": "total order, inside sort only",
    "observe": "autopar's own: a copy that shows values",
    "one_minus_square": "inside derivatives of tanh only, on newer JAX",
    "ormqr": "inside products with the Q of a factorization only",
    "polygamma": "inside derivatives of digamma only",
    "philox2x32": "test_generators.py has it",
    "philox4x32": "test_generators.py has it",
    "polynomial": "inside derivatives of erf and erfc only, on newer JAX",
    "random_clone": "checks the reuse of keys only",
    "random_gamma_grad": "inside derivatives of gamma samples only",
    "regularized_incomplete_beta": "three operands alike",
    "scatter_mul": "another name of scatter-mul",
    "select_and_gather_add": "inside derivatives of derivatives of pooling only",
    "threefry4x32": "test_generators.py has it",
    "with_memory_space_constraint": "names a memory",
}
WITHOUT_EXAMPLE |= dict.fromkeys(
    (
        "nonbatchable",
        "nondifferentiable_backward",
        "nontraceable",
        "select_if_vmap",
        "unvmap_all",
        "unvmap_any",
        "unvmap_max",
    ),
    "equinox's",
)
CONTROL_FLOW = {"scan", "while", "cond"}
KNOWN = {*EXAMPLES, *CONTROL_FLOW, "one_minus_square", "polynomial"}


# --- what the rules say -----------------------------------------------------------------------------------------------


def shown(avals):
    return ", ".join(f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in avals) or "."


def golden_lines():
    for name in sorted(EXAMPLES):
        for example in EXAMPLES[name]:
            eqn = example.equation(name)
            shapes = " -> ".join(shown([v.aval for v in side]) for side in (eqn.invars, eqn.outvars))
            rule = rule_for(eqn)
            yield f"{name}: {shapes}\n    {rule}\n    {entry_for(eqn).work.value}, {flops_of(eqn, rule):.0f} flops"


def test_every_rule_is_as_in_the_golden_file():
    text = "\n".join(golden_lines()) + "\n"
    if os.environ.get("AUTOPAR_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text.splitlines() == GOLDEN.read_text().splitlines()


def test_every_primitive_of_the_table_has_an_example_or_a_reason():
    assert sorted({*EXAMPLES, *WITHOUT_EXAMPLE}) == sorted(RULES)
    assert not {*EXAMPLES} & {*WITHOUT_EXAMPLE}


def test_the_table_is_sorted_and_each_primitive_has_one_row():
    source = inspect.getsource(table)
    rows = re.findall(r'^        "([^"]+)": \w+[(,]', source, re.MULTILINE)
    assert rows == sorted(RULES)


# --- no model falls back ----------------------------------------------------------------------------------------------


def primitives_of(fun, *args):
    program, _ = program_of(jax.make_jaxpr(fun)(*args))
    return {eqn.primitive.name for eqn in program.walk()} - {"fan_out"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", registry.MODELS)
def test_every_primitive_of_a_model_has_a_rule(name):
    model = registry.build(name, **SIZES[name])
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    assert primitives_of(model.train_step, state, model.batch_shape()) <= KNOWN


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ZOO)
def test_every_primitive_of_a_step_of_the_zoo_has_a_rule(name):
    step, state, batch = ZOO[name]()
    assert primitives_of(step, state, batch) <= KNOWN


OPTIMIZERS = [
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "nadamw",
    "novograd",
    "optimistic_gradient_descent",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sign_sgd",
    "sm3",
    "yogi",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_primitive_of_an_optimizer_has_a_rule(name):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), getattr(optax, name)(1e-3))
    params = {"kernel": jnp.ones((256, 128)), "bias": jnp.ones(8), "filters": jnp.ones((3, 3, 4, 8))}

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    assert primitives_of(step, params, optimizer.init(params), params) <= KNOWN


# --- random bits ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**40))
def test_a_wide_product_is_the_product_in_two_words(index, stride):
    high, low = on_shard._wide_product(jnp.asarray([index], jnp.uint32), stride)
    assert (int(high[0]) << 32) + int(low[0]) == (index * stride) % 2**64


def test_a_wide_product_is_right_at_the_edges():
    edges = [0, 1, 0xFFFF, 0x10000, 0x10001, 2**31, 2**32 - 1]
    for stride in (*edges[1:], 2**32, 2**32 + 1, 2**33 + 12345, random.Random(0).getrandbits(45)):
        high, low = on_shard._wide_product(jnp.asarray(edges, jnp.uint32), stride)
        whole = [(int(h) << 32) + int(lo) for h, lo in zip(high, low, strict=True)]
        assert whole == [(i * stride) % 2**64 for i in edges]


class BigCall:
    """Just what `_counters` asks of a call: a shard of one element per dimension of a huge array."""

    def __init__(self, position):
        self.position = position
        self.rule = type("Rule", (), {"outputs": (tuple((f"d{i}",) for i in range(len(position))),)})

    def out_shape(self):
        return (1,) * len(self.position)

    def offset(self, dim):
        return self.position[int(dim[0][1:])]


@given(st.data())
def test_positions_in_arrays_of_more_than_two_to_the_32_elements_are_right(data):
    shape = data.draw(
        st.sampled_from([(2**20, 2**15, 3), (5, 2**31, 7), (70_000, 70_000), (2**33, 3), (3, 2**16, 2**16)])
    )
    position = tuple(data.draw(st.integers(0, min(n, 2**32) - 1)) for n in shape)
    high, low = on_shard._counters(BigCall(position), shape)
    expected = 0
    for p, n in zip(position, shape, strict=True):
        expected = expected * n + p
    assert (int(high.ravel()[0]) << 32) + int(low.ravel()[0]) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3,)])
def test_random_bits_of_every_split_are_those_of_the_whole(dtype, mesh_shape):
    draw = lambda key: jax.random.bits(key, (12, 3, 24), dtype)  # noqa: E731
    key = jax.random.key(11)
    expected = np.asarray(jax.jit(draw)(key))
    for seed in range(4):
        actual = run_with_random_strategies(draw, key, mesh_shape=mesh_shape, seed=seed)
        np.testing.assert_array_equal(np.asarray(actual), expected)


def test_a_primitive_whose_rule_is_to_run_whole_has_a_rule():
    def equation(name):
        return SimpleNamespace(primitive=SimpleNamespace(name=name))

    assert all(has_rule(equation(name)) for name in RULES)
    assert not has_rule(equation("unheard_of"))
