"""Train steps that scan over stacked layers, each with one thing that is hard to divide between stages.

Each function returns (step, state, batch) as in `pipeline_steps`; everything is eight wide. `LAYERS` is odd, so that pieces
differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.pipeline_steps import WIDTH, descended, normal, rows, trained_on

LAYERS = 5


def stacked(count=LAYERS, seed=0):
    """Weights and biases of as many layers, stacked."""
    draw = np.random.default_rng(seed)
    return {"w": jnp.stack([normal(draw, WIDTH, WIDTH) for _ in range(count)]), "b": normal(draw, count, WIDTH)}


def block(x, p):
    """tanh(x w + b)."""
    return jnp.tanh(x @ p["w"] + p["b"])


def through(params, x):
    """All layers, one after the other."""
    return lax.scan(lambda x, p: (block(x, p), None), x, params)[0]


def error(x, batch):
    """Mean squared error."""
    return jnp.mean((x - batch["y"]) ** 2)


def plain():
    """Gradient descent."""
    return trained_on(lambda params, batch: error(through(params, batch["x"]), batch), stacked(), rows())


def clipped_adamw():
    """The norm of all gradients reduces over the layers; moments are stacked like the weights."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def step(state, batch):
        params, moments = state
        loss, gradients = jax.value_and_grad(lambda p: error(through(p, batch["x"]), batch))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": loss, "norm": optax.tree.norm(gradients)}

    return step, (stacked(), optimizer.init(stacked())), rows()


def returned_gradients():
    """Gradients go out beside the weights, the norm of each layer's, and a part of each."""

    def step(params, batch):
        loss, gradients = jax.value_and_grad(lambda p: error(through(p, batch["x"]), batch))(params)
        norms = jnp.sqrt(jnp.sum(gradients["w"] ** 2, axis=(1, 2)))
        return descended(params, gradients), {
            "loss": loss,
            "gradients": gradients,
            "norms": norms,
            "half": gradients["w"][:, :4],
        }

    return step, stacked(), rows()


def dropout(key=None):
    """A random mask in every layer, from one key per layer."""

    def step(state, batch):
        kept, used = jax.random.split(state["key"])

        def layer(x, given):
            p, key = given
            x = block(x, p)
            return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0), None

        def loss_of(params):
            return error(lax.scan(layer, batch["x"], (params, jax.random.split(used, LAYERS)))[0], batch)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        return {"params": descended(state["params"], gradients), "key": kept}, loss

    return step, {"params": stacked(), "key": jax.random.key(5) if key is None else key}, rows()


def keys_per_layer():
    """As `dropout`, with a key for each layer in the state."""

    def step(state, batch):
        def layer(x, given):
            p, key = given
            return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), block(x, p) / 0.8, 0), None

        def loss_of(params):
            return error(lax.scan(layer, batch["x"], (params, state["keys"]))[0], batch)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(state["keys"])
        return {"params": descended(state["params"], gradients), "keys": keys}, loss

    return step, {"params": stacked(), "keys": jax.random.split(jax.random.key(5), LAYERS)}, rows()


def raw_key_dropout():
    """As `dropout`, with a key of the old kind: two integers."""
    return dropout(jax.random.PRNGKey(5))


def carried_key():
    """The key is split in every layer and carried on."""

    def step(state, batch):
        def layer(carried, p):
            x, key = carried
            key, used = jax.random.split(key)
            x = block(x, p)
            return (jnp.where(jax.random.bernoulli(used, 0.8, x.shape), x / 0.8, 0), key), None

        def loss_of(params):
            return error(lax.scan(layer, (batch["x"], state["key"]), params)[0][0], batch)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        return {"params": descended(state["params"], gradients), "key": jax.random.fold_in(state["key"], 1)}, loss

    return step, {"params": stacked(), "key": jax.random.PRNGKey(5)}, rows()


