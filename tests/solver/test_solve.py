"""Oracle 4: the planner equals brute force, on generated graphs and on the strategy graphs of generated programs.

Every case small enough to enumerate is enumerated with `itertools.product`: the planner's choice has the least objective of
all choices that fit the memory, and its bound is below it.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost_model.hardware import PRESETS
from autopar.intra_op.choices.graph import build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of
from autopar.solver.dual_ascent import bound_costs
from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, Unreachable
from autopar.solver.presolve import min_plus, reduce_costs
from autopar.solver.problem import Costs, MemoryRow
from autopar.solver.tuning import Tuning
from tests.solver.problems import choose_of, least_value, value_of

RTOL = 1e-6


def assert_optimal(costs, edges, rows=(), limit_bytes=np.inf):
    best = least_value(costs, edges, rows, limit_bytes)
    found = choose_of(costs, edges, rows=rows, limit_bytes=limit_bytes)
    if not np.isfinite(best):
        assert isinstance(found, DoesNotFit | Unreachable), "and it says that there is none, not that it found none"
        assert isinstance(found, DoesNotFit) or not np.isfinite(least_value(costs, edges))
        return
    assert isinstance(found, Chosen), f"{found}, brute force found {best}"
    assert all(row.used(found.numbers) <= limit_bytes * (1 + 1e-9) for row in rows)
    assert found.seconds == pytest.approx(value_of(costs, edges, found.numbers), rel=1e-12)
    scale = max(abs(best), 1e-12)
    assert found.seconds <= best + RTOL * scale
    assert found.lower_bound_s <= best + RTOL * scale
    assert choose_of(costs, edges, rows=rows, limit_bytes=limit_bytes) == found


# --- generated graphs -------------------------------------------------------------------------------------------------


@st.composite
def problems(draw, *, most_nodes=8, infinities=True):
    """Costs and edges of up to eight nodes with up to three choices; one choice of each node is free of infinities."""
    count = draw(st.integers(1, most_nodes))
    sizes = [draw(st.integers(1, 3)) for _ in range(count)]
    values = st.integers(0, 20).map(float)
    if infinities:
        values = st.one_of(values, values, values, st.just(np.inf))
    safe = [draw(st.integers(0, size - 1)) for size in sizes]

    def table(*shape):
        flat = draw(st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.array(flat).reshape(shape)

    costs = [table(size) for size in sizes]
    edges = {}
    pairs = list(itertools.combinations(range(count), 2))
    for u, v in draw(st.lists(st.sampled_from(pairs), max_size=14, unique=True)) if pairs else []:
        edges[u, v] = table(sizes[u], sizes[v])
    for v, p in enumerate(safe):
        costs[v][p] = min(costs[v][p], 30.0)
    for (u, v), matrix in edges.items():
        matrix[safe[u], safe[v]] = min(matrix[safe[u], safe[v]], 30.0)
    return costs, edges


@st.composite
def memory_rows(draw, costs):
    """Up to three live sets over some of the nodes; what a node needs may differ between live sets."""
    rows = []
    for number in range(draw(st.integers(1, 3))):
        alive = draw(st.lists(st.sampled_from(range(len(costs))), min_size=1, unique=True))
        bytes_of = {v: np.array([float(draw(st.integers(0, 9))) for _ in costs[v]]) for v in sorted(alive)}
        rows.append(MemoryRow(f"point {number}", bytes_of, float(draw(st.integers(0, 3)))))
    return rows


@settings(max_examples=150)
@given(problems())
def test_the_planner_equals_brute_force(problem):
    assert_optimal(*problem)


@settings(max_examples=100)
@given(st.data())
def test_the_planner_equals_brute_force_within_memory(data):
    costs, edges = data.draw(problems(most_nodes=6))
    rows = data.draw(memory_rows(costs))
    least = max(row.least() for row in rows)
    assert_optimal(costs, edges, rows, least + data.draw(st.integers(-1, 12)))


@settings(max_examples=150)
@given(problems())
def test_reductions_keep_the_optimum_and_extend_to_it(problem):
    costs, edges = problem
    reduced = reduce_costs(Costs.of(costs, edges))
    order = list(reduced.costs.nodes)
    number = {v: i for i, v in enumerate(order)}
    left_costs = list(reduced.costs.nodes.values())
    left_edges = {(number[u], number[v]): m for (u, v), m in reduced.costs.edges.items()}
    everything = itertools.product(*(range(len(c)) for c in left_costs))
    best = min(everything, key=lambda choice: value_of(left_costs, left_edges, choice))
    full = reduced.extend(dict(zip(order, best, strict=True)))
    assert list(full) == list(range(len(costs)))
    assert value_of(costs, edges, full) == pytest.approx(least_value(costs, edges), rel=1e-9)
    assert value_of(left_costs, left_edges, best) + reduced.constant == pytest.approx(least_value(costs, edges))


@settings(max_examples=40)
@given(st.data())
def test_reductions_keep_the_nodes_that_they_are_told_to_keep(data):
    costs, edges = data.draw(problems(most_nodes=6))
    keep = frozenset(data.draw(st.lists(st.sampled_from(range(len(costs))), unique=True)))
    usage = [np.array([float(data.draw(st.integers(0, 5))) for _ in c]) for c in costs]
    reduced = reduce_costs(Costs.of(costs, edges), keep=keep, usage=[u[:, None] for u in usage])
    assert keep <= set(reduced.costs.nodes)
    assert all((np.diff(reduced.open_choices[v]) > 0).all() for v in reduced.costs.nodes)


def test_a_node_is_looked_at_again_when_a_neighbour_loses_a_choice():
    """The first node's second choice pays only beside the second node's second choice, which is beaten later."""
    costs, edges = [np.zeros(2), np.array([0.0, 100.0])], {(0, 1): np.array([[0.0, 9.0], [1.0, 0.0]])}
    reduced = reduce_costs(Costs.of(costs, edges), keep=frozenset({0, 1}))
    assert {v: list(reduced.open_choices[v]) for v in (0, 1)} == {0: [0], 1: [0]}


@settings(max_examples=150)
@given(problems(infinities=False))
def test_the_bound_is_a_bound_and_rules_out_no_optimum(problem):
    costs, edges = problem
    best = least_value(costs, edges)
    bounded = bound_costs(Costs.of(costs, edges), tuning=dataclasses.replace(Tuning(), sweeps=50))
    slack = 1e-9 * max(1.0, abs(best))
    assert bounded.lower <= best + slack
    assert bounded.upper >= best - slack
    assert bounded.upper == pytest.approx(value_of(costs, edges, [bounded.choice[v] for v in range(len(costs))]))
    alive = bounded.below(bounded.upper)
    optima = [
        choice
        for choice in itertools.product(*(range(len(c)) for c in costs))
        if value_of(costs, edges, choice) <= best + slack
    ]
    assert all(alive[v][p] for choice in optima for v, p in enumerate(choice))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_the_min_plus_product_is_the_shortest_two_steps(n, m, k, seed):
    draw = np.random.default_rng(seed)
    left, right = draw.integers(0, 9, (n, m)).astype(float), draw.integers(0, 9, (m, k)).astype(float)
    product = min_plus(left, right)
    for i, j in np.ndindex(n, k):
        assert product[i, j] == min(left[i, q] + right[q, j] for q in range(m))


def test_a_limit_below_what_no_choice_can_avoid_has_no_solution():
    costs = [np.array([1.0, 2.0])]
    rows = [MemoryRow("peak", {0: np.array([8.0, 4.0])}, 1.0)]
    assert choose_of(costs, {}, rows=rows, limit_bytes=4) == DoesNotFit(least_bytes=5.0)
    found = choose_of(costs, {}, rows=rows, limit_bytes=5)
    assert (found.numbers, found.seconds) == ((1,), 2.0)


def test_points_that_cannot_both_be_met_have_no_solution_though_each_can():
    costs = [np.array([1.0, 2.0])]
    rows = [MemoryRow("first", {0: np.array([8.0, 4.0])}), MemoryRow("second", {0: np.array([4.0, 8.0])})]
    assert choose_of(costs, {}, rows=rows, limit_bytes=5) == DoesNotFit(least_bytes=4.0)


def test_costs_that_are_all_infinite_are_told_from_memory_that_does_not_fit():
    impossible = np.array([[np.inf, 1.0], [2.0, np.inf]])
    edges = {(0, 1): impossible, (1, 2): impossible, (0, 2): impossible}
    assert choose_of([np.zeros(2)] * 3, edges) == Unreachable(), (
        "no two of three nodes may choose alike, of two choices"
    )


def test_a_cutoff_below_the_best_choice_is_said_with_the_bound():
    assert choose_of([np.array([3.0, 4.0])], {}, cutoff_s=2.0) == CutOff(3.0)


def test_the_objective_counts_every_node_and_every_edge_once():
    costs, edges = (
        [np.array([1.0, 10.0])] * 3,
        {(0, 1): np.full((2, 2), 100.0), (1, 2): np.array([[0, 0], [0, 1000.0]])},
    )
    assert Costs.of(costs, edges).value((1, 1, 1)) == 30 + 100 + 1000
    assert Costs.of(costs, edges).value({0: 1, 1: 0, 2: 0}) == 12 + 100


# --- the strategy graphs of generated programs ------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)

OPERATIONS = {
    "sin": lambda x, y, w: jnp.sin(x),
    "add": lambda x, y, w: jax.lax.add(x, y),
    "mul": lambda x, y, w: jax.lax.mul(x, y),
    "dot": lambda x, y, w: jax.lax.dot(x, w),
    "neg": lambda x, y, w: jax.lax.neg(x),
    "rev": lambda x, y, w: jax.lax.rev(x, (0,)),
}


@st.composite
def programs(draw):
    """Functions of (x, w) of up to eight equations, each on earlier results."""
    count = draw(st.integers(1, 5))
    names = [draw(st.sampled_from(sorted(OPERATIONS))) for _ in range(count)]
    picks = [(draw(st.integers(0, k)), draw(st.integers(0, k))) for k in range(count)]

    def fun(x, w):
        values = [x]
        for name, (i, j) in zip(names, picks, strict=True):
            values.append(OPERATIONS[name](values[i], values[j], w))
        return values[-1].sum() if draw_sum else values[-1]

    draw_sum = draw(st.booleans())
    return fun


def restricted(graph, most):
    """The graph's costs and edges with at most `most` choices per node, spread over all; and what each output takes."""
    kept = [
        np.unique(np.linspace(0, len(c) - 1, most).astype(int)) if len(c) > most else np.arange(len(c))
        for c in graph.costs
    ]
    costs = [c[k] for c, k in zip(graph.costs, kept, strict=True)]
    edges = {(u, v): m[np.ix_(kept[u], kept[v])] for (u, v), m in graph.edges.items()}
    usage = [node.choices.out_bytes[k] for node, k in zip(graph.nodes, kept, strict=True)]
    return costs, edges, usage


