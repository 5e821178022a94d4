"""A step of two towers that compare the examples of a batch."""

import jax
import jax.numpy as jnp
import optax


def two_towers(state, batch):
    """One clipped step of two towers that compare their examples, with a moving average of the weights."""

    def tower(weights, x):
        for w in weights["hidden"]:
            x = x + jnp.tanh(x @ w)
        return x @ weights["out"]

    def loss_of(weights):
        scores = tower(weights["a"], batch["a"]) @ tower(weights["b"], batch["b"]).T
        return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(scores.shape[0])).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    updates, opt = optimizer.update(gradients, state["opt"], state["weights"])
    weights = optax.apply_updates(state["weights"], updates)
    mean = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, state["mean"], weights)
    return {"weights": weights, "opt": opt, "mean": mean}, loss


def arguments_of_two_towers():
    tower = {
        "hidden": [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 3,
        "out": jax.ShapeDtypeStruct((128, 64), jnp.float32),
    }
    weights = {"a": tower, "b": tower}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"weights": weights, "opt": jax.eval_shape(optimizer.init, weights), "mean": weights}
    return state, {name: jax.ShapeDtypeStruct((64, 128), jnp.float32) for name in "ab"}
