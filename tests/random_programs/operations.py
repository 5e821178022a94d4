"""The operations that a `Writer` draws: `OPERATIONS`, by family; each takes the writer and returns the values it made."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.random_programs.writer import SIZES, Value, fit

# --- entry by entry ---------------------------------------------------------------------------------------------------

SMOOTH = (
    jnp.tanh,
    jnp.sin,
    jnp.negative,
    jnp.arctan,
    lax.erf,
    jax.nn.sigmoid,
    lambda x: jnp.exp(-jnp.square(jnp.tanh(x))),
    lambda x: jnp.log1p(x * x),
    lambda x: lax.rsqrt(x * x + 0.5),
    lambda x: jnp.sqrt(x * x + 0.5) - 1,
    lambda x: lax.integer_pow(jnp.tanh(x), 3),
    lambda x: x * 0.5 - 2,
    lambda x: x / 3,
    lambda x: 0 * x,
    lambda x: jnp.expm1(jnp.tanh(x)),
    lambda x: jnp.asinh(x),
    lambda x: lax.lgamma(x * x + 1),
    lambda x: x.astype(jnp.complex64).real + (1j * x).imag,
)
KINKED = (jnp.abs, jax.nn.relu, lambda x: jnp.clip(x, -0.5, 0.75), lambda x: jnp.maximum(x, 0.25))
PAIRS = (
    jnp.add,
    jnp.add,
    jnp.subtract,
    lambda x, y: x * jnp.tanh(y),
    lambda x, y: x / (1 + y * y),
    lambda x, y: jnp.atan2(x, 1 + y * y),
    lambda x, y: jnp.power(0.5 + jnp.tanh(x) ** 2, jnp.tanh(y)),
    lambda x, y: jnp.logaddexp(x, y),
    lambda x, y: abs(lax.complex(x, y) + (2 + 1j)),
)
JUMPING = (jnp.sign, jnp.floor, jnp.round, jnp.ceil, lambda x: x % 0.75)
WHOLE = (jnp.add, jnp.multiply, jnp.subtract, jnp.bitwise_xor, jnp.bitwise_and, jnp.maximum, jnp.minimum)
OF_ONE_INTEGER = (
    lambda i: i // 3,
    lambda i: i % 5,
    lambda i: -i,
    lambda i: ~i,
    lambda i: i << 2,
    lambda i: i >> 1,
    lax.population_count,
    lambda i: lax.rem(i, jnp.full_like(i, 3)),
)
TYPES = (jnp.int32, jnp.uint8, jnp.int16, jnp.uint32, jnp.int8)
COMPARISONS = (jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater)


def smooth(w):
    return Value(w.pick(SMOOTH)(w.number().array))


def kinked(w):
    return Value(w.pick(KINKED)(w.kinked().array))


def pair(w):
    x = w.number()
    return Value(w.pick(PAIRS)(x.array, w.like(x).array))


def larger(w):
    x = w.kinked()
    return Value(w.pick((jnp.maximum, jnp.minimum))(x.array, w.like(x).array))


def jumping(w):
    return Value(w.pick(JUMPING)(w.number(exact=True).array))


def integers(w):
    i = w.integer()
    made = w.pick(WHOLE)(i.array, w.like(i).array) if w.draw(2) else w.pick(OF_ONE_INTEGER)(i.array)
    return Value(made)


def change_type(w):
    kind = w.draw(4)
    if kind == 0:
        return Value(w.integer().array.astype(w.pick(TYPES)))
    if kind == 1:
        return Value((w.integer().array % 7).astype(jnp.float32), moved_only=True)
    if kind == 2:
        return Value(w.truth(w.shape()).astype(w.pick(TYPES)))
    return Value(lax.bitcast_convert_type(w.number(exact=True).array, jnp.int32) % 8)


def compare(w):
    x = w.number(exact=True) if w.draw(2) else w.integer()
    return Value(w.pick(COMPARISONS)(x.array, w.like(x).array))


def logic(w):
    shape = w.shape()
    return Value(w.pick((jnp.logical_and, jnp.logical_or, jnp.logical_xor))(w.truth(shape), ~w.truth(shape)))


def select(w):
    x = w.anything()
    y = w.like(x)
    return Value(jnp.where(w.truth(x.array.shape), x.array, y.array), x.moved_only and y.moved_only)


# --- sums, maxima, orders ---------------------------------------------------------------------------------------------


def total(w):
    x = w.number(1).array
    axis = w.pick([None, w.axis(x), (w.axis(x),)])
    how = w.pick((jnp.sum, jnp.mean, jnp.var, jax.nn.logsumexp, lambda v, axis: jnp.prod(jnp.tanh(v), axis)))
    return Value(how(x, axis=axis))


def total_of_integers(w):
    i = w.integer(1).array
    return Value(w.pick((jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.cumsum))(i, axis=w.axis(i)))


def extreme(w):
    x = w.kinked(1)
    how = w.pick((jnp.max, jnp.min, lax.cummax, lax.cummin, jnp.sort))
    return Value(how(x.array, axis=w.axis(x.array)))


def truths(w):
    mask = w.truth(w.shape(2))
    return Value(w.pick((jnp.any, jnp.all, jnp.sum))(mask, axis=w.draw(2)))


def running(w):
    x = w.number(1).array
    how = w.pick((jnp.cumsum, lax.cumlogsumexp, lambda v, axis: jnp.cumprod(jnp.tanh(v), axis=axis)))
    return Value(how(x, axis=w.axis(x)))


def positions(w):
    x = (w.number(1, exact=True) if w.draw(2) else w.integer(1)).array
    return Value(w.pick((jnp.argmax, jnp.argmin, jnp.argsort))(x, axis=w.axis(x)))


def largest(w):
    x = w.number(1, exact=True)
    count = 1 + w.draw(x.array.shape[-1])
    values, places = lax.top_k(x.array, count)
    return [Value(values, moved_only=True), Value(places)]


def normalize(w):
    x = w.number(1).array
    axis = w.axis(x)
    return Value(w.pick((jax.nn.softmax, jax.nn.log_softmax, lambda v, axis: v - v.mean(axis, keepdims=True)))(x, axis))


# --- products and windows ---------------------------------------------------------------------------------------------


def product(w):
    x = w.number(2).array
    inner = x.shape[-1]
    y = fit(w.number().array, (inner, w.pick(SIZES)))
    return Value(jnp.matmul(x, y) / max(inner, 1) ** 0.5)


def product_of_batches(w):
    x = w.number(3).array
    x = x.reshape(-1, *x.shape[-2:])
    y = fit(w.number().array, (x.shape[0], w.pick(SIZES), x.shape[2]))
    return Value(jnp.einsum(w.pick(("bij,bkj->bik", "bij,bkj->bki", "bij,bkj->ik")), x, y) / 4)


def product_of_integers(w):
    i = w.integer(2).array
    i = i.reshape(i.shape[0], -1)
    return Value(i @ i.T)


def convolve(w):
    x = fit(w.number().array, (w.pick((2, 4, 8)), 8, w.pick((2, 4))))
    kernel = fit(w.number().array, (3, x.shape[2], w.pick((2, 4, 6))))
    stride, padding = w.pick((1, 2)), w.pick(("SAME", "VALID"))
    return Value(lax.conv_general_dilated(x, kernel, (stride,), padding, dimension_numbers=("NWC", "WIO", "NWC")) / 4)


def pool(w):
    x = w.number(2).array
    x = x.reshape(x.shape[0], -1)
    window, padding = (1, min(2, x.shape[1])), w.pick(("SAME", "VALID"))
    if w.draw(2) and not w.gradient:
        return Value(lax.reduce_window(x, -jnp.inf, lax.max, window, window, padding))
    return Value(lax.reduce_window(x, 0.0, lax.add, window, (1, 1), padding))


def solve(w):
    x = fit(w.number().array, (w.pick((1, 2, 4)), 3, 3))
    x = jnp.tanh(jnp.nan_to_num(x))
    symmetric = x @ x.swapaxes(1, 2) + 2 * jnp.eye(3)
    right = fit(w.number().array, (x.shape[0], 3, 2))
    how = (
        jnp.linalg.cholesky,
        lambda a: jnp.linalg.solve(a, right),
        jnp.linalg.inv,
        lambda a: jnp.linalg.slogdet(a)[1],
    )
    return Value(w.pick(how)(symmetric))


def frequencies(w):
    x = w.number(1).array
    return Value(abs(jnp.fft.rfft(x)[..., :4] + (1 + 1j)) if x.shape[-1] > 1 else x + 1)


# --- moves ------------------------------------------------------------------------------------------------------------


def reshape(w, x):
    sizes = [x.size]
    for divisor in (2, 3, 4):
        if sizes[-1] % divisor == 0 and w.draw(2):
            sizes[-1:] = [divisor, sizes[-1] // divisor]
    return x.reshape(w.pick([tuple(sizes), (-1,), (x.shape[0], -1), (*x.shape, 1), (-1, x.shape[-1])]))


def transpose(w, x):
    return x.transpose(tuple(w.rng.permutation(x.ndim).tolist()))


def cut(w, x):
    axis = w.axis(x)
    first = w.draw(x.shape[axis])
    last = first + 1 + w.draw(x.shape[axis] - first)
    return lax.slice_in_dim(x, first, last, stride=w.pick((1, 1, 2)), axis=axis)


def pad(w, x):
    low, high, between = w.draw(3), w.draw(3), w.draw(2)
    config = [(0, 0, 0)] * x.ndim
    config[w.axis(x)] = (low, high, between)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def roll(w, x):
    return w.pick((lambda v, a: jnp.roll(v, 3, a), lambda v, a: jnp.flip(v, a)))(x, w.axis(x))


def join(w, x):
    axis = w.axis(x)
    return jnp.concatenate([x, lax.rev(x, (axis,)), x], axis=axis) if x.size < 400 else jnp.split(x, 1, axis)[0]


def spread(w, x):
    return jnp.broadcast_to(x[..., None], (*x.shape, w.pick((1, 2, 3)))) if x.size < 400 else x[:1]


def take(w, x):
    places = fit(w.integer().array, (w.pick(SIZES),)).astype(jnp.int32)
    mode = w.pick(("clip", "wrap", "fill"))
    return jnp.take(x, places, axis=w.axis(x), mode=mode, fill_value=0 if mode == "fill" else None)


def take_along(w, x):
    places = fit(w.integer().array, x.shape).astype(jnp.int32)
    return jnp.take_along_axis(x, places % x.shape[-1], axis=x.ndim - 1)


def slice_somewhere(w, x):
    """XLA of JAX 0.10 joins a slice of a slice wrongly where they begin outside, in `jax.jit` too; so none does here."""
    axis = w.axis(x)
    size = 1 + w.draw(x.shape[axis])
    start = fit(w.integer().array, ()).astype(jnp.int32) % (x.shape[axis] - size + 1)
    return lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def write_somewhere(w, x):
    start = fit(w.integer().array, ()).astype(jnp.int32)
    axis = w.axis(x)
    return lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(x, 0, 1, axis=axis), start, axis=axis)


def set_first(w, x):
    return x.at[: 1 + w.draw(x.shape[0])].set(jnp.zeros((), x.dtype))


MOVES = (
    reshape,
    reshape,
    transpose,
    cut,
    pad,
    roll,
    join,
    spread,
    take,
    take_along,
    slice_somewhere,
    write_somewhere,
    set_first,
)


def move(w):
    x = w.anything(1)
    return Value(w.pick(MOVES)(w, x.array), x.moved_only)


def write_at(w):
    """Rows added to, or joined with, others; in sums their order rounds."""
    x = w.number(1)
    i = fit(w.integer().array, (w.pick(SIZES),)).astype(jnp.int32)
    rows = fit(w.number(exact=w.gradient).array, (i.shape[0], *x.array.shape[1:]))
    how = w.pick(("add", "add", "max", "min")) if not w.gradient else "add"
    return Value(getattr(x.array.at[i], how)(rows, mode=w.pick(("drop", "clip"))))


def count_of(w):
    i = w.integer(1).array
    return Value(jnp.bincount(i.ravel() % 6, length=6) if w.draw(2) else jax.nn.one_hot(i % 4, 4, dtype=jnp.int32))


def ramp(w):
    return Value(w.pick((jnp.arange(w.pick(SIZES)), lax.broadcasted_iota(jnp.uint8, (4, 6), w.draw(2)))))


def noise(w):
    key = jax.random.fold_in(jax.random.key(w.draw(99)), fit(w.integer().array, ()).astype(jnp.uint32))
    shape = w.shape()
    kind = w.draw(4)
    if kind == 0:
        return Value(jax.random.bits(key, shape, jnp.uint32))
    if kind == 1:
        return Value(jax.random.bernoulli(key, 0.7, shape))
    if kind == 2:
        return Value(jax.random.randint(key, shape, -9, 9))
    return Value(jax.random.normal(key, shape))


OPERATIONS = {
    family.__name__: family
    for family in (
        smooth,
        kinked,
        pair,
        larger,
        jumping,
        integers,
        change_type,
        compare,
        logic,
        select,
        total,
        total_of_integers,
        extreme,
        truths,
        running,
        positions,
        largest,
        normalize,
        product,
        product_of_batches,
        product_of_integers,
        convolve,
        pool,
        solve,
        frequencies,
        move,
        write_at,
        count_of,
        ramp,
        noise,
    )
} | {f"move_{k}": move for k in range(5)}
