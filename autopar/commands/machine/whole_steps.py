"""Whole steps against the sum of their parts: what a step costs beside what the cluster says that it computes.

In: a cluster, and the devices that it was measured on. Out: `Beside`. For each step, the ratio of measured to predicted seconds
of compute; and over all steps, by which factors the device's rates and its launches are slower than their parts say. With w the
seconds of a step without launches and l those of its launches, measured seconds are f w + g l. Each model has an f of its own, of
which the device has the geometric mean. Steps of one model in few and in many microbatches tell f from g: both compute as much,
the latter in smaller operations. Where no model is measured in several numbers of microbatches, f = g. The steps take turns, so
that all see the same machine. What can go wrong: no time for them, since a step takes long to compile; one that would take longer
than what is left is left out, as far as that can be known before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
from rich.console import Console

from autopar import ParallelStep, data_parallel, parallelize
from autopar.cost_model.calibration.clocks import step_clock, undisturbed_s
from autopar.cost_model.calibration.fits import nonnegative_fit
from autopar.cost_model.machine import Cluster
from autopar.models import registry
from autopar.plan import Plan

Sizes: TypeAlias = Mapping[str, int | float]
_GPT_CPU: Sizes = {"layers": 2, "hidden": 128, "heads": 4, "seq": 64, "batch": 64, "vocab": 256, "dropout": 0.0}
WHOLE_STEPS_CPU: Sequence[tuple[str, Sizes, int]] = (
    ("gpt", _GPT_CPU, 1),
    ("gpt", _GPT_CPU, 8),
    ("bert", {"layers": 1, "hidden": 256, "heads": 8, "seq": 64, "batch": 16}, 1),
    ("unet", {"base_channels": 32, "image_size": 16, "batch": 32}, 1),
)
WHOLE_STEPS: Sequence[tuple[str, Sizes, int]] = (
    ("bert", {"layers": 2, "hidden": 2048, "heads": 16, "seq": 512, "batch": 16}, 1),
    ("unet", {"base_channels": 128, "image_size": 64, "batch": 32}, 1),
)
"""Models, sizes and microbatches: so large that an accelerator does more than launch kernels."""
WARM_STEPS, STEPS, LEAST_STEPS = 2, 15, 3
"""Steps that do not count, those that do, and how many of these are made when time is over."""


@dataclasses.dataclass(kw_only=True)
class WholeStep:
    """A data-parallel step ready to run.

    Attributes:
        name: The model, and in how many microbatches.
        step: The parallel step, from (state, batch) to (state, metrics).
        state: The current state.
        batch: The batch of every step.
        computed_s: The seconds that the cluster says that it computes.
        launches_s: Of these, the seconds of launches.
        beside_s: The seconds that the cluster says for collectives and the call.
        model: The name of its model; it may be measured in several numbers of microbatches.
        times_s: What its steps took.
    """

    name: str
    step: Callable[[object, object], tuple[object, object]]
    state: object
    batch: object
    computed_s: float
    beside_s: float
    model: str
    launches_s: float = 0.0
    times_s: list[float] = dataclasses.field(default_factory=list)

    def run(self, clock: Callable[[], float]) -> None:
        """Make two steps and time the second: in training a step follows one of its own, whose code and operands are near."""
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        started = clock()
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        self.times_s.append(clock() - started)

    def measured_s(self) -> float:
        """Seconds that the step computed."""
        return max(undisturbed_s(self.times_s) - self.beside_s, 0.1 * self.beside_s)

    def ratio(self) -> float:
        """Seconds that the step computed, over those that the cluster says."""
        return self.measured_s() / self.computed_s


@dataclasses.dataclass(frozen=True)
class Beside:
    """What whole steps take beside their parts: the ratio of each, and the factors of rates and of launches for all together."""

    ratios: Mapping[str, float]
    rates: float = 1.0
    launches: float = 1.0

    @classmethod
    def of(cls, steps: Sequence[WholeStep]) -> Beside:
        """The factors that explain the steps best."""
        ratios = {step.name: step.ratio() for step in steps}
        factor = _mean(list(ratios.values()))
        models = list(dict.fromkeys(step.model for step in steps))
        if len(models) == len(steps):
            return cls(ratios, factor, factor)
        parts = [
            [*((step.computed_s - step.launches_s) * (step.model == model) for model in models), step.launches_s]
            for step in steps
        ]
        (*rates, launches), _ = nonnegative_fit(parts, [step.measured_s() for step in steps])
        return cls(ratios, _mean(rates), launches) if launches and all(rates) else cls(ratios, factor, factor)


def measure_whole_steps(
    cluster: Cluster,
    devices: Sequence[jax.Device],
    console: Console,
    *,
    left_s: Callable[[], float],
    first_s: float,
) -> Beside:
    """Measure the steps that there is time for against the seconds that the cluster says that they compute.

    Args:
        cluster: What the parts say.
        devices: That it was measured on.
        console: Where to show progress.
        left_s: How much time is left.
        first_s: How long the first model may take to compile; another takes as long as the one before.
    """
    clock = step_clock(devices)
    steps: list[WholeStep] = []
    with console.status("planning whole steps") as status:
        for name, sizes, microbatches in _steps_on(devices):
            before_s = left_s()
            if before_s < first_s:
                break
            status.update(f"planning and compiling a step of {name}")
            steps.append(_plan_step(name, sizes, microbatches, cluster=cluster, devices=devices))
            steps[-1].run(clock)
            first_s = before_s - left_s()
        for turn in range(WARM_STEPS + STEPS if steps else 0):
            if turn >= WARM_STEPS + LEAST_STEPS and left_s() <= 0:
                break
            status.update(f"whole steps, round {turn + 1} of {WARM_STEPS + STEPS}")
            for step in steps:
                step.run(clock)
    for step in steps:
        del step.times_s[: 1 + WARM_STEPS]
    return Beside.of(steps)


def _mean(factors: Sequence[float]) -> float:
    """The geometric mean; 1 of none."""
    return math.prod(factors) ** (1 / max(len(factors), 1))


def steps_left_out(devices: Sequence[jax.Device], ratios: Mapping[str, float]) -> list[str]:
    """The steps that were not measured, in words."""
    names = [_in_words(name, microbatches) for name, _, microbatches in _steps_on(devices)]
    return [f"whole steps of {name}" for name in names if name not in ratios]


def _steps_on(devices: Sequence[jax.Device]) -> list[tuple[str, Sizes, int]]:
    """Those in microbatches only where each device has examples of every one."""
    every = WHOLE_STEPS_CPU if devices[0].platform == "cpu" else WHOLE_STEPS
    return [step for step in every if step[2] == 1 or step[1]["batch"] % (step[2] * len(devices)) == 0]


def _in_words(name: str, microbatches: int) -> str:
    return name if microbatches == 1 else f"{name} in {microbatches} microbatches"


def _plan_step(
    name: str, sizes: Sizes, microbatches: int, *, cluster: Cluster, devices: Sequence[jax.Device]
) -> WholeStep:
    """Plan a data-parallel step of a model."""
    model = registry.build(name, **sizes)
    state = jax.device_get(jax.jit(model.create_state)(jax.random.key(0)))
    batch = next(model.data(0))

    def plan_on(cluster: Cluster) -> tuple[Plan, ParallelStep]:
        step = parallelize(
            model.train_step,
            devices=devices,
            mesh_shape=(len(devices),),
            constraints=data_parallel(),
            cluster=cluster,
            num_microbatches=microbatches,
            plan_cache=False,
        )
        plan = step.plan(state, batch)
        assert isinstance(plan, Plan)
        return plan, step

    plan, step = plan_on(cluster)
    without, _ = plan_on(dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, launch_s=0.0)))
    beside_s = plan.comm_s + cluster.dispatch_s(len(plan.inputs))
    return WholeStep(
        name=_in_words(name, microbatches),
        step=step,
        state=state,
        batch=batch,
        computed_s=plan.step_s - beside_s,
        launches_s=max(0.0, (plan.step_s - plan.comm_s) - (without.step_s - without.comm_s)),
        beside_s=beside_s,
        model=name,
    )
