"""The number format that a contraction multiplies in, from its operands and the precision that the program asks for."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_model.hardware import preset
from autopar.rules.flops import number_format
from autopar.rules.table import entry_for

SIDE = 4096


def format_of(function, *dtypes):
    shapes = [jax.ShapeDtypeStruct((8, 8), dtype) for dtype in dtypes]
    (eqn,) = (eqn for eqn in jax.make_jaxpr(function)(*shapes).eqns if entry_for(eqn).heavy)
    return number_format(eqn)


def product(precision=None, **wishes):
    return lambda a, b: jnp.matmul(a, b, precision=precision, **wishes)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, "tensorfloat32"),
        ("default", "tensorfloat32"),
        ("high", "tensorfloat32"),
        ("highest", "float32"),
        ("TF32_TF32_F32", "tensorfloat32"),
        ("TF32_TF32_F32_X3", "float32"),
        ("BF16_BF16_F32", "bfloat16"),
        ("BF16_BF16_F32_X3", "float32"),
        ("F32_F32_F32", "float32"),
    ],
)
def test_products_of_float32_are_rounded_unless_the_program_asks_for_more(precision, expected):
    assert format_of(product(precision), jnp.float32, jnp.float32) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_narrow_operands_are_narrow_whatever_they_add_up_to(dtype):
    assert format_of(product(preferred_element_type=jnp.float32), dtype, dtype) == dtype
    assert format_of(product("highest"), dtype, dtype) == dtype


def test_a_default_for_all_products_counts():
    def exact(a, b):
        with jax.default_matmul_precision("highest"):
            return a @ b

    assert format_of(exact, jnp.float32, jnp.float32) == "float32"


def test_convolutions_are_rounded_as_products_are():
    def convolved(precision):
        return lambda x, w: jax.lax.conv(x[None, None], w[None, None], (1, 1), "SAME", precision=precision)

    assert format_of(convolved(None), jnp.float32, jnp.float32) == "tensorfloat32"
    assert format_of(convolved("highest"), jnp.float32, jnp.float32) == "float32"


def seconds(cluster, precision):
    shape = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    return autopar.parallelize(product(precision), devices=1, cluster=cluster).plan(shape, shape)


def test_a_product_takes_what_its_format_takes_where_the_device_has_it():
    device = preset("dgx-a100-80gb").device
    rounded, exact = seconds("dgx-a100-80gb", None), seconds("dgx-a100-80gb", "highest")
    flops = 2 * SIDE**3
    assert rounded.at_peak_s == pytest.approx(flops / 156e12)
    assert exact.at_peak_s == pytest.approx(flops / 19.5e12)
    curve = device.matrix_efficiency["tensorfloat32"].of(SIDE, SIDE, SIDE)
    assert rounded.compute_s == pytest.approx(flops / (156e12 * curve), rel=0.05)
    on_v100 = [seconds("p3.16xlarge", precision).compute_s for precision in (None, "highest")]
    assert on_v100[0] == pytest.approx(on_v100[1], rel=1e-12)
