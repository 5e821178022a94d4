"""A step under a plan that `plan -o` wrote, on as many devices as the plan has.

In: the file and what is trained. Out: the step, planned. What can go wrong: the plan is for another program, or for more
devices or memory than there are; each is said.
"""

from __future__ import annotations

from pathlib import Path

from autopar.api import ParallelStep, parallelize
from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.arguments.subject import Subject
from autopar.commands.plans.plan import read_plan
from autopar.cost_model.hardware import find_preset
from autopar.errors import PlanError, warn
from autopar.explain.units import bytes_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan


def read_plan_for_here(path: Path) -> Plan | PipelinePlan:
    """Read a plan, and have JAX make as many virtual devices as it needs, if they are virtual. Raises as `read_plan` does."""
    found = read_plan(path)
    ask_for_virtual_devices(found.num_devices)
    return found


def parallel_under(found: Plan | PipelinePlan, subject: Subject, path: Path) -> ParallelStep:
    """The step under the plan. Raises ArgumentError for too few devices, PlanError if the plan is for another program."""
    devices = find_devices(found.num_devices)
    step: ParallelStep = parallelize(subject.step, devices=devices, plan=found)
    try:
        step.plan(subject.state, subject.batch)
    except PlanError as error:
        raise PlanError(
            f"{path} does not fit this step: {error} Its MODEL and sizes stand behind the plan's file."
        ) from None
    preset = find_preset(devices[0].platform, devices[0].device_kind).cluster
    if devices[0].platform != "cpu" and found.peak_bytes > preset.usable_memory_bytes:
        warn(
            f"the plan needs {bytes_text(found.peak_bytes)} of each device, and one of {preset.name} has "
            f"{bytes_text(preset.usable_memory_bytes)} for programs"
        )
    return step
