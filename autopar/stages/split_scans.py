"""Divide scans over layers: the same step with each scanned stack in pieces, so that stages can be cut between them.

In: a traced step and, for each of its stacks, the layers at which it is cut. Out: a `SplitStep`, whose program has

    scan over [a_0, a_1); scan over [a_1, a_2); ...     in place of a scan over [0, L)

The pieces hand on what the scan carries, read their part of what it reads layer by layer, and make their part of what it stacks;
a scan that goes backwards runs its pieces from the last to the first. What is stacked stays in pieces through every operation
whose factor rule allows it, exactly as it would be sharded: residuals, gradients, moments, updates. What reduces over the layers
is combined from the pieces by its monoid. Anything else reads the whole stack, joined for it. Leaves of the step that are stacked
become one leaf per piece, and results that are stacked alike, such as returned gradients, one result per piece. A sum that a
backward scan carries along, as of the gradient of a weight that all layers share, is taken in each piece from zero and added up
after it: otherwise every stage would wait for the next one's sum.

What can go wrong: an operation between two layers of a stack; it makes the stack whole where it runs, which is right but slow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
from jax.typing import ArrayLike

from autopar.avals import is_opaque
from autopar.compat import Literal, Var, attributed_to
from autopar.layouts.pieces import Piece
from autopar.program.fingerprint import fingerprint_of
from autopar.program.from_jaxpr import program_of
from autopar.program.loops import LoopEquation
from autopar.program.program import Atom, Equation, Program
from autopar.program.step import Leaf, TracedStep
from autopar.split_array import LeafPieces, cut_array
from autopar.stages.divided_values import Divided, Values, evaluate
from autopar.stages.scan_stacks import ScanCuts, find_stacks


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitStep:
    """See the module's text. `inputs` and `outputs` say for each leaf of `whole` which leaves of `step` hold it.

    `origins`: for operations of `step` the one of `whole` of which they do a part, or all; not of those that only cut and join.
    """

    whole: TracedStep
    step: TracedStep
    cuts: ScanCuts
    inputs: tuple[LeafPieces, ...]
    outputs: tuple[LeafPieces, ...]
    origins: Mapping[Equation, Equation] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def pieces(self) -> frozenset[Equation]:
        """The scans of `step` that are pieces of a longer one; stages that are not cut between them have them in one again."""
        scans = {
            scan for stack, at in zip(find_stacks(self.whole), self.cuts, strict=False) if at for scan in stack.scans
        }
        return frozenset(
            eqn for eqn, origin in self.origins.items() if origin in scans and isinstance(eqn, LoopEquation)
        )


def split_scans(traced: TracedStep, cuts: ScanCuts) -> SplitStep:
    """The step with its stacks (`stacks.find_stacks`) cut at these layers; without any it is the step itself."""
    if not any(cuts):
        inputs = tuple(LeafPieces(i) for i in range(len(traced.inputs) - len(traced.constants)))
        outputs = tuple(LeafPieces(i) for i in range(len(traced.outputs)))
        return SplitStep(whole=traced, step=traced, cuts=(), inputs=inputs, outputs=outputs)
    stacks = find_stacks(traced)
    divided = [Divided(stack, (0, *at, stack.length)) for stack, at in zip(stacks, cuts, strict=True) if at]
    return _Splitter(traced, divided).split(cuts)


class _Splitter:
    """Makes the split step: its leaves, its program, its results."""

    def __init__(self, traced: TracedStep, divided: Sequence[Divided]) -> None:
        self.traced, self.divided = traced, tuple(divided)
        self._given = len(traced.inputs) - len(traced.constants)
        self._leaves = self._pieces_of_leaves()

    def split(self, cuts: ScanCuts) -> SplitStep:
        """The step in pieces."""
        leaves = self._number(self._leaves[: self._given])
        outputs = self._number(self._pieces_of_results())
        closed = jax.make_jaxpr(functools.partial(self._run, outputs))(*self._avals())
        tagged, captured = program_of(closed)
        program, origins = _without_tags(tagged)
        step = dataclasses.replace(
            self.traced,
            program=program,
            constants=(*self._constants(), *captured),
            inputs=self._input_leaves(program),
            outputs=tuple(self._in_pieces(self.traced.outputs, outputs)),
            state_of_output=self._states(leaves, outputs),
        )
        return SplitStep(
            whole=self.traced,
            step=_without_unused_constants(step),
            cuts=cuts,
            inputs=leaves,
            outputs=outputs,
            origins=origins,
        )

    def _pieces_of_leaves(self) -> list[LeafPieces]:
        return [
            self._pieces_of(v) if leaf.role != "batch" and not is_opaque(v.aval) else LeafPieces(0)
            for v, leaf in zip(self.traced.program.invars, self.traced.inputs, strict=True)
        ]

    def _pieces_of_results(self) -> list[LeafPieces]:
        """A result that takes a leaf's place is held as the leaf is; so is a stack of a leaf's shape, as a gradient is."""
        pairs = zip(self.traced.program.outvars, self.traced.state_of_output, strict=True)
        return [self._leaves[source] if source is not None else self._pieces_of_other(v) for v, source in pairs]

    def _pieces_of_other(self, result: Atom) -> LeafPieces:
        """Of a result that is no state; a number per layer, and what has another shape than stacked leaves, is whole."""
        if isinstance(result, Literal) or is_opaque(result.aval) or len(result.aval.shape) < 2:
            return LeafPieces(0)
        pieces = self._pieces_of(result)
        alike = any(
            leaf.shape == result.aval.shape and (held.dim, held.bounds) == (pieces.dim, pieces.bounds)
            for leaf, held in zip(self.traced.inputs, self._leaves, strict=True)
        )
        return pieces if alike else LeafPieces(0)

    def _pieces_of(self, v: Var) -> LeafPieces:
        for divided in self.divided:
            if v in divided.stack.dims:
                dim = divided.stack.dims[v]
                return LeafPieces(0, dim, divided.of_size(v.aval.shape[dim]))
        return LeafPieces(0)

    def _number(self, pieces: Sequence[LeafPieces]) -> tuple[LeafPieces, ...]:
        starts = itertools.accumulate((p.count for p in pieces), initial=0)
        return tuple(dataclasses.replace(p, first=first) for p, first in zip(pieces, starts, strict=False))

    def _avals(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(shape, v.aval.dtype, weak_type=bool(getattr(v.aval, "weak_type", False)))
            for v, pieces in zip(self.traced.program.invars, self._leaves, strict=True)
            for shape in _shapes(v.aval.shape, pieces)
        ]

    def _constants(self) -> list[ArrayLike]:
        return [
            part
            for value, pieces in zip(self.traced.constants, self._leaves[self._given :], strict=True)
            for part in cut_array(value, pieces)
        ]

    def _in_pieces(self, leaves: Sequence[Leaf], pieces: Sequence[LeafPieces]) -> list[Leaf]:
        return [part for leaf, held in zip(leaves, pieces, strict=True) for part in _leaf_pieces(leaf, held)]

    def _input_leaves(self, program: Program) -> tuple[Leaf, ...]:
        held = self._in_pieces(self.traced.inputs, self._leaves)
        added = program.invars[len(held) :]
        names = itertools.count(len(self.traced.constants))
        return (
            *held,
            *(
                Leaf(path=f"constant/{next(names)}", role="const", shape=tuple(v.aval.shape), dtype=v.aval.dtype)
                for v in added
            ),
        )

    def _states(self, leaves: Sequence[LeafPieces], outputs: Sequence[LeafPieces]) -> tuple[int | None, ...]:
        return tuple(
            None if source is None else leaves[source].first + k
            for source, held in zip(self.traced.state_of_output, outputs, strict=True)
            for k in range(held.count)
        )

    def _run(self, outputs: Sequence[LeafPieces], *arrays: jax.Array) -> list[ArrayLike]:
        values = Values(self.traced.program, self.divided)
        given = iter(arrays)
        for v, pieces in zip(self.traced.program.invars, self._leaves, strict=True):
            parts = [next(given) for _ in range(pieces.count)]
            if pieces.bounds:
                values.set_parts(v, pieces.dim, parts)
            else:
                values.set_whole(v, parts[0])
        for eqn in self.traced.program.equations:
            with attributed_to(eqn):
                evaluate(eqn, values)
        results: list[ArrayLike] = []
        for atom, held in zip(self.traced.program.outvars, outputs, strict=True):
            results += values.parts_between(atom, held.dim, held.bounds) if held.bounds else [values.whole(atom)]
        return results


def _without_tags(tagged: Program) -> tuple[Program, dict[Equation, Equation]]:
    """The program without its tags, and what they say: which operation of the whole step each operation does a part of."""
    equations: list[Equation] = []
    origins: dict[Equation, Equation] = {}
    for eqn in tagged.equations:
        origin = eqn.tag
        if isinstance(origin, Equation):
            eqn = dataclasses.replace(eqn, source_info=origin.source_info, tag=None)
            if eqn.primitive is origin.primitive:
                origins[eqn] = origin
        equations.append(eqn)
    return dataclasses.replace(tagged, equations=tuple(equations)), origins


def _shapes(shape: Sequence[int], pieces: LeafPieces) -> list[tuple[int, ...]]:
    if not pieces.bounds:
        return [tuple(shape)]
    dim = pieces.dim
    return [(*shape[:dim], b - a, *shape[dim + 1 :]) for a, b in itertools.pairwise(pieces.bounds)]


def _leaf_pieces(leaf: Leaf, pieces: LeafPieces) -> list[Leaf]:
    """A leaf's pieces, each a leaf with a path of its own."""
    if not pieces.bounds:
        return [leaf]
    parts = zip(itertools.pairwise(pieces.bounds), _shapes(leaf.shape, pieces), strict=True)
    return [
        dataclasses.replace(leaf, path=Piece(leaf.path, pieces.dim, a, b).path, shape=shape) for (a, b), shape in parts
    ]


def _without_unused_constants(step: TracedStep) -> TracedStep:
    """Pieces of constants that no operation reads any more are not kept."""
    used = {v for eqn in step.program.equations for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in step.program.outvars if not isinstance(v, Literal)}
    first = len(step.inputs) - len(step.constants)
    kept = [i for i, v in enumerate(step.program.invars) if i < first or v in used]
    program = dataclasses.replace(step.program, invars=tuple(step.program.invars[i] for i in kept))
    return dataclasses.replace(
        step,
        program=program,
        inputs=tuple(step.inputs[i] for i in kept),
        constants=tuple(step.constants[i - first] for i in kept if i >= first),
        fingerprint=fingerprint_of(program),
    )
