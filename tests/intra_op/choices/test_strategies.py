"""Strategies follow from a rule and a mesh: every legal one, once, and no other."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.intra_op.choices.strategies import most_divided, strategies_key, strategies_of
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.rules.factor_rule import make_rule
from autopar.rules.notation import parse
from autopar.rules.table import rule_for
from tests.rules.examples import EXAMPLES

DENSE = parse("b c, c e -> b e | sum: c | linear: 0; 1", [(8, 4), (4, 12)], [(8, 12)])


def shown(rule, mesh_shape, **options):
    mesh = LogicalMesh.of(mesh_shape)
    return [strategy.show(mesh) for strategy in strategies_of(rule, mesh, **options)]


def test_a_matrix_product_on_one_axis_has_one_strategy_per_factor_and_linear_operand():
    assert shown(DENSE, (4,)) == [
        "[-, -], [-, -] -> [-, -]",
        "[x, -], [-, -] -> [x, -]",
        "[-, x], [x, -] -> [-, -] partial(x: sum)",
        "[-, -], [-, x] -> [-, x]",
        "[-, -] partial(x: sum), [-, -] -> [-, -] partial(x: sum)",
        "[-, -], [-, -] partial(x: sum) -> [-, -] partial(x: sum)",
    ]


def test_two_axes_on_one_factor_come_in_both_orders():
    assert {"[xy, -], [-, -] -> [xy, -]", "[yx, -], [-, -] -> [yx, -]"} <= set(shown(DENSE, (2, 2)))


def test_a_factor_that_the_axis_does_not_divide_is_not_split():
    assert all("[x, -], " not in text for text in shown(DENSE, (3,)))
    assert "[-, -], [-, x] -> [-, x]" in shown(DENSE, (3,))


def test_a_minor_factor_is_split_only_below_a_major_one_that_is_cut_to_single_elements():
    rule = parse("(h d) -> h d", [(8,)], [(2, 4)])
    texts = shown(rule, (2, 2))
    assert "[xy] -> [x, y]" in texts
    assert "[y] -> [-, y]" not in texts
    assert all("[-, x]" not in text for text in shown(rule, (2,)))


def test_a_seed_is_partial_while_a_reduced_factor_is_split():
    rule = parse("v d, b 1, b d -> v d | sum: b | seed: 0", [(8, 4), (4, 1), (4, 4)], [(8, 4)])
    assert "[-, -] partial(x: sum), [x, -], [x, -] -> [-, -] partial(x: sum)" in shown(rule, (4,))


def test_an_operation_that_only_moves_data_carries_the_monoids_it_is_given():
    rule = parse("a -> a | linear: 0 | any", [(5,)], [(5,)])
    assert shown(rule, (2,), monoids=("max", "sum"))[1:] == [
        "[-] partial(x: max) -> [-] partial(x: max)",
        "[-] partial(x: sum) -> [-] partial(x: sum)",
    ]
    assert shown(rule, (2,), monoids=()) == ["[-] -> [-]"]


def test_operands_of_one_linear_group_are_partial_together():
    rule = parse("a, a -> a | linear: 0 1", [(3,), (3,)], [(3,)])
    assert shown(rule, (2,)) == ["[-], [-] -> [-]", "[-] partial(x: sum), [-] partial(x: sum) -> [-] partial(x: sum)"]


def test_undivided_strategies_are_dropped_where_some_divide_the_work():
    mesh = LogicalMesh.of((2, 2))
    kept = most_divided(strategies_of(DENSE, mesh))
    assert {strategy.ways for strategy in kept} == {4}


def expected_layouts(rule, jobs, order):
    """(inputs, outputs) straight from the definition, for jobs that name a factor or nothing, axes taken in `order`."""
    reduced = dict(rule.reduced)

    def layout(operand, *, gets_partial):
        dims = [[] for _ in operand]
        partial = []
        for axis in order:
            factor = jobs[axis]
            places = [d for d, dim in enumerate(operand) if factor in dim]
            for d in places:
                dims[d].append(axis)
            if factor in reduced and not places and gets_partial:
                partial.append((axis, reduced[factor]))
        return tuple(map(tuple, dims)), tuple(sorted(partial))

    ins = tuple(layout(operand, gets_partial=i in rule.seeds) for i, operand in enumerate(rule.inputs))
    return ins, tuple(layout(operand, gets_partial=True) for operand in rule.outputs)


CASES = [(name, number) for name in EXAMPLES for number in range(len(EXAMPLES[name]))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 4), (3,)])
def test_strategies_of_every_rule_are_legal_distinct_and_begin_with_the_replicated_one(mesh_shape):
    mesh = LogicalMesh.of(mesh_shape)
    for name, number in CASES:
        eqn = EXAMPLES[name][number].equation(name)
        rule = rule_for(eqn)
        strategies = strategies_of(rule, mesh)
        assert len(set(strategies)) == len(strategies)
        first = strategies[0]
        assert first.ways == 1
        assert all(layout == Layout.replicated(len(layout.dims)) for layout in (*first.inputs, *first.outputs))
        for strategy in strategies:
            for var, layout in zip((*eqn.invars, *eqn.outvars), (*strategy.inputs, *strategy.outputs), strict=True):
                assert layout.fits(var.aval.shape, mesh), (name, strategy.show(mesh))
                assert not {*layout.sharded_axes} & {*layout.partial_axes}
            axes = Counter(axis for _, members in strategy.factor_axes for axis in members)
            for axis in axes:
                parts = tuple(factor for factor, members in strategy.factor_axes if axis in members)
                assert len(parts) == 1 or parts in rule.together, (name, strategy.show(mesh))
            assert strategy.ways == math.prod(mesh.shape[axis] for axis in axes)


@pytest.mark.parametrize("mesh_shape", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("name", ["dot_general", "gather", "reshape", "scatter-add"])
def test_axes_in_the_order_of_the_mesh_alone_give_the_same_strategies_in_that_order(name, mesh_shape):
    mesh = LogicalMesh.of(mesh_shape)
    for example in EXAMPLES[name]:
        rule = rule_for(example.equation(name))
        every, few = strategies_of(rule, mesh), strategies_of(rule, mesh, every_order=False)
        is_ascending = [all(la.is_ascending for la in (*s.inputs, *s.outputs)) for s in every]
        assert {s for s, keep in zip(every, is_ascending, strict=True) if keep} <= set(few) <= set(every)
        assert max(s.ways for s in few) == max(s.ways for s in every)


@given(st.sampled_from([case for case in CASES if case[0] in ("dot_general", "gather", "reduce_sum", "scatter-add")]))
def test_layouts_follow_from_the_factors_that_the_axes_split(case):
    name, number = case
    rule = rule_for(EXAMPLES[name][number].equation(name))
    mesh = LogicalMesh.of((2, 2))
    found = {
        (tuple((la.dims, la.partial) for la in s.inputs), tuple((la.dims, la.partial) for la in s.outputs))
        for s in strategies_of(rule, mesh, monoids=())
    }
    expected = set()
    for jobs in itertools.product(("", *rule.shardable()), repeat=2):
        ways = Counter(jobs)
        if all(rule.size_of(factor) % 2**count == 0 for factor, count in ways.items() if factor):
            expected |= {expected_layouts(rule, jobs, order) for order in ((0, 1), (1, 0))}
    assert found == expected


@given(
    sizes=st.tuples(*[st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 40])] * 4),
    others=st.tuples(*[st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 40])] * 4),
    mesh_shape=st.sampled_from([(8,), (2, 4), (2, 2, 2), (2, 3)]),
)
def test_rules_of_one_key_have_equal_strategies(sizes, others, mesh_shape):
    def rule(b, c, d, e):
        factors = {"b": b, "c": c, "d": d, "e": e}
        inputs, outputs = [(("b",), ("c", "d")), (("d",), ("e",))], [(("b", "c"), ("e",))]
        return make_rule(inputs, outputs, factors, reduced={"d": "sum"}, linear=[(0,), (1,)])

    mesh, (one, other) = LogicalMesh.of(mesh_shape), (rule(*sizes), rule(*others))
    if strategies_key(one, mesh) == strategies_key(other, mesh):
        assert strategies_of(one, mesh) == strategies_of(other, mesh)


def test_sizes_that_a_mesh_divides_alike_have_one_key():
    mesh, keys = LogicalMesh.of((2, 4)), {}
    for size in (0, 2, 4, 8, 12, 20, 24, 40, 48):
        rule = parse("a, a -> a", [(size,), (size,)], [(size,)])
        keys.setdefault(strategies_key(rule, mesh), []).append(size)
    assert list(keys.values()) == [[0], [2], [4], [8], [12, 20], [24, 40, 48]]
