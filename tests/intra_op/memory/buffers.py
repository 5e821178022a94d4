"""Values and buffers of operations written by hand, memory models of steps, and the bytes that XLA says a program needs."""

import jax

from autopar.cost_model.hardware import PRESETS
from autopar.intra_op.choices.graph import build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.memory.device_operations import Block, Value
from autopar.intra_op.memory.footprint import footprint_of
from autopar.intra_op.memory.model import MemoryModel
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of

FLOAT = 4


def real_bytes(compiled):
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    return kept + account.temp_size_in_bytes


def values(*elements):
    return [
        Value(name=f"v{i}", shape=(n,), dtype="float32", bytes=n * FLOAT, var=None, itemsize=FLOAT)
        for i, n in enumerate(elements)
    ]


def buffers(operations, given, *, outputs=()):
    return sorted(span.value for span in footprint_of(Block(tuple(operations), tuple(outputs)), given).spans)


def memory_of(step, state, batch, *, aliased_outputs=(), **options):
    """The memory model of a step with one result on four devices, with all layouts open."""
    program, _ = program_of(jax.make_jaxpr(step)(state, batch))
    graph = build_graph(
        program,
        LogicalMesh.of((4,)),
        PRESETS["cpu"],
        PlannerOptions(),
        input_layouts=[None] * 2,
        output_layouts=[None],
    )
    return MemoryModel(graph, input_names=["state", "batch"], aliased_outputs=dict(aliased_outputs), **options)
