"""Train steps in the signatures in which libraries write them, of small models of two layers, and what they give undecorated.

A `Signature` makes a step, its first arguments, and how a call takes the arguments of the next one from its results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

SIGNATURES: dict[str, Signature] = {}
TX = optax.adam(0.05)
SHAPES = {"a": (8, 16), "b": (16, 4)}


@dataclasses.dataclass(frozen=True)
class Signature:
    """A step and its use: `call(step, state, x, y)` returns the new state and the loss; `state` is made anew for each run."""

    step: Callable[..., Any]
    state: Callable[[], Any]
    call: Callable[..., Any]
    jit: Callable[..., Any] = jax.jit


def weights():
    return {
        key: jnp.asarray(np.random.default_rng(len(key) + shape[0]).standard_normal(shape) / 3, jnp.float32)
        for key, shape in SHAPES.items()
    }


def batches():
    rng = np.random.default_rng(0)
    return [
        (jnp.asarray(rng.standard_normal((16, 8)), jnp.float32), jnp.asarray(rng.standard_normal((16, 4)), jnp.float32))
        for _ in range(3)
    ]


def loss_of(w, x, y, activation=jnp.tanh):
    return jnp.mean((activation(x @ w["a"]) @ w["b"] - y) ** 2)


def train(signature, step):
    """Losses of three steps, and the leaves of the last state."""
    state, losses = signature.state(), []
    for x, y in batches():
        state, loss = signature.call(step, state, x, y)
        losses.append(float(loss))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(state) if hasattr(leaf, "dtype")]


@functools.cache
def reference(name):
    """The same of the undecorated step under its library's jit."""
    return train(SIGNATURES[name], SIGNATURES[name].jit(SIGNATURES[name].step))


def update(w, kept, x, y, **how):
    loss, gradients = jax.value_and_grad(functools.partial(loss_of, **how))(w, x, y)
    updates, kept = TX.update(gradients, kept, w)
    return optax.apply_updates(w, updates), kept, loss


def in_two():
    return weights(), TX.init(weights())


def params_opt_state_batch(params, opt_state, batch):
    return update(params, opt_state, *batch)


SIGNATURES["params, opt_state, batch"] = Signature(
    params_opt_state_batch, in_two, lambda step, state, x, y: ((out := step(*state, (x, y)))[:2], out[2])
)


def batch_opt_state_params(batch, opt_state, params):
    params, opt_state, loss = update(params, opt_state, *batch)
    return loss, opt_state, params


SIGNATURES["batch, opt_state, params"] = Signature(
    batch_opt_state_params, in_two, lambda step, state, x, y: ((out := step((x, y), *state[::-1]))[:0:-1], out[0])
)


def params_and_opt_state_apart(params, x, opt_state, y):
    params, opt_state, loss = update(params, opt_state, x, y)
    return params, loss, opt_state


SIGNATURES["params, x, opt_state, y"] = Signature(
    params_and_opt_state_apart,
    in_two,
    lambda step, state, x, y: ((out := step(state[0], x, state[1], y))[::2], out[1]),
)


def state_without_names(state, batch):
    w, kept, loss = update(*state, *batch)
    return (w, kept), loss


SIGNATURES["a state without names"] = Signature(
    state_without_names, in_two, lambda step, state, x, y: step(state, (x, y))
)


def with_functions(state, batch):
    w, kept, loss = update(state["w"], state["kept"], *batch, activation=state["activation"])
    assert state["name"] == "perceptron"
    return state | {"w": w, "kept": kept}, loss


def jit_without_functions(step):
    """As a user of `jax.jit` writes it: functions and strings taken out of the state by hand."""

    @jax.jit
    def run(arrays, batch):
        state, loss = step(arrays | {"activation": jnp.tanh, "name": "perceptron"}, batch)
        return {key: state[key] for key in ("w", "kept")}, loss

    def whole(state, batch):
        new, loss = run({key: state[key] for key in ("w", "kept")}, batch)
        return state | new, loss

    return whole


SIGNATURES["functions and strings in the state"] = Signature(
    with_functions,
    lambda: {"w": weights(), "kept": TX.init(weights()), "activation": jnp.tanh, "name": "perceptron", "no": None},
    lambda step, state, x, y: step(state, (x, y)),
    jit_without_functions,
)


def with_a_mode(state, batch, mode, *, power):
    w, kept, loss = update(*state, *batch, activation=jnp.sin if mode == "sin" else jnp.tanh)
    return (w, kept), loss**power


SIGNATURES["a jitted step with static arguments"] = Signature(
    jax.jit(with_a_mode, static_argnames=("mode", "power")),
    in_two,
    lambda step, state, x, y: step(state, (x, y), mode="sin", power=1),
    lambda jitted: jitted,
)


# --- flax.nnx ---------------------------------------------------------------------------------------------------------


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.activation = jnp.tanh

    def __call__(self, x):
        return self.b(self.activation(self.a(x)))


