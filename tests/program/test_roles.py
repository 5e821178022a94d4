"""What each argument of a step is, by what the step returns: the roles of leaves in a traced step, which no planner has seen."""

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import ArgumentError, AutoparWarning
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace


def roles(fun, *args, batch=(1,)):
    """Role of each leaf by its path, and the paths of those that are donated."""
    signature = CallSignature(fun, batch, (), "auto")
    inputs = trace(signature, bind_arguments(signature, args, {})).inputs
    return {leaf.path: leaf.role for leaf in inputs}, {leaf.path for leaf in inputs if leaf.donated}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_lone_scalar_is_never_state_though_a_loss_of_its_type_comes_out(shape):
    found, donated = roles(lambda rate, batch: rate * jnp.sum(batch), array(*shape), array(8))
    assert found == {"rate": "other" if shape == () else "state", "batch": "batch"}
    assert donated == (set() if shape == () else {"rate"})


def test_a_scalar_in_a_tree_that_comes_back_is_state():
    def step(state, batch):
        return {"w": state["w"] - jnp.mean(batch), "count": state["count"] + 1}, jnp.sum(batch)

    found, donated = roles(step, {"w": array(4), "count": array()}, array(8))
    assert found == {"state/count": "state", "state/w": "state", "batch": "batch"}
    assert donated == {"state/count", "state/w"}


def test_of_two_arguments_of_one_type_the_first_is_state_if_only_one_comes_back():
    found, donated = roles(lambda one, batch, other: one + other + jnp.sum(batch), array(4), array(8), array(4))
    assert found == {"one": "state", "batch": "batch", "other": "other"}
    assert donated == {"one"}


# --- which arguments are the batch -----------------------------------------------------------------------------------


def loss_of(w, x):
    return jnp.mean((x @ w) ** 2)


def descend(w, x):
    return w - jax.grad(loss_of)(w, x)


def with_momentum(w, m, x):
    m = m + jax.grad(loss_of)(w, x)
    return w - m, m


