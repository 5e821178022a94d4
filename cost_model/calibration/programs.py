"""The compiled programs that are timed: one function per kind of case, on all devices at once.

All devices do the same at the same time, as in an SPMD step, so that devices which share cores or a link are seen sharing
them. Most cases are one program with a loop inside, whose count is an argument, so that calling it costs little beside what
is measured. What XLA compiles differently inside a loop (copies into another order, transposed copies, random bits) is
measured by programs without one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.cost_model.calibration.cases import COLLECTIVES, Case
from autopar.cost_model.calibration.tuning import TUNING

Program: TypeAlias = Callable[[int], None]
"""Does what a case says so many times, and waits for it."""
Shape: TypeAlias = tuple[int, ...]
Body: TypeAlias = Callable[..., Sequence[jax.Array]]
"""One repetition on one device, from arrays to arrays of the same shapes."""


def make_program(case: Case, devices: Sequence[jax.Device]) -> Program:
    """Make the program of a case; it is compiled at its first call."""
    return _MAKERS.get(case.kind, _make_loop)(case, devices)


def _make_calls(case: Case, devices: Sequence[jax.Device]) -> Program:
    """Calls of a program that does next to nothing, with so many arrays in and out.

    Results take the places of arguments, as in a step that donates its state; or, of a case with bytes, they are new arrays.
    """
    number, *size = case.sizes
    length = max(1, sum(size) // 4)
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, P("device"))
    arrays = [jax.device_put(jnp.zeros((len(devices) * length,)), sharding) for _ in range(number)]
    donated = () if size else (0,)
    step = jax.jit(lambda given: [x + 1 for x in given], donate_argnums=donated, out_shardings=sharding)
    held = [step(arrays)]

    def run(count: int) -> None:
        for _ in range(count):
            held[0] = jax.block_until_ready(step(held[0]))

    return run


def _make_transfers(case: Case, devices: Sequence[jax.Device]) -> Program:
    """Copies of so many arrays, each divided among one half of the devices, to the other half, which computes meanwhile.

    So do the meshes of a pipeline: a host that shares its cores with them copies several times slower than alone.
    """
    number, size = case.sizes
    each = len(devices) // 2
    halves = [Mesh(np.array(own), ("device",)) for own in (devices[:each], devices[each : 2 * each])]
    here, there = (NamedSharding(mesh, P("device")) for mesh in halves)
    length = each * max(1, size // 4 // each)
    arrays = [jax.device_put(np.zeros(length, np.float32), here) for _ in range(number)]
    work = jax.jit(lambda x: _activate(x)[0], out_shardings=there)
    operand = jax.device_put(np.zeros(each * TUNING.beside_length, np.float32), there)
    _wait([work(operand)])

    def run(count: int) -> None:
        with _repeated(lambda: _wait([work(operand)])):
            for _ in range(count):
                _wait(jax.device_put(arrays, [there] * number, may_alias=False))

    return run


@contextlib.contextmanager
def _repeated(job: Callable[[], None]) -> Iterator[None]:
    """A context in which another thread does a job again and again; it ends with the job that is under way."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            job()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _make_loop(case: Case, devices: Sequence[jax.Device]) -> Program:
    """A program on all devices that repeats the case on each."""
    ranks = case.sizes[0] if case.kind in COLLECTIVES else 1
    mesh = Mesh(np.array(devices).reshape(-1, ranks), ("group", "rank"))
    body, shapes = _loop_body(case, ranks, devices[0].platform)
    spec = P(("group", "rank"))
    operands = [
        jax.device_put(
            np.full((len(devices) * shape[0], *shape[1:]), 1 / 64, jnp.dtype(case.element_type)),
            NamedSharding(mesh, spec),
        )
        for shape in shapes
    ]

    def repeat(count: jax.Array, *values: jax.Array) -> Sequence[jax.Array]:
        held: Sequence[jax.Array] = lax.fori_loop(0, count, lambda _, held: body(*held), values)
        return held

    specs = (spec,) * len(shapes)
    program = jax.jit(jax.shard_map(repeat, mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=False))
    return lambda count: _wait(program(jnp.int32(count), *operands))


def _make_straight(case: Case, devices: Sequence[jax.Device]) -> Program:
    """Calls of a program without a loop that does the case on each device, `TUNING.repeats` times."""
    body, shapes = {"reordered": _attention_body, "transposed": _transpose_body, "random": _random_body}[case.kind](
        case
    )
    mesh, spec = Mesh(np.array(devices), ("device",)), P("device")
    operands = [
        jax.device_put(
            np.full((len(devices) * shape[0], *shape[1:]), 1 / 64, jnp.dtype(case.element_type)),
            NamedSharding(mesh, spec),
        )
        for shape in shapes
    ]
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def run(count: int) -> None:
        for _ in range(count):
            _wait(program(*operands))

    return run


