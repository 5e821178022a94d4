"""Rules of a user's own, for primitives that the table does not list.

In: a primitive, and its rule as text or as a function of an equation. Out: a row beside the table, for this process. What can go
wrong: text that means nothing is refused when it is registered; text, or a function's answer, that does not describe an
equation is refused when a step with it is planned; a rule that claims too much is found by random strategies alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax.extend.core import Primitive

from autopar.compat import JaxprEqn
from autopar.errors import ArgumentError, RuleError
from autopar.rules import by_shape, flops, on_shard
from autopar.rules.factor_rule import FactorRule
from autopar.rules.notation import parse, read
from autopar.rules.primitive_rule import PrimitiveRule, Work
from autopar.rules.table import RULES, USER_RULES


@dataclasses.dataclass(frozen=True)
class Notated:
    """A rule that a user wrote down: every equation is described by the same text."""

    notation: str

    def __call__(self, eqn: JaxprEqn) -> FactorRule:
        """The text's rule for an equation's shapes."""
        return _parse_for(eqn, self.notation)


@dataclasses.dataclass(frozen=True)
class Computed:
    """A rule that a user's function makes of an equation, as a `FactorRule` or as text."""

    function: Callable[[JaxprEqn], FactorRule | str]

    def __call__(self, eqn: JaxprEqn) -> FactorRule:
        """The function's rule for an equation. Raises RuleError if it is none."""
        rule = self.function(eqn)
        if isinstance(rule, str):
            return _parse_for(eqn, rule)
        if not isinstance(rule, FactorRule):
            raise RuleError(
                f"the function {self.function!r} gives {rule!r} as its rule: return the rule as text, or a FactorRule"
            )
        return rule


def register_rule(
    primitive: str | Primitive,
    notation: str | Callable[[JaxprEqn], FactorRule | str],
    *,
    local: on_shard.Local = on_shard.unchanged,
    heavy: bool = False,
    replace: bool = False,
) -> None:
    """Teach autopar how a primitive of your own shards, such as a Pallas kernel or a custom call.

    The rule is there for this process. A step with the primitive that was planned before is planned again.

    Args:
        primitive: the primitive, or its name.
        notation: the factor rule as text, such as `"b s c, c e -> b s e | sum: c"`, or a function from the equation to such a
            text, or to a `FactorRule`.
        local: runs the equation on a shard: takes a `LocalCall`, returns a sequence of local results. By default the primitive is
            bound with the same parameters.
        heavy: whether it is to be priced as a contraction, by 2 operations for every combination of its factors. Otherwise it is
            priced by the bytes that it reads and writes and by the start of a kernel; its arithmetic costs nothing.
        replace: whether the rule may take the place of another one that was registered for the primitive.

    Raises:
        ArgumentError: `primitive` is no primitive and no name, `notation` no text and no function, or `local` no function.
        RuleError: the text is not in the notation; autopar has a rule for the primitive already; or another one was registered
            and `replace` is False. A rule that does not describe an equation's shapes is refused when a step with it is planned,
            one whose local results have other shapes than it promises when the step is compiled.
    """
    name = _name_of(primitive)
    if name in RULES:
        raise RuleError(f"primitive {name!r} has a rule in autopar; only new primitives can be registered")
    work, count = (Work.CONTRACTION, flops.of_product) if heavy else (Work.OTHER, flops.of_elements)
    if not callable(local):
        raise ArgumentError(f"primitive {name!r}: local={local!r} is no function from a LocalCall to its results")
    entry = PrimitiveRule(rule=_rule_of(name, notation), work=work, local=local, flops=count)
    known = USER_RULES.get(name)
    if known is not None and known != entry and not replace:
        raise RuleError(
            f"primitive {name!r} has been registered with another rule, {_describe(known)}; pass replace=True to "
            f"register {_describe(entry)} in its place"
        )
    USER_RULES[name] = entry


def _name_of(primitive: object) -> str:
    if isinstance(primitive, Primitive):
        return primitive.name
    if isinstance(primitive, str) and primitive:
        return primitive
    raise ArgumentError(f"register_rule takes a primitive or its name first, not {primitive!r}")


def _rule_of(name: str, notation: object) -> Notated | Computed:
    if isinstance(notation, str):
        try:
            read(notation)
        except RuleError as error:
            raise RuleError(f"primitive {name!r}: {error}") from None
        return Notated(notation)
    if callable(notation):
        return Computed(notation)
    raise ArgumentError(
        f"primitive {name!r}: a rule is text, such as 'b s c, c e -> b s e | sum: c', or a function from an equation to its "
        f"rule, not {notation!r}"
    )


def _parse_for(eqn: JaxprEqn, text: str) -> FactorRule:
    """The rule that a text says of an equation's shapes."""
    return parse(text, *([by_shape.shape_of(v) for v in side] for side in (eqn.invars, eqn.outvars)))


def _describe(entry: PrimitiveRule) -> str:
    """A registered rule as its user wrote it."""
    rule = repr(entry.rule.notation) if isinstance(entry.rule, Notated) else ""
    rule = f"the function {entry.rule.function!r}" if isinstance(entry.rule, Computed) else rule
    local = "" if entry.local is on_shard.unchanged else f" with local={entry.local!r}"
    return f"{rule}{local}{' and heavy=True' if entry.heavy else ''}"
