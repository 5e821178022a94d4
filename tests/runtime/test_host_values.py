"""Which values every process knows alike, and how they become arrays of several processes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.runtime.processes import are_here, as_host, from_host, is_global, is_here, processes_of
from tests.runtime.resharding.test_reshard import sharding_on


def devices_of(*processes):
    """A sharding over one device of each of these processes."""
    return SimpleNamespace(device_set=[SimpleNamespace(process_index=process) for process in processes])


@pytest.mark.parametrize(
    ("processes", "some_here", "all_here"), [((0,), True, True), ((0, 2), True, False), ((1, 2), False, False)]
)
def test_a_sharding_is_here_in_part_or_as_a_whole(processes, some_here, all_here):
    """The tests run in process 0."""
    sharding = devices_of(*processes)
    assert processes_of(sharding) == set(processes)
    assert is_here(sharding) == some_here
    assert are_here(sharding.device_set) == all_here


def test_what_lies_on_a_mesh_is_global_and_nothing_else():
    spread = jax.device_put(np.arange(4.0), sharding_on((2,), 0, P("x")))
    assert is_global(spread)
    assert is_global(jax.device_put(1.0, sharding_on((1,), 0, P())))
    for value in (jnp.ones(3), jax.device_put(1.0, jax.devices()[3]), np.ones(3), 2.0, jax.random.key(0)):
        assert not is_global(value)


def test_host_values_are_committed_to_no_device():
    found = as_host(jax.device_put(np.arange(3), jax.devices()[2]))
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.arange(3))
    key = jax.device_put(jax.random.key(5, impl="rbg"), jax.devices()[2])
    again = as_host(key)
    assert not again.committed
    assert again.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(key))


def test_other_values_stay_as_they_are():
    spread = jax.device_put(np.arange(4.0), sharding_on((2,), 0, P("x")))
    for value in (spread, np.arange(3), 2.5):
        assert as_host(value) is value


@pytest.mark.parametrize(
    "make",
    [lambda: np.arange(8.0).reshape(4, 2), lambda: jnp.ones((4, 2)), lambda: 2.5],
    ids=["of numpy", "of jax", "of python"],
)
def test_a_host_value_becomes_the_array_of_its_numbers_in_jaxs_type(make):
    sharding = sharding_on((2,), 0, P("x") if np.ndim(make()) else P())
    found = from_host(make(), sharding)
    assert found.sharding == sharding
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, make())
