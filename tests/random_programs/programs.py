"""Random programs by number, of 3 to 30 drawn operations: `random_program`, and train steps, `random_step`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import autopar
from tests.random_programs.control import CONTROL
from tests.random_programs.operations import OPERATIONS
from tests.random_programs.writer import Value, Writer, fit

FAMILIES = {"operations": OPERATIONS, "control": CONTROL}
MESHES = ((2, 2), (3, 2), (8,), (2, 2, 2))
LONG_EVERY = 12


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with arguments, the families that it was drawn of, and how to run it."""

    fun: object
    arguments: tuple
    used: list
    mesh_shape: tuple
    options: dict = dataclasses.field(default_factory=dict)


def is_float(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def writer_of(seed, known, *, depth=2, gradient=False):
    return Writer(seed, known, FAMILIES, depth=depth, gradient=gradient)


def drawn_arguments(rng):
    """Two or three numbers, one of which may hold infinities and NaNs, integers and truths."""
    sizes = lambda rank: tuple(int(n) for n in rng.choice((2, 3, 4, 6, 8, 12), size=rank))  # noqa: E731
    floats = [rng.normal(size=sizes(rank)).astype(np.float32) for rank in (2, int(rng.integers(1, 4)), 1)]
    if not rng.integers(5):
        wild = floats[int(rng.integers(3))].reshape(-1)
        wild[rng.integers(wild.size, size=2)] = rng.choice([np.inf, -np.inf, np.nan, -0.0], size=2)
    return [*map(jnp.asarray, floats), jnp.asarray(rng.integers(-20, 20, size=sizes(2)), jnp.int32)]


def is_long(number):
    """Whether the program of a number has 10 to 30 operations, instead of 1 to 6."""
    return number % LONG_EVERY == LONG_EVERY - 1


def random_program(number):
    """The program of a number: 3 to 30 equations, or as many operations; every third one with its gradient."""
    rng = np.random.default_rng((1, number))
    arguments = drawn_arguments(rng)
    count = int(rng.integers(10, 31)) if is_long(number) else int(rng.integers(1, 7))
    gradient = bool(number % 3 == 2)
    used = []

    def plain(*given):
        writer = writer_of(number, [Value(x, moved_only=True) for x in given], gradient=gradient)
        made = writer.block(count)
        used[:] = writer.used
        return [value.array for value in made]

    fun = plain
    if gradient:
        fun = with_gradient(plain, arguments)
    return Program(fun, tuple(arguments), used, MESHES[number % len(MESHES)])


def with_gradient(fun, arguments):
    """`fun` with the derivatives of the sum of its numbers behind its results; itself if JAX has none."""

    def both(*given):
        def total(floats):
            results = fun(*floats, *given[len(floats) :])
            return sum(jnp.tanh(r).sum() for r in results if is_float(r)), results

        count = sum(map(is_float, given))
        gradients, results = jax.grad(total, has_aux=True)(list(given[:count]))
        return results, gradients

    try:
        jax.make_jaxpr(both)(*arguments)
    except (TypeError, ValueError, NotImplementedError):
        return fun  # a while loop among others
    return both


# --- train steps ------------------------------------------------------------------------------------------------------

EXAMPLES, WIDTH = 16, 12
OPTIONS = (
    {},
    {"constraints": autopar.data_parallel()},
    {"constraints": autopar.zero1()},
    {"constraints": autopar.zero3()},
    {"constraints": {"state/params/*": autopar.Split()}},
    {"constraints": {"batch/x": P("x")}},
    {"recompute": "layer"},
    {"num_microbatches": 2},
    {"num_microbatches": 2, "constraints": autopar.data_parallel()},
    {"num_microbatches": 2, "recompute": "layer"},
    {"num_stages": 2, "num_microbatches": 2},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe"},
    {"num_stages": 2, "num_microbatches": 4, "schedule": "zb-h1"},
)


def random_step(number):
    """The train step of a number, with one of the ways to parallelize it.

    Each example goes through three layers, which random operations follow; of every fourth step these see the whole batch.
    """
    rng = np.random.default_rng((2, number))
    count = int(rng.integers(1, 4))
    sees_batch = number % 4 == 3
    used = []

    def layer(seed, weights, rows, places):
        known = [Value(fit(weights, (WIDTH,))), Value(places, True), Value(rows)]
        writer = writer_of(seed, known, depth=1, gradient=True)
        writer.block(count)
        used.extend(writer.used)
        return fit(jnp.tanh(rows @ weights), rows.shape) + 0.1 * jnp.tanh(fit(writer.number().array, rows.shape))

    def loss_of(params, batch):
        rows = batch["x"]
        for k, weights in enumerate(params["layers"]):
            seed = 1000 * number + k
            if sees_batch:
                rows = layer(seed, weights, rows, batch["i"])
            else:
                rows = jax.vmap(lambda r, i, w=weights, s=seed: layer(s, w, r, i))(rows, batch["i"])
        return jnp.mean((rows @ params["last"] - batch["y"]) ** 2)

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "count": state["count"] + 1}, loss

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / max(1, shape[0]) ** 0.5, jnp.float32)

    params = {"layers": [array(WIDTH, WIDTH) for _ in range(3)], "last": array(WIDTH)}
    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}
    places = jnp.asarray(rng.integers(-20, 20, size=(EXAMPLES, 4)), jnp.int32)
    batch = {"x": array(EXAMPLES, WIDTH), "i": places, "y": array(EXAMPLES)}
    options = OPTIONS[number % len(OPTIONS)]
    mesh = (2, 2) if "num_stages" in options else ((8,), (2, 2), (4, 2))[number // len(OPTIONS) % 3]
    return Program(step, (state, batch), used, mesh, options)
