"""Equations that are alike share what is known of them; those that differ in what a rule may look at do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import PRESETS
from autopar.intra_op.choices.graph import build_graph
from autopar.intra_op.choices.known_equations import RuleBook
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of
from autopar.program.loops import LoopEquation
from autopar.rules.table import flops_of, rule_for

SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
FLAT = jax.ShapeDtypeStruct((4, 6), jnp.float32)


def equations(fun, *shapes):
    program, _ = program_of(jax.make_jaxpr(fun)(*shapes))
    return [eqn for eqn in program.walk() if not isinstance(eqn, LoopEquation) and eqn.primitive.name != "fan_out"]


@pytest.mark.parametrize(
    ("fun", "shapes", "kinds"),
    [
        (lambda x: jnp.sin(jnp.sin(x)), [SQUARE], 1),
        (lambda x, y: (jnp.sin(x), jnp.sin(y)), [SQUARE, FLAT], 2),
        (lambda x: (jnp.sin(x), jnp.cos(x)), [SQUARE], 2),
        (lambda x: (x.sum(0), x.sum(1)), [SQUARE], 2),
        (lambda x: (jax.lax.pad(x, 0.0, [(1, 1, 0)] * 2), jax.lax.pad(x, 1.0, [(1, 1, 0)] * 2)), [SQUARE], 2),
        (lambda x, y: (x @ y, x @ (y + y)), [SQUARE, FLAT], 2),
    ],
)
def test_equations_that_are_alike_share_a_rule(fun, shapes, kinds):
    book, found = RuleBook(), equations(fun, *shapes)
    rules = {id(book.rule(eqn)) for eqn in found}
    assert len(rules) == kinds
    for eqn in found:
        assert book.rule(eqn) == rule_for(eqn)
        assert book.flops(eqn) == flops_of(eqn, rule_for(eqn))
    numbers = {book.likeness(eqn, book.rule(eqn)) for eqn in found}
    assert len(numbers) <= kinds


def test_the_same_rule_at_another_price_is_not_alike():
    book = RuleBook()
    single, half = equations(lambda x, y: (jnp.sin(x), jnp.sin(y)), SQUARE, jax.ShapeDtypeStruct((4, 4), jnp.float16))
    assert book.rule(single) == book.rule(half)
    assert book.likeness(single, book.rule(single)) != book.likeness(half, book.rule(half))


def test_parameters_that_cannot_be_compared_are_no_obstacle():
    book = RuleBook()
    (eqn,) = equations(jnp.sin, SQUARE)
    eqn.params["unhashable"] = [1]
    assert book.rule(eqn) == rule_for(eqn)


def test_of_a_program_the_traffic_is_found_once():
    book = RuleBook()
    program, _ = program_of(jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(SQUARE))
    assert book.traffic(program) is book.traffic(program)
    assert set(book.traffic(program)) == set(program.equations)


def test_alike_operations_of_a_graph_share_their_costs():
    """Later passes price what is shared once. What a loop repeats costs as often."""

    def step(x):
        looped, _ = jax.lax.scan(lambda carried, _: (jnp.sin(carried), None), jnp.sin(jnp.sin(x)), length=3)
        return looped.sum()

    program, _ = program_of(jax.make_jaxpr(step)(SQUARE))
    graph = build_graph(
        program,
        LogicalMesh.of((2,)),
        PRESETS["cpu"],
        PlannerOptions(),
        input_layouts=[None],
        output_layouts=[None],
    )
    found: dict[str, list[int]] = {}
    for node, costs in zip(graph.nodes, graph.costs, strict=True):
        found.setdefault(node.label, []).append(id(costs))
        assert (costs == node.choices.seconds * node.trips).all()
    assert sorted(map(found["sin"].count, found["sin"])) == [1, 2, 2]
    assert len({number for numbers in found.values() for number in numbers}) > 1
