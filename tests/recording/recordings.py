"""Recordings written by hand, for tests of what is made of them."""

import dataclasses

from autopar.recording.recorded import (
    ProgramOperation,
    Recorded,
    RecordedCall,
    RecordedOperation,
    RecordedSpan,
)
from tests.explain.test_pipelines import TRANSFERS, pipeline_of, two_stages
from tests.plan_examples import collective, plan_of

GROUPS = ((0, 1), (2, 3))
PRODUCT = ProgramOperation(name="dot.1", opcode="dot", bytes=3000, flops=2e6, scope="block_0/up")
REDUCE = ProgramOperation(
    name="psum.2", opcode="all-reduce", collective="all-reduce", axes=("y",), groups=GROUPS, bytes=1024
)
PLAN = plan_of(
    collectives=(collective("all-reduce", "y"), collective("all-gather", "x")),
    mesh_shape=(2, 2),
    compute_s=2e-3,
    comm_s=2e-3,
    hidden_s=5e-4,
)
CALLS = (
    RecordedCall(number=1, wall_s=9.0, is_first=True),
    RecordedCall(number=2, wall_s=7e-3, is_detailed=True),
    RecordedCall(number=3, wall_s=4e-3),
    RecordedCall(number=4, wall_s=5e-3),
    RecordedCall(number=5, wall_s=6e-3),
)


def ran(name: str, device: int, start_ms: float, end_ms: float, call: int = 2) -> RecordedOperation:
    return RecordedOperation(call=call, name=name, device=device, start_s=start_ms / 1e3, end_s=end_ms / 1e3)


def on_one_mesh(**changes) -> Recorded:
    """Four devices compute for 1, 2, 1 and 1 ms, meet in pairs, and the last pair has nothing more to do from 2 ms on."""
    base = Recorded(
        step="train",
        plan_text=PLAN.to_json(),
        cluster_text="",
        device_kind="toy",
        jax_version="0",
        calls=CALLS,
        program=(PRODUCT, REDUCE),
        operations=(
            *(ran("dot.1", device, 0, 2 if device == 1 else 1) for device in range(4)),
            ran("psum.2", 0, 1, 3),
            ran("psum.2", 1, 2, 3),
            ran("psum.2", 2, 1, 2),
            ran("psum.2", 3, 1, 2),
        ),
    )
    return dataclasses.replace(base, **changes)


STAGES = pipeline_of(*two_stages(), transfers=TRANSFERS, num_microbatches=2)


def span(mesh: int, kind: str, start_ms: float, end_ms: float, microbatch: int | None = None, **more) -> RecordedSpan:
    stage = None if kind in ("send", "receive") else mesh
    return RecordedSpan(
        call=2,
        mesh=mesh,
        kind=kind,
        start_s=start_ms / 1e3,
        end_s=end_ms / 1e3,
        stage=stage,
        microbatch=microbatch,
        **more,
    )


def in_stages(**changes) -> Recorded:
    """Two microbatches through two stages; the second stage waits 1 ms for a value that is under way."""
    spans = (
        span(0, "forward", 0, 2, 0),
        span(0, "send", 2, 2, name="x@0", transfer=0),
        span(0, "forward", 2, 4, 1),
        span(0, "backward", 9, 13, 0),
        span(0, "backward", 13, 17, 1),
        span(0, "epilogue", 17, 18),
        span(1, "receive", 0, 3, name="x@0", transfer=0),
        span(1, "forward", 3, 5, 0),
        span(1, "backward", 5, 9, 0),
        span(1, "forward", 9, 11, 1),
        span(1, "backward", 11, 15, 1),
        span(1, "prologue", 15, 15.5),
        span(1, "epilogue", 15.5, 17),
    )
    return on_one_mesh(plan_text=STAGES.to_json(), spans=spans, program=(), operations=(), **changes)


BESIDE = ((0, 1),)
"""The groups of a mesh of two devices."""
ACROSS = ProgramOperation(
    name="psum.2", opcode="all-reduce", collective="all-reduce", axes=("x",), groups=BESIDE, bytes=1024
)


def task_of(one: RecordedSpan) -> RecordedSpan:
    """The span of a task, with the task's name."""
    return one if one.transfer is not None else dataclasses.replace(one, name=f"{one.kind} {one.stage}")


def with_operations(**changes) -> Recorded:
    """The same two stages, each of two devices: a product in all of each task but its last quarter, then an all-reduce.

    The second device of the first stage comes 0.1 ms late to each all-reduce.
    """
    base = in_stages()
    stages = [
        dataclasses.replace(
            stage,
            first_device=2 * stage.stage,
            plan=plan_of(
                collectives=(collective("all-reduce", "x", count=2),),
                mesh_shape=(2,),
                axis_names=("x",),
                compute_s=4e-3,
                comm_s=1e-3,
            ),
        )
        for stage in two_stages()
    ]
    spans = tuple(map(task_of, base.spans))
    tasks = [one for one in spans if one.transfer is None]
    operations = []
    for one in tasks:
        for device in range(2):
            late_s = 1e-4 * (device and one.mesh == 0)
            turn_s = one.start_s + 0.75 * one.seconds
            known = {"call": 2, "device": device, "task": one.name, "microbatch": one.microbatch}
            operations.append(RecordedOperation(name="dot.1", start_s=one.start_s, end_s=turn_s + late_s, **known))
            operations.append(RecordedOperation(name="psum.2", start_s=turn_s + late_s, end_s=one.end_s, **known))
    program = [dataclasses.replace(one, task=task.name) for task in tasks for one in (PRODUCT, ACROSS)]
    fields = {
        "plan_text": pipeline_of(*stages, transfers=TRANSFERS, num_microbatches=2).to_json(),
        "spans": spans,
        "program": tuple(dict.fromkeys(program)),
        "operations": tuple(operations),
    }
    return dataclasses.replace(base, **{**fields, **changes})
