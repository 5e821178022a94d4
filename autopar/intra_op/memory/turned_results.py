"""Results of a program whose dimensions stand in another order, and which the library for reductions reads as well.

In: the operations of a program as they were written, its values and results. Out: the operations with a copy for each such
result, and the results with the copies in their places. XLA's CPU compiler writes the order twice: the result is copied, and the
library, which takes only whole buffers in their usual order, reads a buffer of its own. That is what a norm of gradients costs
where backward makes them with rows and columns exchanged, as for `x @ w`. What can go wrong: readers other than the library; they
read the operand in place, so that nothing changes for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.intra_op.memory.block_writer import Values
from autopar.intra_op.memory.device_operations import Kind, Operation


def copy_turned(
    operations: Sequence[Operation], values: Values, outputs: Sequence[int]
) -> tuple[list[Operation], list[int]]:
    """(operations with the copies, results). A copy is made after what the library reads, and before the library reads that."""
    if not any(op.kind is Kind.LIBRARY for op in operations):
        return list(operations), list(outputs)
    names: dict[int, int] = {}
    for op in operations:
        if op.kind is Kind.ALIAS:
            names[op.outputs[0]] = names.get(op.inputs[0], op.inputs[0])
    by_library = [op for op in operations if op.by_library and op.kind is not Kind.ALIAS]
    shared = {names.get(v, v) for v in outputs} & {names.get(v, v) for op in by_library for v in op.inputs}
    written: list[Operation] = []
    copies: dict[int, int] = {}
    for op in operations:
        turned = op.outputs[0] if op.kind is Kind.MOVED else None
        if turned is None or turned not in shared or turned not in values.permuted:
            written.append(op)
            continue
        copies[turned] = values.add_like(turned)
        written.append(dataclasses.replace(op, kind=Kind.WHOLE, by_library=False))
        written.append(Operation(kind=Kind.MOVED, inputs=(*op.inputs, turned), outputs=(copies[turned],)))
    return written, [copies.get(names.get(v, v), v) for v in outputs]