class Tied(nnx.Module):
    """The first layer is used again, transposed, and known by two names."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.again = self.a

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)) @ self.again.kernel[...].T)


def nnx_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def model_and_optimizer(kind=Perceptron):
    model = kind(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


SIGNATURES["nnx: model, optimizer, batch"] = Signature(
    nnx_step, model_and_optimizer, lambda step, state, x, y: (state, step(*state, (x, y))), nnx.jit
)
SIGNATURES["nnx: tied weights"] = Signature(
    nnx_step,
    functools.partial(model_and_optimizer, Tied),
    lambda step, state, x, y: (state, step(*state, (x, y))),
    nnx.jit,
)


def nnx_step_of_one(optimizer, batch, metrics):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(optimizer.model)
    optimizer.update(gradients)
    metrics.update(values=loss)
    return loss


SIGNATURES["nnx: an optimizer with its model, and metrics"] = Signature(
    nnx_step_of_one,
    lambda: (nnx.ModelAndOptimizer(Perceptron(nnx.Rngs(0)), TX, wrt=nnx.Param), nnx.metrics.Average()),
    lambda step, state, x, y: (state, step(state[0], (x, y), state[1])),
    nnx.jit,
)


def nnx_step_sharing(model, optimizer, batch):
    return nnx_step_of_one(optimizer, batch, nnx.metrics.Average()) + 0 * jnp.sum(model.a.bias[...])


SIGNATURES["nnx: two arguments that share a model"] = Signature(
    nnx_step_sharing,
    lambda: ((model := Perceptron(nnx.Rngs(0))), nnx.ModelAndOptimizer(model, TX, wrt=nnx.Param)),
    lambda step, state, x, y: (state, step(*state, (x, y))),
    nnx.jit,
)


def nnx_split_by_hand(state, batch):
    model = nnx.merge(GRAPH, state[0])
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
    updates, kept = TX.update(gradients, state[1], state[0])
    return (optax.apply_updates(state[0], updates), kept), loss


GRAPH, _ = nnx.split(Perceptron(nnx.Rngs(0)))
SIGNATURES["nnx: split by hand"] = Signature(
    nnx_split_by_hand,
    lambda: ((params := nnx.state(Perceptron(nnx.Rngs(0)))), TX.init(params)),
    lambda step, state, x, y: step(state, (x, y)),
)


def nnx_returned(model, kept, batch):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
    updates, kept = TX.update(gradients, kept, nnx.state(model, nnx.Param))
    nnx.update(model, optax.apply_updates(nnx.state(model, nnx.Param), updates))
    return model, kept, loss


SIGNATURES["nnx: a model that comes back"] = Signature(
    nnx_returned,
    lambda: ((model := Perceptron(nnx.Rngs(0))), TX.init(nnx.state(model, nnx.Param))),
    lambda step, state, x, y: ((out := step(*state, (x, y)))[:2], out[2]),
    nnx.jit,
)


# --- equinox ----------------------------------------------------------------------------------------------------------


class Regularised(eqx.Module):
    """A perceptron with functions, a switch and numbers of Python among its leaves, as equinox's own layers have."""

    layers: eqx.nn.Sequential
    dropout: eqx.nn.Dropout
    strength: float

    def __init__(self, key):
        one, two = jax.random.split(key)
        first, last = eqx.nn.Linear(8, 16, key=one), eqx.nn.Linear(16, 4, key=two)
        self.layers = eqx.nn.Sequential([first, eqx.nn.Lambda(jax.nn.softplus), last])
        self.dropout, self.strength = eqx.nn.Dropout(0.5, inference=True), 0.5

    def __call__(self, x):
        return self.dropout(self.layers(x)) * (2 * self.strength if self.strength < 1 else 1)


def eqx_step(model, opt_state, x, y):
    loss, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
    updates, opt_state = TX.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def eqx_state():
    model = Regularised(jax.random.key(0))
    return model, TX.init(eqx.filter(model, eqx.is_array))


for wrapped, step in (("", eqx_step), (" under filter_jit", eqx.filter_jit(eqx_step))):
    SIGNATURES["equinox: model, opt_state, x, y" + wrapped] = Signature(
        step, eqx_state, lambda step, state, x, y: ((out := step(*state, x, y))[:2], out[2]), eqx.filter_jit
    )


class EqxTrainer(eqx.Module):
    """A module that holds the whole state; its step is a method."""

    model: Regularised
    opt_state: optax.OptState

    def step(self, x, y):
        model, opt_state, loss = eqx_step(self.model, self.opt_state, x, y)
        return EqxTrainer(model, opt_state), loss


SIGNATURES["equinox: a method of the state"] = Signature(
    EqxTrainer.step, lambda: EqxTrainer(*eqx_state()), lambda step, state, x, y: step(state, x, y), eqx.filter_jit
)
