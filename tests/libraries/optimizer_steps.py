"""Steps with the optimizers of optax, on one perceptron."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.libraries.corpus import labelled, library_step, mixes_examples, noise, trained


def parameters():
    return {"in": noise(8, 16, scale=0.3), "bias": jnp.zeros(16), "mid": noise(16, 16, scale=0.3), "out": noise(16, 4)}


def loss_of(params, batch):
    h = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    logits = jnp.tanh(h @ params["mid"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def optimized(tx):
    return trained(loss_of, parameters(), labelled(8), tx)


@library_step("optax")
def optax_adamw_with_a_schedule_and_clipping():
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 5, 20)
    return optimized(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-3)))


@library_step("optax")
def optax_lion():
    return optimized(optax.lion(1e-3, b1=0.5))


@library_step("optax")
def optax_adafactor():
    return optimized(optax.adafactor(1e-2, min_dim_size_to_factor=8))


@library_step("optax")
def optax_updates_every_second_step():
    return optimized(optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2))


@library_step("optax")
def optax_skips_updates_that_are_not_finite():
    return optimized(optax.apply_if_finite(optax.rmsprop(1e-2, eps=1e-3, momentum=0.9), 3))


@library_step("optax")
def optax_other_rates_for_other_leaves():
    ways = {"slow": optax.sgd(0.01), "fast": optax.adagrad(0.1, eps=1e-3), "never": optax.set_to_zero()}
    labels = {"in": "slow", "bias": "never", "mid": "fast", "out": "fast"}
    return optimized(optax.multi_transform(ways, labels))


@library_step("optax")
def optax_muon():
    return optimized(contrib.muon(1e-2, eps=1e-3))


@library_step("optax")
def optax_schedule_free():
    return optimized(contrib.schedule_free_sgd(1e-2))


@library_step("optax")
def optax_prodigy():
    return optimized(contrib.prodigy(1e-2, eps=1e-3))


@library_step("optax", refused=mixes_examples("reduced over all examples"))
def optax_sharpness_aware():
    """SAM takes two gradients in a step."""
    tx = contrib.sam(
        optax.sgd(0.05), optax.chain(contrib.normalize(), optax.sgd(0.01)), sync_period=2, opaque_mode=True
    )
    params, batch = parameters(), labelled(8)

    def step(state, batch):
        def gradient_of(params, _):
            return jax.grad(loss_of)(params, batch)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"], grad_fn=gradient_of)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": params, "opt": tx.init(params)}, batch


@library_step(
    "optax",
    refused=mixes_examples("needs a value that is reduced over all examples, on every example"),
    told=("are weakly typed",),
)
def optax_lbfgs_with_a_line_search():
    tx, batch = optax.lbfgs(memory_size=3), labelled(8)

    def step(state, batch):
        def value_of(params):
            return loss_of(params, batch)

        loss, gradients = jax.value_and_grad(value_of)(state["params"])
        how = {"value": loss, "grad": gradients, "value_fn": value_of}
        updates, opt = tx.update(gradients, state["opt"], state["params"], **how)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": parameters(), "opt": tx.init(parameters())}, batch


@library_step("optax")
def optax_private_gradients_of_each_example():
    tx = optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0))
    tx, batch = optax.chain(tx, optax.sgd(0.1)), labelled(8)

    def step(state, batch):
        def one(params, example):
            return loss_of(params, jax.tree.map(lambda leaf: leaf[None], example))

        losses, gradients = jax.vmap(jax.value_and_grad(one), in_axes=(None, 0))(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses.mean()

    return step, {"params": parameters(), "opt": tx.init(parameters())}, batch
