"""Results of a program whose dimensions stand in another order.

In: the operations of a program as they were written, its values and results. Out: the operations with a copy for each such
result that costs a buffer, and the results with the copies in their places. XLA's CPU compiler writes the order twice where the
library for reductions reads the result as well: the result is copied, and the library, which takes only whole buffers in their
usual order, reads a buffer of its own. That is what a norm of gradients costs where backward makes them with rows and columns
exchanged, as for `x @ w`. Since JAX 0.12 what is copied is a buffer too, and no longer a name of its source, whoever reads it; a
program's only result is written at once. What can go wrong: readers other than the library on JAX 0.10; they read the operand in
place, so that nothing changes for them. An elementwise source, which XLA fuses with the order: then it is there on JAX 0.10.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.intra_op.memory.block_writer import Values
from autopar.intra_op.memory.device_operations import Kind, Operation


def copy_turned(
    operations: Sequence[Operation], values: Values, outputs: Sequence[int]
) -> tuple[list[Operation], list[int]]:
    """(operations with the copies, results). A copy is made after what the library reads, and before the library reads that."""
    if not values.compiler.has_library:
        return list(operations), list(outputs)
    names: dict[int, int] = {}
    for op in operations:
        if op.kind is Kind.ALIAS:
            names[op.outputs[0]] = names.get(op.inputs[0], op.inputs[0])
    has_reductions = any(op.kind is Kind.LIBRARY for op in operations)
    by_library = _read_of([op for op in operations if op.by_library], names) if has_reductions else set()
    shared = {names.get(v, v) for v in outputs} & by_library
    apart = _results_in_order(values, names, outputs) if values.compiler.writes_turned else set()
    written: list[Operation] = []
    copies: dict[int, int] = {}
    for op in operations:
        turned = op.outputs[0] if op.kind is Kind.MOVED else None
        if turned is None or turned not in values.permuted or turned not in shared | apart:
            written.append(op)
            continue
        source = (*op.inputs, turned)
        if turned in apart:
            source = (values.add_like(turned),)
            written.append(Operation(kind=Kind.WHOLE, inputs=op.inputs, outputs=source))
        written.append(dataclasses.replace(op, kind=Kind.WHOLE, by_library=False) if turned in shared else op)
        copies[turned] = values.add_like(turned)
        written.append(Operation(kind=Kind.MOVED, inputs=source, outputs=(copies[turned],)))
    return written, [copies.get(names.get(v, v), v) for v in outputs]


def _results_in_order(values: Values, names: Mapping[int, int], outputs: Sequence[int]) -> set[int]:
    """Of several results the first names, where the dimensions are the same: a reshape asks XLA for the usual order itself."""
    if len(outputs) == 1:
        return set()
    made = [v for v in outputs if v >= 0]
    return {names.get(v, v) for v in made if values.values[names.get(v, v)].shape == values.values[v].shape}


def _read_of(operations: Sequence[Operation], names: Mapping[int, int]) -> set[int]:
    """What operations read, by the first of its names."""
    return {names.get(v, v) for op in operations if op.kind is not Kind.ALIAS for v in op.inputs}
