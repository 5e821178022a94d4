"""Random programs of loops in loops, by seed: scans, whiles and conds nested in each other, on a few matrices.

Every loop has what can go wrong in one: constants that it closes over, carries that change their layout, stacks, results that
are literals, values that the body hands on unchanged, and outer values that several loops read.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, COLUMNS, LENGTH = 8, 24, 4


class Writer:
    """Draws operations; every function of it takes and returns matrices of `ROWS` times `COLUMNS`."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def pick(self, values):
        return values[int(self.rng.integers(len(values)))]

    def block(self, known, weights, depth):
        """A few operations and loops, each on values that are known by then; returns the last ones."""
        known = list(known)
        for _ in range(int(self.rng.integers(2, 4))):
            kinds = [self.product, self.pointwise, self.reduction]
            kinds += [self.scan, self.while_loop, self.cond] * 2 if depth else []
            known.append(self.pick(kinds)(known, weights, depth - 1))
        return known[-1]

    def product(self, known, weights, depth):
        return self.pick(known) @ self.pick(weights)

    def pointwise(self, known, weights, depth):
        return jnp.tanh(self.pick(known)) + self.pick(known)

    def reduction(self, known, weights, depth):
        return self.pick(known) - self.pick(known).sum(axis=int(self.rng.integers(2)), keepdims=True)

    def scan(self, known, weights, depth):
        stack = jnp.stack([self.pick(known) for _ in range(LENGTH)])
        outer, seed = self.pick(known), int(self.rng.integers(1 << 30))

        def body(carry, row):
            made = Writer(seed).block([carry[0], row, outer], weights, depth)
            return (made, carry[0]), (made * 2, jnp.float32(1), row.sum(axis=0))

        (one, other), (rows, ones, sums) = lax.scan(
            body, (self.pick(known), self.pick(known)), stack, reverse=bool(self.rng.integers(2))
        )
        return one + other + rows[1] + ones[0] + sums[2]

    def while_loop(self, known, weights, depth):
        outer, seed = self.pick(known), int(self.rng.integers(1 << 30))

        def goes_on(carry):
            value, count = carry
            return (count < 3) & ((value * outer).sum() < 1e6)

        def body(carry):
            value, count = carry
            return Writer(seed).block([value, outer], weights, depth), count + 1

        return lax.while_loop(goes_on, body, (self.pick(known), 0))[0]

    def cond(self, known, weights, depth):
        seeds = [int(seed) for seed in self.rng.integers(1 << 30, size=2)]
        given, outer = self.pick(known), self.pick(known)
        branches = [lambda x, s=s: Writer(s).block([x, outer], weights, depth) for s in seeds]
        same = lambda x: x  # noqa: E731
        return lax.switch(jnp.int32(given[0, 0]) % 3, [*branches, same], self.pick(known))


def nested_program(seed, *, depth):
    """(function, arguments): a program with loops nested up to `depth` deep, and what to call it with."""
    rng = np.random.default_rng(seed)
    args = [rng.normal(size=(ROWS, COLUMNS)), *rng.normal(size=(2, COLUMNS, COLUMNS)) / 5]

    def run(x, *weights):
        return Writer(seed).block([x, x * 2], weights, depth)

    return run, [jnp.asarray(a, jnp.float32) for a in args]
