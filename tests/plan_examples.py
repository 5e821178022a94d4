"""Small plans written by hand, and the rows of a report made of them, for the tests of reports."""

import dataclasses
import math
import re

from autopar.plan import CollectivePlan, LiveTensor, Plan, Spec, ValuePlan

MESH = {"x": 2, "y": 4}


def leaf(path: str, shape: tuple[int, ...], spec: Spec | None = None, *, role: str = "state") -> ValuePlan:
    spec = spec or ((),) * len(shape)
    ways = math.prod(MESH[axis] for axes in spec for axis in axes)
    size = 4 * math.prod(shape) // ways
    return ValuePlan(path=path, role=role, shape=shape, dtype="float32", spec=spec, bytes_per_device=size)


def collective(kind: str, axis: str, *, operand: str = "float32[7]", count: float = 1, source: str = "m.py:7"):
    return CollectivePlan(
        kind=kind, axes=(axis,), bytes=1024, count=count, operand=operand, source=source, predicted_s=1e-3
    )


def plan_of(*inputs: ValuePlan, collectives: tuple[CollectivePlan, ...] = (), **changes) -> Plan:
    base = Plan(
        fingerprint="f",
        trail="",
        cluster_figures="",
        cluster="cpu",
        mesh_shape=tuple(MESH.values()),
        axis_names=tuple(MESH),
        inputs=inputs,
        outputs=(leaf("1/loss", (), role="other"),),
        layouts=(),
        strategies=(),
        equations=(),
        rules=(),
        collectives=collectives,
        compute_s=0.1,
        comm_s=0.05,
        peak_bytes=3 * 2**30,
        memory_limit_bytes=12 * 2**30,
        peak_tensors=(
            LiveTensor(name="small", shape=(2,), dtype="int8", bytes_per_device=2),
            *(LiveTensor(name="logits", shape=(16, 256), dtype="float32", bytes_per_device=16384),) * 2,
        ),
        planning_s=1.5,
        lower_bound_s=0.15,
        allow_redundant_compute=False,
    )
    return dataclasses.replace(base, **changes)


BATCH = leaf("batch/tokens", (16, 64), (("x",), ()), role="batch")
WHOLE_BATCH = leaf("batch/tokens", (16, 64), role="batch")
UP, DOWN = "state/params/up/kernel", "state/params/down/kernel"
ALL_WHOLE = "1 of 1 parameters (100% of their bytes) replicated"


def layer_stack(layers: int) -> list[ValuePlan]:
    specs = {"up": ((), ("y",)), "down": (("y",), ())}
    return [
        leaf(f"state/params/block_{n}/{name}", (32, 32), spec) for n in range(layers) for name, spec in specs.items()
    ]


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the rows below a table's title."""
    lines = text.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[1:]]
