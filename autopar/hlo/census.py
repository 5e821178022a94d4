"""The census of collectives: what a compiled program really communicates.

In: the text of a compiled module (`jax.stages.Compiled.as_text()`) and its number of devices. Out: one `Collective` per
collective instruction, with the bytes of each operand, the groups of devices, and how often a run performs it. XLA is
free to combine collectives, and does so differently from version to version: compare operands and bytes, never the
number of instructions.

An operand's bytes are what one device holds on the larger side:

    all-reduce          operand             all-gather     result
    reduce-scatter      operand             all-to-all, collective-permute   operand

An instruction inside a loop counts once per trip, through all loops around it; inside a conditional it counts once per
branch. What can go wrong: a loop whose trip count XLA does not know and whose condition is not a plain counter is
counted once, and `count_is_exact` is False. Bytes are those of the compiled program, which may differ from the traced
one: XLA on CPU sums bfloat16 in float32 and so sends twice the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from autopar.hlo.text import Instruction, parse_module, runs_per_step, split_at_commas

Kind = Literal[
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
]
KINDS: tuple[str, ...] = get_args(Kind)

Groups = tuple[tuple[int, ...], ...]
Devices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction; see the module's text for what its bytes mean.

    `groups` are row-major numbers in the program's device assignment; those of a collective-permute are the devices
    that its `pairs` (sender, receiver) connect, directly or through others.
    """

    kind: Kind
    operand_bytes: tuple[int, ...]
    groups: Groups
    count: int = 1
    op_name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()
    count_is_exact: bool = True

    @property
    def operands(self) -> int:
        """Number of values that the instruction communicates; more than one where XLA combined several."""
        return len(self.operand_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of all operands together, once, without the loops around the instruction."""
        return sum(self.operand_bytes)

    @property
    def group_size(self) -> int:
        """Number of devices in the largest group."""
        return max(map(len, self.groups), default=1)

    def mesh_axes(self, mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
        """The logical mesh axes it communicates along; None if they are not whole axes of a mesh of this shape."""
        if self.kind != "collective-permute":
            return mesh_axes_of(self.groups, mesh_shape)
        moves = [np.unravel_index(pair, mesh_shape) for pair in self.pairs]
        return tuple(axis for axis in range(len(mesh_shape)) if any(move[axis][0] != move[axis][1] for move in moves))


def collectives(hlo_text: str, *, num_devices: int) -> tuple[Collective, ...]:
    """Every collective of a module, in the order of the text.

    `num_devices` is the number of partitions, needed where the text leaves the groups out (all devices in one group).
    Raises ValueError for text that is not an HLO module, or whose groups are written in a way not known here.
    """
    module = parse_module(hlo_text)
    runs = runs_per_step(module)
    found = []
    for computation in module.values():
        count, exact = runs.get(computation.name, (0, True))
        for instruction in computation.instructions.values():
            kind = _kind_of(instruction)
            if kind is not None and count:
                found.append(_collective(instruction, kind, num_devices, count, exact))
    return tuple(found)


def collective_of(instruction: Instruction, *, num_devices: int) -> Collective | None:
    """The collective that one instruction performs or starts, as if it ran once; None for others."""
    kind = _kind_of(instruction)
    return None if kind is None else _collective(instruction, kind, num_devices, 1, True)


def mesh_axes_of(groups: Sequence[Sequence[int]], mesh_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a logical mesh (row-major device order) whose coordinates vary inside each group.

    Axes of size 1 are never named; groups of one device give (). None if no set of axes gives exactly these groups.
    """
    devices = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    wanted = {frozenset(group) for group in groups}
    axes = [axis for axis, size in enumerate(mesh_shape) if size > 1]
    for chosen in itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1)):
        if {frozenset(group) for group in _grouped(devices, chosen)} == wanted:
            return chosen
    return None


def _grouped(devices: Devices, axes: Sequence[int]) -> Groups:
    """Devices that differ only along `axes`, one group for each position along the other axes."""
    others = [axis for axis in range(devices.ndim) if axis not in axes]
    size = math.prod(devices.shape[axis] for axis in axes)
    rows = devices.transpose(*others, *axes).reshape(-1, size)
    return tuple(tuple(int(device) for device in row) for row in rows)


def _kind_of(instruction: Instruction) -> Kind | None:
    """The collective that an instruction performs or starts; None for others and for the second half of a pair."""
    opcode = instruction.opcode.removesuffix("-start")
    return next((kind for kind in get_args(Kind) if kind == opcode), None)


def _collective(instruction: Instruction, kind: Kind, num_devices: int, count: int, exact: bool) -> Collective:
    pairs = _pairs(instruction.attributes) if kind == "collective-permute" else ()
    groups = _connected(pairs) if kind == "collective-permute" else _groups(instruction.attributes, num_devices)
    op_name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return Collective(
        kind=kind,
        operand_bytes=_operand_bytes(instruction, kind, max(map(len, groups), default=1)),
        groups=groups,
        count=count,
        op_name=op_name[1] if op_name else "",
        pairs=pairs,
        count_is_exact=exact,
    )


