"""What XLA's CPU compiler hands to its library for reductions in one piece: reductions, and the pointwise work around them.

In: the operations of a block, who makes and who reads each value. Out: for each operation that the library does the one of its
piece whose result is written. The idea is the compiler's own: a piece starts at a large reduction, the last of a program first.
It grows downwards, while one operation alone reads its result, and upwards, to what only the piece itself reads; then again, as
what it grew to may be the last reader of more. A value that the library reads and does not compute is in a buffer, even if it
only repeats another one. What can go wrong: which operations the library knows is a fact of its version, see `xla_cpu.table`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.intra_op.memory.device_operations import FOLDED, Kind, Operation, Value
from autopar.intra_op.xla_cpu.table import LIBRARY_ELEMENTS


class LibraryGroups:
    """Finds the pieces; `last_of` says which operation writes the result of the piece that an operation belongs to."""

    def __init__(
        self,
        operations: Sequence[Operation],
        values: Sequence[Value],
        *,
        names: Mapping[int, int],
        makers: Mapping[int, Operation],
        users: Mapping[int, Sequence[Operation]],
        ends: Collection[int],
    ) -> None:
        self._values, self._names, self._makers, self._users, self._ends = values, names, makers, users, ends
        self._taken = set[Operation]()
        self.last_of: dict[Operation, Operation] = {}
        for op in reversed(operations):
            if op.kind is Kind.LIBRARY and op not in self._taken and self._is_large(op):
                members, last = self._grow(op)
                self.last_of.update(dict.fromkeys(members, last))

    def _grow(self, start: Operation) -> tuple[set[Operation], Operation]:
        """The operations of the piece that starts at a reduction, and the one that writes its result."""
        members, last = {start}, start
        self._taken.add(start)
        while True:
            before = len(members)
            waiting = [v for op in members for v in op.inputs]
            while waiting:
                maker = self._makers.get(self._names.get(waiting[-1], waiting[-1]))
                waiting.pop()
                if maker is not None and self._joins(maker) and self._is_read_by(maker, members):
                    members.add(maker)
                    self._taken.add(maker)
                    waiting += maker.inputs
            while (reader := self._only_reader(last)) is not None and self._joins(reader):
                members.add(reader)
                self._taken.add(reader)
                last = reader
            if len(members) == before:
                return members, last

    def _joins(self, op: Operation) -> bool:
        """Whether the library does this too, and no piece has it yet."""
        is_known = op.kind is Kind.LIBRARY or (op.by_library and op.kind in FOLDED)
        return is_known and op not in self._taken and self._is_large(op)

    def _is_read_by(self, op: Operation, members: Collection[Operation]) -> bool:
        """Whether nothing outside of a piece reads what an operation makes."""
        return all(v not in self._ends and all(user in members for user in self._users[v]) for v in op.outputs)

    def _only_reader(self, op: Operation) -> Operation | None:
        (result,) = op.outputs
        readers = self._users[result]
        return readers[0] if len(readers) == 1 and result not in self._ends else None

    def _is_large(self, op: Operation) -> bool:
        return any(self._values[v].elements >= LIBRARY_ELEMENTS for v in (*op.inputs, *op.outputs))
