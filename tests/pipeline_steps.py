"""Train steps of a few operations, each with one thing that is hard to cut into stages and microbatches.

Each function returns (step, state, batch) with `step(state, batch)` -> the new state, or a tuple that begins with it.
Everything is eight wide, so that compiling a pipeline of it takes about a second.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

ROWS, WIDTH, VOCAB, RATE = 8, 8, 16, 0.1
TABLE = np.random.default_rng(9).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def normal(draw, *shape):
    """Gaussian with deviation 1/sqrt(first dimension)."""
    return jnp.asarray(draw.normal(size=shape) / math.sqrt(shape[0]), jnp.float32)


def layers(count=4):
    """Weights and biases of as many layers."""
    draw = np.random.default_rng(0)
    return [{"w": normal(draw, WIDTH, WIDTH), "b": normal(draw, WIDTH)} for _ in range(count)]


def rows(seed=1):
    """Inputs, targets, and a mask that leaves some examples out."""
    draw = np.random.default_rng(seed)
    x, y = (jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2))
    return {"x": x, "y": y, "mask": jnp.asarray(np.arange(ROWS) % 3 > 0, jnp.float32)}


def forward(params, x):
    """tanh(x w + b), again and again."""
    for p in params:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return x


def errors(params, batch):
    """The squared error of each example."""
    return jnp.sum((forward(params, batch["x"]) - batch["y"]) ** 2, axis=-1)


def mean_error(params, batch):
    """The mean over examples."""
    return errors(params, batch).mean()


def descended(params, gradients, rate=RATE):
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients)


def trained_on(loss_of, state, batch):
    """A step of gradient descent on a loss."""

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state, batch)
        return descended(state, gradients), loss

    return step, state, batch


def plain():
    """Mean squared error."""
    return trained_on(mean_error, layers(), rows())


def masked_loss():
    """The divisor is a count over the full batch."""

    def loss_of(params, batch):
        return jnp.sum(errors(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])

    return trained_on(loss_of, layers(), rows())


def clipped_adamw():
    """The update of every stage needs the norm of all gradients."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def step(state, batch):
        params, moments = state
        loss, gradients = jax.value_and_grad(mean_error)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": loss, "norm": optax.tree.norm(gradients)}

    return step, (layers(), optimizer.init(layers())), rows()


def tied_weights():
    """The first stage and the last one use the same table."""
    draw = np.random.default_rng(3)
    tokens, labels = (jnp.asarray(draw.integers(VOCAB, size=ROWS), jnp.int32) for _ in range(2))

    def loss_of(params, batch):
        logits = forward(params["layers"], params["embed"][batch["tokens"]]) @ params["embed"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], axis=-1))

    state = {"embed": normal(draw, VOCAB, WIDTH), "layers": layers()}
    return trained_on(loss_of, state, {"tokens": tokens, "labels": labels})


def dropout(key=None):
    """Random masks from a key in the state, one per layer; the key is split in every step."""

    def step(state, batch):
        kept, used = jax.random.split(state["key"])

        def loss_of(params):
            x = batch["x"]
            for number, p in enumerate(params):
                x = jnp.tanh(x @ p["w"] + p["b"])
                x = jnp.where(jax.random.bernoulli(jax.random.fold_in(used, number), 0.8, x.shape), x / 0.8, 0)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        return {"params": descended(state["params"], gradients), "key": kept}, loss

    return step, {"params": layers(3), "key": jax.random.key(5) if key is None else key}, rows()


def raw_key_dropout():
    """As `dropout`, with a key of the old kind: two integers."""
    return dropout(jax.random.PRNGKey(5))


def metrics():
    """Values per example, per batch, of the first layer alone, and norms of gradients on all stages."""

    def step(params, batch):
        def loss_of(params):
            out = forward(params, batch["x"])
            each = jnp.sum((out - batch["y"]) ** 2, axis=-1)
            found = {"each": each, "best": jnp.argmax(out, axis=-1), "largest": each.max(), "hits": jnp.sum(each < 8.0)}
            return each.mean(), found | {"first": forward(params[:1], batch["x"]).mean()}

        (loss, found), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return descended(params, gradients), found | {
            "loss": loss,
            "norms": [jnp.linalg.norm(g["w"]) for g in gradients],
        }

    return step, layers(), rows()


def loss_scaling(scale=1024.0):
    """The update of every stage happens only if all gradients are finite, and so does the next scale."""

    def step(state, batch):
        loss, gradients = jax.value_and_grad(lambda p: mean_error(p, batch) * state["scale"])(state["params"])
        gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
        finite = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)])
        moved = descended(state["params"], gradients)
        params = jax.tree.map(lambda old, new: jnp.where(finite, new, old), state["params"], moved)
        good = jnp.where(finite, state["good"] + 1, 0)
        grown = jnp.where(good == 2, state["scale"] * 2, state["scale"])
        new = {"params": params, "good": good, "scale": jnp.where(finite, grown, state["scale"] / 2), "finite": finite}
        return new | {"skipped": state["skipped"] + jnp.where(finite, 0, 1)}, loss

    counts = {"good": jnp.int32(0), "skipped": jnp.int32(0)}
    return step, {"params": layers(), "scale": jnp.float32(scale), "finite": jnp.bool_(True)} | counts, rows()


