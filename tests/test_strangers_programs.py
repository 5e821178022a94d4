"""Train steps as strangers write them, each with something that no other test's step has, against `jax.jit`.

On a mesh, in microbatches, in stages. A step that cannot be cut that way must say so in words; then it is compared without.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.stages.even_cuts import choose_even_cuts
from tests.fast_part import on_the_diagonal
from tests.oracles import assert_same_as_jit

PROGRAMS = {}


def program(**how):
    """Register a function that returns (step, state, batch); `how` goes to the comparison, `cut` says whether it can be cut."""

    def register(build):
        PROGRAMS[build.__name__] = (build, how)
        return build

    return register


def noise(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def descend(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads)


def trained(loss_of, rate=0.1):
    """A step whose state is its parameters; `loss_of(params, batch)`."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state, batch)
        return descend(state, grads, rate), loss

    return step


@program()
def recurrent_cell_of_odd_sizes():
    def loss_of(p, batch):
        def cell(h, x):
            h = jnp.tanh(x @ p["in"] + h @ p["again"])
            return h, h @ p["out"]

        _, ys = lax.scan(cell, jnp.zeros((12, 10)), batch["x"].swapaxes(0, 1))
        return jnp.mean((ys.swapaxes(0, 1) - batch["y"]) ** 2)

    state = {"in": noise(6, 10, scale=0.3), "again": noise(10, 10, scale=0.3), "out": noise(10, 3, scale=0.3)}
    return trained(loss_of), state, {"x": noise(12, 7, 6), "y": noise(12, 7, 3)}


@program()
def key_counter_flag_and_history_in_the_state():
    def step(state, batch):
        key, now = jax.random.split(state["key"])

        def loss_of(p):
            h = jax.nn.gelu(batch["x"] @ p["a"])
            h = jnp.where(jax.random.bernoulli(now, 0.8, h.shape), h / 0.8, 0)
            picked = jnp.take_along_axis(jax.nn.log_softmax(h @ p["b"]), batch["y"][:, None], 1)
            return -jnp.mean(picked)

        loss, grads = jax.value_and_grad(loss_of)(state["p"])
        history = jnp.roll(state["history"], 1).at[0].set(state["count"].astype(jnp.int8))
        new = {"key": key, "count": state["count"] + 1, "flag": ~state["flag"], "history": history}
        return {"p": descend(state["p"], grads), **new}, loss

    state = {"p": {"a": noise(8, 16, scale=0.3), "b": noise(16, 4, scale=0.3)}, "key": jax.random.key(3)}
    state |= {"count": jnp.int32(0), "flag": jnp.array(True), "history": jnp.zeros(5, jnp.int8)}
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 4, 16))
    return step, state, {"x": noise(16, 8), "y": labels}


@program(rtol_of_scale=3e-3)
def float16_with_a_loss_scale():
    def step(state, batch):
        def loss_of(p):
            a, b = (leaf.astype(jnp.float16) for leaf in (p["a"], p["b"]))
            out = jax.nn.relu(batch["x"].astype(jnp.float16) @ a) @ b
            return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2) * state["scale"]

        loss, grads = jax.value_and_grad(loss_of)(state["p"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), descend(state["p"], grads), state["p"])
        scale = lax.cond(finite, lambda s: s * 2, lambda s: s / 2, state["scale"])
        return {"p": kept, "scale": scale}, loss / state["scale"]

    state = {"p": {"a": noise(8, 16, scale=0.3), "b": noise(16, 4, scale=0.3)}, "scale": jnp.float32(1024)}
    return step, state, {"x": noise(16, 8), "y": noise(16, 4)}


