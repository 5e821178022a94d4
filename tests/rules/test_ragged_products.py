"""Ragged products: what a compiler without a kernel for groups keeps and multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.program.from_jaxpr import program_of
from autopar.rules.table import entry_for


def ragged(rows, matrices, sizes):
    return jax.lax.ragged_dot(rows, matrices, sizes)


def gradient_of_matrices(rows, matrices, sizes):
    return jax.grad(lambda matrices: jnp.sum(ragged(rows, matrices, sizes) ** 2))(matrices)


def gradient_alone(rows, matrices, sizes, cotangent):
    return jax.vjp(lambda matrices: ragged(rows, matrices, sizes), matrices)[1](cotangent)[0]


def gradient_of_rows(rows, matrices, sizes, cotangent):
    return jax.vjp(lambda rows: ragged(rows, matrices, sizes), rows)[1](cotangent)[0]


def shapes_of(count, depth, width, groups):
    """Rows, matrices, sizes of groups, and a cotangent of the product."""
    array, number = jnp.float32, jnp.int32
    shapes = ((count, depth), array), ((groups, depth, width), array), ((groups,), number), ((count, width), array)
    return [jax.ShapeDtypeStruct(*one) for one in shapes]


@pytest.mark.parametrize("sizes", [(64, 16, 32, 8), (128, 64, 32, 4)])
@pytest.mark.parametrize("compute", [ragged, gradient_alone, gradient_of_rows])
def test_scratch_is_what_xla_takes(compute, sizes):
    shapes = shapes_of(*sizes)[: 3 if compute is ragged else 4]
    temporaries = jax.jit(compute).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    program, _ = program_of(jax.make_jaxpr(compute)(*shapes), rearranged=True)
    found = [
        entry_for(eqn).scratch(eqn, [v.aval.shape for v in eqn.invars])
        for eqn in program.walk()
        if entry_for(eqn).scratch is not None
    ]
    assert found[-1] == pytest.approx(temporaries, rel=0.01)


def test_a_step_with_groups_verifies_its_arithmetic():
    def step(matrices, batch):
        rows, sizes = batch["rows"], jnp.bincount(batch["group"], length=4).astype(jnp.int32)
        return matrices - 0.1 * gradient_of_matrices(rows[jnp.argsort(batch["group"])], matrices, sizes)

    draw = np.random.default_rng(0)
    batch = {"rows": draw.normal(size=(16, 8)).astype(np.float32), "group": draw.integers(0, 4, 16)}
    verified = autopar.parallelize(step, mesh_shape=(2,)).verify(jnp.ones((4, 8, 8)), batch)
    (arithmetic,) = (row for row in verified.rows if row.topic == "arithmetic")
    assert (arithmetic.verdict, arithmetic.planned) == ("matches", arithmetic.compiled)


def test_masked_rows_cost_time_except_on_tpus():
    """Times so many as there are groups; products are large enough for operations to be what takes time."""

    def seconds(cluster, groups):
        def forward(matrices, rows):
            return matrices, ragged(rows, matrices, jnp.full((groups,), 4096 // groups, jnp.int32))

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((groups, 2048, 2048), (4096, 2048))]
        return autopar.parallelize(forward, cluster=preset(cluster), mesh_shape=(1,)).plan(*shapes).compute_s

    assert seconds("cpu", 8) > 6 * seconds("cpu", 1)
    assert seconds("dgx-a100-80gb", 8) > 6 * seconds("dgx-a100-80gb", 1)
    assert seconds("tpu-v4", 8) < 2 * seconds("tpu-v4", 1)
