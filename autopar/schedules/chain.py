"""A plain chain of stages as tasks: what a schedule means when no model is at hand.

Stage s turns `x{s}` into `x{s+1}` and keeps residuals `r{s}`. Its backward turns the cotangent `g{s+1}` into `g{s}` and adds
to the accumulator `dw{s}`. The last stage's output is its own cotangent. The simulator measures bubbles on the chain, and
tests and benchmarks run it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedules.emit import emit
from autopar.schedules.instructions import InstructionList, Slot, TaskSpec, Value
from autopar.schedules.tasks import Schedule, TaskKind


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The tasks of a chain, and the other arguments of `emit`."""

    schedule: Schedule
    specs: tuple[TaskSpec, ...]
    inputs: dict[int, tuple[Value, ...]]
    outputs: tuple[tuple[int, Value], ...]
    consumable: frozenset[tuple[int, Value]]

    def emit(self) -> InstructionList:
        """The instructions of one step."""
        return emit(self.schedule, self.specs, inputs=self.inputs, outputs=self.outputs, consumable=self.consumable)


def make_chain(schedule: Schedule) -> Chain:
    """Make the chain of a schedule's stages. Weights `w{s}` survive the step; accumulators and the batch do not."""
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

    def spec(
        kind: TaskKind, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...], donated: tuple[int, ...] = ()
    ) -> TaskSpec:
        name = f"{kind}{stage}"
        return TaskSpec(name=name, mesh=mesh, kind=kind, stage=stage, inputs=inputs, outputs=outputs, donated=donated)

    specs = [spec("forward", (weight, x), (y, residual) if training else (y,))]
    if "backward" in schedule.kinds:
        specs.append(spec("backward", (accumulator, residual, cotangent, weight), (accumulator, *before), (0, 1)))
    if "input_gradient" in schedule.kinds:
        specs.append(spec("input_gradient", (residual, cotangent, weight), before))
        specs.append(spec("weight_gradient", (accumulator, residual, cotangent), (accumulator,), (0, 1)))
    return specs
