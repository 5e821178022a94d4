"""What train steps measure beside their loss, by number: `random_step_with_metrics`.

A metric takes rows (examples, width) and whole numbers (examples, 4), and may reduce over the examples in any way: with sums that
wrap, extremes that have to keep NaN, masks, counts, orders. A step computes some from the batch behind its loss, or from the last
layer within it, where microbatches and stages see parts of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.random_programs.programs import EXAMPLES, OPTIONS, WIDTH, Program

GROUPS, LAYERS, MOST = 4, 3, 4


def groups_of(i):
    return i[:, 0] % GROUPS


METRICS = {
    "sum of integers": lambda r, i: i.sum(0),
    "sum of bytes": lambda r, i: i.astype(jnp.uint8).sum(0, dtype=jnp.uint8).astype(jnp.float32),
    "rounded sum beside another": lambda r, i: (
        (1001 * i - 903 * i[:, ::-1] ** 2).sum(0).astype(jnp.bfloat16) + r.astype(jnp.bfloat16)[:, :4].sum(0)
    ),
    "unsigned difference beside a sum": lambda r, i: (
        (i.astype(jnp.uint32).sum(0) - (i[:, ::-1].astype(jnp.uint32) + 20).sum(0)).astype(jnp.float32)
        + r[:, :4].sum(0)
    ),
    "remainder of a sum": lambda r, i: i.sum(0) % 3,
    "quotient of a sum": lambda r, i: i.sum(0) // 2,
    "sign of a sum": lambda r, i: jnp.sign(i.sum(0)),
    "shifted sum": lambda r, i: i.sum(0) >> 1,
    "greatest": lambda r, i: r.max(0),
    "least": lambda r, i: r.min(),
    "greatest, converted": lambda r, i: r.max(0).astype(jnp.bfloat16),
    "greatest, negated": lambda r, i: -r.max(0) * 2,
    "greatest, clipped": lambda r, i: jnp.clip(r.max(0), -0.5, 0.5),
    "product of extremes": lambda r, i: r.max(0) * r.min(0),
    "greatest of extreme and sum": lambda r, i: jnp.maximum(i.max(0), i.sum(0)),
    "range of integers": lambda r, i: i.max() - i.min(),
    "greatest of some": lambda r, i: jnp.where(i[:, :1] > 0, r, -jnp.inf).max(0),
    "any": lambda r, i: ~(i > 0).any(0),
    "all": lambda r, i: (i > -15).all(0),
    "any NaN": lambda r, i: jnp.isnan(r).any(),
    "bits in all": lambda r, i: lax.reduce_and(i, (0,)),
    "bits in any": lambda r, i: lax.reduce_or(i, (0,)),
    "parity of bits": lambda r, i: lax.reduce_xor(i, (0,)),
    "sum of halves": lambda r, i: r.astype(jnp.bfloat16).sum(0),
    "mean as a half": lambda r, i: r.mean().astype(jnp.float16),
    "infinite sum beside another": lambda r, i: r.sum(0) * jnp.exp(1000 + i[0, 0].astype(r.dtype)) + r[:, ::-1].sum(0),
    "sum by zero beside another": lambda r, i: r.sum(0) / jnp.exp(i[0, 0].astype(r.dtype) - 1000) + r[:, ::-1].sum(0),
    "mean of squares": lambda r, i: (r**2).mean(0),
    "variance": lambda r, i: r.var(0),
    "covariance": lambda r, i: jnp.cov(r.T),
    "products of pairs": lambda r, i: jnp.einsum("bi,bj->ij", r, r),
    "product": lambda r, i: r.prod(0),
    "norm": lambda r, i: jnp.linalg.norm(r),
    "logarithm of summed exponentials": lambda r, i: jax.nn.logsumexp(r, 0),
    "exponential of the mean": lambda r, i: jnp.exp(-r.mean()),
    "accuracy": lambda r, i: (r.argmax(1) == i[:, 0] % WIDTH).mean(),
    "ratio of counts": lambda r, i: ((r > 0) & (i[:, :1] > 0)).sum() / jnp.maximum(1, (i[:, :1] > 0).sum()),
    "count": lambda r, i: jnp.count_nonzero(i > 0),
    "more than half": lambda r, i: (i > 0).sum(0) > EXAMPLES // 2,
    "counts by group": lambda r, i: jnp.bincount(groups_of(i), length=GROUPS),
    "sums by group": lambda r, i: jax.ops.segment_sum(r, groups_of(i), GROUPS),
    "greatest by group": lambda r, i: jax.ops.segment_max(r, groups_of(i), GROUPS),
    "least by group": lambda r, i: jax.ops.segment_min(i, groups_of(i), GROUPS),
    "counts of places, some outside": lambda r, i: jnp.zeros(8, jnp.int32).at[i[:, 1]].add(1, mode="drop"),
    "greatest of places": lambda r, i: jnp.zeros(8, r.dtype).at[i[:, 1] % 8].max(r[:, 0]),
    "each example": lambda r, i: (r, i),
    "sums and integers": lambda r, i: (r.sum(0), i),
    "sums beside extremes": lambda r, i: jnp.stack([r.sum(0), r.max(0)]),
    "the first": lambda r, i: r[0],
    "every second": lambda r, i: r[::2],
    "running sum": lambda r, i: jnp.cumsum(r, 0),
    "smallest two": lambda r, i: jnp.sort(r, 0)[:2],
    "running maximum in a loop": lambda r, i: lax.scan(
        lambda c, x: (jnp.maximum(c, x), x.sum()), jnp.full(WIDTH, -9, r.dtype), r
    ),
    "one of two": lambda r, i: lax.cond(i.sum() > 0, lambda: r.max(0), lambda: r.min(0)),
}


def random_step_with_metrics(number):
    """The step of a number with up to `MOST` metrics; in every fifth batch a number is not finite."""
    rng = np.random.default_rng((3, number))
    chosen = [str(name) for name in rng.choice([*METRICS], size=int(rng.integers(1, MOST + 1)), replace=False)]
    is_within = bool(rng.integers(2))

    def loss_of(params, batch):
        rows = batch["x"]
        for weights in params["layers"]:
            rows = jnp.tanh(rows @ weights)
        seen = lax.stop_gradient(rows) if is_within else batch["x"]
        return jnp.mean((rows @ params["last"] - batch["y"]) ** 2), [METRICS[n](seen, batch["i"]) for n in chosen]

    def step(state, batch):
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, (loss, metrics)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32) / np.float32(max(1, shape[0]) ** 0.5)

    params = jax.tree.map(jnp.asarray, {"layers": [array(WIDTH, WIDTH) for _ in range(LAYERS)], "last": array(WIDTH)})
    rows, places = array(EXAMPLES, WIDTH), rng.integers(-20, 20, size=(EXAMPLES, 4)).astype(np.int32)
    if number % 5 == 0:
        rows[rng.integers(EXAMPLES), rng.integers(WIDTH)] = rng.choice([np.inf, -np.inf, np.nan])
    batch = jax.tree.map(jnp.asarray, {"x": rows, "i": places, "y": array(EXAMPLES)})
    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}
    options = OPTIONS[number % len(OPTIONS)]
    mesh = (2, 2) if "num_stages" in options else ((8,), (2, 2), (4, 2))[number // len(OPTIONS) % 3]
    return Program(step, (state, batch), chosen, mesh, options)
