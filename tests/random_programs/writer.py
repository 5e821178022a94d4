"""Draws programs: a `Writer` applies random operations to the values that are known by then.

A value is exact if any correct program has it bit for bit: integers, booleans, and numbers that were only moved. What jumps,
such as a comparison, a rounding or a position, is drawn of exact values alone; so is, in programs whose gradient is taken,
what has a kink. Everything else is continuous, so that rounding in another order stays rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZES = (1, 2, 3, 4, 6, 8, 12, 24)
MOST_ENTRIES = 1024


@dataclasses.dataclass(frozen=True)
class Value:
    """An array, and whether any correct program has it bit for bit."""

    array: jax.Array
    moved_only: bool = False

    @property
    def is_number(self):
        return jnp.issubdtype(self.array.dtype, jnp.floating)

    @property
    def is_integer(self):
        return jnp.issubdtype(self.array.dtype, jnp.integer)

    @property
    def is_truth(self):
        return self.array.dtype == jnp.bool_

    @property
    def is_exact(self):
        return self.moved_only or not self.is_number


def fit(x, shape):
    """`x` cut, repeated and broadcast to a shape."""
    if not x.size:
        return jnp.zeros(shape, x.dtype)
    while x.ndim > len(shape):
        x = x[x.shape[0] // 2]
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    for axis, wanted in enumerate(shape):
        if x.shape[axis] not in (1, wanted):
            times = -(-wanted // x.shape[axis])
            x = jnp.concatenate([x] * times, axis=axis) if times > 1 else x
            x = lax.slice_in_dim(x, 0, wanted, axis=axis)
    return jnp.broadcast_to(x, shape)


class Writer:
    """Draws operations by a seed.

    Args:
        seed: what is drawn.
        known: values to begin with; there is a number among them.
        families: by name, functions of a writer that return the values they made.
        depth: how deep control flow may be nested from here.
        gradient: whether the gradient of the program is taken.
    """

    def __init__(self, seed, known, families, *, depth, gradient):
        self.rng = np.random.default_rng(seed)
        self.known = list(known)
        self.families, self.depth, self.gradient = families, depth, gradient
        self.used = []

    def draw(self, below):
        """A whole number."""
        return int(self.rng.integers(below))

    def pick(self, values):
        """One of a sequence."""
        return values[self.draw(len(values))]

    def shape(self, rank=None):
        """A shape of at most 1,024 entries, now and then an empty one."""
        rank = self.draw(4) if rank is None else rank
        sizes = [self.pick(SIZES) for _ in range(rank)]
        while np.prod(sizes, dtype=int) > MOST_ENTRIES:
            sizes[int(np.argmax(sizes))] //= 2
        if sizes and not self.draw(60):
            sizes[self.draw(rank)] = 0
        return tuple(sizes)

    def latest(self, fits):
        """One of the known values, of those that fit, rather a late one; None if none fits."""
        chosen = [value for value in self.known if fits(value)]
        return chosen[max(self.draw(len(chosen)), self.draw(len(chosen)))] if chosen else None

    def anything(self, rank=0):
        """A value of at least so many dimensions, if there is one."""
        return self.latest(lambda v: v.array.ndim >= rank and v.array.size) or self.number(rank)

    def number(self, rank=0, *, exact=False):
        """A number of at least so many dimensions; `exact` asks for one that was only moved."""
        found = self.latest(
            lambda v: v.is_number and v.array.ndim >= rank and v.array.size and (v.is_exact or not exact)
        )
        if found is None:
            source = self.latest(lambda v: v.is_exact and v.array.size)
            array = fit((source or self.known[0]).array, tuple(self.pick(SIZES[:6]) for _ in range(rank)))
            array = array.astype(jnp.float32) if array.dtype != jnp.bool_ else jnp.where(array, 0.75, -0.5)
            array = array if source is None or source.is_number else array % 7 / 4
            found = Value(array.astype(jnp.float32), source is not None)
        return found

    def kinked(self, rank=0):
        """A number to apply a function with a kink to."""
        return self.number(rank, exact=self.gradient)

    def integer(self, rank=0):
        """An integer array of at least so many dimensions."""
        found = self.latest(lambda v: v.is_integer and v.array.ndim >= rank and v.array.size)
        if found is None:
            number = self.number(rank, exact=True).array
            found = Value((jnp.nan_to_num(number, posinf=5.0, neginf=-5.0) * 10).astype(jnp.int32))
        return found

    def truth(self, shape):
        """A boolean array of a shape."""
        found = self.latest(lambda v: v.is_truth) or Value(self.integer().array % 3 == 0)
        return fit(found.array, shape)

    def like(self, value):
        """A value of the same kind and shape, and as exact where `value` is exact and the gradient is taken."""
        array = value.array
        alike = self.latest(lambda v: v.array.dtype == array.dtype and (v.is_exact or not value.is_exact)) or value
        return Value(fit(alike.array, array.shape), alike.moved_only)

    def axis(self, array):
        """One of an array's dimensions."""
        return self.draw(array.ndim)

    def block(self, count):
        """Draw so many operations; the values made."""
        first = len(self.known)
        for _ in range(count):
            names = sorted(self.families["operations"])
            if self.depth and not self.draw(4):
                names = sorted(self.families["control"].keys() - ({"while_loop"} if self.gradient else set()))
            name = self.pick(names)
            self.used.append(name)
            made = {**self.families["operations"], **self.families["control"]}[name](self)
            self.known += made if isinstance(made, list) else [made]
        return self.known[first:]

    def within(self, seed, known):
        """A writer of the body of control flow."""
        return Writer(seed, known, self.families, depth=self.depth - 1, gradient=self.gradient)