def recomputed():
    """Every layer is computed again in the backward pass."""

    def loss_of(params, batch):
        layer = jax.checkpoint(lambda x, p: (jnp.sin(block(x, p)), None), prevent_cse=False)
        return error(lax.scan(layer, batch["x"], params)[0], batch)

    return trained_on(loss_of, stacked(), rows())


def shared_weights():
    """All layers use one matrix as well as their own; its gradient sums over the layers."""

    def loss_of(params, batch):
        def layer(x, p):
            return block(x @ params["shared"], p), None

        return error(lax.scan(layer, batch["x"], params["layers"])[0], batch)

    return trained_on(loss_of, {"layers": stacked(), "shared": jnp.eye(WIDTH)}, rows())


def values_per_layer():
    """Every layer returns a value per batch and one per example; one of them is in the loss."""

    def step(params, batch):
        def layer(x, p):
            x = block(x, p)
            return x, {"size": jnp.mean(x**2), "each": x.sum(axis=-1)}

        def loss_of(params):
            x, found = lax.scan(layer, batch["x"], params)
            return error(x, batch) + 0.01 * found["size"].sum(), found

        (loss, found), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return descended(params, gradients), loss, found

    return step, stacked(), rows()


def carried_sum():
    """The layers add up a loss of their own on the way."""

    def loss_of(params, batch):
        def layer(carried, p):
            x, total = carried
            x = block(x, p)
            return (x, total + jnp.mean(x**2)), None

        x, total = lax.scan(layer, (batch["x"], jnp.float32(0)), params)[0]
        return error(x, batch) + 0.01 * total

    return trained_on(loss_of, stacked(), rows())


def carried_weight():
    """A weight goes through the layers, read by each, and is used behind them: the sum of its gradient begins with that."""

    def loss_of(params, batch):
        def layer(carried, p):
            x, shared = carried
            return (block(x, p) @ shared, shared + 0.01), None

        x, shared = lax.scan(layer, (batch["x"], params["shared"]), params["layers"])[0]
        return error(x @ shared, batch)

    return trained_on(loss_of, {"layers": stacked(), "shared": jnp.eye(WIDTH)}, rows())


def frozen_scales():
    """Layers that only scale, by numbers that are not trained: what backward carries is multiplied, and by nothing else read."""

    def step(state, batch):
        def loss_of(first):
            return error(lax.scan(lambda x, scale: (x * scale, None), batch["x"] @ first, state["scale"])[0], batch)

        loss, gradient = jax.value_and_grad(loss_of)(state["first"])
        return state | {"first": descended(state["first"], gradient)}, loss

    draw = np.random.default_rng(0)
    return step, {"first": normal(draw, WIDTH, WIDTH), "scale": 1 + normal(draw, LAYERS, WIDTH)}, rows()


def merged_and_scattered():
    """The layers as the minor part of a dimension, a sum over layers into what is there already, and truths looked up."""

    def step(params, batch):
        loss, gradients = jax.value_and_grad(lambda p: error(through(p, batch["x"]), batch))(params)
        found = {
            "looked up": (gradients["b"] > 0)[jnp.array([3, 1, 3])],
            "merged": jnp.cumsum(jnp.ravel(gradients["b"].T)),
            "scattered": jnp.ones(3).at[np.arange(LAYERS) % 3].add(jnp.sum(gradients["b"] ** 2, axis=1)),
        }
        return descended(params, gradients), loss, found

    return step, stacked(), rows()


def encoder_and_decoder():
    """Two stacks; every layer of the second reads what the first has made."""

    def loss_of(params, batch):
        memory = through(params["encoder"], batch["x"])

        def layer(x, p):
            return block(x, p) + memory * 0.1, None

        return error(lax.scan(layer, batch["x"][:, ::-1], params["decoder"])[0], batch)

    return trained_on(loss_of, {"encoder": stacked(4), "decoder": stacked(4, seed=1)}, rows())


def nested():
    """Groups of layers: a scan in a scan."""
    grouped = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5, leaf * 0.9]), stacked(2))
    return trained_on(
        lambda params, batch: error(lax.scan(lambda x, p: (through(p, x), None), batch["x"], params)[0], batch),
        grouped,
        rows(),
    )


