"""Steps of flax.linen and flax.nnx."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

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


def linen(model, batch, *inputs, tx=None):
    """A step of a linen module that maps `inputs` of the batch to logits."""
    params = model.init(jax.random.key(0), *(batch[name] for name in inputs))["params"]

    def loss_of(params, batch):
        return cross_entropy(model.apply({"params": params}, *(batch[name] for name in inputs)), batch["y"])

    return trained(loss_of, params, batch, tx)


@library_step()
def linen_perceptron_with_a_train_state():
    model = nn.Sequential([nn.Dense(16), nn.gelu, nn.LayerNorm(), nn.Dense(4)])
    batch = labelled(8)
    variables = model.init(jax.random.key(0), batch["x"])

    def step(state, batch):
        def loss_of(params):
            return cross_entropy(state.apply_fn({"params": params}, batch["x"]), batch["y"])

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    tx = optax.sgd(0.1, momentum=0.9)
    return step, TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx), batch


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(32)(x)


@library_step()
def linen_multi_head_attention():
    return linen(Encoder(), {"x": integers(32, BATCH, 8), "y": integers(32, BATCH, 8, seed=1)}, "x")


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.OptimizedLSTMCell(8))(x)
        h = nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.GRUCell(8)))(h)
        return nn.Dense(4)(h[:, -1])


@library_step()
def linen_lstm_and_bidirectional_gru():
    return linen(Recurrent(), labelled(6, 8), "x")


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


@library_step(
    refused=mixes_examples("BatchNorm, whose statistics are of the whole batch"),
)
def linen_convolutions_with_batch_norm_and_dropout():
    model, batch, tx = Convolutional(), labelled(8, 8, 1), optax.sgd(0.1)
    variables = model.init(jax.random.key(0), batch["x"], False)

    def step(state, batch):
        key, now = jax.random.split(state["key"])

        def loss_of(params):
            given = {"params": params, "batch_stats": state["batch_stats"]}
            logits, changed = model.apply(given, batch["x"], True, mutable=["batch_stats"], rngs={"dropout": now})
            return cross_entropy(logits, batch["y"]), changed["batch_stats"]

        (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "batch_stats": stats, "key": key}, loss

    return step, {**variables, "opt": tx.init(variables["params"]), "key": jax.random.key(1)}, batch


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.Dense(8)(nn.silu(nn.Dense(16)(nn.RMSNorm()(x)))), None

        over = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(4)(over()(x, None)[0])


@library_step()
def linen_scan_over_recomputed_layers():
    return linen(Scanned(), labelled(8), "x")


class Weighted(nn.Module):
    window: int

    @nn.compact
    def __call__(self, x):
        x = nn.WeightNorm(nn.Dense(16))(x.reshape(x.shape[0], -1, 8))
        x = nn.ConvLocal(8, (self.window,))(x)
        x = nn.GroupNorm(4)(nn.ConvTranspose(8, (2,), strides=(self.window,))(x))
        return nn.DenseGeneral(4, axis=(-2, -1))(x)


@library_step()
def linen_rare_layers():
    """The norm is over groups of two numbers: its variance, a difference of two means, makes much of rounding."""
    return linen(Weighted(window=1), labelled(8), "x")


@library_step()
def linen_rare_layers_over_windows():
    return linen(Weighted(window=3), labelled(6, 8), "x")


def of_nnx(model, batch, loss_of, tx=None):
    """A step in nnx's functional form: the module and its optimizer are split into their graph and their state."""
    graph, state = nnx.split((model, nnx.Optimizer(model, tx or optax.sgd(0.1), wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model, batch))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return step, state, batch


@library_step()
def nnx_perceptron_with_dropout():
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(8, 16, rngs=rngs), nnx.relu, nnx.Dropout(0.1, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)]
    model = nnx.Sequential(*layers)
    return of_nnx(model, labelled(8), lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]))


@library_step()
def nnx_multi_head_attention():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 16, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.out = nnx.Linear(16, 32, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            return self.out(self.norm(x + self.attend(x)))

    batch = {"x": integers(32, BATCH, 8), "y": integers(32, BATCH, 8, seed=1)}
    return of_nnx(Model(nnx.Rngs(0)), batch, lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]))


@library_step(
    refused=mixes_examples("BatchNorm, whose statistics are of the whole batch"),
)
def nnx_convolutions_with_batch_norm():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.out = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    return of_nnx(
        Model(nnx.Rngs(0)), labelled(8, 8, 1), lambda model, batch: cross_entropy(model(batch["x"]), batch["y"])
    )


@library_step()
def nnx_recurrent_network():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.GRUCell(8, 16, rngs=rngs))
            self.out = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.rnn(x))

    batch = {"x": noise(BATCH, 6, 8), "y": noise(BATCH, 6, 3)}
    return of_nnx(Model(nnx.Rngs(0)), batch, lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
