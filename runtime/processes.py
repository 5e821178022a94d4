"""Which process has which devices, and values that every process knows as arrays of all of them.

In: shardings, and values that are the same on every process. Out: arrays of which each process holds its own part. A *global*
array has one sharding that all processes know: autopar made it, or `jax.jit` did. Any other value (a NumPy array, a number, a
`jax.Array` on one device) is a *host* value: every process has its own copy and all are equal. What a process does must depend
on nothing but what all processes know, so the kind of sharding decides, and never whether the array can be addressed here.

What can go wrong: host values that differ; nothing compares them, and each process makes its part from its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from autopar.compat import as_it_is_now

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 2e-3


def processes_of(sharding: Sharding) -> frozenset[int]:
    """The processes that have devices of a sharding."""
    devices: Iterable[Any] = sharding.device_set
    return frozenset(device.process_index for device in devices)


def is_here(sharding: Sharding) -> bool:
    """Whether this process has one of the devices."""
    return jax.process_index() in processes_of(sharding)


def are_here(devices: Iterable[Any]) -> bool:
    """Whether all devices are of this process."""
    here = jax.process_index()
    return all(device.process_index == here for device in devices)


def absent(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array that lies on devices of other processes alone: shape, type and sharding, and no shard here."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def absent_like(shape: Any, sharding: Sharding) -> jax.Array:
    """The same for anything that has a shape and a type, which is weak as it is: all processes must trace alike."""
    array = absent(shape.shape, shape.dtype, sharding)
    if not getattr(shape, "weak_type", False):
        return array
    # JAX's public functions make no array without shards that is weakly typed.
    kind: Any = type(array)
    weak: jax.Array = kind(jax.typeof(array).update(weak_type=True), sharding, [], committed=True)
    return weak


def is_global(value: Any) -> bool:
    """Whether a value is an array that all processes know by one sharding; see the module's text."""
    return isinstance(value, jax.Array) and not isinstance(value.sharding, SingleDeviceSharding)


def as_host(value: Any) -> Any:
    """A host value that is committed to no device, so that every process may pass it to a program of all."""
    if not isinstance(value, jax.Array) or is_global(value):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return np.asarray(value)


def from_host(value: Any, sharding: Sharding) -> jax.Array:
    """The array of a host value, on devices of any processes: each makes its own part; PRNG keys as their words."""
    if not is_here(sharding):
        return absent(np.shape(value), jax.typeof(value).dtype, sharding)
    if are_here(sharding.device_set):
        placed: jax.Array = jax.device_put(as_it_is_now(value), sharding)
        return placed
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = from_host(np.asarray(jax.random.key_data(value)), sharding)
        keys: jax.Array = jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
        return keys
    numbers = np.array(value, jax.typeof(value).dtype)
    return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])


def wait_until_ready(array: Any, given_up: Callable[[], bool]) -> bool:
    """Wait for an array in Python, where a waiting thread can be told to stop; False if it was given up.

    What waits in XLA for another process cannot be woken up, and ends the process badly when the interpreter exits.
    """
    pause_s = SHORTEST_PAUSE_S
    while not array.is_ready():
        if given_up():
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return True
