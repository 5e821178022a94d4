"""Rows of a table, and the gradients of rows that are taken often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.models.transformer import look_up, look_up_few

ROWS, WIDTH, TIMES = 5, 3, 4096


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("taken", [look_up, look_up_few])
def test_rows_are_those_of_the_table(taken, dtype):
    table = jax.random.normal(jax.random.key(0), (ROWS, WIDTH), dtype)
    rows = jnp.array([[4, 0, 0], [2, 3, 1]])
    found = taken(table, rows)
    assert found.dtype == table.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(table, np.float32)[np.asarray(rows)])


@pytest.mark.parametrize("taken", [look_up, look_up_few])
def test_a_row_that_is_taken_often_gets_all_of_its_gradient(taken):
    """In bfloat16 256 + 1 is 256."""
    table = jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    rows = jnp.full(TIMES, 2)
    gradient = jax.grad(lambda table: taken(table, rows).astype(jnp.float32).sum())(table)
    expected = np.zeros((ROWS, WIDTH))
    expected[2] = TIMES
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), expected)