def overflowing():
    """As `loss_scaling`, with gradients that are never finite."""
    return loss_scaling(math.inf)


def odd_leaves():
    """Integers, booleans, empty and unused leaves in the state; results that are constants or the batch's own."""

    def step(state, batch):
        loss, gradients = jax.value_and_grad(mean_error)(state["params"], batch)
        new = {
            "params": descended(state["params"], gradients),
            "seen": state["seen"] + jnp.arange(3),
            "flags": ~state["flags"],
            "large": state["large"] * 2,
            "count": state["count"] + 1,
        }
        return state | new, loss, jnp.float32(3.0), batch["mask"]

    state = {"params": layers(), "seen": jnp.arange(3), "flags": jnp.array([True, False]), "count": jnp.int32(7)}
    unused = {"unused": jnp.ones((5, 5)), "empty": jnp.zeros((0, 4)), "large": jnp.ones((40, 40))}
    return step, state | unused, rows()


def returned_gradients():
    """Nothing is updated."""

    def step(params, batch):
        loss, gradients = jax.value_and_grad(mean_error)(params, batch)
        return params, loss, gradients

    return step, layers(), rows()


def captured_constants():
    """Arrays that the step closes over: one for all examples, one with an entry per example."""
    table, weights = jnp.asarray(TABLE), jnp.linspace(0.5, 1.5, ROWS)

    def loss_of(params, batch):
        x = forward(params[:2], batch["x"]) @ table
        return jnp.mean(jnp.sum((forward(params[2:], x) - batch["y"]) ** 2, axis=-1) * weights)

    return trained_on(loss_of, layers(), rows())


def whole_batch_leaves():
    """A leaf of the batch that every microbatch reads whole, and scalars."""

    def step(params, batch):
        def loss_of(params):
            return mean_error(params, batch | {"x": batch["x"] @ batch["table"]}) * batch["times"]

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return descended(params, gradients, batch["rate"]), loss

    more = {"table": jnp.asarray(TABLE), "rate": jnp.float32(0.05), "times": jnp.int32(3)}
    return step, layers(), rows() | more


def long_skips():
    """The first layer's result is used on the last stage; averages of parameters and sums of gradients in the state."""

    def step(state, batch):
        def loss_of(params):
            first = forward(params[:1], batch["x"])
            return jnp.mean((forward(params[1:], first) + first + batch["x"] - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        params = descended(state["params"], gradients)
        average = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["average"], params)
        total = jax.tree.map(jnp.add, state["total"], gradients)
        return {"params": params, "average": average, "total": total, "best": jnp.minimum(state["best"], loss)}, loss

    zeros = jax.tree.map(jnp.zeros_like, layers())
    return step, {"params": layers(), "average": layers(), "total": zeros, "best": jnp.float32(9e9)}, rows()


def recomputed():
    """Every layer is computed again in the backward pass."""

    def loss_of(params, batch):
        x = batch["x"]
        for p in params:
            x = jax.checkpoint(lambda p, x: jnp.tanh(jnp.sin(x @ p["w"]) + p["b"]))(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return trained_on(loss_of, layers(), rows())


def transformer():
    """One block between two tables, with a masked loss over tokens."""
    draw = np.random.default_rng(4)
    block = {"qkv": normal(draw, WIDTH, 3, 2, 4), "out": normal(draw, 8, WIDTH), "up": normal(draw, WIDTH, 16)}
    state = {"embed": normal(draw, VOCAB, WIDTH), "block": block | {"down": normal(draw, 16, WIDTH)}}
    tokens, labels = (jnp.asarray(draw.integers(VOCAB, size=(ROWS, 4)), jnp.int32) for _ in range(2))

    def loss_of(params, batch):
        x, p = params["embed"][batch["tokens"]], params["block"]
        query, key, value = jnp.moveaxis(jnp.einsum("bsh,hcnd->bscnd", x, p["qkv"]), 2, 0)
        scores = jnp.einsum("bqnd,bknd->bnqk", query, key) + jnp.where(jnp.tril(jnp.ones((4, 4), bool)), 0, -1e9)
        mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), value)
        x = x + mixed.reshape(x.shape) @ p["out"]
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        found = jax.nn.log_softmax(x @ params["embed"].T)
        losses = -jnp.take_along_axis(found, batch["labels"][..., None], axis=-1)[..., 0]
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    mask = jnp.asarray(np.arange(ROWS * 4).reshape(ROWS, 4) % 5 > 0, jnp.float32)
    return trained_on(loss_of, state, {"tokens": tokens, "labels": labels, "mask": mask})


def in_stages(step, num_stages=2, **options):
    """The step as a pipeline, one device per stage and in 1F1B if nothing else is said."""
    options.setdefault("mesh_shape", (1,))
    options.setdefault("schedule", "1f1b")
    options.setdefault("num_microbatches", 4)
    return autopar.parallelize(step, num_stages=num_stages, **options)
