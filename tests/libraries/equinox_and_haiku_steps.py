"""Steps of equinox and haiku."""

import jax
import jax.numpy as jnp
import optax

from tests.libraries.corpus import (
    BATCH,
    cross_entropy,
    integers,
    labelled,
    library_step,
    mixes_examples,
    noise,
    trained,
)


def of_equinox(model, batch, loss_of, tx=None):
    """A step of an equinox module: its arrays are the parameters."""
    import equinox as eqx

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    return trained(lambda arrays, batch: loss_of(eqx.combine(arrays, static), batch), arrays, batch, tx)


@library_step("equinox")
def equinox_perceptron():
    import equinox as eqx

    model = eqx.nn.MLP(8, 4, width_size=16, depth=3, key=jax.random.key(0))
    return of_equinox(model, labelled(8), lambda model, batch: cross_entropy(jax.vmap(model)(batch["x"]), batch["y"]))


@library_step("equinox")
def equinox_attention_and_dropout():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)

    class Block(eqx.Module):
        attend: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        out: eqx.nn.Linear
        drop: eqx.nn.Dropout

        def __call__(self, x, key):
            x = x + self.attend(x, x, x)
            x = self.drop(jax.vmap(self.norm)(x), key=key)
            return jax.vmap(self.out)(x)

    model = Block(
        eqx.nn.MultiheadAttention(2, 8, key=keys[0]),
        eqx.nn.LayerNorm(8),
        eqx.nn.Linear(8, 3, key=keys[1]),
        eqx.nn.Dropout(0.1),
    )

    def loss_of(model, batch):
        made = jax.vmap(model)(batch["x"], batch["keys"])
        return jnp.mean((made - batch["y"]) ** 2)

    batch = {"x": noise(BATCH, 6, 8), "y": noise(BATCH, 6, 3), "keys": jax.random.split(keys[2], BATCH)}
    return of_equinox(model, batch, loss_of)


@library_step("equinox")
def equinox_convolutions():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0]),
            eqx.nn.GroupNorm(4, 8),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.ConvTranspose2d(8, 4, 2, stride=2, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(256, 4, key=keys[2]),
        ]
    )
    return of_equinox(
        model, labelled(1, 8, 8), lambda model, batch: cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])
    )


@library_step("equinox")
def equinox_gated_recurrent_cell():
    import equinox as eqx

    cell = eqx.nn.GRUCell(4, 8, key=jax.random.key(0))

    def loss_of(cell, batch):
        def one(xs):
            return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(8), xs)[0]

        return jnp.mean((jax.vmap(one)(batch["x"]) - batch["y"]) ** 2)

    return of_equinox(cell, {"x": noise(BATCH, 6, 4), "y": noise(BATCH, 8)}, loss_of)


def of_haiku(forward, batch, loss_of, tx=None):
    """A step of a transformed haiku function without state: `loss_of(result, batch)`."""
    import haiku as hk

    network = hk.without_apply_rng(hk.transform(forward))
    params = network.init(jax.random.key(0), batch["x"])
    return trained(lambda params, batch: loss_of(network.apply(params, batch["x"]), batch), params, batch, tx)


def classified(logits, batch):
    return cross_entropy(logits, batch["y"])


@library_step("haiku")
def haiku_perceptron():
    import haiku as hk

    return of_haiku(lambda x: hk.nets.MLP([16, 16, 4])(x), labelled(8), classified)


@library_step("haiku")
def haiku_lstm():
    import haiku as hk

    def forward(x):
        core = hk.LSTM(8)
        outputs, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(x.shape[0]))
        return hk.Linear(4)(outputs[-1])

    return of_haiku(forward, labelled(6, 5), classified)


@library_step("haiku")
def haiku_attention():
    import haiku as hk

    def forward(tokens):
        x = hk.Embed(32, 16)(tokens)
        init = hk.initializers.VarianceScaling(1.0)
        x = hk.LayerNorm(-1, True, True)(x + hk.MultiHeadAttention(2, 8, w_init=init)(x, x, x))
        return hk.Linear(32)(x)

    return of_haiku(forward, {"x": integers(32, BATCH, 8), "y": integers(32, BATCH, 8, seed=1)}, classified)


@library_step(
    "haiku",
    refused=mixes_examples("BatchNorm, whose statistics are of the whole batch"),
)
def haiku_residual_network():
    """Its BatchNorms keep state."""
    import haiku as hk

    def forward(x, train):
        blocks = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (8, 8, 16, 16), "bottleneck": False}
        return hk.nets.ResNet(**blocks, num_classes=4, resnet_v2=True)(x, train)

    network, batch, tx = hk.without_apply_rng(hk.transform_with_state(forward)), labelled(16, 16, 1), optax.sgd(0.01)
    params, kept = network.init(jax.random.key(0), batch["x"], True)

    def step(state, batch):
        def loss_of(params):
            logits, kept = network.apply(params, state["kept"], batch["x"], True)
            return cross_entropy(logits, batch["y"]), kept

        (loss, kept), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "kept": kept}, loss

    return step, {"params": params, "opt": tx.init(params), "kept": kept}, batch


@library_step("haiku")
def haiku_vector_quantizer():
    """Straight-through gradients and a moving average of the codes."""
    import haiku as hk

    def forward(x, train):
        found = hk.nets.VectorQuantizerEMA(8, 16, commitment_cost=0.25, decay=0.9)(hk.Linear(8)(x), is_training=train)
        made = hk.Linear(6)(found["quantize"])
        return jnp.mean((made - x) ** 2) + found["loss"]

    network, tx = hk.without_apply_rng(hk.transform_with_state(forward)), optax.sgd(0.01)
    batch = {"x": noise(BATCH, 6)}
    params, kept = network.init(jax.random.key(0), batch["x"], True)

    def step(state, batch):
        apply = jax.value_and_grad(network.apply, has_aux=True)
        (loss, kept), gradients = apply(state["params"], state["kept"], batch["x"], True)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "kept": kept}, loss

    return step, {"params": params, "opt": tx.init(params), "kept": kept}, batch
