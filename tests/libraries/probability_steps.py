"""Steps of libraries for probability and reinforcement learning."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.libraries.corpus import (
    BATCH,
    integers,
    library_step,
    noise,
    of_sizes,
    perceptron,
    trained,
)


@library_step("numpyro")
def numpyro_stochastic_variational_inference():
    import numpyro
    from numpyro import distributions, infer

    def model(x, y):
        weights = numpyro.sample("weights", distributions.Normal(0, 1).expand([8]).to_event(1))
        spread = numpyro.sample("spread", distributions.HalfNormal(1.0))
        with numpyro.plate("examples", BATCH):
            numpyro.sample("y", distributions.Normal(x @ weights, spread), obs=y)

    guide = infer.autoguide.AutoNormal(model)
    svi = infer.SVI(model, guide, optax.sgd(1e-3), infer.Trace_ELBO())
    batch = {"x": noise(BATCH, 8), "y": noise(BATCH)}
    state = svi.init(jax.random.key(0), **batch)
    return (lambda state, batch: svi.update(state, **batch)), state, batch


@library_step("numpyro")
def numpyro_variational_autoencoder():
    import numpyro
    from numpyro import distributions, infer
    from numpyro.contrib.module import flax_module

    class Both(nn.Module):
        outputs: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.outputs)(nn.tanh(nn.Dense(16)(x)))

    def model(x):
        decode = flax_module("decoder", Both(8), input_shape=(BATCH, 2))
        with numpyro.plate("examples", BATCH):
            z = numpyro.sample("z", distributions.Normal(0, 1).expand([2]).to_event(1))
            numpyro.sample("x", distributions.Normal(decode(z), 1.0).to_event(1), obs=x)

    def guide(x):
        encode = flax_module("encoder", Both(4), input_shape=(BATCH, 8))
        with numpyro.plate("examples", BATCH):
            place, spread = jnp.split(encode(x), 2, axis=-1)
            numpyro.sample("z", distributions.Normal(place, jnp.exp(spread)).to_event(1))

    svi = infer.SVI(model, guide, optax.sgd(1e-3), infer.Trace_ELBO())
    batch = {"x": noise(BATCH, 8)}
    state = svi.init(jax.random.key(0), **batch)
    return (lambda state, batch: svi.update(state, **batch)), state, batch


@library_step("distrax")
def distrax_coupling_flow():
    import distrax

    def flow(params):
        layers = []
        for number, layer in enumerate(params):
            mask = jnp.arange(4) % 2 == number % 2

            def shift_and_scale(values):
                return distrax.ScalarAffine(shift=values[..., :4], log_scale=jnp.tanh(values[..., 4:]))

            conditioner = functools.partial(perceptron, layer)
            layers.append(distrax.MaskedCoupling(mask, conditioner=conditioner, bijector=shift_and_scale))
        base = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        return distrax.Transformed(base, distrax.Block(distrax.Chain(layers), 0))

    params = [of_sizes(4, 16, 8), of_sizes(4, 16, 8)]
    return trained(lambda params, batch: -flow(params).log_prob(batch["x"]).mean(), params, {"x": noise(BATCH, 4)})


@library_step("rlax", "distrax")
def rlax_actor_and_critic():
    import distrax
    import rlax

    def loss_of(params, batch):
        values = perceptron(params["critic"], batch["seen"])[..., 0]
        policy = distrax.Categorical(logits=perceptron(params["actor"], batch["seen"][:, :-1]))
        learned = jax.vmap(rlax.td_lambda, in_axes=(0, 0, 0, 0, None))
        errors = learned(values[:, :-1], batch["reward"], batch["discount"], values[:, 1:], 0.9)
        ratio = jnp.exp(policy.log_prob(batch["action"]) - batch["log_prob"])
        clipped = jax.vmap(rlax.clipped_surrogate_pg_loss, in_axes=(0, 0, None))(ratio, errors, 0.2)
        return jnp.mean(clipped) + 0.5 * jnp.mean(errors**2) - 0.01 * policy.entropy().mean()

    params = {"actor": of_sizes(5, 16, 3), "critic": of_sizes(5, 16, 1)}
    batch = {"seen": noise(BATCH, 7, 5), "reward": noise(BATCH, 6), "discount": jnp.full((BATCH, 6), 0.95)}
    batch |= {"action": integers(3, BATCH, 6), "log_prob": jnp.full((BATCH, 6), -1.1)}
    return trained(loss_of, params, batch)


@library_step("rlax")
def rlax_deep_q_network_with_a_target_network():
    import rlax

    tx = optax.sgd(0.05)

    def step(state, batch):
        def loss_of(params):
            now, then = perceptron(params, batch["now"]), perceptron(state["target"], batch["then"])
            chosen = perceptron(params, batch["then"])
            learned = jax.vmap(rlax.double_q_learning)
            errors = learned(now, batch["action"], batch["reward"], batch["discount"], then, chosen)
            return jnp.mean(rlax.huber_loss(errors))

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(gradients, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        target = optax.periodic_update(params, state["target"], state["count"], 2)
        return {"params": params, "target": target, "opt": opt, "count": state["count"] + 1}, loss

    params = of_sizes(5, 16, 3)
    state = {"params": params, "target": of_sizes(5, 16, 3), "opt": tx.init(params), "count": jnp.int32(0)}
    batch = {"now": noise(BATCH, 5), "then": noise(BATCH, 5, seed=1), "action": integers(3, BATCH)}
    return step, state, batch | {"reward": noise(BATCH), "discount": jnp.full(BATCH, 0.9)}


@library_step("rlax", "distrax")
def rlax_plays_and_learns_in_one_step():
    """The environment is in the step: a cart pole that 16 copies of the policy play for five moves."""
    import distrax
    import rlax

    def move(state, push):
        place, speed, angle, turning = jnp.moveaxis(state, -1, 0)
        turns = jnp.sin(angle) - 0.5 * push
        return jnp.stack([place + 0.1 * speed, speed + 0.1 * push, angle + 0.1 * turning, turning + 0.1 * turns], -1)

    def loss_of(params, batch):
        def play(state, key):
            policy = distrax.Categorical(logits=perceptron(params, state))
            action = policy.sample(seed=key)
            after = move(state, 2.0 * action - 1)
            return after, (policy.logits, action, 1 - jnp.abs(after[..., 2]))

        def one(start, key):
            _, (logits, actions, rewards) = jax.lax.scan(play, start, jax.random.split(key, 5))
            gains = rlax.discounted_returns(rewards, jnp.full(5, 0.9), jnp.float32(0))
            return rlax.policy_gradient_loss(logits, actions, jax.lax.stop_gradient(gains), jnp.ones(5))

        return jax.vmap(one)(batch["start"], batch["keys"]).mean()

    batch = {"start": 0.1 * noise(BATCH, 4), "keys": jax.random.split(jax.random.key(0), BATCH)}
    return trained(loss_of, of_sizes(4, 16, 2), batch)
