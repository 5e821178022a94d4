"""What the devices at hand take for products, pointwise work, collectives and calls: compiled cases, timed in rounds.

In: JAX devices and a time limit. Out: `Sample`s, the least seconds of each case over the rounds. All devices do the same at the
same time, as in an SPMD step, so that devices which share cores or a link are seen sharing them. Most cases are one program with
a loop inside, whose count is an argument, so that calling it costs little beside what is measured. Those that XLA compiles
otherwise inside a loop, copies into another order, transposed ones and random bits, are programs without one. Rounds go through
all cases in turn and the least time of each counts.

Virtual CPU devices share the cores and keep them busy, so a step takes the processor seconds of all threads over the cores.
That is what is measured there: it hardly changes while other programs run, and on a quiet machine it is the time on the clock.
What can go wrong elsewhere: a busy machine; `spread` tells how unsteady the rounds were. And on Linux an allocator that gives
freed buffers back to the system: every step then pays for new pages again, up to a third of its time and not the same from
process to process; `keep_freed_memory` asks it not to.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.cost_model.cores import available_cores

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"]
Kind = Literal["product", "reordered", "transposed", "random", "pointwise", "operation", "dispatch"] | Collective
CASE_S = 0.02
"""A case is repeated inside its program until a call takes about this long."""
PRODUCTS_CPU = (
    (32, 32, 32),
    (128, 128, 128),
    (512, 512, 512),
    (64, 256, 1024),
    (256, 64, 256),
    (1024, 256, 32),
    (16, 512, 512),
    (4096, 4, 256),
    (1024, 8, 512),
    (4096, 16, 64),
)
"""The last three are narrow, as channels split over many devices make them: libraries compute whole tiles."""
PRODUCTS = (
    *((size,) * 3 for size in (512, 1024, 2048, 4096, 8192)),
    (8192, 1024, 128),
    (512, 4096, 4096),
    (4096, 128, 4096),
)
ATTENTION_CPU = ((2, 64, 8, 32), (1, 128, 4, 64), (4, 128, 8, 16))
ATTENTION = ((4, 1024, 16, 64), (8, 2048, 16, 128))
TRANSPOSED_CPU = ((256, 128), (256, 1024), (1024, 256))
TRANSPOSED = ((1024, 1024), (4096, 4096), (16384, 1024))
COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


CHAINS, CHAIN_LENGTH = 4, 16
"""Small operations are measured in so many chains side by side, each of so many."""
REPEATS = 4
"""How often a program without a loop does what it measures."""
_MALLOPT = {"trim threshold": (-1, 2**31 - 1), "top pad": (-2, 2**28), "mapped regions": (-4, 0)}
"""glibc's options by number: free memory beyond which it gives back, what it keeps spare (more than a heap of 64 MB, which is
then never given back whole), regions of their own for large buffers."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure. `sizes`: m, n, k of a product; examples, positions, heads and width of products that need their
    operands reordered; rows and columns; bytes; ranks and bytes; small operations; arrays of a call."""

    kind: Kind
    sizes: tuple[int, ...]
    dtype: str = "float32"

    @property
    def label(self) -> str:
        """The case in words."""
        return f"{self.kind} {'x'.join(map(str, self.sizes))} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case, its least seconds for one repetition, and how far the median round was above it, as a ratio."""

    case: Case
    seconds: float
    spread: float


@dataclasses.dataclass
class _Prepared:
    case: Case
    run: Callable[[int], None]
    count: int
    clock: Callable[[], float]
    times_s: list[float] = dataclasses.field(default_factory=list)
    empty_s: list[float] = dataclasses.field(default_factory=list)

    def sample(self) -> Sample:
        """The least seconds of one repetition: those of a call with repetitions less those of one without."""
        least = min(self.times_s)
        seconds = max(least - min(self.empty_s), 0.1 * least) / self.count
        return Sample(self.case, seconds, float(np.median(self.times_s)) / least)


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, if its allocator is glibc's; call it before devices are first used.

    Returns whether it will.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    return all(library.mallopt(option, value) == 1 for option, value in _MALLOPT.values())


def cases_for(platform: str, devices: int) -> tuple[Case, ...]:
    """What is worth measuring on this many devices of a platform."""
    on_cpu = platform == "cpu"
    formats = ("float32",) if on_cpu else ("bfloat16", "float16", "float32")
    shapes = PRODUCTS_CPU if on_cpu else PRODUCTS
    cases = [Case("product", shape, dtype) for dtype in formats for shape in shapes]
    cases += [Case("reordered", sizes, formats[0]) for sizes in (ATTENTION_CPU if on_cpu else ATTENTION)]
    cases += [Case("transposed", sizes, formats[0]) for sizes in (TRANSPOSED_CPU if on_cpu else TRANSPOSED)]
    cases += [Case("random", (size,), "uint32") for size in ((2**16, 2**18) if on_cpu else (2**22, 2**26))]
    lengths = (2**12, 2**16, 2**20, 2**23) if on_cpu else (2**16, 2**22, 2**26, 2**29)
    cases += [Case("pointwise", (length,)) for length in lengths]
    cases += [Case("operation", (CHAINS * CHAIN_LENGTH,))]
    cases += [Case("dispatch", (arrays,)) for arrays in (1, 100)]
    groups = [n for n in range(2, devices + 1) if devices % n == 0 and (n & (n - 1) == 0 or n == devices)]
    payloads = (2**10, 2**16, 2**20, 2**22) if on_cpu else (2**12, 2**20, 2**26)
    cases += [Case(kind, (n, size)) for kind in COLLECTIVES for n in groups for size in payloads]
    return tuple(cases)


