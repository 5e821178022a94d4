"""The notation of factor rules, read.

In: a rule as text, such as `b s c, c e -> b s e | sum: c | linear: 0; 1`, and the shapes that it is to describe. Out: the
`FactorRule`, which prints as text with the same meaning. `factor_rule.py` explains the notation. What can go wrong: text that
means nothing, or not these shapes; every such text is a `RuleError` that quotes it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from autopar.errors import RuleError
from autopar.layouts.monoids import MONOIDS
from autopar.rules.factor_rule import Dim, FactorRule, Operand, show_operands

CLAUSES = (*MONOIDS, "whole", "together", "seed", "linear", "any")


@dataclasses.dataclass(frozen=True)
class Notation:
    """A rule's words: factors of the dimensions of inputs and outputs, and what stands in its clauses."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    fields: Mapping[str, str]


def read(text: str) -> Notation:
    """Read the notation, whatever the shapes; RuleError says what means nothing."""
    head, *clauses = text.split("|")
    if head.count("->") != 1:
        raise RuleError(f"rule '{text}' needs exactly one '->' between its inputs and its outputs")
    inputs, outputs = (_parse_operands(text, side) for side in head.split("->"))
    return Notation(inputs, outputs, _parse_clauses(text, clauses))


def parse(text: str, in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]) -> FactorRule:
    """Read the notation for an operation of these shapes; RuleError says what is wrong and where."""
    notation = read(text)
    fields, sides = notation.fields, ((notation.inputs, in_shapes), (notation.outputs, out_shapes))
    rule = FactorRule(
        inputs=notation.inputs,
        outputs=notation.outputs,
        sizes=tuple(_solve_sizes(text, _pair(text, sides)).items()),
        reduced=tuple((factor, monoid) for monoid in MONOIDS for factor in fields.get(monoid, "").split()),
        whole=frozenset(fields.get("whole", "").split()),
        seeds=_parse_inputs(text, "seed", fields.get("seed", "")),
        linear=tuple(_parse_inputs(text, "linear", group) for group in _groups(fields, "linear")),
        any_monoid="any" in fields,
        together=tuple(tuple(group.split()) for group in _groups(fields, "together")),
    )
    _check_factors(text, rule, fields)
    _check_inputs(text, rule)
    return rule.check(in_shapes, out_shapes)


def _parse_operands(text: str, side: str) -> tuple[Operand, ...]:
    return tuple(_parse_operand(text, part) for part in side.split(",")) if side.strip() else ()


def _parse_operand(text: str, part: str) -> Operand:
    """The dimensions of one operand, such as `b (h d) 1`, or `.` for none."""
    if part.strip() == ".":
        return ()
    words = re.findall(r"\([^()]*\)|[^\s()]+|[()]", part)
    if not words:
        raise RuleError(f"rule '{text}' has an operand without a word; a scalar is written '.'")
    return tuple(_parse_dimension(text, word) for word in words)


def _parse_dimension(text: str, word: str) -> Dim:
    names = tuple(word[1:-1].split()) if len(word) > 1 and word.startswith("(") else (word,)
    if names == ("1",):
        return ()
    for name in names:
        if not name.isidentifier():
            raise RuleError(
                f"rule '{text}': {name!r} names no factor; a dimension is a name, 1, or names in parentheses, such as (h d)"
            )
    if not names:
        raise RuleError(f"rule '{text}': '()' names no factor; a dimension of size one is written 1")
    return names


def _parse_clauses(text: str, clauses: Iterable[str]) -> dict[str, str]:
    """What stands behind the colon of each clause."""
    fields: dict[str, str] = {}
    for clause in clauses:
        key, _, value = (part.strip() for part in clause.partition(":"))
        if key not in CLAUSES:
            raise RuleError(f"rule '{text}': no clause {key!r}; there are {', '.join(CLAUSES)}")
        if key in fields:
            raise RuleError(f"rule '{text}': two clauses {key!r}; write one that lists everything")
        if bool(value) == (key == "any"):
            raise RuleError(f"rule '{text}': clause {key!r} {'takes no value' if value else 'needs a value'}")
        fields[key] = value
    return fields


def _groups(fields: Mapping[str, str], key: str) -> list[str]:
    return fields[key].split(";") if key in fields else []


