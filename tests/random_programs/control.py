"""Control flow and calls around random operations: `CONTROL`, by family; each takes a `Writer` and returns the values it made."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.random_programs.writer import MOST_ENTRIES, Value, fit


def bodies(w, count=1):
    """Seeds of sub-programs, and how many operations each may have."""
    return [(int(seed), 1 + w.draw(3)) for seed in w.rng.integers(1 << 30, size=count)]


def written(w, body, known):
    """The writer of a sub-program, which has drawn its operations."""
    seed, count = body
    inner = w.within(seed, known)
    inner.block(count)
    w.used += inner.used
    return inner


def last_number(inner, shape):
    """The latest number of a sub-program in a shape."""
    return fit(inner.number().array, shape)


def last_integer(inner):
    """The latest integer of a sub-program, as a small one."""
    return fit(inner.integer().array, ()).astype(jnp.int32) % 11


def scan(w):
    rows, carried, outer = w.number(1), w.number(), w.anything()
    (body,) = bodies(w)

    def step(carry, row):
        value, count = carry
        inner = written(w, body, [Value(value), Value(count), Value(row, rows.moved_only), outer])
        new = last_number(inner, value.shape)
        return (new, count + last_integer(inner)), (new.sum(), inner.known[-1].array)

    start = (carried.array.astype(jnp.float32), jnp.int32(w.draw(5)))
    stack = rows.array[:6] if rows.array.size <= MOST_ENTRIES else rows.array[:1]
    (value, count), (sums, stacked) = lax.scan(step, start, stack, reverse=bool(w.draw(2)))
    return [Value(value), Value(count), Value(sums), Value(stacked)]


def while_loop(w):
    carried, outer = w.number(), w.anything()
    (body,) = bodies(w)
    limit = fit(w.integer().array, ()).astype(jnp.int32) % 4

    def step(carry):
        value, count, turns = carry
        inner = written(w, body, [Value(value), Value(count), outer])
        return last_number(inner, value.shape), count + last_integer(inner), turns + 1

    def goes_on(carry):
        return (carry[2] < limit) & (carry[1] < 1000)

    first = (carried.array.astype(jnp.float32), jnp.int32(2), jnp.int32(0))
    value, count, turns = lax.while_loop(goes_on, step, first)
    return [Value(value), Value(count), Value(turns)]


def counted_loop(w):
    carried = w.number()
    (body,) = bodies(w)

    def step(i, value):
        return last_number(written(w, body, [Value(value), Value(i)]), value.shape)

    return Value(lax.fori_loop(0, 1 + w.draw(3), step, carried.array.astype(jnp.float32)))


def cond(w):
    given, outer, shape = w.number(), w.anything(), w.shape()
    which = fit(w.integer().array, ()).astype(jnp.int32)

    def branch(body):
        def run(value):
            inner = written(w, body, [Value(value, given.moved_only), outer])
            return last_number(inner, shape).astype(jnp.float32), last_integer(inner)

        return run

    same = lambda value: (fit(value, shape).astype(jnp.float32), jnp.int32(3))  # noqa: E731
    branches = [*map(branch, bodies(w, 1 + w.draw(2))), same]
    return [*map(Value, lax.switch(which % len(branches), branches, given.array))]


def called(w, wrap):
    """A sub-program of three values that `wrap` turns into a function to call."""
    given = [w.number(), w.integer(), w.anything()]
    (body,) = bodies(w)
    moved = []

    def run(*arrays):
        inner = written(w, body, [Value(a, v.moved_only) for a, v in zip(arrays, given, strict=True)])
        made = inner.known[3:]
        moved[:] = [value.moved_only for value in made]
        return [value.array for value in made]

    results = wrap(run)(*(value.array for value in given))
    return [Value(array, was) for array, was in zip(results, moved, strict=True)]


def nested_jit(w):
    return called(w, jax.jit)


def recomputed(w):
    return called(w, jax.checkpoint)


def custom_jvp(w):
    @jax.custom_jvp
    def run(x):
        return jnp.tanh(x) * 2

    run.defjvp(lambda primals, tangents: (run(*primals), tangents[0] * jnp.cos(primals[0])))
    return Value(run(w.number().array))


def custom_vjp(w):
    axis_sum = w.draw(2)

    @jax.custom_vjp
    def run(x, y):
        return jnp.sin(x) * y

    def backward(kept, g):
        x, y = kept
        return g * y * 0.5 + (g.sum() if axis_sum else 0.0), g * x

    run.defvjp(lambda x, y: (run(x, y), (x, y)), backward)
    x = w.number()
    return Value(run(x.array, w.like(x).array))


def vmapped(w):
    given, outer = w.number(2), w.anything()
    (body,) = bodies(w)
    moved = []

    def run(row):
        inner = written(w, body, [Value(row, given.moved_only), outer])
        made = inner.known[2:]
        moved[:] = [value.moved_only for value in made]
        return [value.array for value in made]

    rows = given.array[: max(1, min(8, MOST_ENTRIES // max(1, given.array.size // given.array.shape[0])))]
    return [Value(array, was) for array, was in zip(jax.vmap(run)(rows), moved, strict=True)]


COLLECTIVES = (
    lambda v: v - lax.pmean(v, "i"),
    lambda v: lax.psum(v, "i"),
    lambda v: lax.all_gather(v, "i").sum(axis=0) + v,
    lambda v: v * (1 + lax.axis_index("i")),
    lambda v: v + lax.pmax(lax.stop_gradient(v), "i"),
)


def vmapped_collective(w):
    return Value(jax.vmap(w.pick(COLLECTIVES), axis_name="i")(w.number(1).array))


def associative_scan(w):
    x = w.number(1).array
    how = w.pick((jnp.add, lambda a, b: a * 0.5 + b, lambda a, b: jnp.tanh(a) * jnp.tanh(b)))
    return Value(lax.associative_scan(how, x[:8], axis=0))


CONTROL = {
    family.__name__: family
    for family in (
        scan,
        while_loop,
        counted_loop,
        cond,
        nested_jit,
        recomputed,
        custom_jvp,
        custom_vjp,
        vmapped,
        vmapped_collective,
        associative_scan,
    )
}