def measure(
    devices: Sequence[jax.Device], cases: Sequence[Case], *, seconds: float
) -> Iterator[tuple[str, float] | Sample]:
    """Compile every case, then time all of them in rounds until the time is up; at least two rounds are made.

    Yields (what is being done, part done) as it goes, then the samples.
    """
    started = time.perf_counter()
    prepared = []
    for number, case in enumerate(cases):
        yield f"compiling {case.label}", 0.5 * number / len(cases)
        prepared.append(_prepare(case, devices))
    begun = time.perf_counter()
    rounds = 0
    while rounds < 2 or time.perf_counter() - started < seconds - (time.perf_counter() - begun) / rounds:
        for one in prepared:
            one.times_s.append(_timed(one.run, one.count, one.clock))
            one.empty_s.append(_timed(one.run, 0, one.clock))
        rounds += 1
        yield f"round {rounds}", 0.5 + 0.5 * min(1.0, (time.perf_counter() - begun) / (seconds - (begun - started)))
    for one in prepared:
        yield one.sample()


def step_clock(devices: Sequence[jax.Device]) -> Callable[[], float]:
    """The clock of steps on these devices, in seconds: the wall's, for virtual CPU devices processor seconds over cores."""
    if devices[0].platform != "cpu" or len(devices) == 1:
        return time.perf_counter
    busy = cores_of(devices)
    return lambda: time.process_time() / busy


def cores_of(devices: Sequence[jax.Device]) -> int:
    """How many cores virtual CPU devices can keep busy: those that this process may use, at most one for each device."""
    return min(available_cores(), len(devices))


def undisturbed_s(times_s: Sequence[float]) -> float:
    """What a step takes when little else runs: the lower decile of its times, the second least of fifteen."""
    return sorted(times_s)[len(times_s) // 10]


def _timed(run: Callable[[int], None], count: int, clock: Callable[[], float]) -> float:
    started = clock()
    run(count)
    return clock() - started


def _prepare(case: Case, devices: Sequence[jax.Device]) -> _Prepared:
    """Compile a case and find how often to repeat it."""
    run = _PREPARED.get(case.kind, _loop)(case, devices)
    # One thread of the host calls a step, whatever the devices do: the wall's clock.
    clock = time.perf_counter if case.kind == "dispatch" else step_clock(devices)
    run(1)
    empty_s, count = _least(run, 0, clock), 1
    while (took := _least(run, count, clock) - empty_s) < CASE_S / 4 and count < 1 << 16:
        count *= 4
    return _Prepared(case, run, max(1, round(count * CASE_S / took)) if 0 < took < CASE_S else count, clock)


def _least(run: Callable[[int], None], count: int, clock: Callable[[], float]) -> float:
    return min(_timed(run, count, clock) for _ in range(3))


def _calls(case: Case, devices: Sequence[jax.Device]) -> Callable[[int], None]:
    """Calls of a program that does nothing, with so many arrays in and out."""
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, P("device"))
    arrays = [jax.device_put(jnp.zeros((len(devices),)), sharding) for _ in range(case.sizes[0])]
    step = jax.jit(lambda given: [x + 1 for x in given], donate_argnums=0, out_shardings=sharding)
    held = [step(arrays)]

    def run(count: int) -> None:
        for _ in range(count):
            held[0] = jax.block_until_ready(step(held[0]))

    return run


def _loop(case: Case, devices: Sequence[jax.Device]) -> Callable[[int], None]:
    """A program on all devices that repeats the case on each."""
    ranks = case.sizes[0] if case.kind in COLLECTIVES else 1
    mesh = Mesh(np.array(devices).reshape(-1, ranks), ("group", "rank"))
    body, shapes = _body(case, ranks)
    spec = P(("group", "rank"))
    operands = [
        jax.device_put(
            np.full((len(devices) * shape[0], *shape[1:]), 1 / 64, jnp.dtype(case.dtype)), NamedSharding(mesh, spec)
        )
        for shape in shapes
    ]

    def repeated(count: jax.Array, *values: jax.Array) -> Any:
        return lax.fori_loop(0, count, lambda _, held: body(*held), values)

    specs = (spec,) * len(shapes)
    program = jax.jit(jax.shard_map(repeated, mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=False))
    return lambda count: _wait(program(jnp.int32(count), *operands))