def _attention_body(case: Case) -> tuple[Body, list[Shape]]:
    """Scores and mixtures of attention: three operands have heads behind positions, and the products want them in front."""

    def body(*operands: jax.Array) -> Sequence[jax.Array]:
        return [_mix(*operands[3 * i : 3 * i + 3]) for i in range(TUNING.repeats)]

    return body, [case.sizes] * (3 * TUNING.repeats)


def _mix(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """(examples, positions, heads, width) each -> (examples, heads, positions, width)."""
    scores = lax.dot_general(queries, keys, (((3,), (3,)), ((0, 2), (0, 2))))
    return lax.dot_general(scores, values, (((3,), (1,)), ((0, 1), (0, 2))))


def _transpose_body(case: Case) -> tuple[Body, list[Shape]]:
    """Transposed copies."""
    return lambda *operands: [x.T for x in operands], [case.sizes] * TUNING.repeats


def _random_body(case: Case) -> tuple[Body, list[Shape]]:
    """Random bits, each draw under a key of its own."""
    shape = (case.sizes[0] // 4,)

    def body(*keys: jax.Array) -> Sequence[jax.Array]:
        return [jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), shape) for key in keys]

    return body, [(2,)] * TUNING.repeats


def _loop_body(case: Case, ranks: int, platform: str) -> tuple[Body, list[Shape]]:
    """One repetition as a function of what it carries, and the shapes of that on one device."""
    if case.kind == "product":
        m, n, k = case.sizes
        is_exact = case.dtype == "float32" and platform != "cpu"  # CPUs have one way alone
        return functools.partial(_run_layer, lax.Precision.HIGHEST if is_exact else None), [(m, k), (k, n), (k, n)]
    length = max(ranks * ranks, case.sizes[-1] // jnp.dtype(case.element_type).itemsize)
    length = ranks * math.ceil(length / ranks)
    match case.kind:
        case "pointwise":
            return _activate, [(length,)]
        case "operation":
            return _run_small_operations, [(8, 8)] * TUNING.chains
        case "all-reduce":
            return lambda x: (lax.pmax(x, "rank"),), [(length,)]
        case "all-gather":
            return functools.partial(_gather, length // ranks), [(length // ranks,)]
        case "reduce-scatter":
            return functools.partial(_scatter, length // ranks), [(length,)]
        case "all-to-all":
            return lambda x: (lax.all_to_all(x, "rank", 0, 0, tiled=True),), [(length,)]
        case _:
            around = [(i, (i + 1) % ranks) for i in range(ranks)]
            return lambda x: (lax.ppermute(x, "rank", around),), [(length,)]


def _run_layer(
    precision: lax.Precision | None, x: jax.Array, weights: jax.Array, _: jax.Array
) -> tuple[jax.Array, ...]:
    """(m, k) x (k, n), and the two products of its backward pass: the gradients of x and of the weights."""
    y = jnp.dot(x, weights, precision=precision)
    return (
        lax.dot_general(y, weights, (((1,), (1,)), ((), ())), precision=precision),
        weights,
        lax.dot_general(x, y, (((0,), (0,)), ((), ())), precision=precision),
    )


def _activate(x: jax.Array) -> tuple[jax.Array, ...]:
    """A chain as a compiler fuses it in a training step: a GELU, a gate and a residual."""
    gelu = 0.5 * x * (1.0 + jnp.tanh(0.8 * (x + 0.045 * x * x * x)))
    gate = jnp.exp(gelu - 2.0)
    return (gelu * gate / (1.0 + gate) + 0.1 * x,)


def pointwise_equations() -> int:
    """How many equations the pointwise case has; each counts the bytes of its result."""
    return len(jax.make_jaxpr(_activate)(jnp.zeros(4)).jaxpr.eqns)


def _run_small_operations(*chains: jax.Array) -> tuple[jax.Array, ...]:
    """Products so small that their launch is all they cost."""
    for _ in range(TUNING.chain_length):
        chains = tuple(jnp.dot(x.T, x) for x in chains)
    return chains


def _gather(part: int, x: jax.Array) -> tuple[jax.Array, ...]:
    return (lax.slice(lax.all_gather(x, "rank", tiled=True), (0,), (part,)),)


def _scatter(part: int, x: jax.Array) -> tuple[jax.Array, ...]:
    """The rank's part of the sum is written into the operand, in place, so that the next repetition has to wait for it."""
    own = lax.psum_scatter(x, "rank", tiled=True) * 0.5
    return (lax.dynamic_update_slice(x, own, (0,)),)


def _wait(values: Sequence[jax.Array]) -> None:
    jax.block_until_ready(values)


_MAKERS: Mapping[str, Callable[[Case, Sequence[jax.Device]], Program]] = {
    "dispatch": _make_calls,
    "transfer": _make_transfers,
    "reordered": _make_straight,
    "transposed": _make_straight,
    "random": _make_straight,
}
"""Kinds that are not loops."""
