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

from collections.abc import Hashable, Mapping, Sequence, Set

from autopar.compat import Literal
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.program.loops import Entry, Exit, Filled, Goes, LoopEquation, Nested
from autopar.program.program import Equation
from autopar.program.step import TracedStep
from autopar.program.walk import Scope, StaticDomain
from autopar.rules.factor_rule import FactorRule, Operand
from autopar.rules.table import entry_for

ONE_BY_ONE = "one by one"
"""In place of a factor: the operation is repeated for each example, or for each of several groups of them."""

_EACH = -1
"""In place of a dimension: the value is of one example at a time."""

Dims = frozenset[int]


def find_example_factors(
    traced: TracedStep, rules: RuleBook, *, loosely: bool = False
) -> dict[Equation, frozenset[str]]:
    """For each equation the factors that count examples; see the module's text. A scan over examples is found itself, too."""
    marks, nowhere = _Marks(rules, loosely=loosely), Dims()
    leaves = zip(traced.program.invars, traced.inputs, strict=True)
    scope = Scope(marks, {v: Dims({0}) if leaf.role == "batch" and leaf.shape else nowhere for v, leaf in leaves})
    scope.run(traced.program.equations)
    return marks.found


class _Marks(StaticDomain[Dims]):
    """A value is the dimensions of which each index is an example."""

    def __init__(self, rules: RuleBook, *, loosely: bool) -> None:
        self.rules, self.loosely = rules, loosely
        self.found: dict[Equation, frozenset[str]] = {}
        self._known: dict[Hashable, tuple[frozenset[str], Sequence[Dims]]] = {}

    def literal(self, atom: Literal, scope: Scope[Dims]) -> Dims:
        return Dims()

    def operation(self, eqn: Equation, scope: Scope[Dims]) -> Sequence[Dims]:
        rule, given = self.rules.rule(eqn), tuple(scope.value(atom) for atom in eqn.invars)
        key = id(rule), id(entry_for(eqn)), given
        if key not in self._known:
            self._known[key] = self._find(eqn, rule, given)
        self.found[eqn], results = self._known[key]
        return results

    def _find(self, eqn: Equation, rule: FactorRule, given: Sequence[Dims]) -> tuple[frozenset[str], Sequence[Dims]]:
        """The factors of an equation that count examples, and the dimensions of its results that do."""
        each = any(_EACH in dims for dims in given)
        marked = {
            f
            for dims, operand in zip(given, rule.inputs, strict=True)
            for d in dims
            if d != _EACH
            for f in operand[d][:1]
        }
        if self.loosely:
            marked |= _rearranged(eqn, rule, given)
        results = [self._marked(operand, marked) | (Dims({_EACH}) if each else Dims()) for operand in rule.outputs]
        return frozenset(marked | {ONE_BY_ONE} if each else marked), results

    def _marked(self, operand: Operand, marked: Set[str]) -> Dims:
        """The dimensions of a result that have a marked factor: as their major one, or loosely anywhere."""
        return Dims(d for d, factors in enumerate(operand) if set(factors if self.loosely else factors[:1]) & marked)

    def enter(self, entry: Entry, scope: Scope[Dims], inner: Scope[Dims]) -> Dims:
        dims = scope.value(entry.atom)
        if entry.filled is not Filled.ROW:
            return dims
        inside = Dims(d - 1 for d in dims if d > 0) | (dims & {_EACH})
        if not self.loosely or 0 not in dims:
            return inside
        self.found[entry.loop] = frozenset({ONE_BY_ONE})
        return inside | {_EACH}

    def carries_change(self, nested: Nested, inner: Scope[Dims]) -> bool:
        found = {e.carry.var: inner.value(e.atom) for e in nested.exits if e.carry is not None}
        grown = {var: inner.values[var] | dims for var, dims in found.items() if not dims <= inner.values[var]}
        inner.values.update(grown)
        return bool(grown)

    def leave(self, exit_: Exit, inner: Scope[Dims]) -> Dims:
        return inner.value(exit_.atom)

    def finish(self, eqn: LoopEquation, ends: Mapping[Exit, Dims], scope: Scope[Dims]) -> Sequence[Dims]:
        one_by_one = eqn in self.found
        return [
            _after_loop(exits[0], Dims().union(*(ends[exit_] for exit_ in exits)), one_by_one=one_by_one)
            for exits in eqn.results
        ]


def _rearranged(eqn: Equation, rule: FactorRule, dims: Sequence[Dims]) -> set[str]:
    """Factors of results that take the place of a marked one which no result has: examples in another order or number."""
    given = {f for operand in rule.inputs for dim in operand for f in dim}
    made = {f for operand in rule.outputs for dim in operand for f in dim}
    found: set[str] = set()
    for marked, operand in zip(dims, rule.inputs, strict=True):
        own = {f for dim in operand for f in dim}
        for d in marked - {_EACH}:
            lost = set(operand[d][:1]) - made
            if lost & rule.whole:
                found |= {f for out in rule.outputs for f in _in_place(out, d) if f not in given}
            elif lost and entry_for(eqn).picks:
                found |= (given - own) & made
    return found


def _after_loop(exit_: Exit, dims: Dims, *, one_by_one: bool) -> Dims:
    """Of a result of a loop, which may go through the examples one by one: what each of them gave is there side by side."""
    if exit_.goes is Goes.BRANCH:
        return dims
    if exit_.goes is Goes.CARRY:
        return dims - {_EACH} if one_by_one else dims
    outside = Dims(d + 1 for d in dims if d != _EACH)
    if _EACH not in dims:
        return outside
    return outside | ({0} if one_by_one else {_EACH})


def _in_place(operand: Operand, d: int) -> Sequence[str]:
    return operand[d][:1] if d < len(operand) else ()
