"""The processes of devices, and values that all processes know, as arrays on the devices of all.

In: shardings, and values that are the same on every process. Out: arrays of which each process holds its own part. A *global*
array has one sharding that all processes know: autopar made it, or `jax.jit` did. Any other value (a NumPy array, a number, a
`jax.Array` on one device) is a *host* value: every process has its own copy, and all copies are equal. What a process does
must depend on nothing but what all processes know. So the kind of sharding decides, and never whether the array can be
addressed here.

What can go wrong: host values that differ. Nothing compares them, and each process makes its part from its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from autopar.runtime.tuning import TUNING

T = TypeVar("T")


@runtime_checkable
class _Waitable(Protocol):
    """An array that may still be in computation. JAX's annotations do not have this method."""

    def is_ready(self) -> bool:
        """Whether the array has been computed, or its computation has failed."""


class ShapeAndType(Protocol):
    """Anything with the shape and the type of an array: an array, or a stand-in during tracing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""


def processes_of(sharding: Sharding) -> frozenset[int]:
    """Return the processes that have devices of a sharding."""
    devices: Iterable[jax.Device] = sharding.device_set
    return frozenset(device.process_index for device in devices)


def is_here(sharding: Sharding) -> bool:
    """Whether this process has a device of the sharding."""
    return jax.process_index() in processes_of(sharding)


def are_here(devices: Iterable[jax.Device]) -> bool:
    """Whether all devices belong to this process."""
    here = jax.process_index()
    return all(device.process_index == here for device in devices)


def absent(shape: Sequence[int], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Make an array that lies only on devices of other processes: shape, type and sharding, and no shard here."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def absent_like(like: ShapeAndType, sharding: Sharding) -> jax.Array:
    """Make such an array with the shape and type of `like`. Its type is weak if that of `like` is: all must trace alike."""
    array = absent(like.shape, like.dtype, sharding)
    return as_weak(array) if getattr(like, "weak_type", False) else array


def as_weak(array: jax.Array) -> jax.Array:
    """Return the array with a weak type. JAX's public functions make none without shards."""
    make: Callable[..., jax.Array] = type(array)
    shards = [shard.data for shard in array.addressable_shards]
    return make(jax.typeof(array).update(weak_type=True), array.sharding, shards, committed=True)


def is_global(value: object) -> TypeGuard[jax.Array]:
    """Whether a value is a global array, which has one sharding that all processes know."""
    return isinstance(value, jax.Array) and not isinstance(value.sharding, SingleDeviceSharding)


def as_host(value: object) -> object:
    """Copy a host value off its device, so that every process can pass it to a program of all. Other values are returned."""
    if not isinstance(value, jax.Array) or is_global(value):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = jnp.asarray(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return np.asarray(value)


def as_it_is_now(value: T) -> T:
    """A value for `jax.device_put`: a copy if it is a NumPy array, with JAX's present dtype for it, so that it may be refilled.

    `device_put` (0.10-0.12) may share the array's memory, even while a program reads it. It also caches what it converted, such
    as integers of 64 bits, under the array's identity for as long as that is in use. An array that is refilled in place would
    be taken for what it was, and one that is given under another `jax.enable_x64` would end the process.
    """
    if not isinstance(value, np.ndarray):
        return value
    dtype: np.dtype = np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    return cast(T, value.astype(dtype))


def from_host(value: ArrayLike, sharding: Sharding) -> jax.Array:
    """Make an array of a host value on devices of any processes. Each makes its own part; PRNG keys travel as words."""
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


def is_ready(array: object) -> bool:
    """Whether an array has been computed, or has failed. True also for a deleted array and for anything but an array."""
    try:
        return array.is_ready() if isinstance(array, _Waitable) else True
    except RuntimeError:  # it was consumed by a later program
        return True


def wait_until_ready(array: object, given_up: Callable[[], bool]) -> bool:
    """Wait for an array in Python, where a waiting thread can be told to stop. Returns False if it has given up.

    A thread that waits in XLA for another process cannot be woken, and aborts the process when the interpreter exits.
    """
    assert isinstance(array, _Waitable), f"a {type(array).__name__} cannot be waited for"
    pause_s = TUNING.shortest_pause_s
    while not array.is_ready():
        if given_up():
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, TUNING.longest_pause_s)
    return True
