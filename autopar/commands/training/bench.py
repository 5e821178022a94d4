"""`bench`: the step of a plan beside `jax.jit` on one device, measured.

In: a model or a step of the user's own, and how to plan it, or a plan. Out: the median seconds of a step of each, their
quartiles, and what was predicted. The two take turns, and which begins changes, so that both see the same machine; each step is
waited for. What can go wrong: a busy machine; the quartiles lie far apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
from rich.console import Console

from autopar.api import ParallelStep
from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.arguments.own_step import PyTree
from autopar.commands.arguments.subject import Trainee, find_trainee
from autopar.commands.plans.parallel import count_devices, make_parallel
from autopar.commands.plans.plan import plan_step
from autopar.commands.terminal.printing import print_json, reports
from autopar.commands.training.saved_plan import parallel_under, read_plan_for_here
from autopar.commands.training.training_run import AUTOPAR, JIT, Training, doubt_machine
from autopar.explain import seconds_text
from autopar.live_line import show_progress
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

_WARM = 2


@dataclasses.dataclass(kw_only=True)
class Contestant:
    """A step that is timed: from (state, batch) to (state, ...).

    Attributes:
        name: The name of the step.
        step: The step, compiled.
        state: The current state.
        times_s: The seconds of each of its steps.
    """

    name: str
    step: Callable[..., tuple[PyTree, ...]]
    state: PyTree
    times_s: list[float] = dataclasses.field(default_factory=list)

    def make_step(self, batch: PyTree) -> None:
        """Make one step, wait for all of it, and remember its seconds."""
        started = time.perf_counter()
        made = jax.block_until_ready(self.step(self.state, batch))
        self.times_s.append(time.perf_counter() - started)
        self.state = made[0]

    def document(self) -> dict[str, float]:
        """The median and the quartiles of the timed steps, in seconds."""
        low, median, high = _quartiles(self.times_s)
        return {"median_step_s": median, "lower_quartile_s": low, "upper_quartile_s": high}


def bench(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    console = reports(as_json=options.json)
    found = read_plan_for_here(options.plan) if options.plan is not None else None
    if found is None:
        ask_for_virtual_devices(count_devices(options))
    trainee = find_trainee(options.model, options.sizes, options.seed)
    Training(trainee=trainee, steps=1, console=console).check_data()
    step, plan = _planned(options, trainee, found)
    pair = _contestants(trainee, step)
    _take_turns(trainee, pair, options.rounds)
    documents = {one.name: one.document() for one in pair}
    if options.json:
        print_json(
            {
                "model": options.model,
                "devices": plan.num_devices,
                "step_s": plan.step_s,
                "rounds": options.rounds,
                **{name.replace("jax.", ""): measured for name, measured in documents.items()},
            }
        )
    else:
        _print(console, plan, documents)
    return 0


def _planned(
    options: argparse.Namespace, trainee: Trainee, found: Plan | PipelinePlan | None
) -> tuple[ParallelStep, Plan | PipelinePlan]:
    """The step under the plan that is given, or under one that is searched for."""
    if found is not None:
        return parallel_under(found, trainee.subject, options.plan), found
    count = count_devices(options)
    devices = find_devices(options.devices if options.mesh is None and options.nodes is None else count)
    step = make_parallel(trainee.subject.step, devices, options)
    with show_progress(options.verbose):
        return step, plan_step(step, trainee.subject, options, is_trained=True)


def _contestants(trainee: Trainee, step: ParallelStep) -> tuple[Contestant, Contestant]:
    """Both steps with the same first state."""
    first = jax.device_get(step.init_state(trainee.create_state, *trainee.args))
    whole = jax.device_put(first, jax.devices()[0])
    jitted = jax.jit(trainee.subject.step, donate_argnums=0)
    return (
        Contestant(name=AUTOPAR, step=step, state=step.init_state(lambda given: given, first)),
        Contestant(name=JIT, step=jitted, state=whole),
    )


def _take_turns(trainee: Trainee, pair: tuple[Contestant, Contestant], rounds: int) -> None:
    """Make steps in turns, of the first batch; those of the first rounds are not counted."""
    batch = next(iter(trainee.batches()))
    for number in range(_WARM + rounds):
        for one in pair if number % 2 else pair[::-1]:
            one.make_step(batch)
    for one in pair:
        del one.times_s[:_WARM]


def _quartiles(times_s: list[float]) -> tuple[float, float, float]:
    if len(times_s) == 1:
        return times_s[0], times_s[0], times_s[0]
    low, median, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return low, median, high


def _print(console: Console, plan: Plan | PipelinePlan, documents: dict[str, dict[str, float]]) -> None:
    console.print(f"{plan!r}", markup=False, highlight=False, soft_wrap=True)
    for name, one in documents.items():
        where = f"on {plan.num_devices} devices" if name == AUTOPAR else "on one device"
        quartiles = f"{seconds_text(one['lower_quartile_s'])} to {seconds_text(one['upper_quartile_s'])}"
        words = f"{name} {where}: median step {seconds_text(one['median_step_s'])}, half of them {quartiles}"
        console.print(words, markup=False, highlight=False)
    ours_s, jit_s = documents[AUTOPAR]["median_step_s"], documents[JIT]["median_step_s"]
    console.print(
        f"{jit_s / ours_s:.2f} times as fast; predicted {seconds_text(plan.step_s)} per step "
        f"(measured/predicted {ours_s / plan.step_s:.2f})",
        markup=False,
        highlight=False,
    )
    for doubt in doubt_machine(plan, ours_s):
        console.print(doubt, markup=False, highlight=False)