@program(cut=False)
def generator_and_discriminator_in_one_step():
    ways = {"g": optax.sgd(1e-2, momentum=0.5, nesterov=True), "d": optax.sgd(1e-2, momentum=0.9)}

    def made(p, z):
        return jnp.tanh(z @ p["w"]) @ p["v"]

    def judged(p, x):
        return (jax.nn.leaky_relu(x @ p["w"]) @ p["v"])[:, 0]

    def updated(state, name, loss_of):
        loss, grads = jax.value_and_grad(loss_of)(state[name])
        updates, moved = ways[name].update(grads, state[f"{name}_moved"])
        return {**state, name: optax.apply_updates(state[name], updates), f"{name}_moved": moved}, loss

    def step(state, batch):
        fake = lax.stop_gradient(made(state["g"], batch["z"]))
        state, d_loss = updated(
            state,
            "d",
            lambda d: jax.nn.softplus(-judged(d, batch["x"])).mean() + jax.nn.softplus(judged(d, fake)).mean(),
        )
        critic = state["d"]
        state, g_loss = updated(state, "g", lambda g: jax.nn.softplus(-judged(critic, made(g, batch["z"]))).mean())
        return state, {"d": d_loss, "g": g_loss}

    params = {
        "g": {"w": noise(5, 12, scale=0.3), "v": noise(12, 6, scale=0.3)},
        "d": {"w": noise(6, 10, scale=0.3), "v": noise(10, 1, scale=0.3)},
    }
    state = params | {f"{name}_moved": ways[name].init(params[name]) for name in params}
    return step, state, {"z": noise(16, 5), "x": noise(16, 6)}


@program()
def gradients_of_gradients_per_task():
    def predicted(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

    def loss_of(p, batch):
        def task_loss(t):
            inner = jax.grad(lambda q: jnp.mean((predicted(q, t["x"]) - t["y"]) ** 2))
            q = descend(p, inner(p))
            q = descend(q, inner(q))
            return jnp.mean((predicted(q, t["x2"]) - t["y2"]) ** 2)

        return jax.vmap(task_loss)(batch).mean()

    state = {"w": noise(4, 8, scale=0.4), "b": noise(8, scale=0.1), "v": noise(8, 1, scale=0.4)}
    batch = {"x": noise(8, 5, 4), "y": noise(8, 5, 1), "x2": noise(8, 6, 4), "y2": noise(8, 6, 1)}
    return trained(loss_of, 0.05), state, batch


@program()
def messages_on_graphs():
    def loss_of(p, batch):
        def one(nodes, source, target, label):
            h = p["embed"][nodes]
            for _ in range(2):
                message = jnp.tanh(jnp.concatenate([h[source], h[target]], -1) @ p["message"])
                h = h + jax.ops.segment_sum(message, target, num_segments=11)
            return optax.softmax_cross_entropy_with_integer_labels(h.mean(0) @ p["out"], label)

        return jax.vmap(one)(batch["nodes"], batch["source"], batch["target"], batch["label"]).mean()

    random = np.random.default_rng(2)
    state = {"embed": noise(7, 9, scale=0.4), "message": noise(18, 9, scale=0.3), "out": noise(9, 3, scale=0.3)}
    sizes = {"nodes": (7, (8, 11)), "source": (11, (8, 20)), "target": (11, (8, 20)), "label": (3, (8,))}
    return trained(loss_of), state, {k: jnp.asarray(random.integers(0, n, shape)) for k, (n, shape) in sizes.items()}


@program()
def a_filter_in_the_frequency_domain():
    def loss_of(p, batch):
        spectrum = jnp.fft.rfft(batch["x"], axis=1) * lax.complex(p["re"], p["im"])
        out = jnp.fft.irfft(spectrum, n=16, axis=1) @ p["w"]
        power = jnp.abs(jnp.einsum("bfc,cd->bfd", spectrum, p["w"].astype(jnp.complex64)))
        return jnp.mean((out - batch["y"]) ** 2) + 0.01 * jnp.mean(power**2)

    state = {"re": noise(9, 4, scale=0.3), "im": noise(9, 4, seed=1, scale=0.3), "w": noise(4, 2, scale=0.4)}
    return trained(loss_of), state, {"x": noise(8, 16, 4), "y": noise(8, 16, 2)}


@program(rtol_of_scale=1e-4)
def gaussian_processes_side_by_side():
    def loss_of(p, batch):
        def one(x, y):
            squares = ((x[:, None] - x[None]) / jnp.exp(p["length"])) ** 2
            factor = jnp.linalg.cholesky(jnp.exp(-0.5 * squares.sum(-1)) + (0.1 + jnp.exp(p["noise"])) * jnp.eye(6))
            rest = y - (x @ p["mean"])[:, 0]
            return 0.5 * rest @ jax.scipy.linalg.cho_solve((factor, True), rest) + jnp.log(jnp.diagonal(factor)).sum()

        return jax.vmap(one)(batch["x"], batch["y"]).mean()

    state = {"length": jnp.zeros(3), "noise": jnp.float32(0), "mean": noise(3, 1, scale=0.1)}
    return trained(loss_of, 0.01), state, {"x": noise(8, 6, 3), "y": noise(8, 6)}


@program()
def a_linear_recurrence_by_associative_scan():
    def loss_of(p, batch):
        u = batch["x"] @ p["b"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["a"]), u.shape)
        _, h = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, u), axis=1)
        return jnp.mean((jnp.cumsum(h @ p["c"], axis=1) - batch["y"]) ** 2)

    state = {"a": noise(6, scale=0.1), "b": noise(5, 6, scale=0.4), "c": noise(6, 2, scale=0.4)}
    return trained(loss_of, 0.01), state, {"x": noise(8, 13, 5), "y": noise(8, 13, 2)}


