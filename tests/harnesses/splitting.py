"""Whether anything in JAX's harnesses of a group can be split: what docs/coverage.md shows of each group."""

from autopar.program.from_jaxpr import program_of
from autopar.program.loops import LoopEquation
from autopar.rules.table import rule_for
from tests.harnesses.cases import Case

PER_GROUP = 6
"""Harnesses of a group that are looked at, spread over the group."""
MESH_SIZES = (2, 3)


def any_splits(harnesses):
    """Whether any operation of some of the harnesses can be split."""
    return any(map(splits, harnesses[:: -(-len(harnesses) // PER_GROUP)]))


def splits(harness):
    """Whether any operation of a harness can be split."""
    case = Case.of(harness, gradient=False)
    if case is None:
        return False
    program, _ = program_of(case.jaxpr)
    equations = [eqn for eqn in program.walk() if not isinstance(eqn, LoopEquation) and eqn.primitive.name != "fan_out"]
    return any(
        size > 1 and any(size % ways == 0 for ways in MESH_SIZES)
        for eqn in equations
        for rule in [rule_for(eqn)]
        for size in map(rule.size_of, rule.shardable())
    )
