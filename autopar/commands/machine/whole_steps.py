"""Whole steps against the sum of their parts: what a step costs beside what the cluster says that it computes.

In: a cluster, and the devices that it was measured on. Out: for each model the ratio of measured to predicted seconds of
compute. The models take turns, so that all see the same machine. What can go wrong: no time for them, since a step takes long to
compile; a model that would take longer than what is left is left out, as far as that can be known before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
from rich.console import Console

from autopar import data_parallel, parallelize
from autopar.cost_model.calibration.clocks import step_clock, undisturbed_s
from autopar.cost_model.machine import Cluster
from autopar.models import registry
from autopar.plan import Plan

WHOLE_STEPS_CPU: Mapping[str, Mapping[str, int]] = {
    "bert": {"layers": 1, "hidden": 256, "heads": 8, "seq": 64, "batch": 16},
    "unet": {"base_channels": 32, "image_size": 16, "batch": 32},
}
WHOLE_STEPS: Mapping[str, Mapping[str, int]] = {
    "bert": {"layers": 2, "hidden": 2048, "heads": 16, "seq": 512, "batch": 16},
    "unet": {"base_channels": 128, "image_size": 64, "batch": 32},
}
"""Models and sizes: so large that an accelerator does more than launch kernels."""
WARM_STEPS, STEPS, LEAST_STEPS = 2, 15, 3
"""Steps that do not count, those that do, and how many of these are made when time is over."""


@dataclasses.dataclass(kw_only=True)
class WholeStep:
    """A data-parallel step ready to run.

    Attributes:
        name: The model.
        step: The parallel step, from (state, batch) to (state, metrics).
        state: The current state.
        batch: The batch of every step.
        computed_s: The seconds that the cluster says that it computes.
        beside_s: The seconds that the cluster says for collectives and the call.
        times_s: What its steps took.
    """

    name: str
    step: Callable[[object, object], tuple[object, object]]
    state: object
    batch: object
    computed_s: float
    beside_s: float
    times_s: list[float] = dataclasses.field(default_factory=list)

    def run(self, clock: Callable[[], float]) -> None:
        """Make two steps and time the second: in training a step follows one of its own, whose code and operands are near."""
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        started = clock()
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        self.times_s.append(clock() - started)

    def ratio(self) -> float:
        """Seconds that the step computed, over those that the cluster says."""
        computed_s = undisturbed_s(self.times_s) - self.beside_s
        return max(computed_s, 0.1 * self.beside_s) / self.computed_s


def measure_whole_steps(
    cluster: Cluster,
    devices: Sequence[jax.Device],
    console: Console,
    *,
    left_s: Callable[[], float],
    first_s: float,
) -> dict[str, float]:
    """For each model that there is time for, the seconds that whole steps compute over those that the cluster says.

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
        for name, sizes in _models(devices).items():
            before_s = left_s()
            if before_s < first_s:
                break
            status.update(f"planning and compiling a step of {name}")
            steps.append(_plan_step(name, sizes, cluster=cluster, devices=devices))
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
    return {step.name: step.ratio() for step in steps}


def steps_left_out(devices: Sequence[jax.Device], ratios: Mapping[str, float]) -> list[str]:
    """The models whose steps were not measured, in words."""
    return [f"whole steps of {name}" for name in _models(devices) if name not in ratios]


def _models(devices: Sequence[jax.Device]) -> Mapping[str, Mapping[str, int]]:
    return WHOLE_STEPS_CPU if devices[0].platform == "cpu" else WHOLE_STEPS


def _plan_step(name: str, sizes: Mapping[str, int], *, cluster: Cluster, devices: Sequence[jax.Device]) -> WholeStep:
    """Plan a data-parallel step of a model."""
    model = registry.build(name, **sizes)
    step = parallelize(
        model.train_step,
        devices=devices,
        mesh_shape=(len(devices),),
        constraints=data_parallel(),
        cluster=cluster,
        num_microbatches=1,
        plan_cache=False,
    )
    state = jax.device_get(jax.jit(model.create_state)(jax.random.key(0)))
    batch = next(model.data(0))
    plan = step.plan(state, batch)
    assert isinstance(plan, Plan)
    beside_s = plan.comm_s + cluster.dispatch_s(len(plan.inputs))
    return WholeStep(
        name=name, step=step, state=state, batch=batch, computed_s=plan.step_s - beside_s, beside_s=beside_s
    )
