"""The bound on memory counts what has a buffer whatever is chosen, and is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost_model.hardware import PRESETS
from autopar.intra_op.choices.graph import build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.memory.compilers import XLA_CPU, XLA_GPU
from autopar.intra_op.memory.model import MemoryModel, Wholes
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of
from tests.intra_op.memory.buffers import FLOAT, memory_of

SQUARE = jax.ShapeDtypeStruct((64, 64), np.float32)


def looked_up(state, batch):
    """A step with the gradient of a lookup, which is read twice."""
    grad = jax.grad(lambda table: jnp.sum(jnp.tanh(table[batch]) ** 2))(state)
    return state - jnp.tanh(grad) * grad


def added_up(state, batch):
    """A step that adds up gradients in a loop."""
    grad = jax.grad(lambda table, row: jnp.sum(jnp.tanh(table * row) ** 2))

    def body(sums, row):
        one, two = sums
        each = grad(state, row)
        return (one + each, two + each * each), None

    (one, two), _ = jax.lax.scan(body, (jnp.zeros_like(state), jnp.zeros_like(state)), batch)
    return state - one / jnp.sqrt(two)


def added_to_a_lookup(state, batch):
    """XLA adds the gradient of a lookup onto the other summand."""
    grad = jax.grad(lambda table: jnp.sum(jnp.tanh(table[batch]) ** 2))(state)
    return jnp.tanh(jnp.tanh(state) + grad)


def added_to_a_product(state, batch):
    """On GPUs a product may write its sum over the memory that the state's result takes."""
    return state + (batch.T @ batch).T


@pytest.mark.parametrize("compiler", [XLA_CPU, XLA_GPU], ids=lambda one: one.platform)
@pytest.mark.parametrize(
    ("step", "batch", "held"),
    [
        (looked_up, jax.ShapeDtypeStruct((8,), np.int32), 1),
        (added_up, jax.ShapeDtypeStruct((4, 64), np.float32), 2),
        (added_to_a_lookup, jax.ShapeDtypeStruct((8,), np.int32), 0),
        (added_to_a_product, jax.ShapeDtypeStruct((2, 64), np.float32), {"cpu": 1, "gpu": 0}),
    ],
)
def test_what_is_scattered_and_what_loops_carry_counts_in_the_bound(step, batch, held, compiler):
    """`held`: of the state's size, what is there at once beside the state, which its result takes the place of."""
    held = held[compiler.platform] if isinstance(held, dict) else held
    memory = memory_of(step, SQUARE, batch, aliased_outputs={0: 0}, compiler=compiler)
    rng = np.random.default_rng(0)
    choices = [[int(rng.integers(len(node.choices.strategies))) for node in memory.graph.nodes] for _ in range(20)]
    quarter, few = 64 * 64 * FLOAT // 4, 2000
    least = quarter + held * quarter / memory.tuning.temporaries_margin
    assert least <= memory.bound() <= least + few
    required = min(memory.required(choice) for choice in choices)
    assert memory.bound() <= required
    assert sum(memory.evenly_divided_parts()) <= required


def test_what_a_device_runs_before_anything_is_chosen_is_found_once_for_meshes_of_as_many_devices():
    def model(program, wholes, *shape):
        mesh = LogicalMesh.of(shape)
        layouts = {"input_layouts": [None] * 2, "output_layouts": [None]}
        graph = build_graph(program, mesh, PRESETS["cpu"], PlannerOptions(), **layouts)
        return MemoryModel(graph, input_names=["state", "batch"], aliased_outputs={0: 0}, wholes=wholes)

    def traced():
        return program_of(jax.make_jaxpr(added_up)(SQUARE, jax.ShapeDtypeStruct((4, 64), np.float32)))[0]

    program, wholes = traced(), Wholes()
    line, square, two = model(program, wholes, 4), model(program, wholes, 2, 2), model(program, wholes, 2)
    assert square._whole is line._whole
    assert square._whole_footprint is line._whole_footprint
    assert two._whole is not line._whole
    for shared, shape in ((line, (4,)), (square, (2, 2)), (two, (2,))):
        alone = model(program, None, *shape)
        assert alone._whole is not shared._whole
        first = [0] * len(shared.graph.nodes)
        rows, expected = (one.rows(first) for one in (shared, alone))
        assert shared.bound() == alone.bound()
        assert [row.used(first) for row in rows] == [row.used(first) for row in expected]
        assert shared.least() == alone.least()
