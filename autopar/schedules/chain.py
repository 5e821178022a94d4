"""The plain chain of stages that a schedule is about, as tasks: what a schedule means when no model is at hand.

In: a `Schedule`. Out: one `TaskSpec` per kind and stage, and the inputs and outputs that go with them. Stage s turns `x{s}`
into `x{s+1}` and keeps residuals `r{s}`; its backward turns the cotangent `g{s+1}` into `g{s}` and adds to the accumulator
`dw{s}`. The last stage's output is its own cotangent. The simulator measures bubbles on it, and so do tests and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedules.emit import emit
from autopar.schedules.instructions import InstructionList, Slot, TaskSpec, Value
from autopar.schedules.schedules import Schedule


@dataclass(frozen=True)
class Chain:
    """Tasks of a chain, with the arguments of `emit` that go with them."""

    schedule: Schedule
    specs: tuple[TaskSpec, ...]
    inputs: dict[int, tuple[Value, ...]]
    outputs: tuple[tuple[int, Value], ...]
    consumable: frozenset[tuple[int, Value]]

    def emit(self) -> InstructionList:
        """The instructions of one step."""
        return emit(self.schedule, self.specs, inputs=self.inputs, outputs=self.outputs, consumable=self.consumable)


def chain(schedule: Schedule) -> Chain:
    """The chain of the schedule's stages. Weights `w{s}` survive the step, accumulators and the batch do not."""
    p, last = schedule.num_meshes, schedule.num_stages - 1
    training = len(schedule.kinds) > 1
    specs = [spec for stage in range(last + 1) for spec in _stage_specs(schedule, stage)]
    inputs: dict[int, list[Value]] = {mesh: [] for mesh in range(p)}
    for stage in range(last + 1):
        inputs[stage % p] += [Value(f"w{stage}"), *([Value(f"dw{stage}")] if training else [])]
    inputs[0] += [Value("x0", k) for k in range(schedule.num_microbatches)]
    consumable = {(mesh, value) for mesh in inputs for value in inputs[mesh] if not value.name.startswith("w")}
    results = [(stage % p, Value(f"dw{stage}")) for stage in range(last + 1)]
    if not training:
        results = [(last % p, Value(f"x{last + 1}", k)) for k in range(schedule.num_microbatches)]
    return Chain(
        schedule=schedule,
        specs=tuple(specs),
        inputs={mesh: tuple(values) for mesh, values in inputs.items()},
        outputs=tuple(results),
        consumable=frozenset(consumable),
    )


def _stage_specs(schedule: Schedule, stage: int) -> list[TaskSpec]:
    """The tasks of one stage. Residuals die with the task that reads them last."""
    mesh, last = stage % schedule.num_meshes, schedule.num_stages - 1
    weight, accumulator = Slot(f"w{stage}", False), Slot(f"dw{stage}", False)
    x, y, residual = Slot(f"x{stage}", True), Slot(f"x{stage + 1}", True), Slot(f"r{stage}", True)
    cotangent = Slot(f"x{stage + 1}" if stage == last else f"g{stage + 1}", True)
    before = (Slot(f"g{stage}", True),) if stage > 0 else ()
    training = len(schedule.kinds) > 1

    specs = [TaskSpec(f"forward{stage}", mesh, "forward", stage, (weight, x), (y, residual) if training else (y,))]
    if "backward" in schedule.kinds:
        all_reads = (accumulator, residual, cotangent, weight)
        specs.append(TaskSpec(f"backward{stage}", mesh, "backward", stage, all_reads, (accumulator, *before), (0, 1)))
    if "input_gradient" in schedule.kinds:
        first, second = (residual, cotangent, weight), (accumulator, residual, cotangent)
        specs.append(TaskSpec(f"input_gradient{stage}", mesh, "input_gradient", stage, first, before))
        specs.append(
            TaskSpec(f"weight_gradient{stage}", mesh, "weight_gradient", stage, second, (accumulator,), (0, 1))
        )
    return specs
