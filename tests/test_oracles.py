"""The oracles notice what they should: a wrong entry, a wrong type, a wrong mask, an unexpected collective."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.acceptance.models import mlp
from tests.oracles import Census, Operand, assert_same_as_jit, assert_trees_close, census_of_text

TREE = {"w": np.linspace(-4, 4, 64, dtype=np.float32).reshape(8, 8), "n": np.arange(3), "key": jax.random.key(3)}


def with_entry(value, name="w", index=(0, 1)):
    leaf = TREE[name].copy()
    leaf[index] = value
    return {**TREE, name: leaf}


def test_equal_trees_are_close():
    assert_trees_close(jax.tree.map(lambda leaf: leaf, TREE), TREE)


def test_an_error_is_judged_against_the_largest_entry_of_its_leaf():
    entry = TREE["w"][0, 1]
    assert_trees_close(with_entry(entry + 3e-5), TREE)
    with pytest.raises(AssertionError, match=r"\['w'\]: 1 of 64 entries differ; at \(0, 1\) .* off by 2\.\d+e-05"):
        assert_trees_close(with_entry(entry + 8.5e-5), TREE)


def test_a_tiny_leaf_is_judged_against_the_least_scale():
    tiny = {"bias": np.full(4, 1e-10, np.float32)}
    assert_trees_close({"bias": np.zeros(4, np.float32)}, tiny)
    with pytest.raises(AssertionError, match="4 of 4 entries differ"):
        assert_trees_close({"bias": np.zeros(4, np.float32)}, tiny, least_scale=1e-12)


def test_a_leaf_may_be_off_by_what_rounding_explains_and_no_other_leaf():
    off = with_entry(TREE["w"][0, 1] + 1e-3)
    assert_trees_close(off, TREE, rounding={"['w']": 1.1e-3})
    with pytest.raises(AssertionError, match="allowed 2e-04"):
        assert_trees_close(off, TREE, rounding={"['w']": 9e-4, "['n']": 1.0})
    with pytest.raises(AssertionError, match="must be exact"):
        assert_trees_close(with_entry(7, "n", (0,)), TREE, rounding={"['n']": 9.0})


def test_integers_and_keys_must_be_exact():
    with pytest.raises(AssertionError, match="1 of 3 entries differ, and this type must be exact"):
        assert_trees_close(with_entry(7, "n", (0,)), TREE)
    with pytest.raises(AssertionError, match="must be exact"):
        assert_trees_close({**TREE, "key": jax.random.key(4)}, TREE)


def test_another_type_shape_or_structure_is_an_error():
    with pytest.raises(AssertionError, match=r"float16\[8, 8\] instead of float32\[8, 8\]"):
        assert_trees_close({**TREE, "w": TREE["w"].astype(np.float16)}, TREE)
    with pytest.raises(AssertionError, match="structures differ"):
        assert_trees_close({"w": TREE["w"]}, TREE)


def test_a_lost_infinity_is_an_error():
    with pytest.raises(AssertionError, match="infinities or NaNs in different places"):
        assert_trees_close(with_entry(np.inf), TREE)
    with pytest.raises(AssertionError, match="infinities or NaNs in different places"):
        assert_trees_close(with_entry(np.inf), with_entry(-np.inf))
    assert_trees_close(with_entry(-np.inf), with_entry(-np.inf))
    assert_trees_close(with_entry(np.nan), with_entry(np.nan))


def test_all_differing_leaves_are_reported():
    with pytest.raises(AssertionError, match=r"(?s)\['n'\].*\['w'\]"):
        assert_trees_close({**with_entry(9.0), "n": TREE["n"] + 1}, TREE)


def test_a_step_that_differs_in_the_second_update_is_found():
    problem = mlp(8, 4, layers=2, tx=optax.sgd(0.1))

    def forgets(state, batch):
        new_state, loss = problem.step(state, batch)
        scale = jnp.where(state.step == 1, 1.001, 1.0)
        return new_state.replace(params=jax.tree.map(lambda leaf: leaf * scale, new_state.params)), loss

    assert_same_as_jit(problem.step, jax.jit(problem.step, donate_argnums=0), problem.state, problem.batch)
    with pytest.raises(AssertionError, match=r"step 2: .*params"):
        assert_same_as_jit(problem.step, jax.jit(forgets), problem.state, problem.batch)


def test_adam_may_move_only_entries_without_a_gradient():
    problem = mlp(8, 4, layers=2, tx=optax.adam(1e-2))
    state, _ = jax.jit(problem.step)(problem.state, problem.batch)
    moved = jax.tree.map(lambda leaf: leaf + 5e-3, state.params)
    with pytest.raises(AssertionError, match="entries differ"):
        assert_trees_close(state.replace(params=moved), state, adam_lr=1e-2)
    adam, *rest = state.opt_state
    without = adam._replace(nu=jax.tree.map(lambda leaf: leaf.at[0].set(0.0), adam.nu))
    expected = state.replace(opt_state=(without, *rest))
    moved = jax.tree.map(lambda leaf: leaf.at[0].add(5e-3), state.params)
    assert_trees_close(expected.replace(params=moved), expected, adam_lr=1e-2)
    with pytest.raises(AssertionError, match="entries differ"):
        assert_trees_close(expected.replace(params=moved), expected)


def test_the_census_leaves_out_scalars_and_counts_combined_operands():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def per_device(x):
        rows, total = lax.psum((x, x.sum()), "x")
        return rows + lax.all_gather(x[:2], "y", tiled=True), total

    program = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    found = census_of_text(program.lower(jnp.ones((4, 8))).compile().as_text(), (2, 2))
    assert found.kinds() == {"all-reduce", "all-gather"}
    assert found.bytes_of("all-reduce", axis=0) == [128]
    assert found.bytes_of("all-reduce", axis=1) == []
    assert found.bytes_of("all-gather", axis=1) == [128]


def test_the_cost_of_a_census_is_the_one_of_the_acceptance_cases():
    operands = (
        Operand("all-reduce", 100, (0,), 3),
        Operand("reduce-scatter", 80, (1,), 1),
        Operand("all-reduce", 40, (0, 1), 1),
        Operand("collective-permute", 10, (0, 1), 2),
    )
    cost = Census((2, 4), operands).cost(alpha=(5.0, 7.0), beta=(1.0, 0.1))
    all_reduces = 3 * (5 + 2 * 100 / 2) + (5 + 2 * 40 / 2) + (7 + 2 * 0.1 * 40 * 3 / 4)
    assert cost == pytest.approx(all_reduces + (7 + 0.1 * 80 * 3 / 4) + 2 * (7 + 10))
