import jax
import jax.numpy as jnp
import optax

import autopar

optimizer = optax.adamw(1e-3)


def create_state(key):
    keys = jax.random.split(key, 8)
    params = {
        f"layer_{n}": {
            "up": jax.random.normal(keys[2 * n], (64, 256)) / 8,
            "down": jax.random.normal(keys[2 * n + 1], (256, 64)) / 16,
        }
        for n in range(4)
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def train_step(state, batch):
    def loss_of(params):
        x = batch["x"]
        for layer in params.values():
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


batch = {"x": jnp.ones((32, 64)), "y": jnp.zeros((32, 64))}
shapes = jax.eval_shape(create_state, jax.random.key(0))
