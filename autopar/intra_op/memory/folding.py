"""Which results of a list of operations have a buffer when XLA's CPU compiler has folded operations into those that read them.

In: a `Block` as XLA leaves it (`scattered_sums`, `merged_groups`), and its values. Out: for each operation that runs the buffers
that it reads, and whether it reads each element where it writes the result. What can go wrong: XLA decides by other rules than
those at the top of `footprint`.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from autopar.intra_op.memory.device_operations import ELEMENTWISE, FOLDED, Block, Kind, Operation, Value
from autopar.intra_op.memory.library_groups import LibraryGroups


class Folding:
    """Which values of a block have a buffer, and which buffers each operation that runs reads.

    As XLA's fusion of instructions decides it: whatever is folded is computed in each operation that reads it, except that what
    is costly is not computed twice: it has a buffer if it would be in two operations, or in one that reads its elements often.
    """

    def __init__(self, block: Block, values: Sequence[Value]) -> None:
        self.values, self._keeps_costly = values, block.compiler.keeps_costly
        self.maker: dict[int, Operation] = {}
        self._original: dict[int, int] = {}
        self.users: dict[int, list[Operation]] = collections.defaultdict(list)
        for op in block.operations:
            if op.kind is Kind.ALIAS:
                self._original[op.outputs[0]] = self.original(op.inputs[0])
                continue
            self.maker.update((v, op) for v in op.outputs)
            for v in dict.fromkeys(self.original(v) for v in op.inputs):
                self.users[v].append(op)
        self.ends = {self.original(v) for v in block.outputs}
        operations = [op for op in block.operations if op.kind is not Kind.ALIAS]
        self.library = LibraryGroups(
            operations, values, names=self._original, makers=self.maker, users=self.users, ends=self.ends
        ).last_of
        self._dear = self._ends_of_dear(operations)
        self.with_buffer: set[int] = set()
        self._bits, self._behind = self._shared(operations)
        self._again: set[int] = set()
        self._roots: dict[int, tuple[Operation, ...]] = {}
        self._widest: dict[int, int] = {}
        for op in reversed(operations):
            for v in op.outputs:
                self._settle(v, op)
        self._sources: dict[int, Mapping[int, bool]] = {}
        for op in operations:  # in program order, so that no search goes deep
            for v in op.outputs if self._is_inside(op) else ():
                self._sources[v] = self._sources_through(op)
        self.running = [op for op in operations if self._runs(op)]
        self._reads = {op: self._sources_through(op) for op in self.running}
        self.reads = {op: tuple(found) for op, found in self._reads.items()}

    def original(self, value: int) -> int:
        """The value that this is only another name of."""
        return self._original.get(value, value)

    def read_in_place(self, op: Operation) -> tuple[int, ...]:
        """The buffers of which a running operation reads each element where it writes the result."""
        return tuple(v for v, is_in_place in self._reads[op].items() if is_in_place)

    def _reads_buffers(self, op: Operation) -> bool:
        return op.kind is Kind.WHOLE or op in self.library

    def _settle(self, value: int, op: Operation) -> None:
        """Decide on one value, all of whose readers are decided: its buffer, and up to two operations that compute or read it."""
        users = self.users[value]
        roots: dict[Operation, None] = {}
        widest = 0
        for user in users:
            if user.kind in FOLDED and user not in self.library:
                for out in user.outputs:
                    roots.update(dict.fromkeys(self._roots[out]))
                    widest = max(widest, self.values[out].elements, self._widest[out])
            else:
                roots[self.library.get(user, user)] = None
        needed_by = tuple(roots)[:2]
        is_folded = op.kind in FOLDED and value not in self.ends
        last = self.library.get(op)
        if last is not None:
            has_buffer, is_folded = op is last, False
        else:
            is_read_whole = any(self._reads_buffers(user) for user in users)
            is_costly = value in self._dear or (op.kind is Kind.COSTLY and self._keeps_costly)
            is_twice = is_costly and (len(needed_by) > 1 or widest > self.values[value].elements)
            has_buffer = not is_folded or is_read_whole or is_twice or self._is_torn(value, op)
        is_kept = op.kind is Kind.COSTLY or value in self._dear
        again = has_buffer and is_folded and not is_kept and self._is_computed_again(value, op)
        if has_buffer:
            self.with_buffer.add(value)
        if again:
            self._again.add(value)
        if not has_buffer:
            self._roots[value], self._widest[value] = needed_by, widest
        else:
            self._roots[value] = (op, *(needed_by if again else ()))[:2]
            self._widest[value] = widest if again else 0

    def _ends_of_dear(self, operations: Sequence[Operation]) -> set[int]:
        """What is kept where something DEAR would be computed twice: the last value that is made of it alone."""
        found = set[int]()
        for value in (v for op in operations if op.kind is Kind.DEAR for v in op.outputs):
            while value not in self.ends and len(self.users[value]) == 1:
                (user,) = self.users[value]
                if user.kind not in ELEMENTWISE or len(user.outputs) != 1 or user in self.library:
                    break
                if self.values[user.outputs[0]].elements != self.values[value].elements:
                    break
                value = user.outputs[0]
            found.add(value)
        return found

    def _is_computed_again(self, value: int, op: Operation) -> bool:
        """Whether readers that could fold a value with a buffer compute it all the same: where that reads no more, or where who
        reads the buffer does so under another shape. To XLA that is one more reader that folds it, whose result is the buffer."""
        if self._has_one_large_operand(op, value):
            return True
        whole = [user for user in self.users[value] if self._reads_buffers(user)]
        if not whole or not all(value in self._reshaped(user) for user in whole):
            return False
        joined: set[Operation] = set()
        return all(self._is_joined(value, user, joined) for user in self.users[value] if user not in whole)

    def _reshaped(self, op: Operation) -> set[int]:
        """What an operation reads under another shape."""
        return {self.original(v) for v in op.reshaped}

    def _shared(self, operations: Sequence[Operation]) -> tuple[dict[int, int], dict[Operation, int]]:
        """A bit for each cheap value of several readers, and of each operation the bits of those that it is computed from."""
        bits: dict[int, int] = {}
        behind: dict[Operation, int] = {}
        for op in operations:
            found = 0
            for v in map(self.original, op.inputs):
                found |= bits.get(v, 0) | (behind[self.maker[v]] if v in self.maker else 0)
            behind[op] = found
            if op.kind in (Kind.CHEAP, Kind.MOVED):
                bits.update((v, 1 << len(bits)) for v in op.outputs if len(self.users[v]) > 1)
        return bits, behind

    def _is_torn(self, value: int, op: Operation) -> bool:
        """Whether a value that is more to compute than to read would be folded into an operation that also waits for what has a
        buffer and is made of it, as backward does for forward: XLA folds it into all readers on all ways, or has a buffer."""
        if value not in self._bits or self._has_one_large_operand(op, value):
            return False
        joined: set[Operation] = set()
        return not all(self._is_joined(value, user, joined) for user in self.users[value])

    def _is_joined(self, value: int, op: Operation, joined: set[Operation]) -> bool:
        """Whether all ways from a value to an operation are folded; `joined` are those of which that is known."""
        if op in joined:
            return True
        joined.add(op)
        for v in map(self.original, op.inputs):
            maker = self.maker.get(v)
            if maker is None or not self._behind[maker] & self._bits[value]:
                continue
            if (v in self.with_buffer and v not in self._again) or not self._is_joined(value, maker, joined):
                return False
        return True

    def _has_one_large_operand(self, op: Operation, value: int) -> bool:
        """Whether computing the value again reads no more than reading it: XLA's readers that can fold it do, buffer or not."""
        size = self.values[value].elements
        operands = {self.original(v) for v in op.inputs}
        large = [v for v in operands if self.values[v].elements >= size and not self._is_spread(v)]
        return len(large) <= 1 or sum(self.values[v].elements for v in operands) <= size

    def _is_spread(self, value: int) -> bool:
        """Whether a value repeats or counts: XLA takes that for nothing to read."""
        op = self.maker.get(value)
        if op is None or op.kind not in FOLDED:
            return False
        return all(self.values[v].elements < self.values[value].elements for v in op.inputs)

    def _runs(self, op: Operation) -> bool:
        last = self.library.get(op)
        if last is not None:
            return op is last
        return op.kind not in FOLDED or any(v in self.with_buffer for v in op.outputs)

    def _is_inside(self, op: Operation) -> bool:
        """Whether an operation may be computed inside of those that read it: it is folded, or part of a library's work."""
        return op.kind in FOLDED or self.library.get(op, op) is not op

    def _sources_through(self, op: Operation) -> dict[int, bool]:
        """The buffers from which an operation computes its result, and whether element by element."""
        found: dict[int, bool] = {}
        for v in op.inputs:
            v = self.original(v)
            is_inside = v in self.maker and self._is_inside(self.maker[v])
            if not is_inside or (v in self.with_buffer and (self._reads_buffers(op) or v not in self._again)):
                found[v] = found.get(v, True) and op.kind in ELEMENTWISE
            elif op.kind not in ELEMENTWISE:
                found.update(dict.fromkeys(self._sources[v], False))
            else:  # a test of all gradients is computed from hundreds of buffers, in each update that waits for it
                elsewhere = [source for source in found.keys() & self._sources[v].keys() if not found[source]]
                found.update(self._sources[v])
                found.update(dict.fromkeys(elsewhere, False))
        return found