def single_layer():
    """A scan of one layer among written-out ones."""

    def loss_of(params, batch):
        x = through(params["one"], jnp.tanh(batch["x"] @ params["first"]))
        return error(jnp.tanh(x @ params["last"]), batch)

    draw = np.random.default_rng(2)
    state = {"one": stacked(1), "first": normal(draw, WIDTH, WIDTH), "last": normal(draw, WIDTH, WIDTH)}
    return trained_on(loss_of, state, rows())


def over_time():
    """A recurrent network: the scan is over the columns of each example, between two layers."""

    def loss_of(params, batch):
        def cell(h, column):
            return jnp.tanh(h @ params["h"] + column[:, None]), None

        h = lax.scan(cell, jnp.tanh(batch["x"] @ params["first"]), batch["x"].T)[0]
        return error(h @ params["last"], batch)

    draw = np.random.default_rng(2)
    return trained_on(loss_of, {name: normal(draw, WIDTH, WIDTH) for name in ("first", "h", "last")}, rows())


def with_while_loop():
    """A loop of unknown length before a scan over layers, not differentiated."""

    def loss_of(params, batch):
        scale = lax.while_loop(lambda s: s < 3.0, lambda s: s * 1.5, jnp.float32(1.0))
        return error(through(params, batch["x"] * scale), batch)

    return trained_on(loss_of, stacked(), rows())


def along_the_layers():
    """Frozen scales and rates, numbers and noise per layer, a transposed stack, an update with operations between the layers."""
    rates = np.linspace(0.1, 0.05, LAYERS, dtype=np.float32)

    def step(state, batch):
        def loss_of(params):
            def layer(x, given):
                p, scale, rate, number = given
                return block(x, p) * scale + rate * x * number, None

            matrices = {"w": jnp.moveaxis(params["w"], 1, 0), "b": params["b"]}
            return error(lax.scan(layer, batch["x"], (matrices, state["scale"], rates, jnp.arange(LAYERS)))[0], batch)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        noise = jax.random.normal(jax.random.key(3), gradients["w"].shape)
        params = {
            "w": state["params"]["w"] - gradients["w"] * rates[:, None] + 0.01 * noise,
            "b": state["params"]["b"] - gradients["b"] + 1e-3 * jnp.cumsum(gradients["b"], axis=0),
        }
        found = {
            "largest": jnp.max(gradients["b"]),
            "norm": jnp.linalg.norm(jnp.ravel(gradients["b"])),
            "third largest": jnp.sort(jnp.ravel(gradients["b"]))[-3],
            "of each": jnp.sum(gradients["b"] ** 2, axis=1),
            "finite": jnp.all(jnp.isfinite(gradients["b"])),
        }
        best = jnp.minimum(state["best"], params["b"])
        return {"params": params, "best": best, "scale": state["scale"]}, loss, found

    params = stacked() | {"w": jnp.moveaxis(stacked()["w"], 0, 1)}
    return step, {"params": params, "best": params["b"], "scale": jnp.linspace(1, 1.2, LAYERS)}, rows()


def mixed_precision():
    """The layers run in bfloat16 on casts of float32 weights, whose gradients come back as float32."""

    def loss_of(params, batch):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return error(through(low, batch["x"].astype(jnp.bfloat16)).astype(jnp.float32), batch)

    return trained_on(loss_of, stacked(), rows())


def inference():
    """Forward alone."""
    return (lambda params, batch: (params, through(params, batch["x"]))), stacked(), rows()


ALL = (
    plain,
    clipped_adamw,
    returned_gradients,
    dropout,
    keys_per_layer,
    raw_key_dropout,
    carried_key,
    recomputed,
    shared_weights,
    values_per_layer,
    carried_sum,
    carried_weight,
    frozen_scales,
    merged_and_scattered,
    encoder_and_decoder,
    nested,
    along_the_layers,
    mixed_precision,
    with_while_loop,
    inference,
)