@program()
def derivatives_of_the_users_own_under_recomputation():
    @jax.custom_vjp
    def gently(x):
        return x * 1.0

    gently.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    @jax.custom_jvp
    def size(x):
        return jnp.sqrt(x * x + 1e-3)

    @size.defjvp
    def _(primals, tangents):
        return size(*primals), primals[0] / size(*primals) * tangents[0]

    def loss_of(p, batch):
        h = batch["x"]
        for w in p[:-1]:
            h = jax.checkpoint(lambda w, h: size(gently(h @ w)))(w, h)
        return jnp.sum((h @ p[-1] - batch["y"]) ** 2 * batch["weight"][:, None]) / jnp.sum(batch["weight"])

    state = [noise(8, 12, scale=0.3), noise(12, 12, scale=0.3), noise(12, 4, scale=0.3)]
    return trained(loss_of), state, {"x": noise(12, 8), "y": noise(12, 4), "weight": jnp.abs(noise(12))}


@program()
def eight_bit_weights_a_low_rank_update_and_nothing():
    def step(state, batch):
        learnt = {name: state[name] for name in ("scale", "down", "up", "out")}

        def loss_of(p):
            w = state["quantised"].astype(jnp.float32) * p["scale"] + p["down"] @ p["up"]
            return jnp.mean((jax.nn.silu(batch["x"] @ w) @ p["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(learnt)
        largest = jnp.max(jnp.abs(state["quantised"].astype(jnp.int32)))
        return {**state, **descend(learnt, grads)}, {"loss": loss, "largest": largest, "nothing": state["nothing"]}

    quantised = jnp.asarray(np.random.default_rng(3).integers(-127, 127, (8, 16)), jnp.int8)
    state = {"quantised": quantised, "scale": jnp.full(16, 0.01, jnp.float32), "down": noise(8, 2, scale=0.1)}
    state |= {"up": jnp.zeros((2, 16)), "nothing": jnp.zeros((0, 4)), "out": noise(16, 3, scale=0.2)}
    return step, state, {"x": noise(16, 8), "y": noise(16, 3)}


@program()
def another_branch_each_step():
    def step(state, batch):
        t, params = state["t"], {"w": state["w"], "v": state["v"]}

        def loss_of(p):
            ways = [lambda h: jnp.tanh(h @ p["w"]), lambda h: jax.nn.relu(h @ p["w"]), lambda h: (h @ p["w"]) ** 2]
            out = lax.switch(t % 3, ways, batch["x"]) @ p["v"] - batch["y"]
            return lax.cond(t % 2 == 0, lambda y: jnp.mean(y**2), lambda y: jnp.mean(jnp.abs(y)), out)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return {**descend(params, grads, 0.05), "t": t + 1}, loss

    return (
        step,
        {"w": noise(6, 8, scale=0.3), "v": noise(8, 3, scale=0.3), "t": jnp.int32(0)},
        {
            "x": noise(8, 6),
            "y": noise(8, 3),
        },
    )


@program(cut=False)
def the_smallest_half_of_the_losses():
    def loss_of(p, batch):
        h = jax.nn.softplus(batch["x"] @ p["w"])
        values, places = lax.top_k(h, 3)
        h = jnp.zeros_like(h).at[jnp.arange(16)[:, None], places].set(values)
        each = jnp.sum((h @ p["v"] - batch["y"]) ** 2, -1)
        return jnp.mean(jnp.sort(each)[:8]) + 0.1 * jnp.median(each)

    return (
        trained(loss_of),
        {"w": noise(6, 8, scale=0.3), "v": noise(8, 4, scale=0.3)},
        {"x": noise(16, 6), "y": noise(16, 4)},
    )


@program()
def attention_with_relative_positions_and_a_window():
    def loss_of(p, batch):
        dims = ("NWC", "WIO", "NWC")
        h = lax.conv_general_dilated(batch["x"], p["conv"], (1,), [(4, 0)], rhs_dilation=(2,), dimension_numbers=dims)
        q, k, v = (h @ p[name] for name in "qkv")
        place = jnp.arange(9)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / 3 + p["bias"][place[:, None] - place[None] + 8]
        mixed = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((9, 9), bool)), scores, -jnp.inf), -1) @ v
        mixed = mixed + jnp.pad(mixed[:, 1:], ((0, 0), (0, 1), (0, 0)))
        seen = lax.dynamic_slice_in_dim(mixed, batch["start"], 4, axis=1)
        return jnp.mean((seen @ p["out"] - batch["y"]) ** 2)

    state = {"conv": noise(3, 4, 8, scale=0.3), "bias": noise(17, scale=0.1), "out": noise(8, 2, scale=0.3)}
    state |= {name: noise(8, 8, seed=i, scale=0.3) for i, name in enumerate("qkv")}
    return trained(loss_of), state, {"x": noise(8, 9, 4), "y": noise(8, 4, 2), "start": jnp.int32(3)}


