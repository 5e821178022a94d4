"""Operations are counted in what XLA compiles here, and in texts of libraries that only GPUs call."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.hlo.contractions import arithmetic


def compiled(fun, *shapes):
    return arithmetic(jax.jit(fun).lower(*(jnp.zeros(shape) for shape in shapes)).compile().as_text())


def test_a_product_is_two_operations_for_each_multiply_add():
    assert compiled(lambda a, b: a @ b, (16, 32), (32, 8)).flops == 2 * 16 * 32 * 8


def test_a_batch_of_products_counts_each_of_them():
    found = compiled(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 16, 32), (4, 32, 8))
    assert found.flops == 4 * 2 * 16 * 32 * 8


def test_a_loop_counts_as_often_as_it_runs():
    found = compiled(
        lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=6)[0], (8, 16), (16, 16)
    )
    assert (found.flops, found.is_exact) == (6 * 2 * 8 * 16 * 16, True)


def test_a_loop_of_unknown_length_is_not_exact():
    found = compiled(lambda x, w: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x), (8, 16), (16, 16))
    assert (found.flops, found.is_exact) == (2 * 8 * 16 * 16, False)


def test_a_convolution_meets_every_element_of_its_kernel():
    def conv(image, kernel):
        return lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert compiled(conv, (2, 16, 16, 8), (3, 3, 8, 24)).flops == 2 * (2 * 8 * 8 * 24) * (3 * 3 * 8)


def test_zeros_between_rows_are_not_counted():
    def grow(image, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            image, kernel, (1, 1), ((1, 1), (1, 1)), lhs_dilation=(2, 2), dimension_numbers=numbers
        )

    assert compiled(grow, (2, 16, 16, 8), (2, 2, 8, 24)).flops == 2 * (2 * 32 * 32 * 24) * 8


def module(line):
    return arithmetic(f"""HloModule step

%padded (p0: f32[2,4,4,4], p1: f32[]) -> f32[2,8,8,4] {{
  %p0 = f32[2,4,4,4]{{3,2,1,0}} parameter(0)
  %p1 = f32[] parameter(1)
  ROOT %pad = f32[2,8,8,4]{{3,2,1,0}} pad(%p0, %p1), padding=0_0x1_0_1x1_0_1x0_0
}}

ENTRY %main (p: f32[16,32], q: f32[32,8], x: f32[2,8,8,4], k: f32[3,3,4,6], y: f32[2,8,8,6]) -> f32[] {{
  %p = f32[16,32]{{1,0}} parameter(0)
  %q = f32[32,8]{{1,0}} parameter(1)
  %x = f32[2,8,8,4]{{3,2,1,0}} parameter(2)
  %k = f32[3,3,4,6]{{3,2,1,0}} parameter(3)
  %y = f32[2,8,8,6]{{3,2,1,0}} parameter(4)
  %z = f32[] constant(0)
  %w = f32[2,4,4,4]{{3,2,1,0}} slice(%x), slice={{[0:2], [0:4], [0:4], [0:4]}}
  %apart = f32[2,8,8,4]{{3,2,1,0}} fusion(%w, %z), kind=kLoop, calls=%padded
  {line}
}}
""")


CONVOLUTION = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (
            'ROOT %r = (f32[16,8]{1,0}, s8[4096]{0}) custom-call(%p, %q), custom_call_target="__cublas$gemm", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
            '"rhs_contracting_dimensions":["0"]}}}',
            2 * 16 * 32 * 8,
        ),
        (
            "ROOT %r = (f32[2,8,8,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"',
            CONVOLUTION,
        ),
        (
            "ROOT %r = (f32[2,8,8,6]{3,2,1,0}, u8[0]{0}) custom-call(%apart, %k), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"',
            CONVOLUTION / 4,
        ),
        (
            "ROOT %r = (f32[2,8,8,4]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardInput"',
            CONVOLUTION,
        ),
        (
            "ROOT %r = (f32[3,3,4,6]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"',
            CONVOLUTION,
        ),
    ],
    ids=["gemm", "forward", "forward of rows apart", "backward input", "backward filter"],
)
def test_calls_of_libraries_count_as_what_they_stand_for(line, flops):
    assert module(line).flops == flops


def test_a_call_that_is_not_known_is_named():
    found = module('ROOT %r = f32[16,8]{1,0} custom-call(%p, %q), custom_call_target="__cudnn$fmhaSoftmax"')
    assert (found.flops, found.unknown) == (0.0, ("__cudnn$fmhaSoftmax",))
    assert module('ROOT %r = f32[] custom-call(%p), custom_call_target="TopK"').unknown == ()


def test_text_that_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        arithmetic("module @jit_step { }")