def _parse_inputs(text: str, key: str, words: str) -> tuple[int, ...]:
    """Numbers of inputs."""
    for word in words.split():
        if not re.fullmatch("[0-9]{1,4}", word):
            raise RuleError(f"rule '{text}': clause {key!r} lists numbers of inputs, {word!r} is none")
    return tuple(int(word) for word in words.split())


def _pair(text: str, sides: Iterable[tuple[Sequence[Operand], Sequence[Sequence[int]]]]) -> list[tuple[Dim, int]]:
    """The dimensions of inputs and of outputs, each with its size. Raises RuleError unless they are as many."""
    pairs: list[tuple[Dim, int]] = []
    for side, (operands, shapes) in zip(("input", "output"), sides, strict=True):
        if len(operands) != len(shapes):
            raise RuleError(
                f"rule '{text}' names {len(operands)} {side}s, the operation has {len(shapes)}{_guess(operands, shapes)}"
            )
        for number, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
            if len(operand) != len(shape):
                raise RuleError(
                    f"rule '{text}': {side} {number} has {len(operand)} dimensions, its shape is {tuple(shape)}"
                )
            pairs += zip(operand, shape, strict=True)
    return pairs


def _guess(operands: Sequence[Operand], shapes: Sequence[Sequence[int]]) -> str:
    """What is meant by commas between the dimensions of one operand."""
    if len(shapes) != 1 or len(operands) != len(shapes[0]) or any(len(operand) != 1 for operand in operands):
        return ""
    meant = show_operands([tuple(dim for operand in operands for dim in operand)])
    return f": commas separate operands, spaces the dimensions of one; is '{meant}' meant?"


def _solve_sizes(text: str, pairs: Sequence[tuple[Dim, int]]) -> dict[str, int]:
    """The size of each factor, from dimensions in which all other factors are known."""
    sizes: dict[str, int] = {}
    for _ in range(len(pairs) + 1):
        for dim, size in pairs:
            unknown = [f for f in dim if f not in sizes]
            known = math.prod(sizes[f] for f in dim if f in sizes)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known
    missing = sorted({f for dim, _ in pairs for f in dim if f not in sizes})
    if missing:
        raise RuleError(f"rule '{text}': the sizes of {', '.join(missing)} do not follow from the shapes")
    return sizes


def _check_factors(text: str, rule: FactorRule, fields: Mapping[str, str]) -> None:
    """Raise RuleError unless clauses name factors that there are, once each, and only factors that can be reduced are."""
    for key in (*MONOIDS, "whole", "together"):
        words = fields.get(key, "").replace(";", " ").split()
        for factor in words:
            if factor not in dict(rule.sizes):
                raise RuleError(f"rule '{text}': factor {factor!r} indexes no dimension")
            if words.count(factor) > 1:
                raise RuleError(f"rule '{text}': clause {key!r} lists factor {factor!r} twice")
    if any(len(group) < 2 for group in rule.together):
        raise RuleError(f"rule '{text}': clause 'together' has a group of fewer than two factors")
    for factor, monoid in rule.reduced:
        others = [m for f, m in rule.reduced if f == factor and m != monoid]
        if others:
            raise RuleError(f"rule '{text}': factor {factor!r} is reduced by {monoid} and by {others[0]}")
        if rule.outputs and all(_has(operand, factor) for operand in rule.outputs):
            raise RuleError(f"rule '{text}': factor {factor!r} is not reduced by {monoid}, for every output has it")
    for operand in (*rule.inputs, *rule.outputs):
        named = [f for dim in operand for f in dim]
        for factor in named:
            if named.count(factor) > 1 and factor not in rule.whole:
                raise RuleError(
                    f"rule '{text}': factor {factor!r} indexes one operand twice, where no shard is a block; add whole: {factor}"
                )


def _check_inputs(text: str, rule: FactorRule) -> None:
    """Raise RuleError unless `seed` and every group of `linear` name inputs that there are, once each."""
    for key, group in (("seed", rule.seeds), *(("linear", group) for group in rule.linear)):
        if len(set(group)) < len(group):
            raise RuleError(f"rule '{text}': clause {key!r} lists an input twice")
        if key == "linear" and not group:
            raise RuleError(f"rule '{text}': clause 'linear' has a group without inputs")
        for number in group:
            if number >= len(rule.inputs):
                raise RuleError(
                    f"rule '{text}': clause {key!r} names input {number}, the inputs are numbered 0 to {len(rule.inputs) - 1}"
                )


def _has(operand: Operand, factor: str) -> bool:
    return any(factor in dim for dim in operand)