def graph_of(fun, mesh_shape):
    program, _ = program_of(jax.make_jaxpr(fun)(X, W))
    ins, outs = [None] * len(program.invars), [None] * len(program.outvars)
    mesh = LogicalMesh.of(mesh_shape)
    return build_graph(program, mesh, PRESETS["cpu"], PlannerOptions(), input_layouts=ins, output_layouts=outs)


def enumerable(costs):
    return np.prod([float(len(c)) for c in costs]) <= 30_000


@settings(max_examples=40)
@given(programs(), st.sampled_from([(2,), (4,), (2, 2)]))
def test_the_planner_equals_brute_force_on_programs(fun, mesh_shape):
    graph = graph_of(fun, mesh_shape)
    costs, edges, _ = restricted(graph, 3)
    assume(enumerable(costs))
    assert_optimal(costs, edges)


@settings(max_examples=30)
@given(programs(), st.sampled_from([(4,), (2, 2)]), st.floats(0.0, 1.0))
def test_the_planner_equals_brute_force_on_programs_within_memory(fun, mesh_shape, room):
    graph = graph_of(fun, mesh_shape)
    costs, edges, usage = restricted(graph, 2)
    assume(enumerable(costs))
    row = MemoryRow("all at once", dict(enumerate(usage)))
    most = sum(float(b.max()) for b in usage)
    assert_optimal(costs, edges, [row], row.least() + room * (most - row.least()))


@settings(max_examples=15)
@given(programs(), st.sampled_from([(2, 2), (2, 4)]))
def test_the_graph_s_objective_is_that_of_the_choice_and_two_runs_choose_alike(fun, mesh_shape):
    first, second = graph_of(fun, mesh_shape), graph_of(fun, mesh_shape)
    chosen = [choose_of(graph.costs, graph.edges) for graph in (first, second)]
    assert chosen[0] == chosen[1]
    assert value_of(first.costs, first.edges, chosen[0].numbers) == pytest.approx(chosen[0].seconds, rel=1e-9)
