"""Merged choices: a lower bound, and a search that loses nothing by them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.intra_op.choices.equal_axes import ClassNumbers, find_equal_axes
from autopar.intra_op.request import logical_meshes
from autopar.layouts.mesh import Layout
from autopar.solver.classes import merge_edges, take_least
from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, NotSearched, Unreachable
from autopar.solver.problem import MemoryRow
from autopar.solver.tuning import Tuning
from tests.solver.problems import choose_of, least_value, value_of


def test_axes_are_equal_by_size_and_link():
    assert find_equal_axes((2, 2, 4, 2), ("slow", "fast", "fast", "fast")) == [(1, 3)]
    assert find_equal_axes((1, 1, 4), ("fast",) * 3) == []


def test_exchanging_equal_axes_makes_choices_alike():
    row, column = Layout(((0,), ())), Layout(((), (0,)))
    other_row, third_row = Layout(((1,), ())), Layout(((2,), ()))
    both, swapped = Layout(((0,), (1,))), Layout(((1,), (0,)))
    reduced, other_reduced = Layout(((), ()), ((0, "sum"),)), Layout(((), ()), ((1, "sum"),))
    layouts = (row, column, other_row, third_row, both, swapped, reduced, other_reduced)
    assert ClassNumbers([(0, 1)]).of([(la,) for la in layouts]).tolist() == [0, 1, 0, 2, 3, 3, 4, 4]


def test_operands_of_one_choice_are_renamed_together():
    row, other_row = Layout(((0,), ())), Layout(((1,), ()))
    assert ClassNumbers([(0, 1)]).of([(row, row), (row, other_row), (other_row, row)]).tolist() == [0, 1, 1]


def test_a_class_costs_what_its_cheapest_member_costs():
    classes = np.array([1, 0, 1])
    assert take_least(np.array([5.0, 7.0, 3.0]), classes).tolist() == [7.0, 3.0]
    edges = merge_edges({(0, 1): np.array([[9.0, 8.0], [7.0, 6.0], [1.0, 9.0]])}, [classes, np.array([0, 1])])
    assert edges[0, 1].tolist() == [[7.0, 6.0], [1.0, 8.0]]


@st.composite
def problems(draw):
    """Costs, edges, one memory row with its limit, and any classes whatever."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(1, 6, size=draw(st.integers(2, 6)))
    costs = [rng.integers(0, 20, size=n).astype(float) for n in counts]
    pairs = [p for p in itertools.combinations(range(len(counts)), 2) if rng.random() < 0.7]
    edges = {(u, v): rng.choice([0.0, 1, 5, 9, np.inf], size=(counts[u], counts[v])) for u, v in pairs}
    row = MemoryRow("peak", {v: rng.integers(0, 9, size=n).astype(float) for v, n in enumerate(counts)})
    classes = [np.unique(rng.integers(0, 3, size=n), return_inverse=True)[1] for n in counts]
    return costs, edges, row, float(rng.integers(5, 40)), classes


@settings(max_examples=60, deadline=None)
@given(problem=problems(), limited=st.booleans())
def test_a_search_by_classes_finds_the_optimum(problem, limited):
    costs, edges, row, limit, classes = problem
    rows, limit = ([row], limit) if limited else ([], np.inf)
    best = least_value(costs, edges, rows, limit)
    found = choose_of(costs, edges, rows=rows, limit_bytes=limit, classes=classes)
    if isinstance(found, DoesNotFit | Unreachable):
        assert best == np.inf
        return
    assert isinstance(found, Chosen)
    assert found.seconds == pytest.approx(best)
    assert value_of(costs, edges, found.numbers) == pytest.approx(best)
    assert found.lower_bound_s <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    problem=problems(), limited=st.booleans(), by_classes=st.booleans(), part=st.sampled_from((0.5, 0.99, 1.01, 1.5))
)
def test_a_search_with_a_cutoff_ends_only_where_nothing_better_is(problem, limited, by_classes, part):
    costs, edges, row, limit, classes = problem
    rows, limit = ([row], limit) if limited else ([], np.inf)
    best = least_value(costs, edges, rows, limit)
    cutoff = part * best if 0 < best < np.inf else 10.0
    classes = classes if by_classes else None
    match choose_of(costs, edges, rows=rows, limit_bytes=limit, classes=classes, cutoff_s=cutoff):
        case Chosen() as found:
            assert found.seconds == pytest.approx(best)
        case CutOff(lower) | NotSearched(lower):
            assert cutoff * (1 - Tuning().good_enough) <= best
            assert lower <= best * (1 + 1e-9)
        case DoesNotFit() | Unreachable():
            assert best == np.inf
        case other:
            pytest.fail(f"{other}: a problem this small is settled")


def shapes(devices):
    return [mesh.shape for mesh in logical_meshes(devices)]


def test_every_shape_of_up_to_three_axes_is_compared_fewest_axes_first():
    assert shapes(1) == [(1,)]
    assert shapes(7) == [(7,)]
    assert shapes(8) == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert shapes(12) == [(12,), (2, 6), (3, 4), (4, 3), (6, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2)]
    assert shapes(16) == [(16,), (2, 8), (4, 4), (8, 2), (2, 2, 4), (2, 4, 2), (4, 2, 2)]


def test_three_axes_are_chosen_where_only_they_divide_the_work():
    """No dimension of the product can be cut more than twice, so only a mesh of three axes has work for eight devices."""
    half = 2 * 511
    x, w = jnp.ones((half, half)), jnp.ones((half, half))
    plan = autopar.parallelize(lambda x, w: jnp.tanh(x @ w), devices=8, cluster="cpu", batch_argnums=()).plan(x, w)
    assert plan.mesh_shape == (2, 2, 2)
    assert {c.mesh_shape for c in plan.candidates} == {(8,), (2, 4), (2, 2, 2)}


def test_a_cluster_of_two_links_is_planned_on_at_most_two_axes():
    cluster = autopar.cost_model.hardware.Cluster.uniform(alpha=(1.0, 1.0), beta=(1.0, 0.1))
    plan = autopar.parallelize(lambda x: x * 2, devices=8, cluster=cluster, batch_argnums=()).plan(jnp.ones((8, 8)))
    assert {len(c.mesh_shape) for c in plan.candidates} == {1, 2}
