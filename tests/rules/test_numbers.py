"""The same numbers as NumPy, whatever the strategies: integers that wrap, infinities, NaN, positions, arrays without elements.

`tests/rules/test_linearity.py` has the property of single operations; here programs in which several of them meet.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.testing import run_with_random_strategies


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def with_nan(x, *place):
    x = x.copy()
    x[place] = np.nan
    return x


LARGE = np.random.default_rng(1).integers(2**31, size=(8, 4), dtype=np.int32)
SMALL = np.random.default_rng(2).integers(200, 256, size=(8, 4)).astype(np.uint8)
X, WITH_NAN = floats(8, 4), with_nan(floats(8, 4), 5, 2)
PLACES = np.arange(8, dtype=np.int32) % 4


def segment_max(x, i):
    return jax.ops.segment_max(x, i, num_segments=4)


def distance(x):
    return jax.vmap(lambda v: v - jax.lax.pmean(v, "batch") + jax.lax.pmax(v, "batch"), axis_name="batch")(x)


CASES = {
    "a difference of unsigned sums, converted": (
        lambda n: (jnp.sum(n, 0) - jnp.sum(n * 3, 0)).astype(jnp.float32),
        (LARGE.astype(np.uint32),),
        lambda n: (n.sum(0, dtype=np.uint32) - (n * np.uint32(3)).sum(0, dtype=np.uint32)).astype(np.float32),
    ),
    "sums of bytes that wrap, widened": (
        lambda n: jnp.sum(n, 0, dtype=jnp.uint8).astype(jnp.int32),
        (SMALL,),
        lambda n: n.sum(0, dtype=np.uint8).astype(np.int32),
    ),
    "a product of sums of bytes that wrap, in wider numbers": (
        lambda n: jax.lax.dot(jnp.sum(n.reshape(2, 4, 4), 0, dtype=jnp.uint8), n[:4], preferred_element_type=jnp.int32),
        (SMALL,),
        lambda n: n.reshape(2, 4, 4).sum(0, dtype=np.uint8).astype(np.int32) @ n[:4].astype(np.int32),
    ),
    "a sum times infinity": (
        lambda x, z: jnp.sum(x, 0) * z,
        (X, np.full(4, np.inf, np.float32)),
        lambda x, z: x.sum(0) * z,
    ),
    "a difference of sums, by zero": (
        lambda x, z: (jnp.sum(x, 0) - jnp.sum(x[::-1] * 2, 0)) / z,
        (X, np.zeros(4, np.float32)),
        lambda x, z: (x.sum(0) - (2 * x).sum(0)) / z,
    ),
    "a sum through a matrix with infinities": (
        lambda x, w: jnp.sum(x.reshape(2, 4, 4), 0) @ w,
        ((np.abs(X) + 1) * np.repeat([9, -1], 4)[:, None].astype(np.float32), np.full((4, 4), np.inf, np.float32)),
        lambda x, w: np.full((4, 4), np.inf, np.float32),
    ),
    "a maximum with NaN": (lambda x: jnp.max(x, 0), (WITH_NAN,), lambda x: x.max(0)),
    "a minimum with NaN": (lambda x: jnp.min(x, 0), (WITH_NAN,), lambda x: x.min(0)),
    "a maximum of rows with NaN": (
        segment_max,
        (WITH_NAN, PLACES),
        lambda x, i: np.stack([x[i == n].max(0) for n in range(4)]),
    ),
    "a maximum of complex numbers": (
        lambda x: jnp.max(jax.lax.complex(x, -x), 0),
        (X,),
        lambda x: x.max(0) - 1j * x.max(0),
    ),
    "positions in bfloat16": (
        lambda x: x * jnp.arange(4096, dtype=jnp.bfloat16)[:, None],
        (np.ones((4096, 2), jnp.bfloat16),),
        lambda x: x * np.arange(4096).astype(jnp.bfloat16)[:, None],
    ),
    "random bits for no place": (
        lambda key: jax.random.bits(jax.random.wrap_key_data(key), (0, 4)),
        (np.zeros(2, np.uint32),),
        lambda key: np.zeros((0, 4), np.uint32),
    ),
    "rows at no place": (lambda x, i: x[i], (X, np.zeros(0, np.int32)), lambda x, i: x[i]),
    "products along a dimension, differentiated": (
        lambda x: jax.grad(lambda y: jnp.cumprod(y, 0).sum())(x),
        (np.ones((8, 4), np.float32),),
        lambda x: np.arange(8, 0, -1, dtype=np.float32)[:, None] * x,
    ),
    "means and maxima of a batch axis with a name": (
        distance,
        (np.round(X * 64) / 64,),
        lambda x: x - x.sum(0) / 8 + x.max(0),
    ),
    "a transform of a sum": (
        lambda x: jnp.abs(jnp.fft.fft(jnp.sum(x, 0))),
        (floats(4, 8, 8),),
        lambda x: np.abs(np.fft.fft(x.sum(0))).astype(np.float32),
    ),
}
JOINED_BY_XLA = {
    "rows of a slice that begins behind the end": (
        lambda x, i: jax.lax.dynamic_slice(x, (i, 0), (4, 4)),
        (floats(12, 4), np.int32(20)),
        lambda x, i: x[8:],
    ),
    "bytes added up from three": (
        lambda n: jax.lax.reduce(n, np.uint8(3), lambda a, b: a + b, (0,)),
        (SMALL,),
        lambda n: n.sum(0, dtype=np.uint8) + np.uint8(3),
    ),
}
"""What XLA simplifies wrongly beside the moves of a plan: a slice of a slice, and a reduction of arrays put together."""
CASES |= JOINED_BY_XLA
EXACT = ("bytes", "unsigned", "NaN", "position", "place", "rows")


def assert_same_numbers(name, seeds, mesh_shape):
    fun, args, reference = CASES[name]
    with np.errstate(all="ignore"):
        expected = np.asarray(reference(*args))
    for seed in seeds:
        actual = np.asarray(run_with_random_strategies(fun, *args, mesh_shape=mesh_shape, seed=seed))
        assert actual.dtype == expected.dtype
        if any(word in name for word in EXACT):
            np.testing.assert_array_equal(actual, expected)
        else:
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_random_strategies_give_the_same_numbers(name):
    assert_same_numbers(name, range(4), (2,))


@pytest.mark.parametrize("name", JOINED_BY_XLA)
def test_what_xla_joins_wrongly_stays_apart(name):
    assert_same_numbers(name, range(4), (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_random_strategies_give_the_same_numbers(name):
    for mesh_shape in ((4,), (2, 2), (2, 4)):
        assert_same_numbers(name, range(8), mesh_shape)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [0, 4, 7])
def test_a_value_is_never_partial_under_two_monoids(seed):
    """Neutral elements of min that are added up wrap around."""
    x = jnp.arange(24, dtype=jnp.int32).reshape(6, 4) % 7

    def least_and_sum(x):
        least = jnp.min(x, axis=0)
        for _ in range(4):
            least = jnp.squeeze(jnp.expand_dims(least, 0), 0).reshape(2, 2).reshape(4)
        return least, jnp.sum(x, axis=0)

    found = run_with_random_strategies(least_and_sum, x, mesh_shape=(2, 2), seed=seed)
    for one, expected in zip(found, least_and_sum(x), strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_the_high_halves_of_products_are_those_of_long_integers(dtype):
    info, draw = np.iinfo(dtype), np.random.default_rng(0)
    x, y = draw.integers(info.min, info.max, size=(2, 500), dtype=dtype, endpoint=True)
    x[:4], y[:4] = [info.min, info.max, info.min, info.max], [info.min, info.max, info.max, 0]
    (found,) = run_with_random_strategies(lambda x, y: (jax.lax.mulhi(x, y),), x, y, mesh_shape=(2, 2), seed=0)
    np.testing.assert_array_equal(found, (x.astype(np.int64) * y.astype(np.int64) >> info.bits).astype(dtype))
