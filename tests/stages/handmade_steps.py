"""Steps whose backward pass JAX did not make with `jax.grad`, or whose outputs say little about what is forward.

Each function returns (step, state, batch) with `step(state, batch)` -> the new state, or a tuple that begins with it, unless it
says something else. The layers are those of `tests/pipeline_steps.py`.
"""

import jax
import jax.numpy as jnp

from tests.pipeline_steps import RATE, WIDTH, descended, forward, layers, mean_error, rows, trained_on


def loss_and_gradients(params, batch):
    """The mean error and its gradients, by the chain rule as one writes it on paper."""
    kept = [batch["x"]]
    for p in params:
        kept.append(jnp.tanh(kept[-1] @ p["w"] + p["b"]))
    error = kept[-1] - batch["y"]
    cotangent = 2 * error / error.shape[0]
    gradients = []
    for p, x, y in reversed(list(zip(params, kept[:-1], kept[1:], strict=True))):
        cotangent = cotangent * (1 - y * y)
        gradients.append({"w": x.T @ cotangent, "b": cotangent.sum(axis=0)})
        cotangent = cotangent @ p["w"].T
    return jnp.mean(jnp.sum(error**2, axis=-1)), gradients[::-1]


def by_hand():
    """Forward, backward and update in plain array operations."""

    def step(params, batch):
        loss, gradients = loss_and_gradients(params, batch)
        return descended(params, gradients), loss

    return step, layers(), rows()


def by_hand_without_a_loss():
    """As `by_hand`, with nothing but the new state to return."""

    def step(params, batch):
        return descended(params, loss_and_gradients(params, batch)[1])

    return step, layers(), rows()


def by_hand_with_norms():
    """As `by_hand`, clipped by the norm of all gradients, with the norm of each among the metrics."""

    def step(params, batch):
        loss, gradients = loss_and_gradients(params, batch)
        norms = jax.tree.map(jnp.linalg.norm, gradients)
        scale = jnp.minimum(1.0, 0.5 / jnp.sqrt(sum(n**2 for n in jax.tree.leaves(norms))))
        return descended(params, jax.tree.map(lambda g: g * scale, gradients)), {"loss": loss, "norms": norms}

    return step, layers(), rows()


def by_hand_scanned():
    """As `by_hand`, with stacked layers and a scan each way."""

    def step(params, batch):
        def onward(x, p):
            y = jnp.tanh(x @ p["w"] + p["b"])
            return y, (x, y)

        def back(cotangent, layer):
            p, x, y = layer
            cotangent = cotangent * (1 - y * y)
            return cotangent @ p["w"].T, {"w": x.T @ cotangent, "b": cotangent.sum(axis=0)}

        out, (xs, ys) = jax.lax.scan(onward, batch["x"], params)
        error = out - batch["y"]
        _, gradients = jax.lax.scan(back, 2 * error / error.shape[0], (params, xs, ys), reverse=True)
        return descended(params, gradients), jnp.mean(jnp.sum(error**2, axis=-1))

    return step, jax.tree.map(lambda *x: jnp.stack(x), *layers()), rows()


def returned_by_hand():
    """(loss, gradients) by hand; nothing is updated."""
    return loss_and_gradients, layers(), rows()


def summed_by_hand():
    """Gradients by hand are added to a sum in the state, and the weights stay."""

    def step(state, batch):
        loss, gradients = loss_and_gradients(state["params"], batch)
        return {"params": state["params"], "sum": jax.tree.map(jnp.add, state["sum"], gradients)}, loss

    return step, {"params": layers(), "sum": jax.tree.map(jnp.zeros_like, layers())}, rows()


def own_derivatives():
    """Every layer has a derivative of the user's own."""

    @jax.custom_vjp
    def layer(p, x):
        return jnp.tanh(x @ p["w"] + p["b"])

    def onward(p, x):
        y = layer(p, x)
        return y, (p, x, y)

    def back(kept, cotangent):
        p, x, y = kept
        cotangent = cotangent * (1 - y * y)
        return {"w": x.T @ cotangent, "b": cotangent.sum(axis=0)}, cotangent @ p["w"].T

    layer.defvjp(onward, back)

    def loss_of(params, batch):
        x = batch["x"]
        for p in params:
            x = layer(p, x)
        return jnp.mean(jnp.sum((x - batch["y"]) ** 2, axis=-1))

    return trained_on(loss_of, layers(), rows())


def own_derivative_of_the_loss():
    """The whole loss has a derivative of the user's own."""
    loss_of = jax.custom_vjp(mean_error)
    loss_of.defvjp(
        lambda params, batch: loss_and_gradients(params, batch),
        lambda gradients, cotangent: (jax.tree.map(lambda g: g * cotangent, gradients), None),
    )
    return trained_on(loss_of, layers(), rows())


def linearized():
    """`jax.linearize` and its transposition in place of `jax.grad`."""

    def step(params, batch):
        loss, push = jax.linearize(lambda p: mean_error(p, batch), params)
        (gradients,) = jax.linear_transpose(push, params)(jnp.ones_like(loss))
        return descended(params, gradients), loss

    return step, layers(), rows()


