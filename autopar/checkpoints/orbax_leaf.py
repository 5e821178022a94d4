"""How orbax writes and reads one leaf of a state: each process its own entries, with a checksum for each chunk.

In: leaves, and orbax's word on where they go. Out: zarr arrays in orbax's own layout, which orbax reads without autopar as well.
A `SplitArray` is one array there. Entries are copied to the host before `serialize` returns, and written after that. What can go
wrong: a chunk is missing or damaged, the disk is full; the errors name the leaf.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import warnings
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Sharding
from orbax.checkpoint import future, type_handlers

from autopar.checkpoints.freed import Freed
from autopar.checkpoints.parts import (
    Index,
    Part,
    Saved,
    Wanted,
    chunk_shape,
    entries_wanted,
    parts_to_write,
    pieces_wanted,
    shifted,
    words_per_entry,
)
from autopar.checkpoints.tuning import TUNING
from autopar.errors import CheckpointError
from autopar.events import reach
from autopar.runtime.processes import absent
from autopar.split_array import SplitArray, SplitSharding

T = TypeVar("T")
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclasses.dataclass(kw_only=True)
class LeafRestoreArgs(type_handlers.RestoreArgs):  # type: ignore[misc]
    """The form in which a leaf is read.

    Attributes:
        path: the path of the leaf, for errors.
        shape: the shape of the whole leaf.
        type: the type of its elements; a key type for keys of `jax.random`, whose kind is `key_kind`.
        sharding: the sharding of the result; None for a NumPy array on every process.
    """

    path: str
    shape: tuple[int, ...]
    type: np.dtype
    sharding: Sharding | SplitSharding | None
    key_kind: str | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Written:
    """The entries of one leaf in host memory, and where orbax wants them."""

    info: type_handlers.ParamInfo
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    parts: list[tuple[Index, np.ndarray]]


class LeafHandler(type_handlers.TypeHandler):  # type: ignore[misc]
    """Writes and reads arrays, whole or in pieces, as orbax's handlers do."""

    _array_metadata_store = None
    """Orbax asks for it: the shapes of chunks are noted in the files alone."""

    def __init__(self, *, is_writer: bool) -> None:
        """`is_writer`: whether this process writes what every process has."""
        self._is_writer = is_writer

    def typestr(self) -> str:
        """Return the type that orbax notes beside each leaf. Readers see the leaf as an ordinary array."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[type_handlers.ParamInfo]) -> list[ocp.metadata.ArrayMetadata]:
        """Shape and type of leaves on disk, as orbax shows them."""
        stores = await asyncio.gather(*(_open_to_read(info) for info in infos))
        return [
            ocp.metadata.ArrayMetadata(
                name=info.name,
                directory=info.parent_dir,
                shape=store.shape,
                sharding=None,
                dtype=store.dtype.numpy_dtype,
            )
            for info, store in zip(infos, stores, strict=True)
        ]

    async def serialize(
        self,
        values: Sequence[Saved],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> list[future.Future]:
        """Copy the entries that this process writes to the host; the futures that are returned write them."""
        found = [parts_to_write(value, is_writer=self._is_writer) for value in values]
        for part in (part for parts in found for part in parts):
            part.start_copy()
        written = [
            _written(value, info, parts) for value, info, parts in zip(values, infos, found, strict=True) if parts
        ]
        return [future.CommitFutureAwaitingContractedSignals(_write(written), name="autopar")] if written else []

    async def deserialize(
        self, infos: Sequence[type_handlers.ParamInfo], args: Sequence[LeafRestoreArgs] | None = None
    ) -> list[Saved]:
        """Read each leaf as its `LeafRestoreArgs` say; each device of this process gets what it needs, and no more is read."""
        assert args is not None, "leaves are read with LeafRestoreArgs"
        room = _Room(TUNING.in_flight_bytes)
        return await _all_of([_read_leaf(info, arg, room) for info, arg in zip(infos, args, strict=True)])


async def _all_of(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results of coroutines, all of which end before the first exception is raised: TensorStore answers their loop."""
    found = await asyncio.gather(*work, return_exceptions=True)
    results = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results


