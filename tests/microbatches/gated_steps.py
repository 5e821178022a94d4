"""Steps with gates and other functions of weights, whose gradients in loops and branches are products of sums over examples."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopar

LAYERS, ROWS, WIDTH = 4, 16, 8
ONE_MESH = {"num_microbatches": 4, "mesh_shape": (1,)}
STAGES = {"num_stages": 2, "num_microbatches": 4, "mesh_shape": (1,)}


def drawn(*shape, scale=0.3, dtype=jnp.float32):
    return jnp.asarray(scale * np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def descent(loss_of):
    def step(weights, batch):
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, gradients), loss

    return step


def layered(layer, wrap=lambda group: group, groups=LAYERS):
    """Layers in a scan; `groups` of them are wrapped together."""

    def loss_of(weights, batch):
        grouped = jax.tree.map(lambda w: w.reshape(groups, -1, *w.shape[1:]), weights)
        group = wrap(lambda x, ws: (lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], None))
        return jnp.mean((lax.scan(group, batch["x"], grouped)[0] - batch["y"]) ** 2)

    return loss_of


def gated(x, w):
    return x + jnp.tanh(x @ w["w"]) * jnp.exp(w["g"])


def rolled(x, w):
    return x + jnp.tanh(x @ w["w"]) * jnp.exp(jnp.roll(w["g"], 2))


def over_a_norm(x, w):
    return x + jnp.tanh(x @ w["w"] / jnp.linalg.norm(w["w"])) * w["g"]


def looped(x, w):
    start = w["w"] / jnp.linalg.norm(w["w"])
    return x + jnp.tanh(x @ lax.fori_loop(0, 3, lambda i, m: 1.5 * m - 0.5 * m @ m.T @ m, start)) * w["g"]


def on_the_left(x, w):
    return x + jnp.tanh(jnp.exp(w["w"]) @ x.T).T * w["g"]


def convolved(x, w):
    kernel = jnp.exp(jnp.roll(w["w"][:3, :, None], 1, 1)) / 9
    numbers = ("NWC", "WIO", "NWC")
    return (
        x
        + jnp.tanh(lax.conv_general_dilated(x[..., None], kernel[:, :1], (1,), "SAME", dimension_numbers=numbers))[
            ..., 0
        ]
    )


def behind_a_branch(weights, batch):
    x = jnp.tanh(batch["x"] @ weights["w"][0])
    x = lax.cond(weights["g"][0, 0] > -9, lambda x: x * jnp.exp(weights["g"][0]), lambda x: x, x)
    return jnp.mean((x @ weights["w"][1] - batch["y"]) ** 2)


def in_a_branch(of_weight):
    """Layers that multiply with what a branch makes of a weight."""

    def layer(x, w):
        return x + jnp.tanh(x @ lax.cond(w["g"][0] > -9, of_weight, lambda w: w, w["w"])) * w["g"]

    return layered(layer)


def smoothed(w):
    return lax.conv_general_dilated(w[None, None], jnp.exp(w[None, None, :3, :3]) / 9, (1, 1), "SAME")[0, 0]


def solved(w):
    return jax.scipy.linalg.solve_triangular(jnp.tril(jnp.exp(w)) + 2 * jnp.eye(WIDTH), w, lower=True)


def ragged(w):
    return lax.ragged_dot(w, jnp.stack([jnp.exp(w), jnp.sin(w)]), jnp.asarray([3, 5], jnp.int32))


def turned(weights, batch):
    """Layers of complex numbers, each of which may be skipped; their angles are weights."""

    def layer(w, x):
        return x + (x @ w["w"]) * jnp.exp(1j * w["g"]) + 0.1 * jnp.conj(x)

    def through(x, w):
        return lax.cond(w["g"][0] > -0.2, layer, lambda w, x: x, w, x), None

    x = lax.scan(through, lax.complex(batch["x"], 0.5 * batch["y"]), weights)[0]
    return jnp.mean((x.real - batch["y"]) ** 2) + jnp.mean(x.imag**2)


def ensemble(weights, batch):
    def one(weights):
        return lax.scan(lambda x, w: (gated(x, w), None), batch["x"], weights)[0]

    return jnp.mean((jax.vmap(one)(weights) - batch["y"]) ** 2)


LOSSES = {
    "a branch": behind_a_branch,
    "a rolled weight": layered(rolled),
    "a weight made by a loop": layered(looped),
    "checkpointed groups": layered(over_a_norm, jax.checkpoint, groups=2),
    "an ensemble": ensemble,
    "weights on the left": layered(on_the_left),
    "a kernel": layered(convolved),
    "a convolved weight": in_a_branch(smoothed),
    "a system of equations": in_a_branch(solved),
    "a ragged product": in_a_branch(ragged),
    "complex numbers": turned,
}


def arguments(name="", dtype=jnp.float32):
    models = (3,) if name == "an ensemble" else ()
    weights = {"w": drawn(*models, LAYERS, WIDTH, WIDTH, dtype=dtype), "g": drawn(*models, LAYERS, WIDTH, dtype=dtype)}
    return weights, {"x": drawn(ROWS, WIDTH, dtype=dtype), "y": drawn(ROWS, WIDTH, scale=1.0, dtype=dtype)}


def planned(name, **options):
    return autopar.parallelize(descent(LOSSES[name]), **options).plan(*arguments(name))
