"""What stands for arrays of other processes, and how PRNG keys reach them, without a second process.

JAX makes no array without shards on devices of one's own process, so a record of what it would be given stands for one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.runtime import processes
from autopar.runtime.resharding import routes
from tests.runtime.resharding.test_reshard import sharding_on

SOURCE, TARGET = sharding_on((2,), 0, P("x")), sharding_on((4,), 4, P("x"))


@dataclasses.dataclass
class AbsentArray:
    """What JAX's array type is given."""

    aval: jax.core.ShapedArray
    sharding: jax.sharding.Sharding
    shards: list
    committed: bool

    @property
    def addressable_shards(self):
        """Those of this process: none."""
        return self.shards


def absent(shape, dtype, sharding):
    return AbsentArray(jax.core.ShapedArray(shape, dtype), sharding, [], committed=True)


def generator_keys():
    return jax.device_put(jax.random.split(jax.random.key(7, impl="rbg"), 12), SOURCE)


@pytest.mark.parametrize("weak", [False, True])
def test_an_absent_array_is_as_weakly_typed_as_what_it_is_like(weak, monkeypatch):
    like = jax.ShapeDtypeStruct((4,), jnp.float32, weak_type=weak)
    monkeypatch.setattr(processes, "absent", absent)
    monkeypatch.setattr(jax, "typeof", lambda array: array.aval)
    found = processes.absent_like(like, SOURCE)
    assert found == AbsentArray(jax.core.ShapedArray((4,), np.dtype("float32"), weak_type=weak), SOURCE, [], True)
    assert found.aval.weak_type is weak


def test_an_absent_array_is_like_what_knows_no_weak_types(monkeypatch):
    monkeypatch.setattr(processes, "absent", absent)
    assert not processes.absent_like(np.ones(4, np.float32), SOURCE).aval.weak_type


def test_keys_that_lie_elsewhere_are_absent_words_where_they_move_and_absent_keys_afterwards(monkeypatch):
    keys = generator_keys()
    route = routes.Route(0, routes.Move.of(keys, TARGET), None)
    here = route.to_words(keys)
    assert (here.shape, here.dtype) == ((12, 4), np.uint32)
    monkeypatch.setattr(routes, "absent", absent)
    monkeypatch.setattr(routes, "is_here", lambda sharding: sharding == TARGET)
    assert route.to_words(keys) == absent((12, 4), np.dtype("uint32"), SOURCE)
    monkeypatch.setattr(routes, "is_here", lambda sharding: sharding == SOURCE)
    assert route.from_words(None) == absent((12,), keys.dtype, TARGET)


def test_keys_that_every_process_knows_are_spread_over_several_as_their_words(monkeypatch):
    """The words go through the way of several processes, of which each makes its own part."""
    keys = jax.random.split(jax.random.key(7, impl="rbg"), 12)
    monkeypatch.setattr(processes, "are_here", lambda devices: False)
    spread = processes.from_host(keys, TARGET)
    assert (spread.dtype, spread.shape) == (keys.dtype, (12,))
    assert spread.sharding.is_equivalent_to(TARGET, 1)
    np.testing.assert_array_equal(jax.random.key_data(spread), jax.random.key_data(keys))


def test_a_key_of_other_processes_alone_is_absent_here(monkeypatch):
    monkeypatch.setattr(processes, "absent", absent)
    monkeypatch.setattr(processes, "is_here", lambda sharding: False)
    key = jax.random.key(7, impl="rbg")
    assert processes.from_host(key, TARGET) == absent((), key.dtype, TARGET)
