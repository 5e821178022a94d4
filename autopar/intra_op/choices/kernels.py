"""What a program reads and writes in memory where a compiler makes one kernel of a chain of operations.

In: a `Program`. Out: for each of its equations a `Traffic`: how many times it reads each operand and writes each result, and how
many kernels start with it. Summed over a program that is what its kernels move: a kernel reads what it takes once and writes what
others need once, however many equations it has. The prices of single equations stay a sum over equations this way, so that a
planner can choose layouts by them.

Three kinds of operation. A *stream* computes element by element: pointwise operations, changes of type and order, and reductions
of rows that fit into a multiprocessor (softmax, layer norm). A *sum* reduces anything else: it ends a kernel, whose other
results may go on. Everything else, such as a matrix product, is a kernel of its own, between values in memory. With

    level(e) = max over operands v of level(producer of v), plus 1 if that producer is no stream or e is a kernel of its own

streams and sums of one level that hand values to each other, or read the same value, are one kernel: no way from one of them to
another leads through a different kernel, since that would be on a higher level. A value that only a kernel of a higher
level wants is either written or computed there again from what is in memory, whichever moves less (forward values in backward
passes). A product whose result is only added to something else adds it itself, as BLAS does (accumulated gradients).
What can go wrong: a compiler of less ability; `Device.fuses` says whether this holds for a device at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.avals import bytes_of
from autopar.compat import Literal, Var
from autopar.disjoint_sets import DisjointSets
from autopar.intra_op.choices.tuning import TUNING, Tuning
from autopar.program.loops import LoopEquation
from autopar.program.program import Atom, Equation, Program
from autopar.rules.primitive_rule import Work
from autopar.rules.reductions import reduced_dimensions
from autopar.rules.table import entry_for

_FUSED = frozenset({Work.POINTWISE, Work.FREE, Work.MOVE, Work.REDUCTION, Work.RANDOM})
"""What a compiler puts into one kernel with other work."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """How often an equation reads each operand and writes each result, in parts of their bytes, and kernels that it starts."""

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    kernels: int = 0


def traffic_of(program: Program, tuning: Tuning = TUNING) -> Mapping[Equation, Traffic]:
    """The traffic of every equation, nested ones included."""
    found: dict[Equation, Traffic] = {}
    for scope in _scopes(program):
        found.update(Kernels(scope, tuning=tuning).traffic())
    return found


def _scopes(program: Program) -> Iterator[Program]:
    yield program
    for eqn in program.equations:
        for region in eqn.regions:
            yield from _scopes(region)


class Kernels:
    """The kernels of one program without the nested ones. A value's *root* is the value of which it is another name.

    `phase_of`, where given, says in which part of the program an equation runs: 0, 1, ...; no kernel has equations of two parts.
    `readers`: for each value in memory the equations that read it.
    """

    def __init__(
        self, program: Program, phase_of: Mapping[Equation, int] | None = None, *, tuning: Tuning = TUNING
    ) -> None:
        self.program, self.tuning = program, tuning
        self.phase_of = phase_of or {}
        self._aliases = set(filter(_is_alias, program.equations))
        self._fused = set(filter(_is_fused, program.equations))
        self._streams = {eqn for eqn in self._fused if not _is_long_reduction(eqn, tuning.row_bytes)}
        self.readers: dict[Var, set[Equation]] = defaultdict(set)
        self.roots: dict[Var, Var] = {}
        self.producers: dict[Var, Equation] = {}
        self.levels: dict[Var, int] = {}
        self.source_levels: dict[Var, float] = {}
        self.uses = self._count_uses()
        self.absorbed: dict[Equation, Equation] = {}
        self.order = {eqn: number for number, eqn in enumerate(program.equations)}
        self.written: set[Var] = set()
        self._find_levels()
        self.written = self._find_in_memory()
        self.read_bytes: Counter[tuple[Equation, int]] = Counter()
        self.kernels: Counter[Equation] = Counter()

    # Levels.

    def _count_uses(self) -> Counter[Var]:
        uses: Counter[Var] = Counter()
        for eqn in self.program.equations:
            if eqn in self._aliases:
                self.roots.update((eqn.outvars[0], self.root(v)) for v in _variables(eqn.invars[:1]))
            else:
                uses.update({self.root(v) for v in _variables(eqn.invars)})
        uses.update(self.root(v) for v in _variables(self.program.outvars))
        return uses

    def root(self, var: Var) -> Var:
        """The value of which this is another name."""
        return self.roots.get(var, var)

    def _find_levels(self) -> None:
        for eqn in self.program.equations:
            if eqn in self._aliases:
                continue
            level = max((self._level_after(v, eqn) for v in _variables((*eqn.invars, eqn.after))), default=0)
            level = max(level, self.phase_of.get(eqn, 0) * len(self.program.equations))
            if _keeps_apart(eqn):
                self.levels[eqn.outvars[0]] = level
                continue
            for var in eqn.outvars:
                self.producers[var], self.levels[var] = eqn, level
            self._absorb(eqn)
            self._note_sources(eqn)

    def _level_after(self, var: Var, eqn: Equation) -> int:
        """The level that an equation has at least because it reads a value."""
        producer = self.producers.get(self.root(var))
        if producer is None:
            return self.levels.get(self.root(var), -1) + 1
        return self.levels[self.root(var)] + (0 if self._is_stream(producer) and eqn in self._fused else 1)

    def _is_stream(self, eqn: Equation) -> bool:
        return eqn in self._streams and eqn not in self.absorbed

    def _absorb(self, eqn: Equation) -> None:
        """If an equation adds a product, alone wanted for that, to what was there before: let the product do it."""
        if not entry_for(eqn).adds:
            return
        for place, var in enumerate(eqn.invars):
            chain = self._chain_to_product(var)
            if chain is None:
                continue
            product, other = chain[-1], eqn.invars[1 - place]
            level = self.levels[product.outvars[0]]
            if isinstance(other, Var) and not self._is_there_before(other, level):
                continue
            for one in (eqn, *chain[:-1]):
                self.absorbed[one] = product
                self.levels[one.outvars[0]] = level
            return

    def _chain_to_product(self, var: Atom) -> list[Equation] | None:
        """Equations from a value back to the contraction that makes it, each result used once and of one size; or None."""
        chain: list[Equation] = []
        while isinstance(var, Var):
            root = self.root(var)
            eqn = self.producers.get(root)
            if eqn is None or self.uses[root] != 1 or eqn in self.absorbed:
                return None
            chain.append(eqn)
            if entry_for(eqn).heavy:
                return chain
            if eqn not in self._fused or len(eqn.invars) != 1 or eqn.invars[0].aval.size != root.aval.size:
                return None
            var = eqn.invars[0]
        return None

    def _is_there_before(self, var: Var, level: int) -> bool:
        """Whether a value is, or can be made on the way, of what is in memory before a kernel of that level starts."""
        return self._level_of_sources(self.root(var)) < level

    def _level_of_sources(self, root: Var) -> float:
        """The last level of what is in memory of which a value can be made on the way; infinite of random bits."""
        return self.source_levels.get(root, self.levels.get(root, -1))

    def _note_sources(self, eqn: Equation) -> None:
        """Note that level for what a stream makes: anything else is in memory itself."""
        if not self._is_stream(eqn):
            return
        level = max((self._level_of_sources(self.root(v)) for v in _variables(eqn.invars)), default=-1)
        self.source_levels.update(dict.fromkeys(eqn.outvars, math.inf if entry_for(eqn).random else level))

    def _sources(self, root: Var) -> frozenset[Var] | None:
        """The values in memory of which a streamed value is made; None if it has to be written, as random bits have."""
        found, seen, waiting = set[Var](), {root}, [root]
        while waiting:
            one = waiting.pop()
            producer = self.producers.get(one)
            if producer is None or not self._is_stream(producer) or one in self.written:
                found.add(one)
                continue
            if entry_for(producer).random:
                return None
            operands = {self.root(v) for v in _variables(producer.invars)} - seen
            seen |= operands
            waiting += operands
        return frozenset(found)

    # What is in memory.

    def _find_in_memory(self) -> set[Var]:
        """Values that are read by kernels of their own, or leave the program, or are results of such kernels."""
        found = {self.root(v) for v in _variables((*self.program.invars, *self.program.outvars))}
        for eqn in self.program.equations:
            if eqn in self._aliases or eqn in self.absorbed:
                continue
            if eqn not in self._fused:
                found |= {self.root(v) for v in _variables(eqn.invars)}
            if not self._is_stream(eqn):
                found |= set(eqn.outvars)
        return found | {eqn.outvars[0] for eqn in self.absorbed if entry_for(eqn).adds}

    # Kernels and what they move.

    def traffic(self) -> dict[Equation, Traffic]:
        """See `traffic_of`."""
        kernels = self._fused_kernels()
        for kernel in kernels:
            self._count_reads(kernel)
        for kernel in kernels:
            self._forget_if_nothing_is_written(kernel)
        for eqn in self.program.equations:
            if eqn not in self._fused and eqn not in self._aliases and eqn not in self.absorbed:
                for var in _variables(eqn.invars):
                    self.readers[self.root(var)].add(eqn)
        return {eqn: self._traffic(eqn) for eqn in self.program.equations}

    def _fused_kernels(self) -> list[list[Equation]]:
        """Streams and sums by kernel, kernels by level."""
        fused = [
            e for e in self.program.equations if e in self._fused and e not in self._aliases and e not in self.absorbed
        ]
        joined = DisjointSets(fused)
        readers: dict[tuple[Var, int], Equation] = {}
        for eqn in fused:
            level = self.levels[eqn.outvars[0]]
            for root in {self.root(v) for v in _variables(eqn.invars)}:
                producer = self.producers.get(root)
                if producer is not None and self._is_stream(producer) and self.levels[root] == level:
                    joined.join((producer, eqn))
                elif root in self.written and root.aval.size > 1:
                    joined.join((readers.setdefault((root, level), eqn), eqn))
        return sorted(joined.groups(), key=lambda group: (self.levels[group[0].outvars[0]], self.order[group[0]]))

    def _count_reads(self, kernel: Sequence[Equation]) -> None:
        """Count what a kernel reads, and decide what it computes again: large values first, of which small ones are made."""
        inside, have = set(kernel), set[Var]()
        entering = [
            (eqn, place, self.root(var))
            for eqn in kernel
            for place, var in enumerate(eqn.invars)
            if isinstance(var, Var) and self.producers.get(self.root(var)) not in inside
        ]
        for eqn, place, root in sorted(entering, key=lambda one: (one[2] not in self.written, -bytes_of(one[2]))):
            wanted = self._needed_for(root, have)
            for source in wanted - have:
                self.read_bytes[eqn, place] += bytes_of(source)
                self.readers[source].add(eqn)
            have |= wanted
        if have or any(v in self.written for eqn in kernel for v in eqn.outvars):
            self.kernels[kernel[0]] = 1

    def _forget_if_nothing_is_written(self, kernel: Sequence[Equation]) -> None:
        """There is no kernel of equations that are all computed again in kernels which read them: those count their reads."""
        if any(v in self.written for eqn in kernel for v in eqn.outvars):
            return
        self.kernels[kernel[0]] = 0
        for eqn in kernel:
            for place in range(len(eqn.invars)):
                self.read_bytes[eqn, place] = 0
            for readers in (self.readers[self.root(v)] for v in _variables(eqn.invars)):
                readers.discard(eqn)

    def _needed_for(self, root: Var, have: set[Var]) -> frozenset[Var]:
        """What a kernel reads to have a value: the value itself, then written by its maker, or what it is made of."""
        if root in self.written:
            return frozenset({root})
        sources = self._sources(root)
        if sources is not None and sum(bytes_of(v) for v in sources - have) <= 2 * bytes_of(root):
            return sources
        operands = {self.root(v) for v in _variables(self.producers[root].invars)}
        if operands and not entry_for(self.producers[root]).random and sum(map(bytes_of, operands)) < bytes_of(root):
            return frozenset(v for operand in operands for v in self._needed_for(operand, have))
        self.written.add(root)
        return frozenset({root})

    def _traffic(self, eqn: Equation) -> Traffic:
        none = (0.0,) * len(eqn.outvars)
        if eqn in self._aliases or _keeps_apart(eqn) or eqn in self.absorbed:
            return Traffic((0.0,) * len(eqn.invars), none)
        if eqn in self._fused:
            reads = tuple(
                self.read_bytes[eqn, place] / max(bytes_of(var), 1) if isinstance(var, Var) else 0.0
                for place, var in enumerate(eqn.invars)
            )
            return Traffic(reads, tuple(float(v in self.written) for v in eqn.outvars), self.kernels[eqn])
        writes = (1.0,) * len(eqn.outvars)
        adding = [one for one, product in self.absorbed.items() if product is eqn and entry_for(one).adds]
        if adding:
            moved = sum(bytes_of(v) for v in self._read_to_add(adding[0], eqn)) + bytes_of(adding[0].outvars[0])
            writes = (moved / max(bytes_of(eqn.outvars[0]), 1),)
        return Traffic((1.0,) * len(eqn.invars), writes, 1)

    def _read_to_add(self, adding: Equation, product: Equation) -> frozenset[Var]:
        """What a product reads to add it."""
        own = {one.outvars[0] for one, by in self.absorbed.items() if by is product} | set(product.outvars)
        found: set[Var] = set()
        for var in _variables(adding.invars):
            if self.root(var) not in own:
                found |= self._sources(self.root(var)) or set()
        return frozenset(found)


def _is_alias(eqn: Equation) -> bool:
    """Whether the result is the operand under another name; what waits for something else is not."""
    if not entry_for(eqn).free or len(eqn.invars) != 1 or isinstance(eqn.invars[0], Literal) or _keeps_apart(eqn):
        return False
    given, made = eqn.invars[0].aval, eqn.outvars[0].aval
    return bool(given.size == made.size and given.dtype == made.dtype)


def _keeps_apart(eqn: Equation) -> bool:
    """Whether it gives a value in memory another name that no kernel sees through: recomputation starts from such."""
    return entry_for(eqn).barrier


def _is_fused(eqn: Equation) -> bool:
    """Whether it is a stream or a sum."""
    if _keeps_apart(eqn):
        return False
    if any(not isinstance(v.aval.dtype, np.dtype) for v in (*eqn.invars, *eqn.outvars)):
        return not isinstance(eqn, LoopEquation)  # arithmetic with keys
    return entry_for(eqn).work in _FUSED and not isinstance(eqn, LoopEquation)


def _is_long_reduction(eqn: Equation, row_bytes: int) -> bool:
    """Whether it is a reduction of more than a row of so many bytes."""
    if entry_for(eqn).work is not Work.REDUCTION:
        return False
    shape, axes = eqn.invars[0].aval.shape, reduced_dimensions(eqn)
    real = [d for d, size in enumerate(shape) if size > 1]
    gone = [d for d in real if d in axes]
    trailing = gone == real[len(real) - len(gone) :]
    return not trailing or math.prod(shape[d] for d in gone) * eqn.invars[0].aval.dtype.itemsize > row_bytes


def _variables(atoms: Sequence[Atom | None]) -> list[Var]:
    return [v for v in atoms if isinstance(v, Var)]