def _written(value: Saved, info: type_handlers.ParamInfo, parts: Sequence[Part]) -> _Written:
    extra, dtype = words_per_entry(value.dtype)
    chunk = chunk_shape(value, most_bytes=TUNING.chunk_bytes)
    shape = (*value.shape, *extra)
    held = [(part.index, part.on_host().view(dtype)) for part in parts]
    return _Written(info=info, shape=shape, dtype=dtype, chunk=(*chunk, *extra), parts=held)


async def _write(written: Sequence[_Written]) -> None:
    """Write leaves in one transaction of this process's own files, which orbax merges with those of the others."""
    transaction = ts.Transaction(atomic=True)
    for one in written:
        await one.info.await_path_creation()
    reach("write", written[0].info.parent_dir)
    await _all_of([_write_leaf(one, transaction) for one in written])
    await transaction.commit_async()


async def _write_leaf(one: _Written, transaction: ts.Transaction) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # orbax asks who uses it
        spec = type_handlers.get_json_tspec_write(
            one.info,
            use_ocdbt=True,
            global_shape=one.shape,
            local_shape=one.chunk,
            dtype=one.dtype,
            process_index=jax.process_index(),
        )
    spec["metadata"] |= {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": one.chunk}},
        "codecs": _CODECS,
    }
    store = await ts.open(spec, create=True, open=True, context=one.info.ts_context, transaction=transaction)
    await asyncio.gather(*(store[index].write(numbers) for index, numbers in one.parts if numbers.size))


async def _open_to_read(info: type_handlers.ParamInfo) -> ts.TensorStore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        spec = type_handlers.get_json_tspec_read(info, use_ocdbt=True)
    return await ts.open(spec | {"fill_missing_data_reads": False}, open=True, context=info.ts_context)


