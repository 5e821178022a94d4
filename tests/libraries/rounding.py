"""How far rounding alone moves what a step returns: by this the corpus judges what another order of sums may change.

`jax.jit` runs the step again from numbers that are moved by at most one unit in their last place. How far its results move shows
what the step makes of rounding: little for most, but a bias in front of a norm has a gradient that is rounding alone, and a
variance as the difference of two means carries the rounding of both. The spread comes from `jax.jit` alone, so that it excuses
no wrong number of a plan.
"""

import jax
import jax.numpy as jnp
import numpy as np

REPETITIONS = 8


def is_inexact(leaf):
    """Whether rounding can move the leaf; a number of Python, such as the count in flax's TrainState, is exact."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def moved_by_rounding(tree, seed):
    """The tree with each floating-point number multiplied by 1 + e, for a random e of at most one unit in the last place."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        if not is_inexact(leaf):
            return leaf
        by = 1 + float(jnp.finfo(leaf.dtype).eps) * rng.uniform(-1, 1, leaf.shape)
        return jnp.asarray((np.asarray(leaf) * by).astype(leaf.dtype))

    return jax.tree.map(moved, tree)


def two_steps(run, state, batch):
    """What `run` returns for the first step, and for the second from the state that the first returned."""
    first = run(state, batch)
    return first, run(first[0], batch)


def spread_of_rounding(run, state, batch, expected):
    """For each of two steps, {name of a leaf: the largest distance by which rounding of the inputs moves an entry}.

    Args:
        run: the step, compiled by `jax.jit`.
        state, batch: its arguments.
        expected: what `two_steps` returns for them.
    """
    spread = [dict[str, float](), dict[str, float]()]
    for seed in range(REPETITIONS):
        state_and_batch = moved_by_rounding((state, batch), seed)
        for found, moved, wanted in zip(spread, two_steps(run, *state_and_batch), expected, strict=True):
            for (path, here), there in zip(jax.tree.leaves_with_path(moved), jax.tree.leaves(wanted), strict=True):
                if is_inexact(here) and here.size:
                    name = jax.tree_util.keystr(path)
                    found[name] = max(found.get(name, 0.0), float(_distance(here, there)))
    return tuple(spread)


def _distance(here, there):
    """The largest, over entries that are finite in both."""
    wide = np.complex128 if jnp.issubdtype(here.dtype, jnp.complexfloating) else np.float64
    here, there = np.asarray(here).astype(wide), np.asarray(there).astype(wide)
    both = np.isfinite(here) & np.isfinite(there)
    return np.max(np.abs(here - there), where=both, initial=0.0)
