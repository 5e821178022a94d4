"""Where the examples of a batch are: the factors of each operation that count them.

In: a traced step and the rules of its operations. Out: for every equation the factors that the leading dimension of the batch
became, followed through the rules and into nested programs.

    strictly     a factor counts examples as long as each index is an example of its own: through elementwise operations,
                 products, transpositions, reshapes that keep it major
    loosely      also what is made of rearranged examples: a slice, a flip or a shuffle of them, two views one after the other,
                 examples that are the minor part of a dimension, and a scan that goes through them one by one, whose
                 operations have the factor `ONE_BY_ONE`

Heavy work on examples belongs to one microbatch (`phases.py`): strictly without exception, loosely as a whole, since a few of the
examples may well be looked at after the loop. What can go wrong: a rule that gives a dimension a new factor though it
still counts examples; strictly they are lost there.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.compat import Var
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, Program
from autopar.program.step import TracedStep
from autopar.rules.factor_rule import FactorRule
from autopar.rules.table import entry_for

ONE_BY_ONE = "one by one"
"""In place of a factor: the operation is repeated for each example, or for each of several groups of them."""

_EACH = -1
"""In place of a dimension: the value is of one example at a time."""

Dims = frozenset[int]


def example_factors(traced: TracedStep, rules: RuleBook, *, loosely: bool = False) -> dict[Equation, frozenset[str]]:
    """For each equation the factors that count examples; see the module's text. A scan over examples is found itself, too."""
    marks = _Marks(rules, loosely=loosely)
    for leaf, var in zip(traced.inputs, traced.program.invars, strict=True):
        if leaf.role == "batch" and leaf.shape:
            marks.dims[var] = frozenset({0})
    marks.follow(traced.program)
    return marks.found


class _Marks:
    def __init__(self, rules: RuleBook, *, loosely: bool) -> None:
        self.rules, self.loosely = rules, loosely
        self.found: dict[Equation, frozenset[str]] = {}
        self.dims: dict[Var, Dims] = {}

    def of(self, atom: object) -> Dims:
        return self.dims.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()

    def follow(self, program: Program) -> None:
        for eqn in program.equations:
            if not isinstance(eqn, LoopEquation):
                self._operation(eqn)
            else:
                self._loop(eqn)

    def _operation(self, eqn: Equation) -> None:
        rule = self.rules.rule(eqn)
        each = any(_EACH in self.of(atom) for atom in eqn.invars)
        marked = {
            f
            for atom, operand in zip(eqn.invars, rule.inputs, strict=True)
            for d in self.of(atom)
            if d != _EACH
            for f in operand[d][:1]
        }
        if self.loosely:
            marked |= self._rearranged(eqn, rule, marked)
        self.found[eqn] = frozenset(marked | {ONE_BY_ONE} if each else marked)
        for var, operand in zip(eqn.outvars, rule.outputs, strict=True):
            dims = frozenset(
                d for d, factors in enumerate(operand) if set(factors if self.loosely else factors[:1]) & marked
            )
            self.dims[var] = dims | {_EACH} if each else dims

    def _rearranged(self, eqn: Equation, rule: FactorRule, marked: set[str]) -> set[str]:
        """Factors of results that take the place of a marked one which no result has: examples in another order or number."""
        given = {f for operand in rule.inputs for dim in operand for f in dim}
        made = {f for operand in rule.outputs for dim in operand for f in dim}
        found: set[str] = set()
        for atom, operand in zip(eqn.invars, rule.inputs, strict=True):
            own = {f for dim in operand for f in dim}
            for d in self.of(atom) - {_EACH}:
                lost = set(operand[d][:1]) - made
                if lost & rule.whole:
                    found |= {f for out in rule.outputs for f in _in_place(out, d) if f not in given}
                elif lost and entry_for(eqn).picks:
                    found |= (given - own) & made
        return found

    def _loop(self, eqn: LoopEquation) -> None:
        """Through a nested program; carries are followed until they change no more."""
        loop = eqn.loop
        region = eqn.regions[-1]
        given = eqn.invars[1:] if loop.kind == "cond" else eqn.invars[loop.condition_consts :]
        regions = eqn.regions if loop.kind == "cond" else (region,)
        stack_start = loop.consts + loop.carries
        for body in regions:
            for place, (atom, var) in enumerate(zip(given, body.invars, strict=True)):
                stacked = loop.kind == "scan" and place >= stack_start
                self.dims[var] = self._unstacked(self.of(atom)) if stacked else self.of(atom)
                if stacked and self.loosely and 0 in self.of(atom):
                    self.found[eqn] = frozenset({ONE_BY_ONE})
            for _ in range(len(body.invars) + 1 if loop.carries else 1):
                self.follow(body)
                carried = body.invars[loop.consts : stack_start] if loop.kind != "cond" else ()
                before = [self.of(var) for var in carried]
                for var, atom in zip(carried, body.outvars, strict=False):
                    self.dims[var] = self.of(var) | self.of(atom)
                if before == [self.of(var) for var in carried]:
                    break
        self._results(eqn, regions)

    def _unstacked(self, dims: Dims) -> Dims:
        inside = frozenset(d - 1 for d in dims if d > 0) | (dims & {_EACH})
        return inside | {_EACH} if self.loosely and 0 in dims else inside

    def _results(self, eqn: LoopEquation, regions: Sequence[Program]) -> None:
        loop = eqn.loop
        one_by_one = eqn in self.found
        for place, var in enumerate(eqn.outvars):
            merged = frozenset[int]().union(*(self.of(body.outvars[place]) for body in regions))
            if loop.kind != "scan":
                self.dims[var] = merged
            elif place < loop.carries:
                self.dims[var] = merged - {_EACH} if one_by_one else merged
            else:
                self.dims[var] = _stacked(merged, one_by_one=one_by_one)


def _stacked(dims: Dims, *, one_by_one: bool) -> Dims:
    """Of a stack of such values; what each example gave is there again side by side."""
    outside = frozenset(d + 1 for d in dims if d != _EACH)
    if _EACH not in dims:
        return outside
    return outside | {0} if one_by_one else outside | {_EACH}


def _in_place(operand: Sequence[Sequence[str]], d: int) -> Sequence[str]:
    return operand[d][:1] if d < len(operand) else ()