def _straight(case: Case, devices: Sequence[jax.Device]) -> Callable[[int], None]:
    """Calls of a program without a loop that does the case on each device, `REPEATS` times."""
    body, shapes = {"reordered": _reordered, "transposed": _transposed, "random": _drawn}[case.kind](case)
    mesh, spec = Mesh(np.array(devices), ("device",)), P("device")
    operands = [
        jax.device_put(
            np.full((len(devices) * shape[0], *shape[1:]), 1 / 64, jnp.dtype(case.dtype)), NamedSharding(mesh, spec)
        )
        for shape in shapes
    ]
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def run(count: int) -> None:
        for _ in range(count):
            _wait(program(*operands))

    return run


def _reordered(case: Case) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """Scores and mixtures of attention: three operands have heads behind positions, and the products want them in front."""

    def body(*operands: jax.Array) -> Any:
        return [_mixed(*operands[3 * i : 3 * i + 3]) for i in range(REPEATS)]

    return body, [case.sizes] * (3 * REPEATS)


def _mixed(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """(examples, positions, heads, width) each -> (examples, heads, positions, width)."""
    scores = lax.dot_general(queries, keys, (((3,), (3,)), ((0, 2), (0, 2))))
    return lax.dot_general(scores, values, (((3,), (1,)), ((0, 1), (0, 2))))


def _transposed(case: Case) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """Transposed copies."""
    return lambda *operands: [x.T for x in operands], [case.sizes] * REPEATS


def _drawn(case: Case) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """Random bits, each draw under a key of its own."""
    shape = (case.sizes[0] // 4,)

    def body(*keys: jax.Array) -> Any:
        return [jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), shape) for key in keys]

    return body, [(2,)] * REPEATS


def _wait(values: Any) -> None:
    jax.block_until_ready(values)


def _body(case: Case, ranks: int) -> tuple[Callable[..., tuple[Any, ...]], list[tuple[int, ...]]]:
    """One repetition as a function of what it carries, and the shapes of that on one device."""
    if case.kind == "product":
        m, n, k = case.sizes
        return _layer, [(m, k), (k, n), (k, n)]
    length = max(ranks * ranks, case.sizes[-1] // jnp.dtype(case.dtype).itemsize)
    length = ranks * math.ceil(length / ranks)
    match case.kind:
        case "pointwise":
            return _activations, [(length,)]
        case "operation":
            return _small_operations, [(8, 8)] * CHAINS
        case "all-reduce":
            return lambda x: (lax.pmax(x, "rank"),), [(length,)]
        case "all-gather":
            return functools.partial(_gathered, length // ranks), [(length // ranks,)]
        case "reduce-scatter":
            return functools.partial(_scattered, length // ranks), [(length,)]
        case "all-to-all":
            return lambda x: (lax.all_to_all(x, "rank", 0, 0, tiled=True),), [(length,)]
        case _:
            around = [(i, (i + 1) % ranks) for i in range(ranks)]
            return lambda x: (lax.ppermute(x, "rank", around),), [(length,)]


def _layer(x: jax.Array, weights: jax.Array, _: jax.Array) -> tuple[Any, ...]:
    """(m, k) x (k, n), and the two products of its backward pass: the gradients of x and of the weights."""
    y = jnp.dot(x, weights)
    return (
        lax.dot_general(y, weights, (((1,), (1,)), ((), ()))),
        weights,
        lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
    )


def _activations(x: jax.Array) -> tuple[Any, ...]:
    """A chain as a compiler fuses it in a training step: a GELU, a gate and a residual."""
    gelu = 0.5 * x * (1.0 + jnp.tanh(0.8 * (x + 0.045 * x * x * x)))
    gate = jnp.exp(gelu - 2.0)
    return (gelu * gate / (1.0 + gate) + 0.1 * x,)


def pointwise_equations() -> int:
    """How many equations the pointwise case has; each counts the bytes of its result."""
    return len(jax.make_jaxpr(_activations)(jnp.zeros(4)).jaxpr.eqns)


def _small_operations(*chains: jax.Array) -> tuple[Any, ...]:
    """Products so small that their launch is all they cost."""
    for _ in range(CHAIN_LENGTH):
        chains = tuple(jnp.dot(x.T, x) for x in chains)
    return chains


def _gathered(part: int, x: jax.Array) -> tuple[Any, ...]:
    return (lax.slice(lax.all_gather(x, "rank", tiled=True), (0,), (part,)),)


def _scattered(part: int, x: jax.Array) -> tuple[Any, ...]:
    """The rank's part of the sum is written into the operand, in place, so that the next repetition has to wait for it."""
    own = lax.psum_scatter(x, "rank", tiled=True) * 0.5
    return (lax.dynamic_update_slice(x, own, (0,)),)


_PREPARED: Mapping[str, Callable[[Case, Sequence[jax.Device]], Callable[[int], None]]] = {
    "dispatch": _calls,
    "reordered": _straight,
    "transposed": _straight,
    "random": _straight,
}
