"""Which instruction of a program each kernel on a GPU ran for.

In: kernels in the order in which they ran, the program. Out: the name of an instruction for each, or None. The profiler names
the instruction of a kernel that was launched alone. Kernels of a CUDA graph have only names of their own: that of a fusion, with
underscores for points and hyphens, which may serve other fusions that compute the same, or a library's. A graph holds a stretch
of the program in its order, so its kernels are led back where exactly one stretch explains them all:

    a fusion's kernel       the next instruction, which is that fusion or computes the same
    kernels of libraries    all instructions up to the next fusion: one, or as many as kernels that are no fills of memory

Of several stretches the one counts that goes on where the program was. Kernels of collectives run beside others, and are led back
where as many ran as the program has of their kind, outside of loops. What can go wrong: several stretches explain a graph, or
none does, as where streams run beside each other. A fusion's kernel is then that of the fusion whose name it has, which differs
from the true one in its place alone; a library's kernel has no name.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from autopar.hlo.census import KINDS
from autopar.hlo.text import Computation, Instruction
from autopar.measuring.profile import Seen

_RUN_NOTHING = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id"}
)
_BARRIERS = frozenset({"while", "conditional", "call"})
"""What no graph holds."""
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BODY, _CONDITION = re.compile(r"\bbody=%?([\w.\-]+)"), re.compile(r"\bcondition=%?([\w.\-]+)")
_COUNTED = "known_trip_count"
"""Loops of which this is known do not ask whether to go on."""
_FILL = re.compile(r"^Memset\b", re.IGNORECASE)
_NCCL = re.compile(r"^nccl\w*?_(AllReduce|AllGather|ReduceScatter|SendRecv|Broadcast)")
_BY_NCCL = {
    "AllGather": ("all-gather",),
    "AllReduce": ("all-reduce",),
    "Broadcast": ("collective-broadcast",),
    "ReduceScatter": ("reduce-scatter",),
    "SendRecv": ("collective-permute", "all-to-all", "ragged-all-to-all"),
}
"""The kinds of collectives that a kernel of NCCL is for, the usual one first."""

Kind = tuple[object, ...]


def instructions_of(kernels: Sequence[Seen], module: Mapping[str, Computation]) -> list[str | None]:
    """The instruction of each kernel of one device in one call, which are in the order of their starts; None if not certain."""
    return _Program(module).names_of(kernels)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A position in one of the sequences of a program."""

    sequence: str
    index: int


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Where the body of a loop begins, where what asks whether to go on, and which of them runs first."""

    body: _Place
    asks: _Place
    begin: _Place


class _Program:
    """The instructions that run, in sequences: the entry, and the bodies of loops."""

    def __init__(self, module: Mapping[str, Computation]) -> None:
        self._module = module
        every = {one.name: one for computation in module.values() for one in computation.instructions.values()}
        inner = {
            called
            for one in every.values()
            if one.opcode not in _BARRIERS
            for called in _CALLED.findall(one.attributes)
        }
        self._sequences = {
            name: tuple(one for one in computation.instructions.values() if _runs(one) and not _collective(one))
            for name, computation in module.items()
            if name not in inner
        }
        self._every = every
        self._collectives = [
            one.name
            for computation in module.values()
            if computation.is_entry
            for one in computation.instructions.values()
            if _collective(one)
        ]
        self._places = {
            one.name: _Place(name, index)
            for name, sequence in self._sequences.items()
            for index, one in enumerate(sequence)
        }
        self._fusions = {_kernel_name(name): every[name] for name in self._places if every[name].opcode == "fusion"}
        self._loops = {name: loop for name in self._places if (loop := _loop(every[name])) is not None}
        self._around = {place.sequence: name for name, loop in self._loops.items() for place in (loop.body, loop.asks)}
        self._kind_of = functools.cache(self._kind)
        self._starts: dict[Kind, list[_Place]] = {}
        for fusion in self._fusions.values():
            self._starts.setdefault(self._kind_of(fusion.name), []).append(self._places[fusion.name])

    def names_of(self, kernels: Sequence[Seen]) -> list[str | None]:
        """The instruction of each kernel."""
        apart = [bool(one.graph and _nccl(one.kernel)) for one in kernels]
        compute = iter(self._of_compute([one for one, is_apart in zip(kernels, apart, strict=True) if not is_apart]))
        collectives = iter(self._of_collectives(kernels))
        return [next(collectives if is_apart else compute) for is_apart in apart]

    def _of_collectives(self, kernels: Sequence[Seen]) -> Iterator[str | None]:
        """Of the kernels in graphs: those of each kind in the order of the program, if as many ran as it has; None otherwise."""
        ways = [way for one in kernels if one.graph and (way := _nccl(one.kernel))]
        alone = {one.name for one in kernels}
        for way, number in zip(ways, _numbered(ways), strict=True):
            own = [name for name in self._collectives if name not in alone and _collective(self._every[name]) in way]
            yield own[number] if len(own) == ways.count(way) else None

    def _of_compute(self, kernels: Sequence[Seen]) -> list[str | None]:
        found: list[str | None] = []
        places: Sequence[_Place] = ()
        for graph, own in itertools.groupby(kernels, key=lambda one: one.graph):
            launch = list(own)
            names = self._in_graph(launch, places) if graph else [self._alone(one) for one in launch]
            found += names
            last = names[-1]
            places = list(self._behind(last)) if last in self._places else []
        return found

    def _alone(self, one: Seen) -> str | None:
        return one.name if one.name in self._every else self._by_name(one.kernel)

    def _by_name(self, kernel: str) -> str | None:
        return self._fusions[kernel].name if kernel in self._fusions else None

    def _behind(self, name: str) -> Iterator[_Place]:
        """Where a program may go on behind an instruction; behind a loop, which has just asked whether to, also in its body."""
        place = self._places[name]
        if name in self._loops:
            yield self._loops[name].body
        yield from self._opened(_Place(place.sequence, place.index + 1))

    def _opened(self, place: _Place) -> Iterator[_Place]:
        """A place; if a loop stands there, its begin too; at the end of a body, that again and what is behind the loop."""
        yield place
        sequence, around = self._sequences[place.sequence], self._around.get(place.sequence)
        if place.index < len(sequence):
            name = sequence[place.index].name
            yield from (self._loops[name].begin,) if name in self._loops else ()
        elif around is not None:
            yield self._loops[around].begin
            yield from self._behind(around)

    def _in_graph(self, launch: Sequence[Seen], places: Sequence[_Place]) -> list[str | None]:
        """Of the stretches that explain a launch the only one, or the only one that goes on where the last launch ended."""
        kernels = tuple(one.kernel for one in launch)
        ways = self._ways(kernels)
        near = [way for place, way in ways.items() if place in places] or list(ways.values())
        return list(near[0]) if len(near) == 1 else [self._by_name(one) for one in kernels]

    def _ways(self, kernels: tuple[str, ...]) -> Mapping[_Place, Sequence[str | None]]:
        """Every stretch that explains the kernels, by its start."""
        first = next((one for one in kernels if one in self._fusions), None)
        if first is None:
            return {}
        ahead = kernels.index(first)
        found: dict[_Place, Sequence[str | None]] = {}
        for fusion in self._starts[self._kind_of(self._fusions[first].name)]:
            sequence = self._sequences[fusion.sequence]
            before = _libraries(reversed(sequence[: fusion.index])) if ahead else []
            begins = fusion.index - (1 if before and _works(kernels[:ahead]) == 1 else len(before))
            names = self._explain(kernels, sequence, begins)
            if names is not None:
                found[_Place(fusion.sequence, begins)] = names
        return found

    def _explain(self, kernels: Sequence[str], sequence: Sequence[Instruction], index: int) -> list[str | None] | None:
        """The names of a stretch that begins at `index`; None if it is another."""
        found: list[str | None] = []
        for is_fusion, own in itertools.groupby(kernels, key=self._fusions.__contains__):
            run = list(own)
            if is_fusion:
                stretch = sequence[index : index + len(run)]
                if [self._kind_of(one.name) for one in stretch] != [
                    self._kind_of(self._fusions[one].name) for one in run
                ]:
                    return None
                found += [one.name for one in stretch]
                index += len(run)
            else:
                is_last = len(found) + len(run) == len(kernels)
                between = _libraries(sequence[index:])[: 1 if is_last and _works(run) == 1 else None]
                if not between:
                    return None
                found += _of_libraries(run, between)
                index += len(between)
        return found

    def _kind(self, name: str) -> Kind:
        """Equal for instructions that compute the same of arrays of the same shapes."""
        place = self._places[name]
        instruction = self._sequences[place.sequence][place.index]
        return instruction.opcode, instruction.shape, *self._inside(instruction)

    def _inside(self, instruction: Instruction) -> Iterator[object]:
        for called in _CALLED.findall(instruction.attributes):
            for one in self._module[called].instructions.values() if called in self._module else ():
                yield from (one.opcode, one.shape, *self._inside(one))


def _loop(instruction: Instruction) -> _Loop | None:
    body, asks = _BODY.search(instruction.attributes), _CONDITION.search(instruction.attributes)
    if body is None or asks is None:
        return None
    first = body if _COUNTED in instruction.attributes else asks
    return _Loop(body=_Place(body[1], 0), asks=_Place(asks[1], 0), begin=_Place(first[1], 0))


def _numbered(values: Sequence[Hashable]) -> Iterator[int]:
    """How often each value has come before."""
    count: collections.Counter[Hashable] = collections.Counter()
    for value in values:
        yield count[value]
        count[value] += 1


def collective_of_kernel(kernel: str) -> str:
    """The kind of collective that a kernel of NCCL performs, or the usual one of several; empty for other kernels."""
    return next(iter(_nccl(kernel)), "")


def _nccl(kernel: str) -> tuple[str, ...]:
    found = _NCCL.search(kernel)
    return _BY_NCCL[found[1]] if found else ()


def _collective(instruction: Instruction) -> str:
    """The kind of a collective, or of its first half; empty for others."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def _of_libraries(kernels: Sequence[str], instructions: Sequence[Instruction]) -> Iterator[str | None]:
    """One instruction has all kernels; of several each has one, and the fills of memory before it."""
    works = [not _FILL.search(one) for one in kernels]
    certain = len(instructions) == 1 or (sum(works) == len(instructions) and works[-1])
    number = 0
    for works_itself in works:
        yield instructions[min(number, len(instructions) - 1)].name if certain else None
        number += works_itself and len(instructions) > 1


def _works(kernels: Sequence[str]) -> int:
    return sum(not _FILL.search(one) for one in kernels)


def _libraries(instructions: Iterable[Instruction]) -> list[Instruction]:
    return list(itertools.takewhile(lambda one: one.opcode not in {"fusion", *_BARRIERS}, instructions))


def _runs(instruction: Instruction) -> bool:
    return instruction.opcode not in _RUN_NOTHING and not instruction.opcode.endswith(("-done", "-update"))


def _kernel_name(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)
