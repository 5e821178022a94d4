"""Zeros between the rows of a convolution's operand: libraries for GPUs step over them, Eigen on CPUs multiplies them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cost_model.device import Device
from autopar.cost_model.hardware import find_cluster
from autopar.intra_op.choices.catalogue import Catalogues
from autopar.intra_op.choices.least_work import find_flops
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.mesh import LogicalMesh
from autopar.program.from_jaxpr import program_of

IMAGES, KERNEL = (8, 16, 16, 64), (3, 3, 64, 32)
ONCE = 2 * (8 * 16 * 16 * 64) * 3 * 3 * 32
"""Every row of the operand meets every row of the kernel."""


def grow(image, kernel):
    """As the gradient of a convolution in strides of two: to images of twice the size."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        image, kernel, (1, 1), ((2, 1), (2, 1)), lhs_dilation=(2, 2), dimension_numbers=numbers
    )


@pytest.mark.parametrize(("fuses", "times"), [(True, 1), (False, 4)])
def test_zeros_between_rows_take_time_where_they_are_multiplied(fuses, times):
    device = Device(
        name="made up", peak_flops_per_s={"float32": 1e9}, memory_bytes=1e9, memory_bytes_per_s=1e15, fuses=fuses
    )
    cluster = dataclasses.replace(find_cluster("cpu"), device=device)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (IMAGES, KERNEL))
    program, _ = program_of(jax.make_jaxpr(grow)(*shapes))
    catalogue = Catalogues().of(LogicalMesh.of((1,)), cluster, PlannerOptions())
    (conv,) = (eqn for eqn in program.equations if eqn.primitive.name == "conv_general_dilated")
    seconds, _ = catalogue.whole_seconds(conv, traffic=None)
    assert seconds == pytest.approx(times * ONCE / 1e9)
    assert find_flops(program, catalogue)[0] == ONCE
