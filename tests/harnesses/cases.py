"""JAX's own harnesses of its primitives as programs to compare: each harness with the gradient of its floating-point inputs.

`Case.of` traces a harness once. A program of several cases is compiled once and run once with plain `jax.jit`, and once with
random strategies on a mesh; `compare` names the cases whose numbers differ.
"""

import dataclasses
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from jax._src.internal_test_util import test_harnesses  # noqa: TID251 - JAX offers its harnesses nowhere else

MESHES = ((2, 2), (3, 2), (8,))
RELATIVE = {
    "float64": 1e-12,
    "complex128": 1e-12,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 5e-3,
    "bfloat16": 4e-2,
}
"""What a leaf of a type may be off by, relative to its largest entry: about a hundred, or for short types five, roundings."""
LEAST_RELATIVE = 0.25
"""The same of the types of 8 bits and fewer, whose neighbours are up to a quarter apart."""
TIES_ARE_FREE = ("approx_top_k",)
"""Groups that return the places of equal entries in any order, `jax.jit` another one if it drops a result."""
BROKEN_PROMISES = ("gather_batchdims_shape_2_3_3_start_indices_shape_2_3_slice_sizes_1_3_2_",)
"""Beginnings of the names of harnesses that promise JAX places inside of an array, and have others: gradients are undefined."""
NOT_RUN_BY_JAX = "JAX itself does not run it"


@dataclasses.dataclass(frozen=True)
class Case:
    """A traced harness: the jaxpr of its results and, where JAX has them, of the gradients of its inputs; with its arguments."""

    name: str
    group: str
    jaxpr: object
    arguments: tuple

    @classmethod
    def of(cls, harness, *, gradient=True):
        """The case of a harness, with gradients if it has some; None if JAX itself does not trace it."""
        rng = np.random.RandomState(seed_of(harness.fullname))
        arguments = [
            jnp.asarray(x) if isinstance(x, np.ndarray | float | int) else x for x in harness.dyn_args_maker(rng)
        ]
        if harness.group_name in TIES_ARE_FREE:
            arguments = [without_ties(x) for x in arguments]
        leaves, tree = jax.tree.flatten(arguments)

        def fun(*flat):
            return jax.tree.leaves(harness.dyn_fun(*jax.tree.unflatten(tree, flat)))

        gradient = gradient and not harness.fullname.startswith(BROKEN_PROMISES)
        jaxpr = trace(with_gradients(fun, leaves, rng), leaves) if gradient else None
        jaxpr = jaxpr or trace(fun, leaves)
        return jaxpr and cls(harness.fullname, harness.group_name, jaxpr, tuple(leaves))


def without_ties(x):
    """Numbers in the same order along the last dimension, of which no two are equal: neighbours in their type."""
    order = jnp.argsort(jnp.argsort(x))
    first = jnp.ones((), x.dtype).view(f"uint{8 * x.dtype.itemsize}")
    return (first + order.astype(first.dtype)).view(x.dtype)


def seed_of(name):
    """A number that depends on the name alone."""
    return zlib.crc32(name.encode())


def trace(fun, arguments):
    """The jaxpr of a function, or None if JAX refuses it."""
    if fun is None:
        return None
    try:
        return jax.make_jaxpr(fun)(*arguments)
    except (TypeError, ValueError, NotImplementedError, AssertionError):
        return None


def with_gradients(fun, leaves, rng):
    """`fun` with the derivatives of its results by all inexact arguments behind them; None if there are none."""
    places = [i for i, x in enumerate(leaves) if is_inexact(x)]
    try:
        results = jax.eval_shape(fun, *leaves)
    except (TypeError, ValueError, NotImplementedError, AssertionError):
        return None
    picked = [i for i, r in enumerate(results) if is_inexact(r)]
    if not places or not picked:
        return None
    weights = [jnp.asarray(rng.uniform(0.5, 1.5, results[i].shape), results[i].dtype) for i in picked]

    def both(*flat):
        def of_inexact(*inexact):
            given = list(flat)
            for i, x in zip(places, inexact, strict=True):
                given[i] = x
            made = fun(*given)
            return [made[i] for i in picked]

        _, pull = jax.vjp(of_inexact, *(flat[i] for i in places))
        return [*fun(*flat), *pull(weights)]

    return both


def is_inexact(x):
    """Whether an array's entries are rounded."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def all_harnesses():
    """The harnesses that JAX itself runs on a CPU, in alphabetical order."""
    chosen = [h for h in test_harnesses.all_harnesses if h.filter("cpu")]
    return sorted(chosen, key=lambda h: (h.group_name, h.fullname))


def differences(actual, expected):
    """What is wrong with the leaves of one case, as text; empty if nothing is."""
    problems = [difference(as_numpy(a), as_numpy(e)) for a, e in zip(actual, expected, strict=True)]
    return "; ".join(f"result {i}: {p}" for i, p in enumerate(problems) if p)


def difference(a, e):
    """What is wrong with one leaf, or None."""
    if (a.shape, a.dtype) != (e.shape, e.dtype):
        return f"{a.dtype}{list(a.shape)} instead of {e.dtype}{list(e.shape)}"
    if not a.size:
        return None
    if not jnp.issubdtype(e.dtype, jnp.inexact):
        wrong = int(np.sum(a != e))
        return f"{wrong} of {e.size} entries differ: {a[a != e][:3]} for {e[a != e][:3]}" if wrong else None
    allowed = RELATIVE.get(e.dtype.name, LEAST_RELATIVE)
    wide = np.complex128 if jnp.issubdtype(e.dtype, jnp.complexfloating) else np.float64
    a, e = a.astype(wide), e.astype(wide)
    finite = np.isfinite(e)
    if not np.array_equal(finite, np.isfinite(a)) or not same_infinities(a[~finite], e[~finite]):
        return "infinities or NaNs in different places"
    scale = float(np.max(np.abs(e[finite]), initial=0.0)) or 1.0
    error = float(np.max(np.abs(a[finite] - e[finite]), initial=0.0))
    return f"off by {error / scale:.2e} of the scale {scale:.3g}" if error > allowed * scale else None


def same_infinities(a, e):
    """Whether entries that are not finite are the same infinities; a complex number with a NaN is NaN."""
    nan = np.isnan(e)
    return bool(np.array_equal(nan, np.isnan(a)) and np.array_equal(a[~nan], e[~nan]))


def as_numpy(leaf):
    """A leaf as a NumPy array; keys as their words."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
