"""Arrays that already lie as a task wants them are handed over as they are, keys too."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar.compat import make_mesh, words_of
from autopar.execution.transfers import in_sharding

MESH = make_mesh(np.array(jax.devices()[:2]), ("x",))


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("axis", ["x", None])
def test_only_an_array_that_lies_elsewhere_moves(is_key, axis):
    """A key's sharding is that of the words that it is made of, which have one more dimension."""
    sharding = NamedSharding(MESH, PartitionSpec(axis))
    other = NamedSharding(MESH, PartitionSpec(None if axis else "x"))
    value = jax.random.split(jax.random.key(3), 4) if is_key else jax.numpy.arange(4.0)
    array = jax.device_put(value, sharding)
    assert words_of(array).ndim == array.ndim + is_key, "else what is compared has another number of dimensions"
    assert in_sharding(array, sharding) is array
    moved = in_sharding(array, other)
    assert moved.sharding.is_equivalent_to(other, array.ndim)
    assert jax.numpy.array_equal(words_of(moved), words_of(array))
