import jax
import jax.numpy as jnp

import autopar


def train_step(layers, batch):
    def loss_of(layers):
        x = batch["x"]
        for up, down in layers:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.mean((x - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), loss


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


layers = [(floats(2048, 8192), floats(8192, 2048)) for _ in range(2)]
step = autopar.parallelize(train_step, devices=8, mesh_shape=(8,), cluster="dgx-h100")
for tokens in (512, 32768):
    print(f"{tokens} tokens")
    print(step.plan(layers, {"x": floats(tokens, 2048), "y": floats(tokens, 2048)}).classic())