def _operand_bytes(instruction: Instruction, kind: Kind, group_size: int) -> tuple[int, ...]:
    """Bytes per operand, from the result's type: only that is always printed.

    The first half of an asynchronous pair has the type (operands, results, ...), except for all-reduce-start, whose
    type is the result's.
    """
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        assert shape.members is not None
        shape = shape.members[1]
    sizes = tuple(shape.arrays())
    if kind == "reduce-scatter":
        return tuple(size * group_size for size in sizes)
    if kind == "all-to-all" and shape.members is not None and len(sizes) == group_size:
        return (sum(sizes),)
    return sizes


_PAIR = re.compile(r"\{(\d+),\s*(\d+)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\s*\{[\d,\s]*\},?)*)\s*\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh\[([^\]]*)\](?:,?\s*device_ids=\(([^()]*(?:\([^()]*\))?[^()]*)\))?\s*(?:\{([^}]*)\})?"
)
_SUB_AXIS = re.compile(r"'?([^':,\s]+)'?(?::\((\d+)\)(\d+))?")


def _pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    listed = re.search(r"source_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)*)\}", attributes)
    if listed is None:
        raise ValueError(f"collective-permute without source_target_pairs: {attributes[:120]!r}")
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(listed[1]))


def _connected(pairs: Sequence[tuple[int, int]]) -> Groups:
    group = {device: {device} for pair in pairs for device in pair}
    for source, target in pairs:
        merged = group[source] | group[target]
        for device in merged:
            group[device] = merged
    return tuple(sorted({tuple(sorted(members)) for members in group.values()}))


def _groups(attributes: str, num_devices: int) -> Groups:
    """The groups of devices, from any of the four ways in which XLA writes them.

    replica_groups={{0,1},{2,3}}                                        listed; {} is all devices in one group
    replica_groups=[2,4]<=[4,2]T(1,0)                                   iota, reshaped and transposed
    replica_groups=mesh['a'=2,'b'=4] {'b'}                              axes, or parts of axes, of a mesh
    replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}    the same with another order of devices
    """
    if mesh := _MESH.search(attributes):
        return _mesh_groups(*mesh.groups())
    if listed := _LISTED.search(attributes):
        groups = [re.findall(r"\d+", group) for group in re.findall(r"\{([\d,\s]*)\}", listed[1])]
        return tuple(tuple(map(int, group)) for group in groups) or (tuple(range(num_devices)),)
    if "replica_groups=[" in attributes:
        iota = _IOTA.match(attributes, attributes.index("replica_groups=[") + len("replica_groups="))
        assert iota is not None
        shape = _ints(iota[1])
        return tuple(tuple(map(int, row)) for row in _iota(iota[2] or iota[1], iota[3]).reshape(shape))
    if "replica_groups=" in attributes:
        raise ValueError(f"replica groups in a notation not known here: {attributes[:200]!r}")
    return (tuple(range(num_devices)),)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _iota(dims: str, transpose: str | None) -> Devices:
    """0, 1, 2, ... laid out as `dims`, its axes permuted, flat again."""
    shape = _ints(dims)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return (devices.transpose(_ints(transpose)) if transpose else devices).reshape(-1)


def _mesh_groups(axes: str, device_ids: str | None, over: str | None) -> Groups:
    """Groups along the axes `over` of a mesh; `'b':(2)4` is the part of axis b below its first 2, of size 4."""
    named = (axis.split("=") for axis in split_at_commas(axes) if axis)
    sizes = {name.strip().strip("'"): int(size) for name, size in named}
    parts = [_SUB_AXIS.search(part) for part in split_at_commas(over or "") if part.strip()]
    cuts = {part[1]: _cuts_of_axis(parts, part[1], sizes[part[1]]) for part in parts if part}
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        for start, length in cuts.get(name, [(1, size)]):
            place[name, start] = len(shape)
            shape.append(length)
    devices = _device_order(device_ids, math.prod(shape)).reshape(shape)
    return _grouped(devices, [place[part[1], int(part[2] or 1)] for part in parts if part])


def _device_order(device_ids: str | None, count: int) -> Devices:
    """The devices of a mesh in row-major order: 0, 1, 2, ..., or as `device_ids` states."""
    if device_ids is None:
        return np.arange(count)
    iota = _IOTA.search(device_ids)
    return _iota(iota[2] or iota[1], iota[3]) if iota else np.array(_ints(device_ids))


def _cuts_of_axis(parts: Sequence[re.Match[str] | None], name: str, size: int) -> list[tuple[int, int]]:
    """An axis as the parts (ways before it, ways) that `parts` name and the rests between them, major to minor."""
    cuts, before = [], 1
    named = sorted((int(part[2] or 1), int(part[3] or size)) for part in parts if part and part[1] == name)
    for start, length in named:
        if start > before:
            cuts.append((before, start // before))
        cuts.append((start, length))
        before = start * length
    return cuts if before == size else [*cuts, (before, size // before)]
