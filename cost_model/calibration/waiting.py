"""What a collective waits for its ranks in a step: programs that alternate compute and a collective, by the wall's clock.

In: virtual devices that share cores. Out: `Waited`s, the seconds that a small all-reduce adds to a program for each time that it
stands between two pieces of compute. A collective ends when the last rank has come. While all devices stand ready it costs the
work of its rendezvous. In a step each device first has its turn on a core, the last ones leave cores idle, and every thread
that sleeps has to be woken. So

    seconds = (wall of K x (compute, collective) - wall of K x compute) / K

at two grains of compute, for each size of group, and for several independent all-reduces at once, which the compiler merges
into one instruction whose parts may or may not pay anew.

What can go wrong: other programs on the cores. The wall's clock then measures them. Compute alone tells: on a quiet machine it
takes its processor seconds over the cores. `Waited.disturbed` is what it took over that; beyond `Tuning.disturbed` the samples
say nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.cost_model.calibration.clocks import cores_of, step_clock, undisturbed_s
from autopar.cost_model.calibration.tuning import TUNING


@dataclasses.dataclass(frozen=True)
class Grain:
    """What each device computes between two collectives."""

    operation: Literal["product", "convolution"]
    repetitions: int


GRAINS = (Grain("product", 5), Grain("convolution", 4))
"""About 0.6 and 3 ms for 8 devices on two cores: from many small collectives to one a layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waited:
    """Wall seconds of each time that `merged` all-reduces at once, among `ranks`, stand between pieces of `compute_s`."""

    grain: Grain
    ranks: int
    merged: int
    seconds: float
    compute_s: float
    disturbed: float


@dataclasses.dataclass
class WaitingProgram:
    """A compiled program with its operands, and the times of its rounds by two clocks."""

    step: jax.stages.Compiled
    operands: Sequence[jax.Array]
    wall_s: list[float] = dataclasses.field(default_factory=list)
    processor_s: list[float] = dataclasses.field(default_factory=list)


def ranks_wait(devices: Sequence[jax.Device]) -> bool:
    """Whether these devices share cores, so that not all of them compute at once."""
    return devices[0].platform == "cpu" and len(devices) > cores_of(devices)


def are_steady(samples: Sequence[Waited]) -> bool:
    """Whether there are samples and other programs did not disturb them."""
    return bool(samples) and all(sample.disturbed <= TUNING.disturbed for sample in samples)


def measure_waiting(devices: Sequence[jax.Device], *, rounds: int = 20) -> Iterator[str | Waited]:
    """Time programs with and without collectives in turn; yields what is being done, then the samples."""
    groups = [n for n in range(2, len(devices) + 1) if len(devices) % n == 0]
    wanted = [(n, 1) for n in groups] + [(len(devices), TUNING.merged)]
    programs: dict[tuple[Grain, int, int], WaitingProgram] = {}
    for grain in GRAINS:
        for ranks, merged in [(len(devices), 0), *wanted]:
            yield f"compiling {grain.operation}s between {merged or 'no'} all-reduces of {ranks} ranks"
            programs[grain, ranks, merged] = make_program(grain, devices, ranks=ranks, merged=merged)
    clock = step_clock(devices)
    for turn in range(TUNING.warm_rounds + rounds):
        yield f"collectives between compute, round {turn + 1} of {TUNING.warm_rounds + rounds}"
        for program in programs.values():
            _time(program, clock)
    for program in programs.values():
        del program.wall_s[: TUNING.warm_rounds], program.processor_s[: TUNING.warm_rounds]
    for grain in GRAINS:
        alone = programs[grain, len(devices), 0]
        compute_s = undisturbed_s(alone.wall_s)
        disturbed = compute_s / undisturbed_s(alone.processor_s)
        for ranks, merged in wanted:
            beyond_s = undisturbed_s(programs[grain, ranks, merged].wall_s) - compute_s
            yield Waited(
                grain=grain,
                ranks=ranks,
                merged=merged,
                seconds=beyond_s / TUNING.pairs,
                compute_s=compute_s / TUNING.pairs,
                disturbed=disturbed,
            )


def _time(program: WaitingProgram, clock: Callable[[], float]) -> None:
    """Run twice and time the second."""
    jax.block_until_ready(program.step(*program.operands))
    started_s, wall_s = clock(), time.perf_counter()
    jax.block_until_ready(program.step(*program.operands))
    program.wall_s.append(time.perf_counter() - wall_s)
    program.processor_s.append(clock() - started_s)


def make_program(grain: Grain, devices: Sequence[jax.Device], *, ranks: int, merged: int) -> WaitingProgram:
    """Compile K times compute, then `merged` all-reduces of its result, which the next compute needs."""
    mesh = Mesh(np.array(devices).reshape(-1, ranks), ("group", "rank"))
    shapes = {"product": ((64, 128), (128, 128)), "convolution": ((4, 16, 16, 32), (3, 3, 32, 32))}[grain.operation]
    operands = [
        jax.device_put(np.full((len(devices), *shape), 0.01, np.float32), NamedSharding(mesh, P(("group", "rank"))))
        for shape in (*shapes, *[(TUNING.waiting_width,)] * max(1, merged))
    ]
    body = functools.partial(_alternate, grain, merged)
    spec = P(("group", "rank"))
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return WaitingProgram(step.lower(*operands).compile(), operands)


def _alternate(grain: Grain, merged: int, held: jax.Array, weights: jax.Array, *added: jax.Array) -> jax.Array:
    """One device's part: every array has a leading dimension of 1."""
    x = held[0]
    for _ in range(TUNING.pairs):
        for _ in range(grain.repetitions):
            x = _compute(grain, x, weights[0])
        parts = [one[0] * x.ravel()[0] for one in added]
        if merged:
            parts = [lax.psum(part, "rank") for part in parts]
        x = x + 1e-6 * sum((part[0] for part in parts), start=jnp.float32(0))
    return x[None]


def _compute(grain: Grain, x: jax.Array, weights: jax.Array) -> jax.Array:
    if grain.operation == "product":
        return jnp.tanh(jnp.dot(x, weights))
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=dimensions))
