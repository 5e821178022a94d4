"""Which module a value in memory belongs to whose operation names none: that of the nearest value that has one.

In: a device's program and numbers of its values. Out: their modules. Random bits have none, and what is multiplied by the mask
has one. Readers come before makers. What can go wrong: a value that several modules read; the first in the program tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.intra_op.memory.device_operations import Block, Operation, Value

_FARTHEST = 8
"""So many operations on, the module of another value says nothing of this one."""


def nearest_scopes(block: Block, values: Sequence[Value], numbers: Iterable[int]) -> dict[int, str]:
    """The module of each numbered value: its own, or the nearest by data flow; empty if none is near."""
    found = {number: values[number].scope for number in numbers}
    if all(found.values()):
        return found
    readers: dict[int, list[int]] = {}
    makers: dict[int, list[int]] = {}
    for operation in _every(block):
        for value in operation.inputs:
            readers.setdefault(value, []).extend(operation.outputs)
        for value in operation.outputs:
            makers.setdefault(value, []).extend(operation.inputs)
    return {
        number: scope or _nearest(number, readers, values) or _nearest(number, makers, values)
        for number, scope in found.items()
    }


def _every(block: Block) -> Iterator[Operation]:
    for operation in block.operations:
        yield operation
        for body in operation.bodies:
            yield from _every(body)


def _nearest(number: int, beside: Mapping[int, Sequence[int]], values: Sequence[Value]) -> str:
    """The first module among values at equal distance."""
    edge, seen = [number], {number}
    for _ in range(_FARTHEST):
        edge = [
            one
            for one in dict.fromkeys(n for value in edge for n in beside.get(value, ()))
            if one >= 0 and one not in seen
        ]
        scope = next((values[one].scope for one in edge if values[one].scope), "")
        if scope:
            return scope
        seen.update(edge)
    return ""