def pulled_back():
    """`jax.vjp` of the layers, from a cotangent by hand, with a scaled loss."""

    def step(state, batch):
        out, pull = jax.vjp(lambda p: forward(p, batch["x"]), state["params"])
        error = out - batch["y"]
        (gradients,) = pull(2 * state["scale"] * error / error.shape[0])
        gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
        params = descended(state["params"], gradients)
        return {"params": params, "scale": state["scale"]}, jnp.mean(jnp.sum(error**2, axis=-1))

    return step, {"params": layers(), "scale": jnp.float32(64.0)}, rows()


def predictions():
    """What the step returns beside its state are predictions, and no loss."""

    def step(params, batch):
        def loss_of(params):
            out = forward(params, batch["x"])
            return jnp.mean((out - batch["y"]) ** 2), out

        (_, out), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return descended(params, gradients), out

    return step, layers(), rows()


def sensitivities():
    """Gradients with respect to the examples, among the metrics of a step that trains."""

    def step(params, batch):
        loss, (gradients, back) = jax.value_and_grad(lambda p, x: mean_error(p, batch | {"x": x}), argnums=(0, 1))(
            params, batch["x"]
        )
        return descended(params, gradients), {"loss": loss, "sensitivity": jnp.sum(back**2, axis=-1)}

    return step, layers(), rows()


def only_sensitivities():
    """(loss, gradients with respect to the examples); there is no state."""

    def step(params, batch):
        return jax.value_and_grad(lambda x: mean_error(params, batch | {"x": x}))(batch["x"])

    return step, layers(), rows()


def several_losses():
    """A critic that learns from the trunk's values without teaching the trunk, beside an actor that does."""

    def step(state, batch):
        def loss_of(state):
            seen = forward(state["trunk"], batch["x"])
            judged = forward(state["critic"], jax.lax.stop_gradient(seen))
            acted = forward(state["actor"], seen)
            losses = jnp.mean((judged - batch["y"]) ** 2), jnp.mean((acted - batch["x"]) ** 2)
            return sum(losses), losses

        (_, losses), gradients = jax.value_and_grad(loss_of, has_aux=True)(state)
        return descended(state, gradients), losses

    return step, {"trunk": layers(2), "critic": layers(2), "actor": layers(2)}, rows()


def two_backward_passes():
    """A generator and a discriminator, each with a loss of its own through the other."""

    def step(state, batch):
        def loss_of_d(d):
            made = forward(d, forward(state["g"], batch["x"]))
            return jnp.mean(forward(d, batch["y"]) ** 2) + jnp.mean((1 - made) ** 2)

        def loss_of_g(g):
            return jnp.mean(forward(state["d"], forward(g, batch["x"])) ** 2)

        loss_d, of_d = jax.value_and_grad(loss_of_d)(state["d"])
        loss_g, of_g = jax.value_and_grad(loss_of_g)(state["g"])
        return {"g": descended(state["g"], of_g), "d": descended(state["d"], of_d)}, (loss_d, loss_g)

    return step, {"g": layers(2), "d": layers(2)}, rows()


def balanced_experts():
    """The load of each layer's experts moves a bias of their choice, which no gradient reaches; see arXiv:2408.15664."""

    def step(state, batch):
        def loss_of(params):
            x, loads = batch["x"], []
            for p, bias in zip(params, state["bias"], strict=True):
                scores = jax.nn.sigmoid(x @ p["w"])
                chosen = jax.nn.one_hot(jnp.argmax(scores + bias, axis=-1), WIDTH)
                loads.append(chosen.mean(axis=0))
                x = jnp.tanh(x + (chosen * scores) @ p["w"] + p["b"])
            return jnp.mean((x - batch["y"]) ** 2), loads

        (loss, loads), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        bias = [b + 0.01 * jnp.sign(load.mean() - load) for b, load in zip(state["bias"], loads, strict=True)]
        return {"params": descended(state["params"], gradients), "bias": bias}, loss

    return step, {"params": layers(), "bias": [jnp.zeros(WIDTH) for _ in range(4)]}, rows()


def confusing_scopes():
    """As `by_hand`, in scopes of the user's that are called like what JAX does."""

    def step(params, batch):
        with jax.named_scope("transpose(jvp())"), jax.named_scope("transpose"):
            loss, gradients = loss_and_gradients(params, batch)
        return descended(params, gradients), loss

    return step, layers(), rows()


def evaluation_in_a_confusing_scope():
    """The loss alone."""

    def step(params, batch):
        with jax.named_scope("transpose(jvp())"), jax.named_scope("transpose"):
            return mean_error(params, batch)

    return step, layers(), rows()


def steps_within_the_loss():
    """The loss is that of weights that have made a step of their own: derivatives of derivatives."""

    def loss_of(params, batch):
        moved = descended(params, jax.grad(mean_error)(params, batch))
        return mean_error(moved, batch)

    return trained_on(loss_of, layers(2), rows())


def regression_by_hand():
    """One weight, whose gradient is the whole backward pass."""

    def step(weight, batch):
        error = batch["x"] @ weight - batch["y"]
        return weight - RATE * 2 * batch["x"].T @ error / error.size, jnp.mean(error**2)

    return step, layers(1)[0]["w"], rows()
