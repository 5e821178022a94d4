"""What XLA's CPU compiler leaves to its library in one piece, and which buffers that reads; against XLA's own account."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.intra_op.memory.device_operations import Kind, Operation
from autopar.intra_op.xla_cpu.table import LIBRARY_ELEMENTS
from tests.intra_op.memory.buffers import FLOAT, buffers, real_bytes, values

SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


@pytest.mark.parametrize(("elements", "expected"), [(LIBRARY_ELEMENTS, [1, 3]), (LIBRARY_ELEMENTS - 1, [3])])
def test_a_large_sum_is_left_to_a_library_which_reads_buffers_and_multiplies_by_itself(elements, expected):
    select = Operation(kind=Kind.CHEAP, inputs=(0,), outputs=(1,))
    product = Operation(kind=Kind.CHEAP, inputs=(1,), outputs=(2,), by_library=True)
    total = Operation(kind=Kind.LIBRARY, inputs=(2,), outputs=(3,))
    assert buffers([select, product, total], values(elements, elements, elements, 1), outputs=(3,)) == expected


@pytest.mark.parametrize(
    ("forward_reads", "elements", "expected"),
    [
        (3, LIBRARY_ELEMENTS, [0, 3, 4, 8, 9]),
        (2, LIBRARY_ELEMENTS, [0, 4, 8, 9]),
        (3, LIBRARY_ELEMENTS - 1, [0, 3, 4, 5, 6, 8, 9]),
    ],
)
def test_what_alone_follows_a_large_sum_the_library_does_too_and_reads_what_others_also_repeat(
    forward_reads, elements, expected
):
    """3 repeats 2. Backward scales 0 by it and subtracts the sum over 5 of all that: 8, of which the library makes one piece."""
    given = values(elements, elements, 2, elements, elements, elements, 2, elements, elements, 1)

    def pointwise(inputs, output, kind=Kind.CHEAP):
        return Operation(kind=kind, inputs=inputs, outputs=(output,), by_library=True)

    operations = [
        Operation(kind=Kind.WHOLE, inputs=(), outputs=(0,)),
        pointwise((2,), 3),
        Operation(kind=Kind.WHOLE, inputs=(forward_reads,), outputs=(4,)),
        pointwise((0, 3), 5, Kind.COSTLY),
        Operation(kind=Kind.LIBRARY, inputs=(5,), outputs=(6,)),
        pointwise((6,), 7),
        pointwise((5, 7), 8),
        Operation(kind=Kind.WHOLE, inputs=(8,), outputs=(9,)),
    ]
    assert buffers(operations, given, outputs=(4, 9)) == expected


def most_bytes(step):
    """Predicted bytes of a device, and XLA's."""
    compiled = autopar.parallelize(step, devices=1).compile(SQUARE, SQUARE)
    return compiled.plan.peak_bytes, real_bytes(compiled)


def test_a_constant_that_a_library_and_others_read_is_repeated_in_a_buffer_from_the_start():
    def step(state, batch):
        h, total = batch, 0.0
        for number in range(6):
            h = jnp.sin(h @ state)
            total += jnp.sum(jnp.maximum(h, 0.1 * number + 0.1), -1)
        for number in range(6):
            h = jnp.maximum(jnp.sin(h @ state), 0.1 * number + 0.1)
        return total, h @ state

    predicted, actual = most_bytes(step)
    assert 0.9 <= predicted / actual <= 1.1
    assert predicted >= (2 + 6) * 256 * 256 * FLOAT


def test_a_repeated_value_that_takes_up_a_constant_factor_is_another_one_exactly_where_xla_moves_factors():
    def step_of(scale):
        def step(state, batch):
            h = batch @ state
            total, g = jnp.sum(h, -1, keepdims=True), jnp.sin(h) @ state
            return jnp.sum(scale(g) * total, -1), (jnp.exp(h) * total) @ state

        return step

    (predicted, actual), (scaled, actual_scaled) = (most_bytes(step_of(s)) for s in (lambda g: g, lambda g: g * 0.7))
    assert (scaled < predicted) == (actual_scaled < actual)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_softmax_of_one_device_keeps_its_repeated_inverse_for_backward_and_one_of_several_does_not(devices):
    def step(state, batch):
        def loss_of(state):
            h = batch
            for _ in range(3):
                weights = jnp.exp(h @ state)
                h = (weights / jnp.sum(weights, -1, keepdims=True)) @ state
            return jnp.sum(h**2)

        return state - jax.grad(loss_of)(state)

    shapes = [jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (64, 2 * LIBRARY_ELEMENTS * devices)]
    wishes = {"devices": devices, "mesh_shape": (devices,), "constraints": autopar.data_parallel()}
    compiled = autopar.parallelize(step, **wishes).compile(*shapes)
    assert 0.95 <= compiled.plan.peak_bytes / real_bytes(compiled) <= 1.05