WAYS = {
    "mesh": {"devices": 4},
    "microbatches": {"devices": 4, "num_microbatches": 2},
    "stages": {"devices": 4, "num_stages": 2, "num_microbatches": 2},
}


@functools.cache
def built(name):
    return PROGRAMS[name][0]()


def same_as_jit(name, **options):
    step, state, batch = built(name)
    how = {"rtol_of_scale": 2e-5} | {k: v for k, v in PROGRAMS[name][1].items() if k != "cut"}
    devices = jax.devices()[: options.pop("devices")]
    assert_same_as_jit(step, autopar.parallelize(step, devices=devices, **options), state, batch, **how)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_strangers_step_on_a_mesh_equals_jit(name):
    """No warning either: they are errors here."""
    same_as_jit(name, **WAYS["mesh"])


CAN_BE_CUT = [name for name, (_, how) in PROGRAMS.items() if how.get("cut", True)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "way"), on_the_diagonal(CAN_BE_CUT, ["microbatches", "stages"]))
@pytest.mark.filterwarnings("ignore:.*of the forward work is one operation:autopar.AutoparWarning")
def test_a_strangers_step_in_parts_equals_jit(name, way):
    same_as_jit(name, **WAYS[way])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name, (_, how) in PROGRAMS.items() if not how.get("cut", True)])
def test_a_strangers_step_that_has_no_parts_says_where(name):
    for way in ("microbatches", "stages"):
        with pytest.raises(
            autopar.UnsupportedProgramError, match=r"cannot be cut into 2 microbatches: .* at .*strangers_programs\.py"
        ):
            same_as_jit(name, **WAYS[way])


def test_a_step_without_forward_operations_is_told_what_may_be_the_reason():
    with pytest.raises(
        autopar.ArgumentError, match=r"0 forward operations, .* adds up gradients in a lax\.scan over parts"
    ):
        choose_even_cuts((), 2)