class _Room:
    """The bytes that may be read before they are on their devices; a single range may be larger than all of it."""

    def __init__(self, total_bytes: int) -> None:
        self._total, self._taken, self._changed = total_bytes, 0, asyncio.Condition()
        self.freed = Freed(total_bytes)

    async def take(self, wanted: int) -> None:
        """Wait for room."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._taken or self._taken + wanted <= self._total)
            self._taken += wanted

    async def give_back(self, taken: int) -> None:
        """Leave the room to others."""
        async with self._changed:
            self._taken -= taken
            self.freed.add(taken)
            self._changed.notify_all()


async def _read_leaf(info: type_handlers.ParamInfo, arg: LeafRestoreArgs, room: _Room) -> Saved:
    """A leaf where it belongs. Raises CheckpointError with its path."""
    extra, dtype = words_per_entry(arg.type)
    try:
        store = await _open_to_read(info)
        if (store.shape, store.dtype.numpy_dtype) != ((*arg.shape, *extra), dtype):
            raise ValueError(f"the file holds {store.dtype.name}{list(store.shape)}")
        if arg.sharding is None:
            return (await store.read()).view(arg.type)
        pieces = [
            await _read_array(store, arg, room, shape=shape, dim=dim, start=start, sharding=sharding)
            for shape, dim, start, sharding in pieces_wanted(arg.shape, arg.sharding)
        ]
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{arg.path} cannot be read from {info.parent_dir}: {str(error).partition(' [')[0]}. This checkpoint is damaged: "
            "restore an earlier one, from which a run goes on once this one is removed, or copy it again from where it was kept."
        ) from error
    return SplitArray(pieces, arg.sharding.dim) if isinstance(arg.sharding, SplitSharding) else pieces[0]


async def _read_array(
    store: ts.TensorStore,
    arg: LeafRestoreArgs,
    room: _Room,
    *,
    shape: tuple[int, ...],
    dim: int,
    start: int,
    sharding: Sharding,
) -> jax.Array:
    """An array on one mesh: the entries from `start` along `dim` of a leaf."""
    arrays: list[jax.Array] = []
    for wanted in entries_wanted(shape, sharding):
        index = shifted(wanted.index, dim, start)
        read_bytes = _bytes_of_chunks(store, index)
        await room.take(read_bytes)
        try:
            numbers = await _read_range(store, index, room)
            made = _on_devices(numbers if arg.key_kind else numbers.view(arg.type), wanted, arg.key_kind)
            await asyncio.to_thread(jax.block_until_ready, made)  # the numbers are kept until they are copied
            arrays += made
            del numbers
        finally:
            await room.give_back(read_bytes)
    if not arrays:
        return absent(shape, arg.type, sharding)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


async def _read_range(store: ts.TensorStore, index: Index, room: _Room) -> np.ndarray:
    """The entries of a range; a few chunks at a time, as each chunk of a read is held until all are there."""
    blocks = [*blocks_of(store, index)]
    if len(blocks) == 1:
        return await store[index].read()
    shape = [*(s.stop - s.start for s in index), *store.shape[len(index) :]]
    numbers = np.empty(shape, store.dtype.numpy_dtype)
    for block in blocks:
        place = tuple(slice(b.start - s.start, b.stop - s.start) for b, s in zip(block, index, strict=True))
        numbers[place] = await store[block].read()
        room.freed.add(_bytes_of_chunks(store, block))
    return numbers


def blocks_of(store: ts.TensorStore, index: Index) -> Iterator[Index]:
    """The parts in which a range is read, between chunks: each is of one chunk, or of as many as may be in flight."""
    counts = _counts_of_chunks(store, index)
    if max(counts, default=0) <= 1 or _bytes_of_chunks(store, index) <= TUNING.in_flight_bytes:
        yield index
        return
    dim = counts.index(max(counts))
    size, along = _chunk_of(store)[dim], index[dim]
    middle = (along.start // size + counts[dim] // 2) * size
    for part in (slice(along.start, middle), slice(middle, along.stop)):
        yield from blocks_of(store, (*index[:dim], part, *index[dim + 1 :]))


def _bytes_of_chunks(store: ts.TensorStore, index: Index) -> int:
    """Return the bytes of the chunks that hold these entries. They are read as wholes."""
    return math.prod((*_counts_of_chunks(store, index), *_chunk_of(store), int(store.dtype.numpy_dtype.itemsize)))


def _counts_of_chunks(store: ts.TensorStore, index: Index) -> list[int]:
    """Return the number of chunks that hold these entries, along each dimension."""
    return [-(-s.stop // size) - s.start // size for s, size in zip(index, _chunk_of(store), strict=False)]


def _chunk_of(store: ts.TensorStore) -> list[int]:
    return [int(size or 1) for size in store.chunk_layout.read_chunk.shape or ()]


def _on_devices(numbers: np.ndarray, wanted: Wanted, key_kind: str | None) -> list[jax.Array]:
    """Put the same entries on each device. A CPU device may keep the memory that it is given, so each gets a copy."""
    is_shared = wanted.devices[0].platform == "cpu"
    arrays = [
        jax.device_put(numbers.copy() if k and is_shared else numbers, device)
        for k, device in enumerate(wanted.devices)
    ]
    return [jax.random.wrap_key_data(x, impl=key_kind) for x in arrays] if key_kind else arrays


def registry_of(*, is_writer: bool) -> type_handlers.TypeHandlerRegistry:
    """Return orbax's registry with autopar's handler for every array."""
    handler = LeafHandler(is_writer=is_writer)
    return type_handlers.create_type_handler_registry(
        *((kind, handler) for kind in (SplitArray, jax.Array, np.ndarray, int, float, complex, bool))
    )


def register_with_orbax() -> None:
    """Teach orbax's own checkpointers to save a `SplitArray`, as one array of its whole shape.

    They read it back as an ordinary array, of which the step makes pieces again. `autopar.save` needs no such call.
    """
    handler = LeafHandler(is_writer=jax.process_index() == 0)
    type_handlers.register_type_handler(SplitArray, handler, override=True)
