"""What a pipeline's instructions send between meshes beside what its plan says.

In: a compiled pipeline. Out: a row for each pair of stages between which something crosses, per microbatch and once a step;
bytes of the whole arrays of one step. What can go wrong: stages that share a mesh send each other nothing.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator

from autopar.avals import itemsize_of
from autopar.execution.contents import Lent, Made, Passed
from autopar.execution.pipeline import CompiledPipeline
from autopar.pipeline_plan import ONCE
from autopar.schedules.instructions import Send
from autopar.verification import VerifiedRow

_Way = tuple[int, int, bool]
"""The stage that sends, the stage that receives, whether once a step."""


def rows(compiled: CompiledPipeline) -> Iterator[VerifiedRow]:
    """The rows of a pipeline."""
    planned, sent = collections.Counter[_Way](), _sent(compiled)
    for one in compiled.plan.transfers:
        planned[one.source, one.target, one.what in ONCE] += one.bytes * one.count
    for way in sorted({*planned, *sent}):
        source, target, is_once = way
        yield VerifiedRow(
            topic="transfers",
            what=f"stage {source} to stage {target}, {'once a step' if is_once else 'all microbatches'}",
            unit="bytes",
            planned=planned[way],
            compiled=sent[way],
            verdict="matches" if planned[way] == sent[way] else "differs",
        )


def _sent(compiled: CompiledPipeline) -> collections.Counter[_Way]:
    found = collections.Counter[_Way]()
    for mesh in range(compiled.schedule.num_meshes):
        for instruction in compiled.instructions.of(mesh):
            if isinstance(instruction, Send):
                way, size = _way_of(compiled, instruction)
                found[way] += size
    return found


def _way_of(compiled: CompiledPipeline, send: Send) -> tuple[_Way, int]:
    group, tasks = compiled.links.groups[send.value.name], compiled.pipeline_tasks
    content = group.content
    assert isinstance(content, Passed), "sums and results stay on their mesh"
    target = next(name.stage for name in content.readers if tasks.mesh_of(name.stage) == send.target_mesh)
    if isinstance(content.source, Made):
        arrays = [tasks.maker_of(item).results[item[1]] for item in group.items]
        source = content.source.task.stage
    else:
        assert isinstance(content.source, Lent), "what the caller hands in is put where it is read"
        reader = tasks.by_name[content.readers[0]]
        shapes = dict(zip(reader.reads, reader.shapes, strict=True))
        given = [shapes[ref] for _, ref in group.items]
        arrays = [shape[0] if isinstance(shape, list) else shape for shape in given]
        source = content.source.stage
    size = sum(math.prod(array.shape) * itemsize_of(array) for array in arrays)
    return (source, target, send.value.microbatch is None), size
