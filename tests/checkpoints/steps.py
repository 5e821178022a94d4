"""A step whose state has leaves of every kind, and ways to run it: on one mesh and in stages that divide its stack of layers."""

import jax
import jax.numpy as jnp
import numpy as np

import autopar

LAYERS, WIDTH, ROWS = 4, 16, 8
ONE_MESH = {
    "whole": {"mesh_shape": (1,), "devices": 1},
    "data_parallel": {"mesh_shape": (8,), "constraints": autopar.data_parallel()},
    "zero3": {"mesh_shape": (4, 2), "constraints": autopar.zero3()},
}
STAGES = {
    "2_stages": {"num_stages": 2, "mesh_shape": (2,), "num_microbatches": 2, "schedule": "1f1b"},
    "3_stages": {"num_stages": 3, "mesh_shape": [(1,), (2,), (1,)], "num_microbatches": 2, "schedule": "gpipe"},
    "4_stages": {"num_stages": 4, "mesh_shape": (2,), "num_microbatches": 2, "schedule": "1f1b"},
}
WAYS = ONE_MESH | STAGES


def scanned_step(state, batch):
    """A stack of layers under `lax.scan`, momentum, a key, a count and a mask."""

    def loss_of(params):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["stack"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m.astype(p.dtype), state["params"], momentum)
    key = jax.random.split(state["key"], 1)[0]
    new = {"params": params, "momentum": momentum, "key": key, "count": state["count"] + 1, "mask": ~state["mask"]}
    return new, loss


def make_state(seed=0):
    """The first state; momentum is in bfloat16."""
    draw = np.random.default_rng(seed)
    params = {
        "stack": jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, jnp.float32),
        "head": jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32),
    }
    momentum = jax.tree.map(lambda p: (p * 3).astype(jnp.bfloat16), params)
    mask = jnp.asarray(draw.integers(2, size=WIDTH), bool)
    return {"params": params, "momentum": momentum, "key": jax.random.key(seed), "count": jnp.int32(7), "mask": mask}


def make_batch(number=0):
    """The batch of this number."""
    draw = np.random.default_rng(100 + number)
    return {name: draw.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


def planned(way, fun=scanned_step, state=None, batch=None):
    """The step, planned for a way to run it."""
    options = dict(WAYS[way])
    if "devices" in options:
        options["devices"] = jax.devices()[: options["devices"]]
    step = autopar.parallelize(fun, planning_seconds=None, **options)
    step.plan(make_state() if state is None else state, make_batch() if batch is None else batch)
    return step


def laid_out(step, state):
    """The state as the step keeps it."""
    return step.init_state(lambda given: given, state)


def bits(tree):
    """The numbers of a tree's leaves as bytes, by path."""

    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        return str(leaf.dtype), array.shape, array.tobytes()

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): raw(leaf) for path, leaf in leaves}
