"""Values and buffers of operations written by hand, and the bytes that XLA says a compiled program needs."""

from autopar.intra_op.memory.device_operations import Block, Value
from autopar.intra_op.memory.footprint import footprint_of

FLOAT = 4


def real_bytes(compiled):
    account = compiled.memory_analysis()
    kept = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    return kept + account.temp_size_in_bytes


def values(*elements):
    return [
        Value(name=f"v{i}", shape=(n,), dtype="float32", bytes=n * FLOAT, key=None, itemsize=FLOAT)
        for i, n in enumerate(elements)
    ]


def buffers(operations, given, *, outputs=()):
    return sorted(span.value for span in footprint_of(Block(tuple(operations), tuple(outputs)), given).spans)