UNSAID = {
    "state, batch": (lambda w, x: (descend(w, x), 0.0), (array(4, 2), array(8, 4)), "sb"),
    "params, opt_state, batch": (
        lambda w, m, x: (*with_momentum(w, m, x), 0.0),
        (array(4, 2), array(4, 2), array(8, 4)),
        "ssb",
    ),
    "opt_state, params, batch": (
        lambda m, w, x: (*with_momentum(w, m, x), 0.0),
        (array(4, 2), array(4, 2), array(8, 4)),
        "ssb",
    ),
    "batch, params, opt_state": (
        lambda x, w, m: (*with_momentum(w, m, x), 0.0),
        (array(8, 4), array(4, 2), array(4, 2)),
        "bss",
    ),
    "params, x, opt_state, y": (
        lambda w, x, m, y: (*with_momentum(w, m, x), y.sum()),
        (array(4, 2), array(8, 4), array(4, 2), array(8)),
        "sbsb",
    ),
    "x, y, params": (lambda x, y, w: (descend(w, x), y.sum()), (array(8, 4), array(8), array(4, 2)), "bbs"),
    "state, inputs, labels, key": (
        lambda w, x, y, key: (descend(w, x), y.sum() + jax.random.normal(key)),
        (array(4, 2), array(8, 4), array(8), jax.random.key(0)),
        "sbbo",
    ),
    "state, batch, rate": (
        lambda w, x, rate: (w - rate * jax.grad(loss_of)(w, x), 0.0),
        (array(4, 2), array(8, 4), array()),
        "sbo",
    ),
    "frozen, adapter, batch": (
        lambda frozen, w, x: (descend(w, x @ frozen["a"] + frozen["b"][0]), 0.0),
        ({"a": array(4, 4), "b": array(2, 1, 4)}, array(4, 2), array(8, 4)),
        "osb",
    ),
    "weights, x whose result looks like it": (lambda w, x: x @ w, (array(4, 4), array(8, 4)), "ob"),
    "state, batch that comes back": (lambda w, x: (descend(w, x), 2 * x), (array(4, 2), array(8, 4)), "sb"),
    "weights, tokens, cache": (
        lambda w, x, cache: (x @ w, {"k": cache["k"] + 1}),
        (array(4, 6), array(8, 4), {"k": array(8, 16)}),
        "obs",
    ),
    "weights, cache, tokens": (
        lambda w, cache, x: (x @ w, {"k": cache["k"] + 1}),
        (array(4, 6), {"k": array(8, 16)}, array(8, 4)),
        "osb",
    ),
    "params, opt_state, and nothing else": (
        lambda w, m: with_momentum(w, m, jnp.ones((8, 4))),
        (array(4, 2), array(4, 2)),
        "ss",
    ),
    "state, batch, weights of classes": (
        lambda w, x, table: (descend(w, x) * table.sum(), 0.0),
        (array(4, 2), array(64, 4), array(3)),
        "sbo",
    ),
    "state alone": (lambda w: descend(w, jnp.ones((8, 4))), (array(4, 2),), "s"),
    "x alone": (lambda x: x.sum(), (array(4, 2),), "o"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_the_batch_is_what_does_not_come_back_wherever_it_stands(name):
    fun, args, expected = UNSAID[name]
    found, donated = roles(fun, *args, batch="auto")
    by_argument = dict(zip((path.partition("/")[0] for path in found), found.values(), strict=True))
    assert "".join(role[0] for role in by_argument.values()) == expected
    assert donated == {path for path, role in found.items() if role == "state"}


def test_the_argument_called_batch_is_the_batch_without_a_word():
    def step(state, table, batch):
        return descend(state, batch) + table.sum(), 0.0

    found, _ = roles(step, array(4, 2), array(50, 4), array(8, 4), batch="auto")
    assert found == {"state": "state", "table": "other", "batch": "batch"}


DOUBTFUL = {
    "two numbers of rows": (
        lambda w, x, table: (descend(w, x) + table.sum(), 0.0),
        (array(4, 2), array(8, 4), array(50, 4)),
        {"w": "state", "x": "batch", "table": "other"},
        r"'x' \(rows: 8\) is taken for it, 'table' \(rows: 50\) not. Say which are: batch_argnums=\(1,\) if that is right",
    ),
    "weights of a teacher": (
        lambda w, teacher, x: (descend(w, x @ teacher["a"] + teacher["b"]), 0.0),
        (array(4, 2), {"a": array(6, 4), "b": array(4)}, array(8, 6)),
        {"w": "state", "teacher/a": "other", "teacher/b": "other", "x": "batch"},
        r"'x' \(rows: 8\) is taken for it, 'teacher' \(rows: 4, 6\) not",
    ),
    "a result that looks like one of several": (
        lambda w, x, mask: x @ w * mask[:, None],
        (array(4, 4), array(8, 4), array(8)),
        {"w": "other", "x": "batch", "mask": "batch"},
        r"'x' \(rows: 8\) too, although the step returns its like. Say which are: batch_argnums=\(1, 2\)",
    ),
    "weights that stay as they are, and a token whose next one is returned": (
        lambda cache, w, token: (cache @ w["in"] + w["embedding"][token], jnp.argmax(cache @ w["in"], -1)),
        (array(8, 4), {"embedding": array(11, 4), "in": array(4, 4)}, jnp.arange(8)),
        {"cache": "state", "w/embedding": "batch", "w/in": "batch", "token": "state"},
        r"'w' \(rows: 4, 11\) is taken for it, 'token' \(rows: 8\) not. Say which are: batch_argnums=\(1,\) if that is right",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_where_the_batch_may_be_misread_a_warning_names_what_is_taken_and_what_is_not(name):
    fun, args, expected, words = DOUBTFUL[name]
    with pytest.warns(AutoparWarning, match=words):
        found, _ = roles(fun, *args, batch="auto")
    assert found == expected


def test_state_that_is_given_as_the_batch_is_refused_with_its_rows_or_warned_of():
    def step(params, opt_state, batch):
        new = jax.tree.map(lambda m, w: m + jnp.sum(batch) * w, opt_state, params)
        return params, new, 0.0

    weights = {"a": array(4, 2), "b": array(2)}
    words = r"takes 'opt_state' for the batch, but step returns its like.*opt_state/a has 4, opt_state/b has 2.*=\(2,\)"
    with pytest.raises(ArgumentError, match=words):
        roles(step, weights, weights, array(8, 4), batch=(1,))
    with pytest.warns(AutoparWarning, match=r"takes 'm' \(rows: 4\) for the batch, although.*and not 'x' \(rows: 8\)"):
        roles(lambda w, m, x: with_momentum(w, m, x), array(4, 2), array(4, 2), array(8, 4), batch=(1,))
