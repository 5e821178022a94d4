"""Small programs of every kind of operation, with arguments whose sizes are multiples of 8 and of 3: `PROGRAMS`, by name."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def floats(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def integers(below, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(below, size=shape).astype(np.int32))


X = floats(8, 24)
CUBE = floats(4, 8, 24, seed=1)
WEIGHTS = floats(24, 24, seed=2) / 5
ROWS = integers(24, 8, 3, seed=3)
KEY = jax.random.key(7)


# --- control flow -----------------------------------------------------------------------------------------------------


def scan_with_carry_and_stacks(w, xs):
    def body(carry, x):
        carry = jnp.tanh(carry @ w + x)
        return carry, (carry.sum(axis=0), x * 2)

    return lax.scan(body, jnp.zeros((8, 24)), xs)


def scan_gradient(w, xs):
    return jax.value_and_grad(lambda w, xs: (scan_with_carry_and_stacks(w, xs)[0] ** 2).sum(), argnums=(0, 1))(w, xs)


def scan_backwards_over_the_stack(w, xs):
    def body(carry, x):
        carry = carry * 0.5 + x @ w
        return carry, carry.max()

    return lax.scan(body, xs[0] * 0, xs, reverse=True)


def scan_of_scans(w, xs):
    def inner(carry, row):
        return carry + row, carry * row

    def outer(carry, x):
        carry, ys = lax.scan(inner, carry, x)
        return carry @ w, ys.sum(axis=0)

    return lax.scan(outer, jnp.ones(24), xs)


def scan_with_recomputation(w, xs):
    @jax.checkpoint
    def body(carry, x):
        return jnp.sin(carry @ w) + x, None

    return jax.grad(lambda w: lax.scan(body, xs[0], xs)[0].sum())(w)


def scan_without_stacks(x):
    return lax.fori_loop(0, 3, lambda i, a: a + i * x, x)


def scan_accumulates_gradients(w, xs):
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    return lax.scan(lambda total, x: (total + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)[0]


def while_until_small(x):
    return lax.while_loop(lambda s: (s[0] ** 2).sum() > 1.0, lambda s: (s[0] * 0.5, s[1] + 1), (x, 0))


def while_with_constants(x, w):
    return lax.while_loop(lambda a: jnp.abs(a).max() < 5 * jnp.abs(w).max(), lambda a: a * 1.5 + w[0], x / 10)


def while_of_each_row(x):
    """Rows are done after different numbers of steps."""
    row = lambda r: lax.while_loop(lambda s: (s[0] ** 2).sum() > 9.0, lambda s: (s[0] * 0.8, s[1] + 1), (r, 0))  # noqa: E731
    return jax.vmap(row)(x)


def cond_on_a_sum(x):
    return lax.cond(x.sum() > 0, lambda a: (a * 2, a.sum(axis=0)), lambda a: (a - 1, a.max(axis=0)), x)


def switch_on_data(x, i):
    branches = [lambda a: a, lambda a: a @ a.T @ a / 100, lambda a: jnp.cumsum(a, axis=1)]
    return lax.switch(i[0, 0] % 3, branches, x)


def cond_gradient(x, w):
    return jax.grad(lambda w: lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: (x * 2 @ jnp.sin(w)).sum()))(w)


CONTROL_FLOW = {
    "scan": (scan_with_carry_and_stacks, WEIGHTS, CUBE),
    "scan_gradient": (scan_gradient, WEIGHTS, CUBE),
    "scan_reverse": (scan_backwards_over_the_stack, WEIGHTS, CUBE),
    "scan_of_scans": (scan_of_scans, WEIGHTS, CUBE),
    "scan_recomputed": (scan_with_recomputation, WEIGHTS, CUBE),
    "scan_accumulates": (scan_accumulates_gradients, WEIGHTS, CUBE),
    "fori_loop": (scan_without_stacks, X),
    "while": (while_until_small, X),
    "while_constants": (while_with_constants, X, WEIGHTS),
    "while_of_each_row": (while_of_each_row, X),
    "cond": (cond_on_a_sum, X),
    "cond_gradient": (cond_gradient, X, WEIGHTS),
    "switch": (switch_on_data, X, ROWS),
}


# --- indexing ---------------------------------------------------------------------------------------------------------

FAR = jnp.asarray([[0, -1, 23], [24, 5, -24], [-25, 100, 7], [3, 3, 3], [2, -2, 1], [9, 8, 30], [-30, 0, 0], [1, 2, 3]])
SPOTS = jnp.asarray([0, 7, 3, 3, 8, -1, -9, 5], jnp.int32)
"""Positions in eight rows: repeated, negative, and outside on both sides."""


def scatters(method, mode):
    def run(x, spots, rows):
        return getattr(x.at[spots], method)(rows, mode=mode)

    return run


def set_once(x, rows):
    return x.at[jnp.asarray([6, 0, -1, 9, 2, 1, 4, 3])].set(rows, mode="drop")


def both_coordinates(x, i):
    return x.at[i[:, 0] % 8, i[:, 1]].add(1.5), x[i[:, 0] % 8, i[:, 1]], x.at[2, 5].set(9.0)


def one_row_in_a_branch(x, i):
    return lax.switch(i[0] % 3, [lambda a: a, lambda a: a * 2, lambda a: a.at[0].set(3.0)], x), x.at[2, 5].set(9.0)


def table_gradient(table, i):
    return jax.grad(lambda t: (t[i] ** 3).sum())(table)


def slices_that_move(x, i):
    start = i[0, 0]
    piece = lax.dynamic_slice(x, (start, 0), (3, 24)) + lax.dynamic_slice_in_dim(x, start, 24, axis=1)[:3]
    return piece, lax.dynamic_update_slice(x, piece[:2], (i[1, 0], 0)), lax.dynamic_index_in_dim(x, 2, 1)


def take_along(x, i):
    return jnp.take_along_axis(x, i, axis=1), jax.grad(lambda a: (jnp.take_along_axis(a, i, axis=1) ** 2).sum())(x)


def orders(x):
    values, places = lax.top_k(x, 5)
    return values, places, jnp.sort(x, axis=0), jnp.argsort(x, axis=1), x.argmax(axis=1), x.argmin(axis=0)


def running(x):
    return (
        jnp.cumsum(x, axis=1),
        jnp.cumsum(x, axis=0, dtype=jnp.float32),
        lax.cummax(x, axis=1),
        jnp.cumprod(x, axis=0),
    )


def one_hot_dispatch(x, i):
    chosen = jax.nn.one_hot(i, 24)
    return jnp.einsum("bke,be->bk", chosen, x), jnp.einsum("bke,bk->e", chosen, i.astype(jnp.float32))


INDEXING = {
    "gather_fill": (lambda x, i: jnp.take(x, i, axis=1, mode="fill"), X, FAR),
    "gather_fill_value": (lambda x, i: jnp.take(x, i, axis=1, mode="fill", fill_value=2.5), X, FAR),
    "gather_clip": (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), X, FAR),
    "gather_wrap": (lambda x, i: jnp.take(x, i, axis=1, mode="wrap"), X, FAR),
    "gather_promised": (lambda x, i: x.at[:, i].get(mode="promise_in_bounds"), X, ROWS),
    "gather_negative": (lambda x, i: x[i], X, SPOTS),
    "gather_integers_fill": (lambda x, i: x.at[i].get(mode="fill"), integers(99, 8, 12), SPOTS),
    "gather_booleans": (lambda x, i: (x > 0).at[i].get(mode="fill", fill_value=True), X, SPOTS),
    "gather_range": (lambda x: x[:, jnp.arange(16)], X),
    "gather_gradient": (table_gradient, WEIGHTS, ROWS),
    "take_along_axis": (take_along, X, ROWS),
    "points": (both_coordinates, X, ROWS),
    "one_row_in_a_branch": (one_row_in_a_branch, X, jnp.full(8, 5, jnp.int32)),
    "scatter_set": (set_once, X, floats(8, 24, seed=4)),
    **{
        f"scatter_{method}_{mode}": (scatters(method, mode), X, SPOTS, floats(8, 24, seed=4))
        for method, mode in itertools.product(("add", "max", "min", "multiply"), ("drop", "clip"))
    },
    "dynamic_slices": (slices_that_move, X, ROWS),
    "one_hot": (one_hot_dispatch, X, ROWS),
    "orders": (orders, X),
    "running": (running, X),
    "integers": (lambda i: (i.sum(), i.max(axis=0), i * i % 7, jnp.bincount(i.ravel(), length=24), i // 5), ROWS),
    "logic": (lambda x: ((x > 1).any(axis=0), (x > -3).all(), (x > 0).sum(axis=1), jnp.where(x > 0, x, -x)), X),
}


# --- random numbers ---------------------------------------------------------------------------------------------------


def bits_of_every_width(key):
    keys = jax.random.split(key, 3)
    widths = (jnp.uint8, jnp.uint16, jnp.uint32)
    return [jax.random.bits(k, (8, 12, 3), d) for k, d in zip(keys, widths, strict=True)]


def dropout(key, x):
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return kept, jnp.where(kept, x / 0.9, 0.0)


def draws(key):
    a, b = jax.random.split(jax.random.fold_in(key, 3))
    return jax.random.uniform(a, (8, 24)), jax.random.randint(b, (24,), 0, 100), jax.random.permutation(a, 16)


RANDOM = {
    "random_bits": (bits_of_every_width, KEY),
    "dropout": (dropout, KEY, X),
    "draws": (draws, KEY),
    "raw_key": (lambda key: jax.random.bits(jax.random.wrap_key_data(key), (24, 8)), jax.random.key_data(KEY)),
}


# --- windows, shapes, contractions ------------------------------------------------------------------------------------

IMAGES = floats(8, 12, 12, 8, seed=5)


def convolution(x, kernel, **params):
    return lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **params)


def conv_and_gradients(**params):
    def run(x, kernel):
        loss = lambda x, k: (convolution(x, k, **params) ** 2).sum()  # noqa: E731
        return convolution(x, kernel, **params), jax.grad(loss, argnums=(0, 1))(x, kernel)

    return run


def pools(x):
    top = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    total = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return top, total


def pool_gradient(x):
    return jax.grad(lambda a: (pools(a)[0] ** 2).sum() + (pools(a)[1] ** 2).sum())(x)


def pads_and_joins(x):
    wide = jnp.pad(x, ((0, 0), (2, 1)))
    ones = jnp.pad(x, ((1, 0), (0, 0)), constant_values=1.0)
    inside = lax.pad(x, jnp.float32(0.5), ((0, 0, 1), (0, 0, 0)))
    joined = jnp.concatenate([x, x * 2, wide[:, :24]], axis=0)
    return wide, ones, inside, joined, jnp.split(x, 3, axis=1), x[::-1], x[:, 3:20:2], jnp.roll(x, 5, axis=1)


def reshapes(cube):
    flat = cube.reshape(32, 24)
    heads = flat.reshape(32, 4, 6).transpose(1, 0, 2)
    return (
        flat.reshape(8, 96),
        heads.reshape(-1),
        cube.reshape(4, 2, 4, 12, 2),
        flat.T.reshape(6, 128),
        cube[:, :1].squeeze(1),
    )


def partial_sums_flow(x, w):
    a, b = x @ w, jnp.sin(x) @ w.T
    both = (a + b) * 2 - a / 3
    return both, both.sum(axis=0), jnp.where(x > 0, both, a).T, both.mean() * both.astype(jnp.float32)[0]


def logits(x, w):
    return jax.nn.log_softmax(x @ w), jax.nn.logsumexp(x, axis=0), jnp.var(x, axis=1), x.prod(axis=0)


def vmapped_lookup(x, i):
    return jax.vmap(lambda row, at: row[at])(x, i), jax.vmap(lambda row, at: row.at[at].add(1.0))(x, i)


SHAPES = {
    "conv_same": (conv_and_gradients(window_strides=(1, 1), padding="SAME"), IMAGES, floats(3, 3, 8, 16, seed=6)),
    "conv_strided": (conv_and_gradients(window_strides=(2, 2), padding="SAME"), IMAGES, floats(3, 3, 8, 16, seed=6)),
    "conv_point": (conv_and_gradients(window_strides=(1, 1), padding="VALID"), IMAGES, floats(1, 1, 8, 16, seed=6)),
    "conv_full_window": (
        conv_and_gradients(window_strides=(1, 1), padding="VALID"),
        IMAGES[:, :4, :4],
        floats(4, 4, 8, 12, seed=6),
    ),
    "conv_groups": (
        conv_and_gradients(window_strides=(1, 1), padding="SAME", feature_group_count=4),
        IMAGES,
        floats(3, 3, 2, 16, seed=6),
    ),
    "conv_depthwise": (
        conv_and_gradients(window_strides=(1, 1), padding="SAME", feature_group_count=8),
        IMAGES,
        floats(3, 3, 1, 8, seed=6),
    ),
    "conv_batch_groups": (
        lambda x, k: convolution(x, k, window_strides=(1, 1), padding="SAME", batch_group_count=4),
        IMAGES,
        floats(3, 3, 8, 16, seed=6),
    ),
    "conv_dilated": (
        conv_and_gradients(window_strides=(1, 1), padding=((2, 2), (2, 2)), rhs_dilation=(2, 2), lhs_dilation=(1, 2)),
        IMAGES,
        floats(3, 3, 8, 4, seed=6),
    ),
    "pools": (pools, IMAGES),
    "pool_gradient": (pool_gradient, IMAGES),
    "pads_and_joins": (pads_and_joins, X),
    "reshapes": (reshapes, CUBE),
    "partial_sums": (partial_sums_flow, X, WEIGHTS),
    "logits": (logits, X, WEIGHTS),
    "vmapped_lookup": (vmapped_lookup, X, ROWS),
    "transposed_product": (lambda a, b: a.T @ b.T, floats(24, 8), floats(12, 24)),
    "batched_products": (lambda a: jnp.einsum("bij,bkj->bik", a, a), CUBE),
    "half_precision": (
        lambda x, w: (x.astype(jnp.bfloat16) > 0.5, (x.astype(jnp.bfloat16) * 2).astype(jnp.float32)),
        X,
        X,
    ),
    "constant_output": (lambda x: (jnp.arange(24.0), jnp.float32(3), x, x), X),
    "scalars": (lambda a, b: (a * b, jnp.sin(a)), jnp.float32(2), jnp.float32(3)),
}

PROGRAMS = CONTROL_FLOW | INDEXING | RANDOM | SHAPES
