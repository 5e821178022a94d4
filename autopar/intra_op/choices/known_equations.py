"""What holds of an equation on every mesh: its factor rule, its work, what it reads and writes as a part of its kernel.

In: equations and programs, one at a time. Out: what is known of them, found once for all equations that are alike: the same
primitive on the same shapes with the same parameters and literals, as in the layers of a deep model. Kept with the book. What
can go wrong: a registered rule that looks at more of an equation than that, such as the line that it comes from.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autopar.intra_op.choices.kernels import Traffic, traffic_of
from autopar.intra_op.choices.tuning import TUNING, Tuning
from autopar.intra_op.xla_cpu.table import orders_of
from autopar.program.fingerprint import operand_key, operation_key
from autopar.program.program import Equation, Program
from autopar.rules.factor_rule import FactorRule
from autopar.rules.flops import number_format
from autopar.rules.table import entry_for, flops_of, rule_for


class RuleBook:
    """Rules, work and traffic of equations. `finite`: rules of products are those of finite numbers."""

    def __init__(self, tuning: Tuning = TUNING, *, finite: bool = False) -> None:
        self.tuning, self.finite = tuning, finite
        self._first: dict[Equation, Equation] = {}
        self._alike: dict[Hashable, Equation] = {}
        self._rules: dict[Equation, FactorRule] = {}
        self._flops: dict[Equation, float] = {}
        self._own: dict[Equation, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._traffic: dict[Program, Mapping[Equation, Traffic]] = {}

    def rule(self, eqn: Equation) -> FactorRule:
        """`rule_for` of an equation."""
        found = self._rules.get(eqn)  # every pass asks for it
        if found is None:
            first = self._first_alike(eqn)
            found = self._rules[eqn] = rule_for(eqn, finite=self.finite) if first is eqn else self.rule(first)
        return found

    def flops(self, eqn: Equation) -> float:
        """`flops_of` of an equation under its own rule."""
        first = self._first_alike(eqn)
        if first not in self._flops:
            self._flops[first] = flops_of(first, self.rule(first))
        return self._flops[first]

    def likeness(self, eqn: Equation, rule: FactorRule) -> int:
        """A number that equations have in common if under this rule they have the same strategies at the same prices."""
        first = self._first_alike(eqn)
        if rule is not self.rule(first):
            return self._number(first, rule)
        if first not in self._own:
            self._own[first] = self._number(first, rule)
        return self._own[first]

    def traffic(self, program: Program) -> Mapping[Equation, Traffic]:
        """`traffic_of` a program."""
        if program not in self._traffic:
            self._traffic[program] = traffic_of(program, self.tuning)
        return self._traffic[program]

    def _number(self, eqn: Equation, rule: FactorRule) -> int:
        entry = entry_for(eqn)
        dtypes = tuple(v.aval.dtype for v in (*eqn.invars, *eqn.outvars))
        within = None if entry.divided is None else operation_key(eqn)
        multiplied = number_format(eqn) if entry.heavy else ""
        kind = (rule, entry.work, entry.picks, orders_of(eqn), self.flops(eqn), dtypes, multiplied, within)
        return self._numbers.setdefault(kind, len(self._numbers))

    def _first_alike(self, eqn: Equation) -> Equation:
        """The first equation that is like this one."""
        if eqn not in self._first:
            operands = tuple([operand_key(v) for v in eqn.invars])
            results = tuple([v.aval for v in eqn.outvars])
            self._first[eqn] = self._alike.setdefault((operation_key(eqn), operands, results), eqn)
        return self._first[eqn]
